"""Each family's resize rule: canvases, token counts, bounds, what it refuses, and where its settings come from."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from tests.vitbatch.pictures import encoded, noise
from vitbatch import EncoderConfig, ImageError
from vitbatch.checkpoint import image_processor
from vitbatch.images import RULES, ImageProcessor, largest_canvas, read_processor, rule_of, smart_resize
from vitstripe.checkpoint import Checkpoint, CheckpointError

P14 = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
P16 = {**P14, "patch_size": 16}


def processor(kind: str, tower: dict = P14, **settings) -> ImageProcessor:
    """A processor of the given kind, with the reference's defaults where `settings` says nothing."""
    return read_processor({"image_processor_type": kind, **settings}, **tower)


QWEN = processor("Qwen2VLImageProcessorFast", P16, size={"shortest_edge": 65536, "longest_edge": 16777216})
GLM4V = processor("Glm4vImageProcessor")
GLM46V_FLASH = processor("Glm46VImageProcessor", size={"shortest_edge": 12544, "longest_edge": 9633792})
GLM5 = processor("Glm5NextImageProcessor")

# size; Qwen's canvas and tokens; GLM-5-Next's canvas, content and tokens; GLM-4V's tokens, and with the bounds of
# GLM-4.6V-Flash. Sizes are height x width.
SIZES = [
    ((32, 32), (256, 256), 64, (112, 112), (112, 112), 16, 9, 9),
    ((50, 50), (256, 256), 64, (112, 112), (112, 112), 16, 9, 9),
    ((20, 30), (224, 320), 70, (112, 140), (93, 140), 20, 12, 12),
    ((112, 112), (256, 256), 64, (112, 112), (112, 112), 16, 16, 16),
    ((112, 224), (192, 384), 72, (112, 224), (112, 224), 32, 32, 32),
    ((224, 224), (256, 256), 64, (224, 224), (224, 224), 64, 64, 64),
    ((448, 448), (448, 448), 196, (448, 448), (448, 448), 256, 256, 256),
    ((512, 512), (512, 512), 256, (532, 532), (512, 512), 361, 324, 324),
    ((560, 560), (576, 576), 324, (560, 560), (560, 560), 400, 400, 400),
    ((720, 1280), (704, 1280), 880, (728, 1288), (720, 1280), 1196, 1196, 1196),
    ((768, 1024), (768, 1024), 768, (784, 1036), (768, 1024), 1036, 999, 999),
    ((1024, 1024), (1024, 1024), 1024, (1036, 1036), (1024, 1024), 1369, 1369, 1369),
    ((1080, 1920), (1088, 1920), 2040, (1092, 1932), (1080, 1920), 2691, 2691, 2691),
    ((2160, 3840), (2176, 3840), 8160, (1876, 3332), (1874, 3332), 7973, 7360, 6032),
    ((2464, 2520), (2464, 2528), 6083, (2464, 2520), (2464, 2520), 7920, 7395, 6083),
    ((4100, 4100), (4096, 4096), 16384, (2492, 2492), (2492, 2492), 7921, 7396, 6084),
    ((10, 2000), (32, 3648), 114, (28, 2016), (10, 2000), 72, 200, 200),
    ((1, 200), (32, 3648), 114, (28, 1596), (7, 1596), 57, 200, 200),
]


def tokens(processor: ImageProcessor, canvas: tuple[int, int]) -> int:
    return canvas[0] * canvas[1] // processor.factor**2


@pytest.mark.parametrize("row", SIZES, ids=lambda row: "x".join(map(str, row[0])))
def test_canvas_and_token_count_of_every_family(row):
    size, qwen_canvas, qwen_tokens, glm5_canvas, glm5_content, glm5_tokens, glm4v_tokens, flash_tokens = row
    assert QWEN.fit(*size).canvas == QWEN.fit(*size).content == qwen_canvas
    assert smart_resize(*size, factor=32, min_pixels=65536, max_pixels=16777216) == qwen_canvas
    assert (GLM5.fit(*size).canvas, GLM5.fit(*size).content) == (glm5_canvas, glm5_content)
    counts = [tokens(p, p.fit(*size).canvas) for p in (QWEN, GLM5, GLM4V, GLM46V_FLASH)]
    assert counts == [qwen_tokens, glm5_tokens, glm4v_tokens, flash_tokens]


