"""What scripts/demo asks the embedded models: things on photographs, and pictures with one right answer."""

import base64
import io

from PIL import Image

from scripts.lib.demo import PHOTOS, pick_images
from scripts.lib.demo_sight import drawn, on_photographs
from scripts.lib.miniature.sight.miniature import Sight
from scripts.lib.miniature.sight.words import COLOURS, PLACES, SHAPES

FILES = sorted(p for p in PHOTOS.iterdir() if p.suffix != ".md")


def pictures_of(asked) -> list[Image.Image]:
    [message] = asked.body["messages"]
    urls = [part["image_url"]["url"] for part in message["content"] if part["type"] == "image_url"]
    return [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]


def test_a_photograph_keeps_its_shape_and_gets_things_that_are_asked_about():
    asked = on_photographs(FILES)
    assert [one.what.split(",")[0] for one in asked] == [file.stem.split("_")[0] for file in FILES]
    answers = {*COLOURS, *SHAPES, *(place for row in PLACES for place in row)}
    for one in asked:
        [image] = pictures_of(one)
        assert f"{image.width}x{image.height}" in one.what
        assert max(image.size) <= 320
        assert one.answer in answers
        assert one.body["messages"][0]["content"][-1] == {"type": "text", "text": one.question}
    assert asked == on_photographs(FILES), "the same every time"


def test_drawn_pictures_are_told_with_their_sizes(tmp_path):
    for name, text in Sight("tiny").files().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    asked = drawn(tmp_path, 6)
    assert len(asked) == 6
    for one in asked:
        sizes = [f"{image.width}x{image.height}" for image in pictures_of(one)]
        assert one.what.split(", ")[1] == " and ".join(sizes)
        assert one.question
        assert one.answer


def test_without_the_embedded_models_digits_and_photographs_are_mixed():
    images = pick_images()
    assert len(images) == 16
    assert {label is None for _, label in images} == {True, False}
