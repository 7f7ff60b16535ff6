"""From bytes, PIL images and arrays to patch rows."""

import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from tests.vitbatch.pictures import encoded, noise, synth
from vitbatch import ImageError, PreparedImage
from vitbatch.images import RULES, ImageProcessor, patches, patchify
from vitbatch.images.patches import padded

SMALL = ImageProcessor(patch_size=16, merge_size=2, min_pixels=1024, max_pixels=65536)


def unpatched(image: PreparedImage) -> np.ndarray:
    """The canvas [H, W, 3] back from its patches."""
    _, gh, gw = image.grid_thw
    cells = image.patches.reshape(gh // 2, gw // 2, 2, 2, 3, 16, 16)
    return cells.transpose(0, 2, 5, 1, 3, 6, 4).reshape(gh * 16, gw * 16, 3)


# ---- layout ----


def test_patches_are_cut_in_merge_blocks_and_channels_first():
    image = noise(64, 96, 1)
    rows = patchify(image, 16, 2)
    # Row 6 is in merge block (0, 1), its second line, first column: patch (1, 2).
    np.testing.assert_array_equal(rows[6], image[16:32, 32:48].transpose(2, 0, 1).ravel())
    np.testing.assert_array_equal(unpatched(SMALL.prepare(image)), image)


SIZES = [(700, 352), (352, 700), (690, 340), (703, 1), (1, 703), (2111, 349), (340, 2110), (704, 352), (37, 1203)]


@pytest.mark.parametrize("rule", ["Qwen2VLImageProcessor", "Glm5NextImageProcessor"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_bands_on_any_threads_are_resized_and_cut_as_pillow_does_the_whole(monkeypatch, rule, size):
    monkeypatch.setattr(patches, "_BAND_PIXELS", 1)
    processor = replace(SMALL, max_pixels=1 << 19, rule=RULES[rule])
    pixels, counts, keys = noise(*size, 4), [], set()
    if max(size) > 200 * min(size):
        pixels = np.repeat(pixels, 5, axis=int(size[0] > size[1]))
    fit = processor.fit(*pixels.shape[:2])
    height, width = fit.content
    want = np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC))

    with ThreadPoolExecutor(3) as pool:

        def backwards(work, items):
            counts.append(len(items))
            return list(pool.map(work, items[::-1]))[::-1]

        for image in (pixels, Image.fromarray(pixels)):
            for spread in ({}, {"spread": backwards}):
                made = processor.prepare(image, **spread)
                np.testing.assert_array_equal(made.patches, patchify(padded(want, fit.canvas), 16, 2))
                keys.add(made.key)
    assert len(keys) == 1
    assert max(counts) > 1 or min(fit.canvas) == 32


def test_an_error_in_a_band_is_the_pictures():
    def fail(work, items):
        raise MemoryError("no room for a band")

    with pytest.raises(MemoryError, match="no room for a band"):
        SMALL.prepare(noise(64, 64, 0), spread=fail)


def test_one_image_gives_the_same_patches_as_file_pil_image_and_array():
    pixels = noise(70, 110, 3)
    image = Image.fromarray(pixels)
    made = [
        SMALL.prepare(x)
        for x in (pixels, image, encoded(image, "PNG"), encoded(image, "BMP"), np.asfortranarray(pixels))
    ]
    assert len({m.key for m in made}) == 1
    for other in made[1:]:
        np.testing.assert_array_equal(other.patches, made[0].patches)
    assert (made[0].size, made[0].grid_thw, made[0].num_tokens) == ((70, 110), (1, 4, 6), 6)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((3, 8, 8), np.uint8),
        np.zeros((8, 8), np.uint8),
        np.zeros((8, 8, 4), np.uint8),
        np.zeros((8, 8, 3), np.float32),
    ],
    ids=str,
)
def test_any_other_array_layout_is_refused_not_guessed(array):
    with pytest.raises(ImageError, match=r"give uint8 \[height, width, 3\] RGB"):
        SMALL.prepare(array)


