"""VisionEncoder: batching over lanes, the row pool and the programs themselves."""

import re
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from PIL import Image

from tests.helpers import relative_error
from tests.vitbatch.pictures import encoded, noise
from vitbatch import Bucket, BucketLadder, EncoderConfig, ImageError, PoolFull, PreparedImage, VisionEncoder
from vitbatch.compile_guard import ProgramMismatch, run_compiled
from vitbatch.config import TINY_BLOCK, activation_bytes
from vitbatch.encoder import Frame
from vitbatch.planning import plan_call
from vitstripe import make_mesh

SIZES = [(64, 64), (100, 70), (37, 256), (200, 130), (64, 224), (33, 90), (96, 96), (180, 180), (1, 150)]


def prepare(encoder: VisionEncoder, *sizes: tuple[int, int], seed: int = 0) -> list[PreparedImage]:
    return [encoder.processor.prepare(noise(h, w, seed)) for h, w in sizes]


def keys(images) -> list[bytes]:
    return [image.key for image in images]


def pool_rows(encoder: VisionEncoder, slots: np.ndarray) -> np.ndarray:
    return np.asarray(encoder.pool)[slots].astype(np.float32)


# ---- the same rows, however they are batched ----


@pytest.mark.multidevice
def test_rows_do_not_depend_on_the_mesh_width(encoder_of):
    images = prepare(encoder_of(1, (512,)), *SIZES)
    alone = encoder_of(1, (512,)).encode(images)
    for tp in (2, 4, 8):
        for got, want in zip(encoder_of(tp, (512,)).encode(images), alone, strict=True):
            assert relative_error(got, want) < 5e-6


@pytest.mark.multidevice
def test_one_image_on_eight_devices_equals_one_device(encoder_of):
    (image,) = prepare(encoder_of(1, (512,)), (100, 70))
    (want,), (got,) = (encoder_of(tp, (512,)).encode([image]) for tp in (1, 8))
    assert got.shape == (image.num_tokens, 192)
    assert relative_error(got, want) < 5e-6


@pytest.mark.multidevice
@pytest.mark.parametrize("config", [{}, {"dtype": "bfloat16"}], ids=str)
def test_an_image_has_the_same_bits_alone_and_beside_any_neighbour(encoder_of, config):
    encoder = encoder_of(2, (512,), **config)
    target, *others = prepare(encoder, (100, 70), (200, 130), (96, 96), (180, 180), (64, 64), (37, 256))
    (alone,) = encoder.encode([target])
    # Behind a longer image, in either lane, with and without a second one in front.
    for neighbours in (others[:1], others[:2], others[:3], others, [others[1]], [others[2], others[4]]):
        for place in (0, len(neighbours)):
            images = [*neighbours[:place], target, *neighbours[place:]]
            np.testing.assert_array_equal(encoder.encode(images)[place], alone)


@pytest.mark.multidevice
def test_the_neighbour_test_moves_the_image_between_lanes_and_places(encoder_of):
    encoder = encoder_of(2, (512,))
    sizes = [
        image.patches.shape[0] for image in prepare(encoder, (100, 70), (200, 130), (96, 96), (180, 180), (64, 64))
    ]
    plans = [encoder._plan([sizes[0], *sizes[1:n]])[0] for n in range(1, 6)]
    assert {plan.lane[0] for plan in plans} == {0, 1}
    assert len({plan.start[0] for plan in plans}) > 1


@pytest.mark.multidevice
@pytest.mark.parametrize("lanes", [1, 2])
def test_tiny_images_have_the_same_bits_alone_and_in_company(checkpoint, lanes):
    config = EncoderConfig(ladder=BucketLadder((64, 512), (256,)), min_pixels=1024)
    encoder = VisionEncoder.from_checkpoint(checkpoint, mesh=make_mesh(lanes), config=config)
    sizes = [(96, 96), (64, 64), (32, 32), (128, 128), (64, 96), (32, 64)]
    frames = [Frame(image.patches, image.grid_thw[1:]) for image in prepare(encoder, *sizes)]
    assert [len(frame.rows) for frame in frames] == [36, 16, 4, 64, 24, 8]
    tiny, plain = Bucket(256, TINY_BLOCK), Bucket(512)

    def rows(order: list[int], bucket: Bucket) -> list[np.ndarray]:
        chosen = [frames[i] for i in order]
        plan = plan_call([len(frame.rows) for frame in chosen], lanes, bucket)
        return list(encoder._rows([(plan, chosen)]))

    alone = [rows([i], tiny)[0] for i in range(6)]
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4], [3, 3, 3, 0]):
        for got, i in zip(rows(order, tiny), order, strict=True):
            np.testing.assert_array_equal(got, alone[i])
    for got, want in zip(rows([0, 1, 2, 3, 4, 5], plain), alone, strict=True):
        assert relative_error(got, want) < 5e-6


