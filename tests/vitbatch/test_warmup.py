"""Warm-up: what it compiles and runs, what never compiles after it, and how a compile is told."""

import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from scripts.lib.made_up_tower import TowerSize, write_checkpoint
from scripts.lib.sweep_sizes import bursts, sweep
from tests.vitbatch.pictures import noise
from vitbatch import Bucket, BucketLadder, EncoderConfig, PreparedImage, VisionEncoder
from vitbatch.compile_guard import CompileGuard
from vitbatch.warmup import compile_all, persistent_cache
from vitstripe import Program, make_mesh
from vitstripe.selftest import CollectiveHang


def prepare(encoder: VisionEncoder, *sizes: tuple[int, int], seed: int = 0) -> list[PreparedImage]:
    return [encoder.processor.prepare(noise(h, w, seed)) for h, w in sizes]


def keys(images) -> list[bytes]:
    return [image.key for image in images]


@pytest.fixture
def guard():
    guard = CompileGuard()
    yield guard
    guard.close()


# ---- nothing compiles afterwards ----


@pytest.mark.multidevice
def test_the_first_image_of_any_size_and_every_count_compiles_nothing(checkpoint, guard):
    config = EncoderConfig(ladder=BucketLadder((256, 512)), pool_tokens=600, dp_encoder=False)
    encoder = VisionEncoder.from_checkpoint(checkpoint, mesh=make_mesh(4), config=config)
    encoder.warm_up()
    guard.mark_ready()
    draw = np.random.default_rng(0)
    sizes = [(448, 448), (448, 640), (224, 896), (1000, 37), (32, 32), (1, 1), (150, 1)]
    for count in range(1, 10):
        images = [encoder.processor.prepare(noise(*sizes[int(i)], count)) for i in draw.integers(0, 7, count)]
        encoder.encode(images[:3])
        encoder.encode_to_pool(images[:4])
        encoder.release(keys(images[:4]))
    encoder.warm_up()
    assert guard.after_ready == 0


@pytest.mark.multidevice
def test_a_sweep_of_sizes_and_counts_compiles_nothing(tmp_path, guard):
    # A quarter of the sides of real images: scripts/sweep_sizes takes minutes with whole ones.
    size = TowerSize(16, 1, 2, 32, 8, deepstack=1, min_pixels=1024, max_pixels=1_048_576)
    requests = [request for burst in bursts(4) for request in burst]
    assert len(requests) >= 93
    assert max(burst.count([(630, 616)]) for burst in bursts(4)) == 9
    assert {1, 2, 64} <= {len(request) for request in requests}
    assert [] in requests
    config = EncoderConfig(ladder=BucketLadder((256, 512, 1024, 2048)))
    encoder = VisionEncoder.from_checkpoint(write_checkpoint(tmp_path, size), mesh=make_mesh(2), config=config)
    encoder.warm_up()
    guard.mark_ready()
    swept = sweep(encoder, shrink=4)
    assert (swept.requests, swept.images) == (len(requests), sum(map(len, requests)))
    assert guard.after_ready == 0
    assert swept.padded_ratio < 0.5


# ---- what it does ----


@pytest.mark.multidevice
def test_progress_counts_the_compile_and_the_run_of_every_bucket(checkpoint):
    config = EncoderConfig(ladder=BucketLadder((128, 256)), pool_tokens=100)
    encoder = VisionEncoder.from_checkpoint(checkpoint, mesh=make_mesh(2), config=config)
    seen = []
    report = encoder.warm_up(lambda done, total, name: seen.append((done, total, name)))
    names = [f"vision/{capacity}" for capacity in (128, 256)]
    assert [done for done, _, _ in seen] == [1, 2, 3, 4]
    assert {total for _, total, _ in seen} == {4}
    assert sorted(name for *_, name in seen[:2]) == names
    assert [name for *_, name in seen[2:]] == names
    assert [(b.name, b.lanes, b.capacity, b.source) for b in report.buckets] == [
        (name, 2, capacity, "compiled") for name, capacity in zip(names, (128, 256), strict=True)
    ]
    assert all(b.lower_seconds > 0 and b.compile_seconds > 0 and b.run_seconds > 0 for b in report.buckets)
    assert report.seconds > 0
    again = encoder.warm_up()
    assert {(b.source, b.compile_seconds) for b in again.buckets} == {("ready", 0.0)}