def test_an_image_without_pixels_is_refused():
    with pytest.raises(ImageError, match="0x5 px is empty"):
        SMALL.prepare(np.zeros((5, 0, 3), np.uint8))
    with pytest.raises(ImageError, match="0x5 px is empty"):
        SMALL.prepare(Image.new("RGB", (0, 5)))


# ---- modes ----


def test_transparency_is_composited_on_white():
    rgba = np.concatenate([noise(64, 64, 0), np.zeros((64, 64, 1), np.uint8)], -1)
    rgba[:32, :, 3] = 255
    canvas = unpatched(SMALL.prepare(encoded(Image.fromarray(rgba), "PNG")))
    np.testing.assert_array_equal(canvas[:32], rgba[:32, :, :3])
    assert (canvas[32:] == 255).all()
    grey = Image.merge("LA", [Image.fromarray(rgba[..., 0]), Image.fromarray(rgba[..., 3])])
    canvas = unpatched(SMALL.prepare(encoded(grey, "PNG")))
    np.testing.assert_array_equal(canvas[:32, :, 0], rgba[:32, :, 0])
    assert (canvas[32:] == 255).all()


@pytest.mark.parametrize("mode", ["P", "L", "RGB", "1"])
def test_a_transparent_colour_becomes_white(mode):
    image = Image.new(mode, (64, 64), 0)
    image.paste(1 if mode in "P1" else (100 if mode == "L" else (100, 100, 100)), (0, 0, 64, 32))
    if mode == "P":
        image.putpalette([10, 20, 30, 100, 100, 100])
    clear = (0, 0, 0) if mode == "RGB" else 0
    canvas = unpatched(SMALL.prepare(encoded(image, "PNG", transparency=clear)))
    assert (canvas[32:] == 255).all()
    assert (canvas[:32] == (255 if mode == "1" else 100)).all()


def test_premultiplied_alpha_is_undone_first():
    image = Image.new("RGBA", (64, 64), (200, 100, 40, 128))
    straight, multiplied = (unpatched(SMALL.prepare(x)).astype(int) for x in (image, image.convert("RGBa")))
    assert np.abs(straight - multiplied).max() <= 1


