"""Pictures with all that is known of them: things in places, a text, bars; and questions that have one answer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from string import ascii_uppercase

import numpy as np
from PIL import Image

from scripts.lib.miniature.sight.drawing import (
    Ground,
    Thing,
    background,
    draw_bars,
    draw_text,
    draw_thing,
    grain,
    shade,
    text_box,
)
from scripts.lib.miniature.sight.sources import font_names
from scripts.lib.miniature.sight.words import (
    COLOURS,
    HELD_OUT_WORDS,
    PHRASES,
    PLACES,
    RELATIONS,
    SHAPES,
    WORDS,
    plural,
)

# Pixels of the processor's canvas from the top of a text to its foot, at least.
_LEAST_HEIGHT = 18
# One or two of these can be read alone: I and O are not told apart from 1 and 0.
_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
# Those that words have most of and that look most like others are drawn twice as often.
_ALL_LETTERS = ascii_uppercase + "ILO"
# These look the same small, or are one stroke: a text of them alone does not tell an I from a small l.
_ALIKE = frozenset("CILOSVWXZ")
_HELD_OUT = frozenset(word.upper() for word in HELD_OUT_WORDS)


@dataclass(frozen=True)
class Question:
    """task: one of words.TASKS. text: as a user types it. answer: all of it."""

    task: str
    text: str
    answer: str


@dataclass
class Scene:
    """image: the picture. things: its shapes. text: what stands in it, upper case, and where its middle is."""

    image: Image.Image
    things: list[Thing] = field(default_factory=list)
    text: str = ""
    text_at: tuple[float, float] = (0.0, 0.0)
    bars: list[tuple[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Level:
    """How hard pictures are. letters: of a text at most. things: in a picture at most. held_out: photographs and words
    that are never drawn while training. crowd: more things than training has, for `things` of them exactly. ease: from
    0, all there is, to 1, plain grounds and large texts in few fonts."""

    letters: int = 6
    things: int = 6
    held_out: bool = False
    crowd: bool = False
    ease: float = 0.0


def draw_things(rng: np.random.Generator, width: int, height: int, level: Level, count: int | None = None) -> Scene:
    """Shapes that do not touch, each in a colour that stands out."""
    image = background(rng, width, height, held_out=level.held_out, plain=rng.random() < level.ease)
    if count is None:
        count = level.things if level.crowd else int(rng.integers(1, level.things + 1))
    scene, ground = Scene(image), Ground(image)
    # Few shapes and colours make counts by one of them, and twins.
    few_shapes = [str(s) for s in rng.choice(SHAPES, int(rng.integers(1, 4)), replace=False)]
    few = rng.random() < 0.5
    one_colour = str(rng.choice(list(COLOURS))) if rng.random() < 0.25 else None
    for x, y, radius in _spots(rng, width, height, count, level.ease):
        clear = ground.clear_colours(x, y, radius, radius)
        if not clear:
            continue
        colour = one_colour if one_colour in clear else clear[int(rng.integers(len(clear)))]
        shape = few_shapes[int(rng.integers(len(few_shapes)))] if few else SHAPES[int(rng.integers(len(SHAPES)))]
        scene.things.append(Thing(shape, colour, x, y, radius))
        draw_thing(rng, image, scene.things[-1])
    scene.image = _finish(rng, image)
    return scene


def _spots(
    rng: np.random.Generator, width: int, height: int, count: int, ease: float
) -> list[tuple[float, float, float]]:
    """Up to `count` places (x, y, radius) that keep a distance: in the cells of a 3x3 grid, or anywhere."""
    ratio = max(width, height) / min(width, height)
    if ratio < 2 and count <= 9 and rng.random() < 0.5 * (1 - ease):
        cw, ch = width / 3, height / 3
        cells = rng.permutation(9)[:count]
        radii = rng.uniform(0.33, 0.44, count) * min(cw, ch)
        jitter = rng.uniform(-0.9, 0.9, (count, 2))
        return [
            (
                float((c % 3 + 0.5) * cw + jx * min(cw / 2 - r, 0.18 * cw)),
                float((c // 3 + 0.5) * ch + jy * min(ch / 2 - r, 0.18 * ch)),
                float(r),
            )
            for c, r, (jx, jy) in zip(cells, radii, jitter, strict=True)
        ]
    spots: list[tuple[float, float, float]] = []
    largest = min(0.42 * min(width, height), 0.55 * (width * height / max(count, 2)) ** 0.5 / 1.6)
    for _ in range(count * 12):
        if len(spots) == count:
            break
        radius = largest * rng.uniform(0.4 if count == 1 else 0.6, 1.0)
        x, y = rng.uniform(radius, width - radius), rng.uniform(radius, height - radius)
        if all((x - a) ** 2 + (y - b) ** 2 > (1.12 * (radius + c)) ** 2 for a, b, c in spots):
            spots.append((float(x), float(y), float(radius)))
    return spots


def draw_words(rng: np.random.Generator, width: int, height: int, level: Level, scale: float) -> Scene:
    """A word or a number, large enough to be read. scale: pixels of the picture for one of the processor's canvas."""
    easy = rng.random() < level.ease
    image = background(rng, width, height, held_out=level.held_out, plain=easy)
    names = font_names()[: 4 if easy else None]
    name, letters = names[int(rng.integers(len(names)))], level.letters
    while True:
        text = _text(rng, level, letters)
        _, top, wide, low = text_box(text, name, 40)
        # The largest size that fits, and the least height that the canvas still shows.
        most = 40 * min(0.94 * width / wide, 0.8 * height / (low - top))
        least = 40 * _LEAST_HEIGHT * scale / (low - top)
        if least <= most or letters == 1:
            break
        letters -= 1
    least = min(least, most)
    large = rng.uniform(0.5, 1) if easy else rng.random() ** 1.5
    size = max(7, int(least + (most - least) * large))
    left, top, right, bottom = text_box(text, name, size)
    half_w, half_h = (right - left) / 2, (bottom - top) / 2
    x = rng.uniform(half_w, max(half_w, width - half_w)) if half_w * 2 < width else width / 2
    y = rng.uniform(half_h, max(half_h, height - half_h)) if half_h * 2 < height else height / 2
    clear = Ground(image).clear_colours(x, y, half_w, half_h, thin=True)
    if clear:
        colour = shade(rng, clear[int(rng.integers(len(clear)))])
    else:
        # Nothing stands out on all of it: a plate behind the text does.
        colour, plate = ((15, 15, 15), (245, 245, 245)) if rng.random() < 0.5 else ((245, 245, 245), (15, 15, 15))
        image.paste(plate, (int(x - half_w - 3), int(y - half_h - 3), int(x + half_w + 4), int(y + half_h + 4)))
    fits_turned = half_w * 2.2 < width and half_h * 3 < height
    angle = float(rng.uniform(-8, 8)) if fits_turned and rng.random() < 0.25 else 0.0
    # The small l is the same stroke as I and 1: only the letters beside it tell which it is.
    lower = not easy and rng.random() < 0.4 and ("L" not in text or len(text) > 2)
    drawn = text.lower() if lower else text
    scene = Scene(image, text=text, text_at=(float(x), float(y)))
    if not easy and rng.random() < 0.35:
        _beside_text(rng, scene, (x, y, half_w, half_h))
    draw_text(image, drawn, name, size, (x, y), colour, angle)
    scene.image = _finish(rng, image)
    return scene


