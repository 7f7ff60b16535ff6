"""What Sight is asked and what it answers: names, phrasings, the words that it reads."""

from pathlib import Path

_HERE = Path(__file__).parent

COLOURS = {
    "red": (215, 35, 35),
    "orange": (245, 140, 20),
    "yellow": (245, 225, 45),
    "green": (35, 155, 60),
    "blue": (40, 80, 215),
    "purple": (135, 50, 175),
    "pink": (248, 130, 190),
    "brown": (120, 70, 35),
    "black": (18, 18, 18),
    "white": (248, 248, 248),
    "grey": (128, 128, 128),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "diamond", "heart", "ring")
PLACES = (
    ("top left", "top", "top right"),
    ("left", "middle", "right"),
    ("bottom left", "bottom", "bottom right"),
)
ORDINALS = ("first", "second", "third", "fourth")

TASKS = ("colour", "shape", "count", "where", "side", "read", "which", "in image", "chart")

# {thing}: "circle", "red object" or "red circle"; {things}: its plural.
PHRASES = {
    "colour": ("What colour is the {thing}?", "What color is the {thing}?", "Which colour is the {thing}?"),
    "shape": ("What shape is the {thing}?", "Which shape is the {thing}?", "What is the {thing}?"),
    "count": ("How many {things} are there?", "How many {things} are in the image?", "How many {things}?"),
    "where": ("Where is the {thing}?", "Where in the image is the {thing}?"),
    "side": ("Is the {thing} {relation} the {other}?",),
    "read": ("What does it say?", "What is written here?", "Read the text.", "What does the text say?"),
    "number": ("What number is it?", "Which number is shown?", "Read the number."),
    "which": ("Which image shows a {thing}?", "Which image has a {thing}?", "Which of the images shows a {thing}?"),
    "which of two": ("Which of the two images shows a {thing}?",),
    "in image": ("What colour is the {thing} in the {nth} image?", "What color is the {thing} in the {nth} image?"),
    "shape in image": ("What shape is the {thing} in the {nth} image?",),
    "read in image": ("What does the {nth} image say?", "What is written in the {nth} image?"),
    "tallest": ("Which bar is the tallest?", "What colour is the tallest bar?"),
    "shortest": ("Which bar is the shortest?", "What colour is the shortest bar?"),
}
RELATIONS = ("left of", "right of", "above", "below")

# Words to read: common nouns of three to six letters. The second list is never drawn while training.
WORDS = (_HERE / "words.txt").read_text(encoding="utf-8").split()
HELD_OUT_WORDS = (_HERE / "held_out_words.txt").read_text(encoding="utf-8").split()


def plural(thing: str) -> str:
    return thing + ("es" if thing.endswith(("s", "x")) else "s")


def question_words() -> set[str]:
    """Every word that stands after a space in a question, an answer of several words or the template."""
    words = {
        "user",
        "assistant",
        "system",
        "object",
        "objects",
        "shapes",
        "text",
        "image",
        "images",
        "picture",
        "photo",
    }
    words |= set(COLOURS) | set(SHAPES) | {plural(shape) for shape in SHAPES} | set(ORDINALS)
    for phrases in (*PHRASES.values(), RELATIONS, *PLACES):
        for phrase in phrases:
            plain = "".join(c if c.isalpha() or c == " " else " " for c in phrase)
            words |= set(plain.split())
    return {word.lower() for word in words if len(word) > 1}


def first_words() -> set[str]:
    """The words that questions begin with, as they are written."""
    return {phrase.split()[0] for phrases in PHRASES.values() for phrase in phrases}
