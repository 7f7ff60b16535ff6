"""Draws the pictures: backgrounds, shapes, words, bars."""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image, ImageChops, ImageDraw

from scripts.lib.miniature.sight.sources import font, photographs
from scripts.lib.miniature.sight.words import COLOURS

RGB = tuple[int, int, int]
_SMOOTH = 4  # a shape's mask is drawn this many times larger
_CACHED_SIDE = 96
# The least distance in RGB between a thing's colour and what is behind it.
_CONTRAST = 80.0
_THIN_CONTRAST = 60.0


@dataclass(frozen=True)
class Thing:
    """A shape in a picture. x, y: its middle, radius: half its size, in pixels."""

    shape: str
    colour: str
    x: float
    y: float
    radius: float


def shade(rng: np.random.Generator, colour: str) -> RGB:
    """One of the RGB values that are called `colour`."""
    base = np.array(COLOURS[colour])
    jitter = rng.integers(-14, 15, 3) if colour not in ("black", "grey", "white") else rng.integers(-12, 13)
    r, g, b = np.clip(base + jitter, 0, 255).tolist()
    return r, g, b


def background(
    rng: np.random.Generator, width: int, height: int, *, held_out: bool, plain: bool = False
) -> Image.Image:
    """A plain colour, a slope between two, blurred or fine noise, or a piece of a photograph; the first if `plain`."""
    kind, photos = rng.random(), photographs(held_out=held_out)
    if kind < 0.25 and photos and not plain:
        return _piece(rng, photos[int(rng.integers(len(photos)))], width, height)
    if plain or kind < 0.7:
        return Image.new("RGB", (width, height), _any_colour(rng))
    if kind < 0.85:
        corners = np.array([_any_colour(rng) for _ in range(2)], np.uint8)
        grid = corners[rng.permutation([0, 0, 1, 1])].reshape(2, 2, 3)
    else:
        side = int(rng.integers(3, 12))
        grid = np.clip(np.array(_any_colour(rng)) + rng.integers(-28, 29, (side, side, 3)), 0, 255).astype(np.uint8)
    method = Image.Resampling.NEAREST if kind > 0.95 else Image.Resampling.BILINEAR
    return Image.fromarray(grid).resize((width, height), method)


def _any_colour(rng: np.random.Generator) -> RGB:
    kind = rng.random()
    if kind < 0.3:
        low = int(rng.integers(215, 256))
        r, g, b = rng.integers(low - 12, low + 1, 3).tolist()
    elif kind < 0.45:
        r, g, b = rng.integers(0, 45, 3).tolist()
    else:
        r, g, b = rng.integers(0, 256, 3).tolist()
    return r, g, b


def _piece(rng: np.random.Generator, photo: Image.Image, width: int, height: int) -> Image.Image:
    """A random crop of the picture's shape, some of it mirrored."""
    scale = min(photo.width / width, photo.height / height) * rng.uniform(0.5, 1.0)
    w, h = max(1, int(width * scale)), max(1, int(height * scale))
    left, top = int(rng.integers(photo.width - w + 1)), int(rng.integers(photo.height - h + 1))
    piece = photo.resize((width, height), Image.Resampling.BILINEAR, (left, top, left + w, top + h), reducing_gap=2.0)
    return piece.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else piece


class Ground:
    """What a picture shows before things are put on it; says which colours stand out where."""

    def __init__(self, image: Image.Image):
        self._small = np.asarray(image.resize((16, 16), Image.Resampling.BOX), np.float32)
        self._width, self._height = image.size

    def clear_colours(self, x: float, y: float, w: float, h: float, *, thin: bool = False) -> list[str]:
        """The colours that are far from everything in the box around (x, y); in lightness too, for thin strokes."""
        columns = np.clip(np.array([x - w, x + w]) / self._width * 16, 0, 15).astype(int)
        rows = np.clip(np.array([y - h, y + h]) / self._height * 16, 0, 15).astype(int)
        box = self._small[rows[0] : rows[1] + 1, columns[0] : columns[1] + 1].reshape(-1, 3)
        far = np.linalg.norm(box[:, None] - _PALETTE, axis=-1).min(0) > _CONTRAST
        if thin:
            far &= np.abs((box[:, None] - _PALETTE) @ _LIGHTNESS).min(0) > _THIN_CONTRAST
        return [name for name, clear in zip(COLOURS, far, strict=True) if clear]


_LIGHTNESS = np.array([0.299, 0.587, 0.114], np.float32)
_PALETTE = np.array(list(COLOURS.values()), np.float32)


def draw_thing(rng: np.random.Generator, image: Image.Image, thing: Thing) -> None:
    side = max(6, round(2 * thing.radius))
    turn = int(rng.integers(-3, 4)) * 4
    mask = (_mask if side <= _CACHED_SIDE else _mask.__wrapped__)(thing.shape, side, turn)
    corner = round(thing.x - side / 2), round(thing.y - side / 2)
    image.paste(shade(rng, thing.colour), (*corner, corner[0] + side, corner[1] + side), mask)


