"""Pixels of every family equal those of transformers' image processors (Pillow backend), bit for bit."""

import hashlib
import json

import numpy as np
import pytest
from PIL import Image

from tests.vitbatch.pictures import encoded, synth
from vitbatch import ImageError, PreparedImage
from vitbatch.images import ImageProcessor, read_processor

FAMILIES = ["qwen2_5_vl", "qwen3_vl", "glm4v", "glm46v", "glm5_next"]

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module")
def recorded(goldens):
    return json.loads((goldens / "preprocess" / "processors.json").read_text())


def processor(settings: dict) -> ImageProcessor:
    tower = {name: settings[name] for name in ("patch_size", "merge_size", "temporal_patch_size")}
    return read_processor(settings, **tower)


def normalised(image: PreparedImage, settings: dict) -> np.ndarray:
    """float32 [N, 3, P*P] of one frame, in the reference's own arithmetic: scaled in float64, the rest in float32."""
    levels = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
    mean, std = (np.asarray(settings[name], np.float32) for name in ("image_mean", "image_std"))
    table = (levels - mean[:, None]) / std[:, None]
    patches = image.patches.reshape(len(image.patches), 3, -1)
    return np.stack([table[c][patches[:, c]] for c in range(3)], 1)


def assert_same_pixels(image: PreparedImage, settings: dict, want: dict) -> None:
    rows = normalised(image, settings)
    assert image.grid_thw == tuple(want["grid_thw"][0])
    assert want["shape"] == [rows.shape[0], 2 * 3 * rows.shape[2]]
    # Features of a recorded row are (channel, frame, pixel): its ends are one frame's.
    np.testing.assert_allclose(rows[0, 0, :8], want["row0_first8"], atol=2e-6)
    np.testing.assert_allclose(rows[-1, 2, -4:], want["rowlast_last4"], atol=2e-6)
    np.testing.assert_allclose([rows.min(), rows.max()], [want["min"], want["max"]], atol=2e-6)
    np.testing.assert_allclose(
        [rows.mean(dtype=np.float64), rows.std(dtype=np.float64)], [want["mean"], want["std"]], atol=2e-6
    )
    if "sha256" in want:  # not of JPEGs, whose pixels depend on the JPEG library
        both_frames = np.repeat(rows[:, :, None], 2, 2)
        assert hashlib.sha256(both_frames).hexdigest()[:32] == want["sha256"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_recorded_size_gives_the_recorded_grid_or_error(recorded, family):
    rule = processor(recorded[family]["settings"])
    for name, want in recorded[family]["sizes"].items():
        w, h = map(int, name.split("x"))
        if "error" in want:
            with pytest.raises(ImageError, match="aspect ratio"):
                rule.fit(h, w)
        else:
            assert [1, *(side // rule.patch_size for side in rule.fit(h, w).canvas)] == want["grid_thw"][0]


@pytest.mark.parametrize("name", ["512x512", "1920x1080", "1x1", "29x31", "10x2000", "2000x10", "333x777"])
def test_every_pixel_of_a_size_equals_the_recorded_one(recorded, name):
    picture = synth(*map(int, name.split("x")))
    for family in FAMILIES:
        settings = recorded[family]["settings"]
        assert_same_pixels(processor(settings).prepare(picture), settings, recorded[family]["sizes"][name])


def test_every_pixel_of_a_large_size_equals_the_recorded_one(recorded):
    picture = synth(2464, 2520)
    for family in ("qwen3_vl", "glm46v", "glm5_next"):
        settings = recorded[family]["settings"]
        assert_same_pixels(processor(settings).prepare(picture), settings, recorded[family]["sizes"]["2464x2520"])


@pytest.mark.parametrize("name", ["29x31", "112x112"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_pixel_under_other_bounds_equals_the_reference(goldens, recorded, family, name):
    settings = dict(recorded[family]["settings"])
    if family == "glm5_next":
        settings |= {"min_image_tokens": 4, "max_image_tokens": 16}
    else:
        settings |= {"size": {"shortest_edge": 3136, "longest_edge": 12544}}
    with np.load(goldens / "preprocess" / "small.npz") as stored:
        grid, pixels = (stored[f"{family}|{name}|{part}"] for part in ("grid", "pixels_t0"))
    image = processor(settings).prepare(synth(*map(int, name.split("x"))))
    assert image.grid_thw == tuple(grid[0])
    np.testing.assert_array_equal(normalised(image, settings), pixels.reshape(len(pixels), 3, -1))


@pytest.fixture(scope="module")
def files():
    rgb = Image.fromarray(synth(160, 120))
    grey, alpha = (Image.fromarray(synth(160, 120, 1, seed)[:, :, 0]) for seed in (0, 9))
    cmyk = Image.frombytes("CMYK", (160, 120), synth(160, 120, 4).tobytes())
    turned = Image.Exif()
    turned[0x0112] = 6
    frames = [Image.fromarray(synth(160, 120, 3, s)) for s in range(3)]
    animation = {"save_all": True, "append_images": frames[1:], "duration": 50}
    return {
        "gray_L.png": encoded(grey, "PNG"),
        "gray_alpha_LA.png": encoded(Image.merge("LA", [grey, alpha]), "PNG"),
        "rgba.png": encoded(Image.fromarray(synth(160, 120, 4)), "PNG"),
        "cmyk.jpg": encoded(cmyk, "JPEG", quality=95),
        "palette_P.png": encoded(rgb.quantize(16), "PNG"),
        "bilevel_1.png": encoded(rgb.convert("1"), "PNG"),
        "exif_rot6.jpg": encoded(rgb, "JPEG", quality=95, exif=turned),
        "animated.gif": encoded(frames[0], "GIF", loop=0, **animation),
        "animated.png": encoded(frames[0], "PNG", **animation),
        "webp_lossless.webp": encoded(rgb, "WEBP", lossless=True),
        "rgb.jpg": encoded(rgb, "JPEG", quality=95),
        "rgb.png": encoded(rgb, "PNG"),
    }


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "glm4v"])  # glm4v was not recorded: it is glm46v's
def test_every_recorded_file_gives_the_recorded_pixels(recorded, files, family):
    settings, wanted = recorded[family]["settings"], recorded[family]["files"]
    assert files.keys() == wanted.keys()
    for name, data in files.items():
        assert_same_pixels(processor(settings).prepare(data), settings, wanted[name])
