"""From bytes, PIL images and arrays to patch rows."""

import io
import json
import struct
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from tests.vitbatch.pictures import encoded, noise, synth
from vitbatch import ImageError, PreparedImage
from vitbatch.images import ImageProcessor, largest_canvas, patchify, read_processor, smart_resize

QWEN = ImageProcessor(patch_size=16, merge_size=2, min_pixels=65536, max_pixels=16777216)
SMALL = ImageProcessor(patch_size=16, merge_size=2, min_pixels=1024, max_pixels=65536)


def normalised(image: PreparedImage) -> np.ndarray:
    """float32 [N, 3, 256]: what the device makes of one frame, for mean and std 0.5."""
    return ((image.patches.astype(np.float32) - 127.5) / 127.5).reshape(-1, 3, 256)


def unpatched(image: PreparedImage) -> np.ndarray:
    """The canvas [H, W, 3] back from its patches."""
    _, gh, gw = image.grid_thw
    cells = image.patches.reshape(gh // 2, gw // 2, 2, 2, 3, 16, 16)
    return cells.transpose(0, 2, 5, 1, 3, 6, 4).reshape(gh * 16, gw * 16, 3)


# ---- sizes ----

SIZES = [
    ((32, 32), (256, 256), 64),
    ((50, 50), (256, 256), 64),
    ((20, 30), (224, 320), 70),
    ((112, 112), (256, 256), 64),
    ((112, 224), (192, 384), 72),
    ((224, 224), (256, 256), 64),
    ((448, 448), (448, 448), 196),
    ((512, 512), (512, 512), 256),
    ((560, 560), (576, 576), 324),
    ((720, 1280), (704, 1280), 880),
    ((768, 1024), (768, 1024), 768),
    ((1024, 1024), (1024, 1024), 1024),
    ((1080, 1920), (1088, 1920), 2040),
    ((2160, 3840), (2176, 3840), 8160),
    ((2464, 2520), (2464, 2528), 6083),
    ((4100, 4100), (4096, 4096), 16384),
    ((10, 2000), (32, 3648), 114),
    ((1, 200), (32, 3648), 114),
]


@pytest.mark.parametrize(("size", "canvas", "tokens"), SIZES)
def test_the_canvas_and_token_count_of_a_size(size, canvas, tokens):
    got = smart_resize(*size, factor=32, min_pixels=65536, max_pixels=16777216)
    assert got == canvas
    assert got[0] * got[1] // 1024 == tokens


@pytest.mark.parametrize("size", [(1, 201), (300, 1), (15, 3001)])
def test_an_aspect_ratio_over_200_is_refused_with_the_ratio(size):
    ratio = max(size) / min(size)
    with pytest.raises(ImageError, match=rf"aspect ratio {ratio:g} is over 200; crop it"):
        QWEN.prepare(np.zeros((*size, 3), np.uint8))


@pytest.mark.parametrize(("least", "most"), [(4096, 65536), (1024, 1024), (65536, 70000), (3136, 12544)])
def test_no_canvas_is_larger_than_the_stated_largest(least, most):
    limit, draw = largest_canvas(32, least, most), np.random.default_rng(least)
    shapes = [
        (int(s), int(min(200 * s, max(1, s * r))))
        for s, r in zip(draw.integers(1, 700, 4000), 200 ** draw.random(4000), strict=True)
    ]
    areas = [h * w for h, w in (smart_resize(*shape, factor=32, min_pixels=least, max_pixels=most) for shape in shapes)]
    assert max(areas) <= limit
    assert limit < 4 * max(areas)


def test_the_largest_image_of_the_released_models_fills_65536_patches():
    assert QWEN.largest_image_patches == 65536


# ---- agreement with the reference processor ----


@pytest.fixture(scope="module")
def recorded(goldens):
    return json.loads((goldens / "preprocess" / "qwen3_vl.json").read_text())


def assert_same_pixels(image: PreparedImage, want: dict) -> None:
    rows = normalised(image)
    assert image.grid_thw == tuple(want["grid_thw"][0])
    assert want["shape"] == [rows.shape[0], 2 * 768]
    # Features of a recorded row are (channel, frame, pixel): its ends are one frame's.
    np.testing.assert_allclose(rows[0, 0, :8], want["row0_first8"], atol=2e-6)
    np.testing.assert_allclose(rows[-1, 2, -4:], want["rowlast_last4"], atol=2e-6)
    np.testing.assert_allclose([rows.min(), rows.max()], [want["min"], want["max"]], atol=2e-6)
    np.testing.assert_allclose(
        [rows.mean(dtype=np.float64), rows.std(dtype=np.float64)], [want["mean"], want["std"]], atol=2e-6
    )


@pytest.mark.parity
@pytest.mark.parity
def test_every_recorded_size_gives_the_recorded_pixels(recorded):
    for name, want in recorded["sizes"].items():
        w, h = map(int, name.split("x"))
        if "error" in want:
            with pytest.raises(ImageError, match="aspect ratio"):
                QWEN.prepare(synth(w, h))
        else:
            assert_same_pixels(QWEN.prepare(synth(w, h)), want)


@pytest.mark.parity
@pytest.mark.parity
@pytest.mark.parametrize("name", ["29x31", "112x112"])
def test_every_pixel_of_a_small_image_equals_the_reference(goldens, name):
    w, h = map(int, name.split("x"))
    with np.load(goldens / "preprocess" / "qwen3_vl.npz") as stored:
        want = stored[f"{name}_pixels_t0"].reshape(-1, 3, 256)
    image = QWEN.prepare(synth(w, h), min_pixels=3136, max_pixels=12544)
    np.testing.assert_allclose(normalised(image), want, atol=1e-6)


@pytest.mark.parity
@pytest.mark.parity
def test_every_recorded_file_gives_the_recorded_pixels(recorded):
    rgb = Image.fromarray(synth(160, 120))
    cmyk = Image.frombytes("CMYK", (160, 120), synth(160, 120, 4).tobytes())
    turned = Image.Exif()
    turned[0x0112] = 6
    frames = [Image.fromarray(synth(160, 120, 3, s)) for s in range(3)]
    animation = {"save_all": True, "append_images": frames[1:], "duration": 50}
    files = {
        "gray_L.png": encoded(Image.fromarray(synth(160, 120, 1)[:, :, 0]), "PNG"),
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
    assert files.keys() == recorded["files"].keys()
    for name, data in files.items():
        assert_same_pixels(QWEN.prepare(data), recorded["files"][name])


# ---- layout ----


def test_patches_are_cut_in_merge_blocks_and_channels_first():
    image = noise(64, 96, 1)
    rows = patchify(image, 16, 2)
    # Row 6 is in merge block (0, 1), its second line, first column: patch (1, 2).
    np.testing.assert_array_equal(rows[6], image[16:32, 32:48].transpose(2, 0, 1).ravel())
    np.testing.assert_array_equal(unpatched(SMALL.prepare(image)), image)


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


@pytest.mark.parametrize("size", [(1, 1), (1, 3), (3, 1), (3, 3), (28, 26), (19, 500)])
def test_a_tiny_image_is_height_width_channels_and_scaled_up(size):
    image = SMALL.prepare(noise(*size, 0))
    assert image.size == size
    assert image.num_tokens == image.patches.shape[0] // 4 >= 1
    assert (image.grid_thw[1] >= image.grid_thw[2]) == (size[0] >= size[1])


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
    ]
    assert len(set(keys)) == 5
    assert all(len(key) >= 16 for key in keys)


# ---- hostile input ----


def png(width: int, height: int, body: bytes = b"") -> bytes:
    """A PNG of one bit a pixel whose header claims the given size."""

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IDAT", zlib.compress(body)) + part(b"IEND", b"")


def broken_files() -> dict[str, bytes]:
    picture = Image.fromarray(noise(60, 80, 0))
    jpeg, whole_png = encoded(picture, "JPEG"), encoded(picture, "PNG")
    bad_crc = bytearray(whole_png)
    bad_crc[len(bad_crc) // 2] ^= 0xFF
    return {
        "empty": b"",
        "text": b"not an image",
        "svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="10" height="10"/>',
        "cut jpeg": jpeg[:-128],
        "half jpeg": jpeg[: len(jpeg) // 2],
        "half png": whole_png[: len(whole_png) // 2],
        "header only": whole_png[:33],
        "bad crc": bytes(bad_crc),
        "no pixels": png(64, 64),
        "tiff": encoded(picture, "TIFF"),
        "ico": encoded(picture, "ICO"),
        "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    }


@pytest.mark.parametrize("name", broken_files())
def test_an_unusable_file_gives_one_fixed_text(name):
    with pytest.raises(ImageError) as caught:
        SMALL.prepare(broken_files()[name])
    assert str(caught.value) == "the image cannot be decoded: send a complete PNG, JPEG, WebP, GIF or BMP file"
    assert caught.value.__suppress_context__
    assert caught.value.__cause__ is None


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


def test_an_oversized_image_is_refused_from_its_header():
    with pytest.raises(ImageError, match="image of 9000x8000 px has 72000000 pixels; the limit is 64000000"):
        SMALL.prepare(png(9000, 8000))
    with pytest.raises(ImageError, match=r"too many pixels; the limit is 64000000: send a smaller image"):
        SMALL.prepare(png(12000, 12000))


def test_forty_huge_images_cost_no_memory():
    script = """
import resource, sys, warnings
from vitbatch.images import ImageError, ImageProcessor
warnings.simplefilter("ignore")
processor = ImageProcessor(patch_size=16, merge_size=2, min_pixels=65536, max_pixels=16777216)
data = sys.stdin.buffer.read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(40):
    try:
        processor.prepare(data)
    except ImageError as error:
        text = str(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, text)
"""
    data = png(12000, 12000, bytes(12000 * 1501))
    done = subprocess.run([sys.executable, "-c", script], input=data, capture_output=True, check=True)
    grown, _, text = done.stdout.decode().partition(" ")
    assert int(grown) < 50 * 1024, f"peak memory grew by {grown} kB"
    assert "image of 12000x12000 px has 144000000 pixels; the limit is 64000000" in text


def test_an_image_above_the_largest_bucket_is_refused_before_it_is_decoded():
    limited = ImageProcessor(patch_size=16, merge_size=2, min_pixels=1024, max_pixels=65536, max_patches=128)
    with pytest.raises(ImageError, match="image of 600x600 px needs 256 patches; the limit is 128"):
        limited.prepare(png(600, 600))
    assert limited.largest_image_patches == 128


def test_bounds_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="min_pixels 70000 must be positive and at most max_pixels 65536"):
        SMALL.prepare(noise(64, 64, 0), min_pixels=70000)


def test_threads_prepare_the_same_as_one():
    pictures = [noise(40 + i, 90 - i, i) for i in range(12)]
    alone = [SMALL.prepare(p) for p in pictures]
    with ThreadPoolExecutor(4) as pool:
        for image, want in zip(pool.map(SMALL.prepare, pictures), alone, strict=True):
            assert image.key == want.key
            np.testing.assert_array_equal(image.patches, want.patches)


# ---- settings ----

TOWER = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}


def test_bounds_come_from_the_size_the_older_fields_or_the_caller():
    size = {"size": {"shortest_edge": 5000, "longest_edge": 9000}}
    older = {"min_pixels": 6000, "max_pixels": 8000}
    read = [read_processor(s, **TOWER) for s in (size, older, size | older)]
    read.append(read_processor(size | older, **TOWER, min_pixels=7000, max_pixels=7500))
    assert [(p.min_pixels, p.max_pixels) for p in read] == [(5000, 9000), (6000, 8000), (6000, 8000), (7000, 7500)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch_size": 14}, "patch_size is 14 but the vision tower has 16"),
        ({"do_resize": False}, "do_resize is off"),
        ({"resample": 2}, "resample is 2"),
        ({"rescale_factor": 1.0}, r"rescale_factor is 1\.0"),
        ({"image_mean": [0.5]}, r"image_mean is \[0\.5\]"),
        ({"image_std": [0.5, 0.0, 0.5]}, "every entry must be positive"),
        ({"size": {"height": 5}}, "size lacks shortest_edge or longest_edge"),
    ],
)
def test_unsupported_settings_are_refused_with_their_value(change, message):
    with pytest.raises(ValueError, match=message):
        read_processor({"size": {"shortest_edge": 5000, "longest_edge": 9000}} | change, **TOWER)


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