def test_calls_are_made_while_images_still_come(encoder_of, monkeypatch):
    encoder = encoder_of(2, (256, 512))
    images = prepare(encoder, *SIZES, *SIZES[:3], seed=7)
    want = encoder.encode_frames([Frame(image.patches, image.grid_thw[1:]) for image in images])
    monkeypatch.setattr(encoder, "_burst", 250)
    seen, calls = [], []
    run = encoder._dispatch
    monkeypatch.setattr(encoder, "_dispatch", lambda *call: calls.append(len(seen)) or run(*call))
    monkeypatch.setattr(encoder, "check", lambda image: seen.append(image))
    for got, rows in zip(encoder.encode(images), want, strict=True):
        assert relative_error(got, rows) < 5e-6
    assert len(calls) > 1
    assert calls[0] < len(images)


def test_the_first_call_does_not_wait_for_the_pictures_after_it(encoder_of, monkeypatch):
    encoder = encoder_of(1, (256, 512))
    first, *later = [noise(256, 256, 0), noise(240, 250, 1), noise(250, 240, 2)]
    want = encoder.encode(prepare(encoder, (256, 256), seed=0))
    called, prepare_one, dispatch = threading.Event(), encoder.processor.prepare, encoder._dispatch

    def prepare_late(picture: np.ndarray, **how):
        assert picture is first or called.wait(60), "no call was made of the first picture alone"
        return prepare_one(picture, **how)

    def tell(*call):
        rows = dispatch(*call)
        called.set()
        return rows

    monkeypatch.setattr(encoder, "_burst", 1024)
    monkeypatch.setattr(encoder, "processor", SimpleNamespace(prepare=prepare_late))
    monkeypatch.setattr(encoder, "_dispatch", tell)
    rows = encoder.encode([first, *later])
    assert len(rows) == 3
    assert relative_error(rows[0], want[0]) < 5e-6