def test_the_report_is_an_aligned_table(encoder_of):
    encoder = encoder_of(2, (512,))
    encoder.warm_up()
    header, line, last = str(encoder.warm_up()).splitlines()
    assert header.split() == ["program", "source", "lanes", "patches", "lower", "s", "compile", "s", "run", "s"]
    assert line.split()[:4] == ["vision/512", "ready", "2", "1024"]
    assert len(header) == len(line)
    assert last.endswith(" s in all")


def test_live_rows_stay_and_no_call_is_counted(encoder_of):
    encoder = encoder_of(2, (512,))
    images = prepare(encoder, (96, 96), (100, 70))
    slots = np.concatenate(encoder.encode_to_pool(images).slots)
    encoder.release(keys(images))
    before, calls = np.asarray(encoder.pool)[slots], encoder._calls
    encoder.warm_up()
    np.testing.assert_array_equal(np.asarray(encoder.pool)[slots], before)
    assert encoder._calls == calls


def test_a_run_that_does_not_come_back_is_told_by_its_program_within_the_limit(encoder_of, monkeypatch):
    encoder, release, run, seen = encoder_of(2, (128, 512)), threading.Event(), VisionEncoder._run, []

    def hangs(self, ready, arguments):
        if ready.program.name == "vision/512":
            release.wait(60)
            raise TimeoutError("too late")  # no program may run beside those of the next test
        return run(self, ready, arguments)

    monkeypatch.setattr(VisionEncoder, "_run", hangs)
    with pytest.raises(CollectiveHang, match=r"the first run of vision/512 did not end within 5 s"):
        encoder.warm_up(lambda done, total, name: seen.append(name), seconds=5.0)
    assert seen[2:] == ["vision/128"]
    release.set()


def test_a_run_within_its_limit_leaves_the_encoder_as_without_one(encoder_of):
    bounded, free = encoder_of(2, (128, 512)), encoder_of(2, (128, 512))
    assert [b.name for b in bounded.warm_up(seconds=300.0).buckets] == [b.name for b in free.warm_up().buckets]
    images = prepare(bounded, (96, 96), (100, 70))
    for one, other in zip(bounded.encode(images), free.encode(images), strict=True):
        np.testing.assert_array_equal(one, other)


def test_every_lane_is_full_of_several_images(encoder_of):
    encoder = encoder_of(2, (512,))
    for bucket in (Bucket(256, 16), Bucket(256), Bucket(1024), Bucket(2624)):
        frames = encoder._full_lanes(bucket)
        assert sum(len(frame.rows) for frame in frames) == 2 * bucket.capacity
        assert max(len(frame.rows) for frame in frames) <= bucket.longest
        assert all(len(frame.rows) == frame.grid[0] * frame.grid[1] for frame in frames)
        assert frames[0].rows.std() > 50


@pytest.mark.skipif(os.cpu_count() == 1, reason="one core compiles one program at a time")
def test_programs_compile_side_by_side():
    meeting, names = threading.Barrier(2), []

    def traced(x):
        meeting.wait(timeout=60)  # until another program is being traced
        return x * 2

    number = jax.ShapeDtypeStruct((3,), jnp.float32)
    programs = [Program(f"p{i}", jax.jit(lambda x, i=i: traced(x) + i), (number,)) for i in range(2)]
    compile_all(programs, None, lambda done: names.append(done.program.name))
    assert sorted(names) == ["p0", "p1"]


def test_a_program_that_does_not_compile_ends_the_warm_up():
    def fails(x):
        raise RuntimeError("out of memory")

    programs = [Program("p", jax.jit(fails), (jax.ShapeDtypeStruct((3,), jnp.float32),))]
    with pytest.raises(RuntimeError, match="out of memory"):
        compile_all(programs, None, lambda done: None)


def test_a_program_is_compiled_with_its_own_options():
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    program = Program("p", jax.jit(lambda x: x + 1), (shape,), options={"xla_option_of_nobody": 1})
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_option_of_nobody"):
        compile_all([program], None, lambda done: None)


