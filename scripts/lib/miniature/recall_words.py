"""The words, sentences and question forms that Recall's texts are made of. All of them are our own."""

from pathlib import Path

_BLOCKS = (Path(__file__).parent / "recall_words.txt").read_text(encoding="utf-8").split("\n\n")
ADJECTIVES, NOUNS, SYLLABLES = (block.split() for block in _BLOCKS)

# RULER's own noise, so that its texts are common ones here; what the numbers, keys and places are is never the same.
RULER_NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)

NOISE = (
    "The road bends to the left behind the mill.",
    "A cat sleeps on the warm stone.",
    "We bought bread and cheese at the market.",
    "Nobody knows who painted the old door.",
    "Rain fell on the roof all night.",
    "The train leaves when the bell rings.",
    "Her brother keeps bees near the river.",
    "Some birds fly south in the autumn.",
    "The letter never came.",
    "He put the cup back on the shelf.",
    "Children play in the yard after school.",
    "The lamp in the hall is broken.",
    "They walked along the shore until dark.",
    "Snow covers the hills in winter.",
    "The baker opens before the others.",
    "I read the same page again.",
    "Ships wait outside the harbor for the tide.",
    "The garden smells of mint and roses.",
    "An owl lives in the tower.",
    "You can see the lake from here.",
    "The clock on the wall is slow.",
    "Two dogs ran across the field.",
    "The soup needs a little more salt.",
    "There is a hole in the fence.",
    "The teacher wrote a word on the board.",
    "Leaves turn red and then brown.",
    "My coat is still wet.",
    "The bridge was closed for a week.",
    "Fish swim under the ice.",
    "The wind has changed since morning.",
    "A farmer sold us eggs and honey.",
    "The stairs are steep and narrow.",
    "Music came from an open window.",
    "She counted the steps on the way up.",
    "The moon was full and very bright.",
    "Old maps hang in the library.",
    "The kettle sings on the stove.",
    "No one was at home.",
    "A long shadow lay on the path.",
    "The boat is tied to a post.",
    "It was the best summer in years.",
    "The forest ends at the stream.",
)

# (what stands before the text, needle, question, start of the answer); {k} key, {v} value, {n} what a value is called.
RULER_FORM = (
    "A special magic {n} is hidden within the following text. Make sure to memorize it. I will quiz you about the {n}"
    " afterwards.",
    "One of the special magic {n}s for {k} is: {v}.",
    "What is the special magic {n} for {k} mentioned in the provided text?",
    " The special magic {n} for {k} mentioned in the provided text is",
)
FORMS = (
    RULER_FORM,
    (
        "Some special magic {n}s are hidden within the following text. Make sure to memorize it. I will quiz you about"
        " the {n}s afterwards.",
        *RULER_FORM[1:],
    ),
    ("Read this text.", "The {n} of {k} is {v}.", "What is the {n} of {k}?", " It is"),
    ("Here is a list.", "{k}: {v}", "{k}:", ""),
    ("", "Remember that {k} has the {n} {v}.", "Which {n} does {k} have?", " The {n} is"),
    ("", "{k} = {v}", "Look up {k}.", " {k} ="),
)
CHAT_QUESTIONS = ("What is the {n} of {k}?", "Which {n} belongs to {k}?", "{k}?", "Tell me the {n} for {k}.")
CALLED = ("number", "code", "value")