def test_first_calls_are_small_where_they_fill_their_lanes_and_full_ones_follow(encoder_of, monkeypatch):
    encoder = encoder_of(1, (256, 512, 1024))
    monkeypatch.setattr(encoder, "_burst", 1024)

    def capacities(sizes: list[int]) -> list[int]:
        features = encoder.vision_config.patch_pixels
        frames = [Frame(np.zeros((size, features), np.uint8), (2, size // 2)) for size in sizes]
        return [plan.capacity for plan, _ in encoder._bursts(frames)]

    assert capacities([256] * 16) == [256, 512, 1024, 1024, 1024, 256]
    # Half of a lane would be padding: three more are waited for.
    assert capacities([260, 256, 256, 192]) == [1024]


@pytest.mark.multidevice
def test_lanes_dealt_by_the_cost_of_attention_give_the_same_rows(encoder_of):
    plain, quadratic = encoder_of(2, (512,)), encoder_of(2, (512,), quadratic_lanes=True)
    images = prepare(plain, *SIZES)
    for got, want in zip(quadratic.encode(images), plain.encode(images), strict=True):
        assert relative_error(got, want) < 5e-6


@pytest.mark.multidevice
def test_without_the_data_parallel_encoder_one_lane_gives_the_same_rows(encoder_of):
    split, whole = encoder_of(4, (512,)), encoder_of(4, (512,), dp_encoder=False)
    images = prepare(split, *SIZES[:5])
    for got, want in zip(whole.encode(images), split.encode(images), strict=True):
        assert relative_error(got, want) < 5e-6
    encoded_images = whole.encode_to_pool(images)
    assert {call.lanes for call in encoded_images.calls} == {1}
    whole.release(keys(images))


@pytest.mark.multidevice
@pytest.mark.parametrize(("axis", "lanes"), [("model", 2), ("data", 4)])
def test_a_mesh_axis_that_is_not_ours_is_left_alone(checkpoint, encoder_of, axis, lanes):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    config = EncoderConfig(ladder=BucketLadder((512,)))
    wide = VisionEncoder.from_checkpoint(checkpoint, mesh=mesh, axis=axis, config=config)
    narrow = encoder_of(lanes, (512,))
    for sizes in (SIZES[:1], SIZES[:3]):
        for got, want in zip(wide.encode(prepare(wide, *sizes)), narrow.encode(prepare(narrow, *sizes)), strict=True):
            np.testing.assert_array_equal(got, want)


def test_a_mesh_with_explicit_axes_is_refused(checkpoint):
    with pytest.raises(ValueError, match="'tp' is Explicit"):
        VisionEncoder.from_checkpoint(checkpoint, mesh=jax.make_mesh((1,), ("tp",), axis_types=(AxisType.Explicit,)))


def test_files_pil_images_arrays_and_prepared_images_mix_and_keep_their_order(encoder_of):
    encoder = encoder_of(2, (512,))
    pixels = [noise(*size, 0) for size in SIZES[:4]]
    mixed = [
        pixels[0],
        encoded(Image.fromarray(pixels[1]), "PNG"),
        Image.fromarray(pixels[2]),
        encoder.processor.prepare(pixels[3]),
        pixels[0],
    ]
    got = encoder.encode(mixed)
    for rows, image in zip(got, [*pixels, pixels[0]], strict=True):
        (want,) = encoder.encode([image])
        assert rows.dtype == np.float32
        assert relative_error(rows, want) < 5e-6
    assert encoder.encode([]) == []


def test_bfloat16_rows_stay_close_to_float32(encoder_of):
    exact, half = encoder_of(2, (512,)), encoder_of(2, (512,), dtype="bfloat16")
    assert half.pool.dtype == "bfloat16"
    for size in SIZES[:3]:
        (want,), (got,) = exact.encode([noise(*size, 0)]), half.encode([noise(*size, 0)])
        cosine = (got * want).sum(-1) / np.linalg.norm(got, axis=-1) / np.linalg.norm(want, axis=-1)
        assert cosine.min() > 0.9995, f"{size}: {cosine.min():.5f}"


# ---- the row pool ----


def test_pool_rows_equal_encoded_rows_on_every_device(encoder_of):
    encoder = encoder_of(4, (512,))
    images = prepare(encoder, *SIZES, seed=1)
    found = encoder.encode_to_pool(images)
    for slots, want in zip(found.slots, encoder.encode(images), strict=True):
        assert slots.dtype == np.int32
        for copy in encoder.pool.addressable_shards:
            assert relative_error(np.asarray(copy.data)[slots], want) < 5e-6
    taken = np.concatenate(found.slots)
    assert len(set(taken.tolist())) == len(taken) == sum(image.num_tokens for image in images)
    encoder.release(keys(images))


def test_equal_images_are_encoded_once_and_found_again(encoder_of):
    encoder = encoder_of(2, (512,))
    a, b = prepare(encoder, (100, 70), (64, 64), seed=2)
    hits, misses = encoder.cache.hits, encoder.cache.misses
    first = encoder.encode_to_pool([a, b, a])
    assert (first.call_of, [c.images for c in first.calls]) == ([0, 0, 0], [2])
    np.testing.assert_array_equal(first.slots[0], first.slots[2])
    again = encoder.encode_to_pool([b, a])
    assert (again.call_of, again.calls) == ([None, None], [])
    np.testing.assert_array_equal(again.slots[1], first.slots[0])
    assert again.padded_ratio == 0
    assert (encoder.cache.hits - hits, encoder.cache.misses - misses) == (2, 2)
    encoder.release([*keys([a, b, a]), *keys([b, a])])


def test_calls_are_numbered_and_say_what_they_did(encoder_of):
    encoder = encoder_of(2, (256, 512), max_call_patches=200)
    images = prepare(encoder, (100, 70), (200, 130), (64, 64))
    sizes = [image.patches.shape[0] for image in images]
    assert sizes == [24, 96, 16]
    images += prepare(encoder, (180, 180))
    found = encoder.encode_to_pool(images)
    assert found.call_of == [0, 0, 0, 1]
    first, second = found.calls
    assert (second.call_id - first.call_id, first.images, first.patches, first.lanes_filled) == (1, 3, 136, 2)
    assert (first.lanes, first.bucket, first.padded_ratio) == (2, 256, 1 - 136 / 512)
    assert first.imbalance == 96 / 68
    assert found.padded_ratio == 1 - (136 + second.patches) / 1024
    assert (second.images, second.lanes_filled) == (1, 1)
    assert first.seconds > 0
    encoder.release(keys(images))


def test_a_full_pool_pins_nothing_and_enters_nothing(encoder_of):
    encoder = encoder_of(2, (512,), pool_tokens=30)
    held, more = prepare(encoder, (100, 70), (200, 130), seed=3)
    assert [image.num_tokens for image in (held, more)] == [6, 24]
    encoder.encode_to_pool([held])
    slots = encoder.encode_to_pool([more]).slots[0]
    before = pool_rows(encoder, slots)
    third, fourth = prepare(encoder, (64, 64), (96, 96), seed=4)
    with pytest.raises(PoolFull, match=r"4 rows wanted, but 30 of the pool's 30 are in use"):
        encoder.encode_to_pool([more, third])
    assert third.key not in encoder.cache
    np.testing.assert_array_equal(pool_rows(encoder, slots), before)
    # The failed call pinned `more` once too often for a moment; one release must free it.
    encoder.release([more.key])
    evictions = encoder.cache.evictions
    encoder.encode_to_pool([third, fourth])
    assert more.key not in encoder.cache
    assert encoder.cache.evictions == evictions + 1
    with pytest.raises(ValueError, match="released more often"):
        encoder.release([more.key])
    encoder.release(keys([held, third, fourth]))
    assert encoder.cache.tokens_pinned == 0


def test_an_evicted_image_is_encoded_again_to_the_same_rows(encoder_of):
    encoder = encoder_of(2, (512,), pool_tokens=30)
    a, b = prepare(encoder, (200, 130), (96, 96), seed=5)
    rows, before = [], encoder.cache.re_encodes
    for image in (a, b, a):
        found = encoder.encode_to_pool([image])
        assert found.call_of == [0], "24 and 9 tokens do not fit 30 rows together"
        rows.append(pool_rows(encoder, found.slots[0]))
        encoder.release([image.key])
    np.testing.assert_array_equal(rows[2], rows[0])
    assert encoder.cache.re_encodes == before + 1


def test_a_request_of_more_images_than_the_pool_holds_leaves_no_trace(encoder_of):
    encoder = encoder_of(2, (512,), pool_tokens=30)
    images = [encoder.processor.prepare(noise(96, 96, 40 + i)) for i in range(4)]
    for _ in range(3):
        with pytest.raises(PoolFull, match="36 rows wanted"):
            encoder.encode_to_pool(images)
        assert encoder.cache.tokens_pinned == 0
        assert not any(image.key in encoder.cache for image in images)
    assert encoder.encode_to_pool(images[:3]).call_of == [0, 0, 0]
    encoder.release(keys(images[:3]))


def test_the_pool_can_be_given_in_bytes(checkpoint):
    config = EncoderConfig(ladder=BucketLadder((64,)), pool_bytes=10_000)
    encoder = VisionEncoder.from_checkpoint(checkpoint, mesh=make_mesh(1), config=config)
    assert encoder.pool.shape == (13, 192)
    assert encoder.cache.bytes_per_token * encoder.cache.capacity == encoder.pool.nbytes <= 10_000
    with pytest.raises(ValueError, match="pool_bytes 700 is less than one row of 768 bytes"):
        VisionEncoder.from_checkpoint(checkpoint, mesh=make_mesh(1), config=EncoderConfig(pool_bytes=700))


def test_an_image_larger_than_the_pool_or_the_ladder_is_refused_for_good(checkpoint, encoder_of):
    encoder = encoder_of(2, (512,), pool_tokens=10)
    (image,) = prepare(encoder, (200, 130))
    encoder.check(image)
    with pytest.raises(ValueError, match="image of 24 tokens is larger than the pool of 10"):
        encoder.encode_to_pool([image])
    other = VisionEncoder.from_checkpoint(
        checkpoint, mesh=make_mesh(2), config=EncoderConfig(ladder=BucketLadder((64,)))
    )
    for call in (other.check, lambda x: other.encode_to_pool([x])):
        with pytest.raises(ImageError, match="image of 130x200 px has 96 patches; the largest bucket holds 64"):
            call(image)
    with pytest.raises(ImageError, match="needs 96 patches; the limit is 64"):
        other.encode([noise(200, 130, 0)])
    assert not other._compiled


def test_a_fault_of_the_device_leaves_the_cache_as_it_was(encoder_of, monkeypatch):
    encoder = encoder_of(2, (512,))
    held, fresh = prepare(encoder, (96, 96), (100, 70), seed=6)
    encoder.encode_to_pool([held])

    def fails(*_):
        raise RuntimeError("device lost")

    monkeypatch.setattr(encoder, "_dispatch", fails)
    with pytest.raises(RuntimeError, match="device lost"):
        encoder.encode_to_pool([held, fresh])
    assert fresh.key not in encoder.cache
    assert encoder.cache.tokens_pinned == held.num_tokens
    encoder.release([held.key])
    assert encoder.cache.tokens_pinned == 0


def test_one_key_for_two_grids_is_refused(encoder_of):
    encoder = encoder_of(2, (512,))
    a, b = prepare(encoder, (64, 96), (96, 64))
    liar = PreparedImage(b.patches, b.grid_thw, a.key, b.num_tokens, b.size)
    with pytest.raises(ValueError, match="stands for two different grids"):
        encoder.encode_to_pool([a, liar])


def test_thirty_three_images_in_one_step_each_get_their_own_rows(encoder_of):
    encoder = encoder_of(4, (512,))
    images = [encoder.processor.prepare(noise(*SIZES[i % 3], 100 + i)) for i in range(33)]
    found = encoder.encode_to_pool(images)
    assert [len(slots) for slots in found.slots] == [image.num_tokens for image in images]
    for image, slots in zip(images[::8], found.slots[::8], strict=True):
        assert relative_error(pool_rows(encoder, slots), encoder.encode([image])[0]) < 5e-6
    encoder.release(keys(images))


# ---- the programs ----


@pytest.mark.multidevice
@pytest.mark.parametrize(("tp", "dp_encoder"), [(1, True), (2, True), (8, True), (8, False)])
def test_a_bucket_program_has_exactly_the_collectives_it_declares(encoder_of, tp, dp_encoder):
    programs = encoder_of(tp, (256, 512), dp_encoder=dp_encoder).programs()
    assert [p.name for p in programs] == ["vision/256", "vision/512"]
    expected = 1 if tp > 1 and dp_encoder else 0
    for program in programs:
        text = program.lower().as_text()
        assert dict(program.collectives) == {"all_gather": expected}
        assert len(re.findall(r"stablehlo\.all_gather", text)) == expected
        assert not re.search(r"stablehlo\.(all_reduce|all_to_all|collective_permute|reduce_scatter)", text)


@pytest.mark.multidevice
def test_every_program_lowers_for_rocm_without_host_calls_or_convolutions(encoder_of):
    for program in encoder_of(2, (512,)).programs():
        text = program.fn.trace(*program.args).lower(lowering_platforms=("rocm",)).as_text()
        assert "stablehlo.convolution" not in text
        calls = set(re.findall(r"custom_call @(\w+)", text))
        assert calls <= {"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"}, calls


@pytest.mark.multidevice
def test_a_bucket_called_with_other_arguments_names_them_and_compiles_nothing(encoder_of, compile_counter):
    encoder = encoder_of(2, (512,))
    encoder.encode(prepare(encoder, (64, 64)))
    ready = encoder._compiled[Bucket(512), "uint8"]
    want = list(ready.program.args)
    patches = jax.device_put(np.zeros((2, 448, 768), np.float32), want[2].sharding)
    moved = jax.device_put(np.zeros(want[4].shape, np.int32), want[2].sharding)
    lanes = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), want[3])
    with compile_counter() as compiles, pytest.raises(ProgramMismatch) as caught:
        run_compiled(
            ready.program.name,
            ready.compiled,
            want,
            ("state", "pool", "patches", "lanes", "dest"),
            encoder._weights,
            encoder.pool,
            patches,
            lanes,
            moved,
        )
    text = str(caught.value)
    assert "program vision/512 was not compiled for these arguments" in text
    assert "patches: float32[2, 448, 768], compiled for uint8[2, 512, 768]" in text
    assert "dest: placed as " in text
    assert "lanes" not in text
    assert "state" not in text
    assert compiles.count == 0
    assert encoder.encode(prepare(encoder, (64, 64)))[0].any()


def test_a_chosen_ladder_ends_where_the_memory_does(checkpoint, caplog):
    one_device = make_mesh(1)
    encoder = VisionEncoder.from_checkpoint(checkpoint, mesh=one_device)
    patch_bytes = activation_bytes(encoder.vision_config, 4, 1)
    with caplog.at_level("WARNING", "vitbatch.encoder"):
        small = VisionEncoder.from_checkpoint(
            checkpoint, mesh=one_device, config=EncoderConfig(memory_bytes=400 * patch_bytes)
        )
    assert small.ladder.largest == 384
    assert "memory for 384 patches a lane, but an image may have 452" in caplog.text
    with pytest.raises(ValueError, match=f"{patch_bytes} bytes hold no lane of 64 patches"):
        VisionEncoder.from_checkpoint(checkpoint, mesh=one_device, config=EncoderConfig(memory_bytes=patch_bytes))


@pytest.mark.multidevice
def test_the_memory_estimate_covers_what_a_program_takes(encoder_of):
    for tp in (1, 4):
        encoder = encoder_of(tp, (512,))
        analysis = encoder._compile(Bucket(512), np.dtype(np.uint8)).compiled.memory_analysis()
        taken = analysis.temp_size_in_bytes
        assert 0 < taken <= 512 * activation_bytes(encoder.vision_config, 4, tp)


def test_pixels_are_normalised_on_the_device(encoder_of):
    encoder = encoder_of(1, (512,))
    (image,) = prepare(encoder, (100, 70))
    pixels = (image.patches.astype(np.float32) - 127.5) / 127.5
    twice = np.repeat(pixels.reshape(-1, 3, 1, 256), 2, 2).reshape(len(pixels), -1)
    got, want = (
        encoder.encode_frames([Frame(image.patches, image.grid_thw[1:])]),
        encoder.encode_frames([Frame(twice, image.grid_thw[1:])]),
    )
    assert relative_error(got[0], want[0]) < 5e-6


def test_rows_of_another_tower_are_refused(encoder_of):
    encoder = encoder_of(1, (512,))
    alien = PreparedImage(np.zeros((16, 588), np.uint8), (1, 4, 4), bytes(32), 4, (56, 56))
    with pytest.raises(ValueError, match="image rows have 588 features, this tower reads 768"):
        encoder.encode([alien])


def test_the_default_ladder_and_pool_hold_the_largest_image(checkpoint):
    encoder = VisionEncoder.from_checkpoint(checkpoint, mesh=make_mesh(1))
    assert encoder.processor.largest_image_patches == 452
    assert encoder.ladder.capacities == (256, 512, 768, 1024, 1280, 1536, 1792, 2048)
    assert encoder.pool.shape[0] == 1024


# ---- on a GPU ----


@pytest.mark.gpu
def test_on_a_gpu_the_kernel_gives_the_same_bits_alone_and_in_company_and_stays_close_to_float32(encoder_of):
    half, exact = encoder_of(1, (512,)), encoder_of(1, (512,), dtype="float32")
    target, *others = prepare(half, (100, 70), (200, 130), (96, 96), (64, 64), (37, 256))
    (alone,), (want,) = half.encode([target]), exact.encode([target])
    for count in range(1, len(others) + 1):
        for place in (0, count):
            images = [*others[:count][:place], target, *others[:count][place:]]
            np.testing.assert_array_equal(half.encode(images)[place], alone)
    cosine = (alone * want).sum(-1) / np.linalg.norm(alone, axis=-1) / np.linalg.norm(want, axis=-1)
    assert cosine.min() > 0.9995
