"""Fonts and photographs that come with Python packages; nothing of them is copied into this project.

Fonts: DejaVu, STIX and Computer Modern from matplotlib (free licences, beside the files), and Pillow's own.
Photographs, by the statements of the packages that ship them:
    scikit-image  astronaut, hubble, rocket, moon: public domain (NASA, SpaceX, USGS); camera, chelsea, coffee, brick,
                  grass, gravel: CC0; clock, ihc: no known restrictions
    scikit-learn  china (danielbuechele), flower (vultilion): CC BY 2.0
    matplotlib    grace_hopper: public domain (US Navy)
"""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

from PIL import Image, ImageFont

_FONT_FILES = (
    "DejaVuSans.ttf",
    "DejaVuSans-Bold.ttf",
    "DejaVuSans-Oblique.ttf",
    "DejaVuSansMono.ttf",
    "DejaVuSansMono-Bold.ttf",
    "DejaVuSerif.ttf",
    "DejaVuSerif-Bold.ttf",
    "STIXGeneral.ttf",
    "STIXGeneralBol.ttf",
    "cmss10.ttf",
    "cmr10.ttf",
    "cmb10.ttf",
)
_TRAINING = (
    ("skimage", "data/astronaut.png"),
    ("skimage", "data/chelsea.png"),
    ("skimage", "data/camera.png"),
    ("skimage", "data/brick.png"),
    ("skimage", "data/grass.png"),
    ("skimage", "data/gravel.png"),
    ("skimage", "data/hubble_deep_field.jpg"),
    ("skimage", "data/ihc.png"),
    ("sklearn", "datasets/images/china.jpg"),
    ("matplotlib", "mpl-data/sample_data/grace_hopper.jpg"),
)
_HELD_OUT = (
    ("skimage", "data/coffee.png"),
    ("skimage", "data/rocket.jpg"),
    ("skimage", "data/clock_motion.png"),
    ("skimage", "data/moon.png"),
    ("sklearn", "datasets/images/flower.jpg"),
)
# Larger ones would take most of the time of drawing.
_LONGEST = 640


def _package_file(package: str, name: str) -> Path | None:
    """A file of an installed package, which is found and not imported."""
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(folder) / name).is_file():
            return path
    return None


@cache
def photographs(*, held_out: bool) -> tuple[Image.Image, ...]:
    """RGB images, none where the packages are not installed. Held-out ones are never drawn on while training."""
    found = []
    for package, name in _HELD_OUT if held_out else _TRAINING:
        if path := _package_file(package, name):
            image = Image.open(path).convert("RGB")
            image.thumbnail((_LONGEST, _LONGEST), Image.Resampling.BICUBIC)
            found.append(image)
    return tuple(found)


@cache
def font_names() -> tuple[str, ...]:
    """Paths of the fonts that are there, and "" for Pillow's own."""
    files = [_package_file("matplotlib", f"mpl-data/fonts/ttf/{name}") for name in _FONT_FILES]
    return ("", *(str(path) for path in files if path))


@cache
def font(name: str, size: int) -> ImageFont.FreeTypeFont:
    """The font at `size` pixels. Basic layout: no shaping is needed, and it takes a third of the time."""
    if not name:
        made = ImageFont.load_default(size)
        assert isinstance(made, ImageFont.FreeTypeFont)
        return made
    return ImageFont.truetype(name, size, layout_engine=ImageFont.Layout.BASIC)