def test_rounding_is_half_to_even():
    rule = processor("Qwen2VLImageProcessor", size={"shortest_edge": 784, "longest_edge": 784_000})
    assert [rule.fit(side, 56).canvas[0] for side in (42, 70, 98, 126)] == [56, 56, 112, 112]


@pytest.mark.parametrize("size", [(1, 1), (1, 3), (3, 1), (3, 3), (16, 16), (28, 26), (26, 28), (19, 500), (500, 19)])
@pytest.mark.parametrize("kind", [QWEN, GLM4V, GLM46V_FLASH, GLM5], ids=lambda p: p.rule.name)
def test_a_side_below_one_token_is_scaled_up_in_every_family(kind, size):
    image = kind.prepare(noise(*size, 0))
    assert image.size == size
    assert image.num_tokens == image.patches.shape[0] // 4 >= 1
    _, rows, columns = image.grid_thw
    assert rows >= columns if size[0] >= size[1] else rows <= columns


# ---- what a rule refuses ----


@pytest.mark.parametrize("size", [(1, 201), (300, 1), (15, 3001)])
def test_qwen_refuses_an_aspect_ratio_over_200(size):
    h, w = size
    with pytest.raises(
        ImageError, match=rf"^image of {w}x{h} px: aspect ratio {max(size) / min(size):g} is over 200; "
    ):
        QWEN.prepare(np.zeros((*size, 3), np.uint8))
    assert QWEN.fit(1, 200).canvas == (32, 3648)


def test_glm4v_measures_the_aspect_ratio_of_the_picture_scaled_up():
    with pytest.raises(ImageError, match=r"^image of 3001x15 px, scaled up to 5601x28 px: aspect ratio 200\.036 is ov"):
        GLM4V.fit(15, 3001)
    with pytest.raises(
        ImageError, match=r"^image of 201x1 px, scaled up to 5628x28 px: aspect ratio 201 is over 200; c"
    ):
        GLM4V.fit(1, 201)
    with pytest.raises(ImageError, match=r"^image of 6000x28 px: aspect ratio 214\.286 is over 200; crop it$"):
        GLM4V.fit(28, 6000)


@pytest.mark.parametrize(
    ("size", "canvas"), [((1, 201), (28, 1596)), ((3000, 10), (3024, 28)), ((15, 3001), (28, 3024))]
)
def test_glm5_takes_strips_of_more_than_200(size, canvas):
    assert GLM5.fit(*size).canvas == canvas


def test_glm5_refuses_strips_that_would_be_squeezed_out_of_shape():
    with pytest.raises(ImageError, match=r"^image of 1x1001 px: aspect ratio 1001 is over 1000; crop it$"):
        GLM5.fit(1001, 1)
    for shape in ((5, 4500), (4500, 5)):
        assert GLM5.fit(*shape).content == shape
        with pytest.raises(ImageError, match=r"px: its shorter side vanishes within 16 tokens; crop it or allow more"):
            GLM5.fit(*shape, max_image_tokens=16)


# ---- bounds ----


def shapes(seed: int, ratio: int, count: int) -> list[tuple[int, int]]:
    """`count` random (height, width), up to an aspect ratio of `ratio`."""
    draw = np.random.default_rng(seed)
    pairs = zip(draw.integers(1, 700, count), ratio ** draw.random(count), draw.random(count) < 0.5, strict=True)
    made = [(int(s), int(min(ratio * s, max(1, s * r))), turned) for s, r, turned in pairs]
    return [(w, h) if turned else (h, w) for h, w, turned in made]