def test_grey_of_16_bits_is_scaled_and_not_clipped():
    levels = (synth(64, 64, 1)[:, :, 0].astype(np.uint16) * 257)[:, ::-1]
    canvas = unpatched(SMALL.prepare(encoded(Image.fromarray(np.ascontiguousarray(levels)), "PNG")))
    np.testing.assert_array_equal(canvas, np.repeat((levels // 257)[..., None], 3, -1))


def test_a_turned_grey_image_of_16_bits_is_upright():
    levels = np.arange(64 * 96, dtype=np.uint16).reshape(64, 96) * 10
    turned = Image.Exif()
    turned[0x0112] = 3
    canvas = unpatched(SMALL.prepare(encoded(Image.fromarray(levels), "PNG", exif=turned)))
    np.testing.assert_array_equal(canvas[..., 0], (levels[::-1, ::-1].astype(int) + 128) // 257)


def test_pixels_without_a_known_range_are_refused():
    with pytest.raises(ImageError, match="floating-point"):
        SMALL.prepare(Image.fromarray(np.ones((40, 40), np.float32)))
    with pytest.raises(ImageError, match=r"outside 0\.\.65535"):
        SMALL.prepare(Image.fromarray(np.full((40, 40), 70000, np.int32)))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_exif_orientation_is_applied(orientation):
    pixels, exif = noise(32, 64, 4), Image.Exif()
    exif[0x0112] = orientation
    views = {
        1: pixels,
        2: pixels[:, ::-1],
        3: pixels[::-1, ::-1],
        4: pixels[::-1],
        5: pixels.transpose(1, 0, 2),
        6: pixels[::-1].transpose(1, 0, 2),
        7: pixels[::-1, ::-1].transpose(1, 0, 2),
        8: pixels[:, ::-1].transpose(1, 0, 2),
    }
    image = SMALL.prepare(encoded(Image.fromarray(pixels), "PNG", exif=exif))
    np.testing.assert_array_equal(unpatched(image), views[orientation])
    assert image.size == views[orientation].shape[:2]


def test_broken_exif_leaves_the_pixels_as_stored():
    pixels = Image.fromarray(noise(32, 64, 4))
    data = encoded(pixels, "WEBP", lossless=True, exif=b"Exif\0\0garbage that is no TIFF header")
    np.testing.assert_array_equal(unpatched(SMALL.prepare(data)), np.asarray(pixels))


# ---- keys ----


def test_equal_bytes_of_another_shape_have_another_key():
    pixels = noise(30, 100, 0)
    assert SMALL.prepare(pixels).key != SMALL.prepare(pixels.reshape(100, 30, 3)).key


def test_equal_indices_under_another_palette_have_another_key():
    index = Image.new("P", (64, 64), 1)
    keys = set()
    for palette in ([0, 0, 0, 9, 9, 9], [0, 0, 0, 9, 9, 8]):
        index.putpalette(palette)
        keys.add(SMALL.prepare(encoded(index, "PNG")).key)
    keys.add(SMALL.prepare(encoded(index, "PNG", transparency=1)).key)
    assert len(keys) == 3


def test_channels_in_another_order_and_other_settings_have_another_key():
    pixels = noise(64, 64, 0)
    other = ImageProcessor(patch_size=16, merge_size=2, min_pixels=1024, max_pixels=65536, mean=(0.4, 0.5, 0.5))
    keys = [
        SMALL.prepare(pixels).key,
        SMALL.prepare(np.ascontiguousarray(pixels[..., ::-1])).key,
        SMALL.prepare(pixels, min_pixels=2048).key,
        SMALL.prepare(pixels, max_pixels=32768).key,
        other.prepare(pixels).key,
        replace(SMALL, rule=RULES["Glm5NextImageProcessor"]).prepare(pixels).key,
    ]
    assert len(set(keys)) == 6
    assert all(len(key) >= 16 for key in keys)


def test_a_key_is_of_the_decoded_pixels_whether_or_not_they_are_resized():
    # The bounds in the key are equal, so only the pixels tell the two apart; hashed by lines or at once alike.
    pixels = noise(64, 64, 0)
    changed = pixels.copy()
    changed[-1, -1, -1] ^= 1
    large, other = np.tile(pixels, (9, 11, 1)), np.tile(pixels, (9, 11, 1))
    other[-1, -1, -1] ^= 1
    assert len({SMALL.prepare(x).key for x in (pixels, changed, large, other)}) == 4


def test_preparing_leaves_the_callers_picture_as_it_was():
    pixels = noise(70, 110, 3)
    image = Image.fromarray(pixels)
    SMALL.prepare(image)
    SMALL.prepare(pixels)
    np.testing.assert_array_equal(np.asarray(image), noise(70, 110, 3))
    np.testing.assert_array_equal(pixels, noise(70, 110, 3))


def test_threads_prepare_the_same_as_one():
    pictures = [noise(40 + i, 90 - i, i) for i in range(12)]
    alone = [SMALL.prepare(p) for p in pictures]
    with ThreadPoolExecutor(4) as pool:
        for image, want in zip(pool.map(SMALL.prepare, pictures), alone, strict=True):
            assert image.key == want.key
            np.testing.assert_array_equal(image.patches, want.patches)


def test_a_prepared_image_must_be_whole():
    image = SMALL.prepare(noise(64, 64, 0))
    with pytest.raises(ValueError, match="16 patches do not fill the grid"):
        PreparedImage(image.patches, (1, 4, 6), image.key, 6, image.size)
    with pytest.raises(ValueError, match="key of 8 bytes is too short"):
        PreparedImage(image.patches, image.grid_thw, image.key[:8], 4, image.size)


def test_reading_a_file_needs_no_seekable_name():
    assert isinstance(
        SMALL.prepare(Image.open(io.BytesIO(encoded(Image.fromarray(noise(64, 64, 0)), "PNG")))), PreparedImage
    )
