"""Crafted files: each is prepared or refused with a fixed text, and none costs memory."""

import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from tests.vitbatch.hostile import CAP, UNREADABLE, hostile_files, png
from tests.vitbatch.pictures import encoded, noise
from vitbatch import ImageError, ImageProcessor, PreparedImage

SMALL = ImageProcessor(patch_size=16, merge_size=2, min_pixels=1024, max_pixels=65536, max_decoded_pixels=CAP)


@pytest.mark.parametrize("name", hostile_files())
def test_a_crafted_file_ends_as_it_should(name):
    data, ending = hostile_files()[name]
    if isinstance(ending, int):
        image = SMALL.prepare(data)
        assert image.num_tokens == ending
    else:
        with pytest.raises(ImageError, match=re.escape(ending)) as caught:
            SMALL.prepare(data)
        # A decoder's own words stay out of the text and of what a traceback prints.
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_an_unreadable_file_gives_exactly_one_fixed_text():
    texts = set()
    for data, ending in hostile_files().values():
        if ending == UNREADABLE:
            with pytest.raises(ImageError) as caught:
                SMALL.prepare(data)
            texts.add(str(caught.value))
    assert texts == {UNREADABLE}


def test_no_corruption_of_a_file_raises_anything_but_image_error():
    draw, picture = np.random.default_rng(0), Image.fromarray(noise(40, 50, 0))
    files = [encoded(picture, kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")]
    outcomes = set()
    for turn in range(150):
        data = bytearray(files[turn % 5])
        for place in draw.integers(8, len(data), int(draw.integers(1, 6))):
            data[place] = int(draw.integers(256))
        try:
            outcomes.add(type(SMALL.prepare(bytes(data))))
        except ImageError:
            outcomes.add(ImageError)
    assert outcomes == {PreparedImage, ImageError}


def test_no_file_costs_memory():
    """A process of its own prepares all of them, and forty more bombs under the default cap, and reports its peak."""
    script = """
import pickle, resource, sys, warnings
from vitbatch.images import ImageError, ImageProcessor
warnings.simplefilter("ignore")
files, bomb, good, cap = pickle.load(sys.stdin.buffer)
bounds = {"patch_size": 16, "merge_size": 2, "min_pixels": 1024, "max_pixels": 65536}
capped, default = ImageProcessor(**bounds, max_decoded_pixels=cap), ImageProcessor(**bounds)
default.prepare(good)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for processor, batch in ((capped, files), (default, [bomb] * 40)):
    for data in batch:
        try:
            processor.prepare(data)
        except ImageError as error:
            text = str(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, text)
"""
    files = {name: data for name, (data, _) in hostile_files().items()}
    good = encoded(Image.fromarray(noise(600, 400, 0)), "PNG")
    work = pickle.dumps((list(files.values()), files["png of 144 MP"], good, CAP))
    done = subprocess.run([sys.executable, "-c", script], input=work, capture_output=True, check=True)
    grown, _, text = done.stdout.decode().partition(" ")
    assert int(grown) < 50 * 1024, f"peak memory grew by {grown} kB"
    # Above 89 million pixels Pillow only warns, and the header still decides.
    assert text.strip() == ("image of 12000x12000 px has 144000000 pixels; the limit is 64000000: send a smaller image")


def test_an_oversized_image_is_refused_from_its_header():
    free = ImageProcessor(patch_size=16, merge_size=2, min_pixels=1024, max_pixels=65536)
    with pytest.raises(ImageError, match="image of 9000x8000 px has 72000000 pixels; the limit is 64000000"):
        free.prepare(png(9000, 8000))


def test_an_image_above_the_largest_bucket_is_refused_before_it_is_decoded():
    limited = ImageProcessor(patch_size=16, merge_size=2, min_pixels=1024, max_pixels=65536, max_patches=128)
    with pytest.raises(ImageError, match="image of 600x600 px needs 256 patches; the limit is 128"):
        limited.prepare(png(600, 600))
    assert limited.largest_image_patches == 128
