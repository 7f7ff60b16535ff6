"""scripts/profile_step reads its traces right: time by scope, gaps, and every device."""

import json
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from dsa_indexer import project_rows
from scripts.lib.profile_step import markdown_of, scope_table
from scripts.lib.trace_scopes import OTHER, Section, read_section, scope_in, scopes_of

pytestmark = pytest.mark.multidevice
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("jit(run)/shard_map/select/top_k", "select"),
        ("jit(layer)/encode/while/body/attend/dot_general", "attend"),
        ("jit(run)/reselect/add", OTHER),
        ("", OTHER),
    ],
)
def test_the_innermost_scope_of_an_operation_counts(name, scope):
    assert scope_in(name) == scope


def test_the_query_projection_has_a_scope_of_its_own():
    run = jax.jit(lambda x: project_rows(lambda x: (x[:, None] * 2, x + 1), (x,)))
    compiled = run.lower(jnp.ones((70, 3))).compile()
    assert "project" in scopes_of([compiled]).values()


def test_a_trace_gives_time_by_scope_and_device(mesh_of, tmp_path):
    mesh = mesh_of(2)

    def body(x):
        with jax.named_scope("score"):
            y = x @ x.T
        with jax.named_scope("select"):
            y = lax.top_k(y, 7)[1]
        with jax.named_scope("merge"):
            return lax.pmax(y, "tp")

    mapped = jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec("tp"), out_specs=PartitionSpec())
    x = jax.device_put(np.ones((300, 90), np.float32), NamedSharding(mesh, PartitionSpec("tp")))
    compiled = jax.jit(mapped).lower(x).compile()
    jax.block_until_ready(compiled(x))
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(3):
            with jax.profiler.TraceAnnotation("step"):
                with jax.profiler.TraceAnnotation("plan"):
                    time.sleep(0.001)
                jax.block_until_ready(compiled(x))
        jax.block_until_ready(compiled(jnp.copy(x)))  # outside of any step
    section = read_section(tmp_path, "made up", [compiled], annotation="step")
    assert section.runs == 3
    assert section.host.keys() == {"plan"}
    assert 0 < section.host["plan"] < section.wall
    assert set(section.scopes) >= {"score", "select", "merge"}
    assert len(section.busy) == 2
    assert all(0 < busy <= section.wall for busy in section.busy.values())
    assert 0 <= section.host_share < 1
    assert sum(section.operations.values()) == pytest.approx(sum(section.scopes.values()))
    with pytest.raises(ValueError, match="no annotation 'other step'"):
        read_section(tmp_path, "made up", [compiled], annotation="other step")


def test_the_tables_show_milliseconds_a_run_and_device():
    section = Section(
        "layer",
        2,
        0.02,
        {"a": 0.008, "b": 0.006},
        {"score": 0.008, "merge": 0.004},
        {},
        {"a": [], "b": []},
        {"plan": 0.001},
    )
    assert section.host_share == pytest.approx(0.6)
    table = scope_table(section, 2)
    assert "10.00 ms a run, 60% of it" in str(table.title)
    assert markdown_of([section], 2) == [
        "| step | ms a run | host | plan (host) | score | merge |",
        "|---|---|---|---|---|---|",
        "| layer | 10.00 | 60% | 0.500 | 2.000 | 1.000 |",
    ]


@pytest.mark.slow
def test_every_step_is_profiled_on_host_devices(tmp_path):
    # A process of its own: the number of host devices cannot be changed in this one.
    command = [sys.executable, "-m", "scripts.lib.profile_step", "--tp", "2", "--runs", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    sections = json.loads((tmp_path / "profile.json").read_text())["sections"]
    scopes = {section["name"]: section["scopes"].keys() | section["host"].keys() for section in sections}
    assert len(scopes) == 6
    chosen = {"project", "score", "select"}
    assert {"plan", "encode", "attend"} <= scopes["vision call"]
    assert chosen <= scopes["indexer layer, replicated"]
    for merge in ("pmax", "all_gather"):
        assert {*chosen, "merge"} <= scopes[f"indexer layer, striped, {merge}"]
    assert {*chosen, "splice", "merge", "attend", "mlp", "logits"} <= scopes["splice and prefill pass"]
    assert {*chosen, "splice", "attend", "mlp", "logits", "sample"} <= scopes["decode pass"]
    assert all(list((tmp_path / name).rglob("*.xplane.pb")) for name in ("vision", "indexer", "prefill", "decode"))