@pytest.mark.parametrize(("least", "most"), [(4096, 65536), (1024, 1024), (65536, 70000), (3136, 12544)])
def test_no_canvas_is_larger_than_the_stated_largest(least, most):
    limit = largest_canvas(32, least, most)
    fits = (smart_resize(*shape, factor=32, min_pixels=least, max_pixels=most) for shape in shapes(least, 200, 4000))
    areas = [h * w for h, w in fits]
    assert max(areas) <= limit
    assert limit < 4 * max(areas)


def test_no_image_has_more_patches_than_its_processor_states():
    small = processor("Glm46VImageProcessor", size={"shortest_edge": 12544, "longest_edge": 100352})
    narrow = processor("Glm5NextImageProcessor", min_image_tokens=4, max_image_tokens=64)
    for kind, ratio in ((small, 190), (narrow, 60)):
        most = max(tokens(kind, kind.fit(*shape).canvas) for shape in shapes(ratio, ratio, 800)) * 4
        assert most <= kind.largest_image_patches < 4 * most
    assert (narrow.largest_image_patches, GLM5.largest_image_patches) == (256, 32000)
    assert QWEN.largest_image_patches == 65536


@pytest.mark.parametrize("kind", [GLM4V, GLM5], ids=lambda p: p.rule.name)
def test_a_canvas_is_whole_tokens_and_holds_its_content(kind):
    for shape in shapes(7, 150, 300):
        fit = kind.fit(*shape)
        assert fit.canvas[0] % 28 == fit.canvas[1] % 28 == 0
        assert all(0 < c <= whole for c, whole in zip(fit.content, fit.canvas, strict=True))


def test_glm5_never_stretches():
    for h, w in shapes(8, 30, 300):
        content = GLM5.fit(h, w, max_image_tokens=400).content
        # Each side is cut to whole pixels, and a small picture is grown to whole ones.
        assert abs(content[0] * w - content[1] * h) <= max(h, w) + max(content)


def test_glm5_pads_right_and_below_with_raw_zeros():
    pixels = np.maximum(noise(40, 135, 1), 1)
    image = processor("Glm5NextImageProcessor", min_image_tokens=4).prepare(pixels)
    assert image.grid_thw == (1, 4, 10)
    rows = image.patches.reshape(2, 5, 2, 2, 3, 14, 14).transpose(0, 2, 5, 1, 3, 6, 4).reshape(56, 140, 3)
    np.testing.assert_array_equal(rows[:40, :135], pixels)
    assert not rows[40:].any()
    assert not rows[:, 135:].any()


def test_glm5_counts_a_picture_as_it_will_lie_upright():
    # The search for a canvas runs over heights, so a picture and the same one on its side may differ.
    bounded = {"patch_size": 14, "merge_size": 2, "min_pixels": 4 * 784, "max_pixels": 64 * 784}
    free = ImageProcessor(**bounded, rule=RULES["Glm5NextImageProcessor"])
    lying, standing = (150, 448), (448, 150)
    counts = [tokens(free, free.fit(*shape).canvas) for shape in (lying, standing)]
    assert counts[0] < counts[1]
    limited = replace(free, max_patches=4 * counts[0])
    turned = Image.Exif()
    turned[0x0112] = 6
    stored = {shape: encoded(Image.fromarray(noise(*shape, 0)), "JPEG", exif=turned) for shape in (lying, standing)}
    assert limited.prepare(stored[standing]).num_tokens == counts[0]
    with pytest.raises(
        ImageError, match=f"needs {4 * counts[1]} patches; the limit is {4 * counts[0]}: send a smaller"
    ):
        limited.prepare(stored[lying])


def test_tokens_and_pixels_bound_alike():
    pairs = [(QWEN, 1024), (GLM4V, 2 * 784), (GLM5, 784)]
    for kind, size in pairs:
        assert kind.pixels_per_token == size
        in_tokens = kind.prepare(noise(300, 500, 0), min_image_tokens=70, max_image_tokens=90)
        in_pixels = kind.prepare(noise(300, 500, 0), min_pixels=70 * size, max_pixels=90 * size)
        assert in_tokens.key == in_pixels.key
        assert 70 <= in_tokens.num_tokens <= 90