@cache
def _mask(shape: str, side: int, turn: int) -> Image.Image:
    """The shape in a square of `side` pixels, `turn` degrees turned."""
    big = side * _SMOOTH
    mask = Image.new("L", (big, big))
    draw, r = ImageDraw.Draw(mask), big / 2

    def polygon(points: list[tuple[float, float]]) -> None:
        draw.polygon([(r + r * x, r + r * y) for x, y in points], fill=255)

    def around(radii: list[float], start: float) -> list[tuple[float, float]]:
        step = 2 * math.pi / len(radii)
        return [(k * math.cos(start + i * step), k * math.sin(start + i * step)) for i, k in enumerate(radii)]

    if shape in ("circle", "ring"):
        draw.ellipse((0.04 * r, 0.04 * r, 1.96 * r, 1.96 * r), fill=255)
        if shape == "ring":
            draw.ellipse((0.5 * r, 0.5 * r, 1.5 * r, 1.5 * r), fill=0)
    elif shape == "square":
        polygon([(-0.78, -0.78), (0.78, -0.78), (0.78, 0.78), (-0.78, 0.78)])
    elif shape == "triangle":
        polygon([(0, -0.92), (0.92, 0.76), (-0.92, 0.76)])
    elif shape == "diamond":
        polygon([(0, -0.98), (0.68, 0), (0, 0.98), (-0.68, 0)])
    elif shape == "star":
        polygon(around([0.98, 0.4] * 5, -math.pi / 2))
    elif shape == "cross":
        a, b = 0.3, 0.92
        corners = [(-a, -b), (a, -b), (a, -a), (b, -a), (b, a), (a, a), (a, b), (-a, b), (-a, a), (-b, a), (-b, -a)]
        polygon([*corners, (-a, -a)])
    elif shape == "heart":
        for left in (-0.94, -0.06):
            draw.ellipse((r + r * left, 0.12 * r, r + r * (left + 1.0), 1.12 * r), fill=255)
        polygon([(-0.9, -0.2), (0.9, -0.2), (0, 0.94)])
    else:
        raise ValueError(f"shape is {shape!r}, which nothing here draws")
    if turn:
        mask = mask.rotate(turn, Image.Resampling.NEAREST)
    return mask.resize((side, side), Image.Resampling.BOX)


def text_box(text: str, font_name: str, size: int) -> tuple[int, int, int, int]:
    """left, top, right, bottom of the text drawn at the origin."""
    left, top, right, bottom = font(font_name, size).getbbox(text)
    return math.floor(left), math.floor(top), math.ceil(right), math.ceil(bottom)


def draw_text(
    image: Image.Image, text: str, font_name: str, size: int, centre: tuple[float, float], colour: RGB, angle: float
) -> None:
    """The text with the middle of its box at `centre`, turned by `angle` degrees."""
    left, top, right, bottom = text_box(text, font_name, size)
    width, height = right - left, bottom - top
    if not angle:
        origin = round(centre[0] - width / 2) - left, round(centre[1] - height / 2) - top
        ImageDraw.Draw(image).text(origin, text, font=font(font_name, size), fill=colour)
        return
    mask = Image.new("L", (width + 2, height + 2))
    ImageDraw.Draw(mask).text((1 - left, 1 - top), text, font=font(font_name, size), fill=255)
    mask = mask.rotate(angle, Image.Resampling.BILINEAR, expand=True)
    image.paste(colour, (round(centre[0] - mask.width / 2), round(centre[1] - mask.height / 2)), mask)


def draw_bars(rng: np.random.Generator, image: Image.Image, colours: list[str], heights: list[float]) -> None:
    """A bar chart over the whole picture. heights: 0 to 1."""
    width, height = image.size
    draw, foot, step = ImageDraw.Draw(image), 0.92 * height, 0.9 * width / len(colours)
    gap = step * rng.uniform(0.1, 0.35)
    ink: RGB = (90, 90, 90)
    for i, (colour, tall) in enumerate(zip(colours, heights, strict=True)):
        left = 0.07 * width + i * step
        draw.rectangle((left, foot - 0.84 * height * tall, left + step - gap, foot), fill=shade(rng, colour))
    thick = max(1, round(min(width, height) / 96))
    draw.line((0.05 * width, foot, 0.97 * width, foot), fill=ink, width=thick)
    draw.line((0.05 * width, 0.06 * height, 0.05 * width, foot), fill=ink, width=thick)


@cache
def _grain() -> Image.Image:
    return Image.effect_noise((512, 512), 11.0).convert("RGB")


def grain(rng: np.random.Generator, image: Image.Image) -> Image.Image:
    """A little noise, the same in all channels; for pictures of at most 512 x 512."""
    left, top = int(rng.integers(513 - image.width)), int(rng.integers(513 - image.height))
    return ImageChops.add(image, _grain().crop((left, top, left + image.width, top + image.height)), 1, -128)