def _beside_text(rng: np.random.Generator, scene: Scene, box: tuple[float, float, float, float]) -> None:
    """Up to two shapes that keep clear of the text's box (middle and half sizes)."""
    width, height = scene.image.size
    ground, (x, y, half_w, half_h) = Ground(scene.image), box
    for _ in range(4):
        radius = rng.uniform(0.12, 0.2) * min(width, height)
        at_x, at_y = rng.uniform(radius, width - radius), rng.uniform(radius, height - radius)
        near_text = abs(at_x - x) < half_w + 1.2 * radius and abs(at_y - y) < half_h + 1.4 * radius
        near = any((at_x - t.x) ** 2 + (at_y - t.y) ** 2 < (1.2 * (radius + t.radius)) ** 2 for t in scene.things)
        clear = ground.clear_colours(at_x, at_y, radius, radius)
        if near_text or near or not clear or len(scene.things) == 2:
            continue
        shape = SHAPES[int(rng.integers(len(SHAPES)))]
        colour = clear[int(rng.integers(len(clear)))]
        scene.things.append(Thing(shape, colour, float(at_x), float(at_y), float(radius)))
        draw_thing(rng, scene.image, scene.things[-1])


def _text(rng: np.random.Generator, level: Level, letters: int) -> str:
    """At most `letters` characters."""
    kind = rng.random()
    length = int(rng.integers(1, letters + 1))
    if kind < (0.4 if level.held_out else 0.2):
        return "".join(map(str, rng.integers(0, 10, min(length, 5))))
    if letters < 3 or (kind < 0.8 and not level.held_out):
        # Letters without sense teach to read what was never seen, long ones most; words are soon known by heart.
        return _made_up(rng, length if letters < 3 else max(length, int(rng.integers(1, letters + 1))))
    words = HELD_OUT_WORDS if level.held_out else WORDS
    for _ in range(20):
        word = words[int(rng.integers(len(words)))]
        if len(word) <= letters:
            return word.upper()
    return "CAT"