def test_a_call_may_only_tighten_the_bounds():
    outside = [
        ("min_image_tokens", 63, "64 to 16384"),
        ("max_image_tokens", 16385, "64 to 16384"),
        ("max_image_tokens", 0, "64 to 16384"),
        ("min_pixels", 65535, "65536 to 16777216"),
        ("max_pixels", 16777217, "65536 to 16777216"),
    ]
    for name, value, allowed in outside:
        with pytest.raises(ImageError, match=rf"^{name} is {value}; images are prepared within {allowed} here: choose"):
            QWEN.prepare(noise(64, 64, 0), **{name: value})
    with pytest.raises(
        ImageError, match=r"least size asked for is 204800 pixels \(200 tokens\) and the largest 102400 "
    ):
        QWEN.prepare(noise(64, 64, 0), min_image_tokens=200, max_image_tokens=100)
    with pytest.raises(ImageError, match="max_pixels 70000 and max_image_tokens 70 are both given; give one"):
        QWEN.prepare(noise(64, 64, 0), max_pixels=70000, max_image_tokens=70)


def test_bounds_of_a_processor_must_leave_room():
    with pytest.raises(ValueError, match="min_pixels 70000 must be positive and at most max_pixels 65536"):
        ImageProcessor(patch_size=16, merge_size=2, min_pixels=70000, max_pixels=65536)
    with pytest.raises(ValueError, match="max_pixels 1000 holds no token of 1024 pixels"):
        ImageProcessor(patch_size=16, merge_size=2, min_pixels=1, max_pixels=1000)


# ---- settings ----


def test_the_rule_is_the_one_the_file_names():
    assert {name: rule.name for name, rule in RULES.items()} == {
        "Qwen2VLImageProcessor": "qwen",
        "Qwen2_5_VLImageProcessor": "qwen",
        "Glm4vImageProcessor": "glm4v",
        "Glm46VImageProcessor": "glm4v",
        "Glm5NextImageProcessor": "glm5_next",
    }
    for name, rule in RULES.items():
        for suffix in ("", "Fast", "Pil"):
            assert rule_of({"image_processor_type": name + suffix}, "qwen3_vl") is rule


def test_a_file_that_names_no_processor_gets_its_familys_rule():
    families = ["qwen2_5_vl", "qwen3_vl_moe", "qwen3_5", "qwen4_exp", "glm4v_moe", "glm46v", "glm_ocr", "glm5_next"]
    assert [rule_of({}, family).name for family in families] == ["qwen"] * 4 + ["glm4v"] * 3 + ["glm5_next"]


@pytest.mark.parametrize(("stated", "model_type"), [("ViTImageProcessor", "qwen3_vl"), (None, "llava")])
def test_an_unknown_processor_is_refused_with_the_known_ones(stated, model_type):
    settings = {} if stated is None else {"image_processor_type": stated}
    with pytest.raises(
        ValueError, match=rf"is {stated!r} \(model_type '{model_type}'\); supported: Glm46VImage.*Qwen2VL"
    ):
        read_processor(settings, **P14, model_type=model_type)


def test_bounds_of_qwen_come_from_the_size_the_older_fields_or_the_caller():
    size = {"size": {"shortest_edge": 5000, "longest_edge": 9000}}
    older = {"min_pixels": 6000, "max_pixels": 8000}
    inside = {"size": {"min_pixels": 6500, "max_pixels": 7800}}
    kind = "Qwen2VLImageProcessor"
    read = [processor(kind, P16, **s) for s in (size, older, size | older, inside, {})]
    read.append(read_processor(size | older, **P16, model_type="qwen3_vl", min_pixels=7000, max_pixels=7500))
    read.append(read_processor(size, **P16, model_type="qwen3_vl", min_image_tokens=5, max_image_tokens=6))
    assert [(p.min_pixels, p.max_pixels) for p in read] == [
        (5000, 9000),
        (6000, 8000),
        (6000, 8000),
        (6500, 7800),
        (3136, 1003520),
        (7000, 7500),
        (5120, 6144),
    ]