# ---- the disk cache ----

CACHED = BucketLadder((128, 192))


def warm(checkpoint, folder) -> list[str]:
    """Where a new encoder found its programs."""
    config = EncoderConfig(ladder=CACHED, pool_tokens=64, compilation_cache=folder)
    encoder = VisionEncoder.from_checkpoint(checkpoint, mesh=make_mesh(2), config=config)
    return [bucket.source for bucket in encoder.warm_up().buckets]


OTHER_PROCESS = """
import sys, jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "highest")
from tests.vitbatch.test_warmup import warm
print(*warm(*sys.argv[1:]))
"""


@pytest.mark.multidevice
def test_another_process_finds_every_bucket_in_the_disk_cache(checkpoint, tmp_path):
    settings = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in settings]
    assert warm(checkpoint, tmp_path) == ["compiled"] * 2
    assert any(tmp_path.iterdir())
    assert [getattr(jax.config, name) for name in settings] == before
    other = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, checkpoint, tmp_path],
        env={**os.environ, "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        check=False,
    )
    assert other.stdout.split() == ["disk", "disk"], other.stderr


def test_without_a_folder_the_process_setting_is_left_alone(tmp_path):
    with persistent_cache(tmp_path):
        assert jax.config.jax_compilation_cache_dir == str(tmp_path)
        with persistent_cache(None):
            assert jax.config.jax_compilation_cache_dir == str(tmp_path)


# ---- the guard ----


def test_compiles_before_and_after_ready_are_counted_apart(guard):
    stages = []
    guard._on_compile = stages.append
    jax.jit(lambda x: x + 1)(np.ones(3))
    assert (guard.before_ready, guard.after_ready) == (1, 0)
    guard.mark_ready()
    jax.jit(lambda x: x + 2)(np.ones(3))
    assert (guard.before_ready, guard.after_ready) == (1, 1)
    assert stages == ["before_ready", "after_ready"]


def test_a_compile_after_ready_names_the_program_its_caller_and_the_argument_that_changed(guard, caplog):
    def count_patches(patches, lane):
        return patches.sum() + lane["first"].sum()

    counted = jax.jit(count_patches)
    counted(np.ones((2, 64), np.float32), {"first": np.zeros(3, np.int32)})
    guard.mark_ready()
    counted(np.ones((2, 64), np.float32), {"first": np.zeros(5, np.int32)})
    (text,) = (r.getMessage() for r in caplog.records if r.name == "vitbatch.compile")
    assert text.startswith("compiled after ready: jit(count_patches), ")
    assert "test_warmup.py" in text
    assert "lane['first'], now i32[5] and before i32[3]" in text
    assert "patches" not in text.split("now i32[5]")[1]


@pytest.mark.multidevice
def test_the_same_values_placed_otherwise_are_told_as_such(guard, caplog):
    mesh = make_mesh(2)
    doubled = jax.jit(lambda x: x * 2)
    placed = [
        jax.device_put(np.ones(4, np.float32), NamedSharding(mesh, spec)) for spec in map(PartitionSpec, (None, "tp"))
    ]
    doubled(placed[0])
    guard.mark_ready()
    doubled(placed[0])
    assert guard.after_ready == 0
    doubled(placed[1])
    (text,) = (r.getMessage() for r in caplog.records if r.name == "vitbatch.compile")
    assert text.endswith("an argument is placed on the devices in another way than before")


def test_jax_explains_while_one_guard_is_left_whichever_closes_first(guard):
    before = jax.config.jax_explain_cache_misses
    first, second = CompileGuard(), CompileGuard()
    first.mark_ready()
    second.mark_ready()
    first.close()
    assert jax.config.jax_explain_cache_misses
    second.close()
    assert jax.config.jax_explain_cache_misses == before


def test_a_closed_guard_hears_nothing_and_leaves_no_setting(guard):
    before = jax.config.jax_explain_cache_misses
    other = CompileGuard()
    other.mark_ready()
    other.close()
    assert jax.config.jax_explain_cache_misses == before
    jax.jit(lambda x: x - jnp.float32(3))(np.ones(5, np.float32))
    assert (other.before_ready, other.after_ready) == (0, 0)
    assert guard.before_ready == 1