def _made_up(rng: np.random.Generator, length: int) -> str:
    """Letters without sense of which each can be told, no word of the held-out ones."""
    letters = _ALL_LETTERS if length > 2 else _LETTERS
    while True:
        text = "".join(letters[i] for i in rng.integers(0, len(letters), length))
        if length < 3 or (not _ALIKE.issuperset(text) and text not in _HELD_OUT):
            return text


def draw_chart(rng: np.random.Generator, width: int, height: int, level: Level) -> Scene:
    """Three to five bars, the tallest and the shortest clearly so."""
    image = Image.new("RGB", (width, height), (250, 250, 250))
    count = int(rng.integers(3, 6))
    colours = [str(c) for c in rng.choice([c for c in COLOURS if c != "white"], count, replace=False)]
    heights = rng.permutation([0.2, *rng.uniform(0.32, 0.82, count - 2), 0.95]) * rng.uniform(0.9, 1.0)
    draw_bars(rng, image, colours, heights.tolist())
    return Scene(_finish(rng, image), bars=list(zip(colours, heights.tolist(), strict=True)))


def _finish(rng: np.random.Generator, image: Image.Image) -> Image.Image:
    return grain(rng, image) if rng.random() < 0.15 and max(image.size) <= 512 else image


def referents(things: list[Thing]) -> dict[str, Thing]:
    """What names one thing alone: a shape, a colour, or both, the object where there is no other."""
    found: dict[str, Thing] = {"object": things[0]} if len(things) == 1 else {}
    for thing in things:
        for name, same in (
            (thing.shape, sum(t.shape == thing.shape for t in things)),
            (f"{thing.colour} object", sum(t.colour == thing.colour for t in things)),
            (f"{thing.colour} {thing.shape}", sum((t.colour, t.shape) == (thing.colour, thing.shape) for t in things)),
        ):
            if same == 1:
                found[name] = thing
    return found


def place_of(x: float, y: float, width: int, height: int) -> str | None:
    """The name of the third of the picture that (x, y) lies in, None near a border of two."""
    column, row = _third(x / width), _third(y / height)
    return None if column is None or row is None else PLACES[row][column]


def _third(share: float) -> int | None:
    return next((i for i, (a, b) in enumerate(((0, 0.29), (0.38, 0.62), (0.71, 1))) if a <= share <= b), None)


def ask_things(rng: np.random.Generator, scene: Scene, task: str) -> Question | None:
    """A question of `task` about a scene of things, None where the scene has none with one answer."""
    ask: Callable[[np.random.Generator, Scene], tuple[str, str] | None] = _ASK[task]
    said = ask(rng, scene) if scene.things else None
    return Question(task, *said) if said else None