def test_bounds_of_glm_come_from_its_own_fields():
    assert (GLM4V.min_pixels, GLM4V.max_pixels) == (12544, 11760000)
    assert (GLM46V_FLASH.min_image_tokens, GLM46V_FLASH.max_image_tokens) == (8, 6144)
    assert (GLM5.min_image_tokens, GLM5.max_image_tokens) == (16, 8000)
    # The size that GLM-5-Next's files carry means nothing to it; the expansion is ignored, as Pillow's backend does.
    stated = {"size": {"longest_edge": 1}, "min_image_tokens": 4, "max_image_tokens": 64, "patch_expand_factor": 2}
    tiny = processor("Glm5NextImageProcessor", **stated)
    assert (tiny.min_image_tokens, tiny.max_image_tokens) == (4, 64)
    assert tiny.fit(448, 448).canvas == (224, 224)


def test_normalisation_is_the_files_or_clips():
    assert (QWEN.mean, QWEN.std) == (GLM5.mean, GLM5.std)
    assert QWEN.mean == (0.48145466, 0.4578275, 0.40821073)
    halves = processor("Qwen2VLImageProcessor", image_mean=[0.5, 0.4, 0.3], image_std=[0.5, 0.6, 0.7])
    assert (halves.mean, halves.std) == ((0.5, 0.4, 0.3), (0.5, 0.6, 0.7))


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
        ({"size": 224}, "size is 224; it must hold shortest_edge and longest_edge"),
        ({"size": {"shortest_edge": "4", "longest_edge": 9000}}, "shortest_edge is '4'; it must be a positive whole"),
        ({"max_pixels": -1}, "max_pixels is -1; it must be a positive whole number"),
        (
            {"image_processor_type": "Glm5NextImageProcessor", "max_image_tokens": 0.5},
            r"max_image_tokens is 0\.5; it must be a positive whole number",
        ),
    ],
)
def test_unsupported_settings_are_refused_with_their_value(change, message):
    settings = {"size": {"shortest_edge": 5000, "longest_edge": 9000}} | change
    with pytest.raises(ValueError, match=message):
        read_processor(settings, **P16, model_type="qwen3_vl")


def test_a_servers_bounds_in_tokens_reach_the_processor(goldens):
    opened = Checkpoint(goldens / "qwen3_vl")
    bounded = image_processor(opened, EncoderConfig(min_image_tokens=6, max_image_tokens=40))
    assert (bounded.min_image_tokens, bounded.max_image_tokens) == (6, 40)
    assert bounded.prepare(noise(600, 400, 0)).num_tokens <= 40
    with pytest.raises(ImageError, match="max_image_tokens is 41; images are prepared within 6 to 40 here"):
        bounded.prepare(noise(600, 400, 0), max_image_tokens=41)
    with pytest.raises(CheckpointError, match="min_pixels 5 and min_image_tokens 6 are both set; set one"):
        image_processor(opened, EncoderConfig(min_pixels=5, min_image_tokens=6))
    with pytest.raises(ValueError, match="min_image_tokens 7 is over max_image_tokens 6"):
        EncoderConfig(min_image_tokens=7, max_image_tokens=6)


@pytest.mark.parametrize(
    ("family", "rule", "bounds"),
    [
        ("qwen2_5_vl", "qwen", (4, 64)),
        ("qwen3_vl", "qwen", (4, 64)),
        ("qwen3_5", "qwen", (4, 64)),
        ("qwen4_exp", "qwen", (4, 64)),
        ("glm4v", "glm4v", (8, 64)),
        ("glm46v", "glm4v", (8, 64)),
        ("glm_ocr", "glm4v", (8, 64)),
        ("glm5_next", "glm5_next", (4, 64)),
    ],
)
def test_every_familys_checkpoint_brings_its_processor(goldens, family, rule, bounds):
    made = image_processor(Checkpoint(goldens / family))
    assert made.rule.name == rule
    assert (made.min_image_tokens, made.max_image_tokens) == bounds
    assert made.prepare(noise(91, 170, 0)).num_tokens in range(bounds[0], bounds[1] + 1)