def phrase(rng: np.random.Generator, kind: str, **parts: str) -> str:
    """One of the ways to ask, now and then typed without capital letters or the question mark."""
    options = PHRASES[kind]
    text = options[0 if rng.random() < 0.4 else int(rng.integers(len(options)))].format(**parts)
    return text.lower().rstrip("?.") if rng.random() < 0.08 else text


def _pick(rng: np.random.Generator, options: list[str]) -> str | None:
    return options[int(rng.integers(len(options)))] if options else None


def _ask_colour(rng: np.random.Generator, scene: Scene) -> tuple[str, str] | None:
    named = referents(scene.things)
    name = _pick(rng, [n for n in named if n in SHAPES or n == "object"])
    return None if name is None else (phrase(rng, "colour", thing=name), named[name].colour)


def _ask_shape(rng: np.random.Generator, scene: Scene) -> tuple[str, str] | None:
    named = referents(scene.things)
    name = _pick(rng, [n for n in named if n.endswith("object")])
    return None if name is None else (phrase(rng, "shape", thing=name), named[name].shape)


def _ask_count(rng: np.random.Generator, scene: Scene) -> tuple[str, str] | None:
    things, kind = scene.things, rng.random()
    one = things[int(rng.integers(len(things)))]
    if kind < 0.4:
        name, count = "objects" if rng.random() < 0.6 else "shapes", len(things)
    elif kind < 0.9:
        if rng.random() < 0.5:
            name, count = plural(one.shape), sum(t.shape == one.shape for t in things)
        else:
            name, count = f"{one.colour} objects", sum(t.colour == one.colour for t in things)
    else:
        absent = _pick(rng, [s for s in SHAPES if all(t.shape != s for t in things)])
        name, count = plural(absent or one.shape), 0 if absent else sum(t.shape == one.shape for t in things)
    return phrase(rng, "count", things=name), str(count)


def _ask_where(rng: np.random.Generator, scene: Scene) -> tuple[str, str] | None:
    w, h = scene.image.size
    places = {name: place_of(t.x, t.y, w, h) for name, t in referents(scene.things).items()}
    name = _pick(rng, [name for name, place in places.items() if place])
    return None if name is None else (phrase(rng, "where", thing=name), str(places[name]))


def _ask_side(rng: np.random.Generator, scene: Scene) -> tuple[str, str] | None:
    named = referents(scene.things)
    first, second = _pick(rng, list(named)), _pick(rng, list(named))
    if first is None or second is None or (a := named[first]) is (b := named[second]):
        return None
    relation = RELATIONS[int(rng.integers(len(RELATIONS)))]
    across = relation in ("left of", "right of")
    apart = (b.x - a.x) / scene.image.width if across else (b.y - a.y) / scene.image.height
    if abs(apart) < 0.1:
        return None
    holds = (apart > 0) == (relation in ("left of", "above"))
    return phrase(rng, "side", thing=first, relation=relation, other=second), "yes" if holds else "no"


_ASK = {
    "colour": _ask_colour,
    "shape": _ask_shape,
    "count": _ask_count,
    "where": _ask_where,
    "side": _ask_side,
}


def ask_text(rng: np.random.Generator, scene: Scene) -> Question:
    number = scene.text.isdigit() and rng.random() < 0.5
    return Question("read", phrase(rng, "number" if number else "read"), scene.text)


def ask_text_place(rng: np.random.Generator, scene: Scene) -> Question | None:
    place = place_of(*scene.text_at, *scene.image.size)
    return None if place is None else Question("where", phrase(rng, "where", thing="text"), place)


def ask_chart(rng: np.random.Generator, scene: Scene) -> Question:
    kind = "tallest" if rng.random() < 0.6 else "shortest"
    wanted = max(scene.bars, key=lambda bar: bar[1]) if kind == "tallest" else min(scene.bars, key=lambda bar: bar[1])
    return Question("chart", phrase(rng, kind), wanted[0])
