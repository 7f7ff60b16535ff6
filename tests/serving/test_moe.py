"""A mixture of experts against a loop over tokens in float64, cut over meshes, and as the file may hold it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from scripts.lib.program_list import Scope, language_programs
from scripts.lib.rocm_lowering import kernels_in, lower_for_rocm, rocm_mesh
from serving.models import families
from serving.models.layers import SwiGLU
from serving.models.moe import MoE, MoEConfig, route
from serving.models.shards import Shards
from tests.helpers import det, relative_error
from tests.vitstripe.toy import write_folder
from vitstripe import collectives_in
from vitstripe.checkpoint import Checkpoint, CheckpointError, bind, load, raise_problems, sharding_of
from vitstripe.platform import Platform

D, ROWS = 12, 21
GLM = MoEConfig(hidden_size=D, experts=8, chosen=3, width=10, shared_width=16, scale=2.5)
GROUPED = replace(GLM, groups=4, top_groups=2, normalise=False, limit=0.3)
QWEN = MoEConfig(hidden_size=D, experts=8, chosen=2, width=10, shared_width=16, scoring="softmax")
NO_SHARED = replace(QWEN, shared_width=0)
ODD = replace(GLM, experts=6)
KINDS = {"glm": GLM, "grouped": GROUPED, "qwen": QWEN, "no_shared": NO_SHARED, "odd": ODD}


def shards_of(c: MoEConfig, tp: int) -> Shards:
    widths = (c.shared_width,) if c.shared_width else ()
    return Shards.of(tp, heads=8, kv_heads=8, widths=widths, vocab=8, experts=c.experts, expert_width=c.width)


def weights_of(c: MoEConfig) -> dict[str, np.ndarray]:
    """float32 values by parameter path, the same for every mesh."""
    module = nnx.eval_shape(lambda: MoE(c, dtype=jnp.float32, shards=shards_of(c, 1)))
    found = {}
    for i, (path, variable) in enumerate(nnx.to_flat_state(nnx.state(module))):
        found[".".join(map(str, path))] = det(variable.get_value().shape, 10 + i)
    return found


def program(c: MoEConfig, tp: int, mesh, values: dict[str, np.ndarray]):
    """(x, real) -> the mixture's whole output on a mesh of tp devices, and the state it takes first."""
    shards = shards_of(c, tp)
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: MoE(c, dtype=jnp.float32, shards=shards)))
    placed = [
        (path, v.replace(jax.device_put(values[".".join(map(str, path))], sharding_of(v, mesh, "tp"))))
        for path, v in nnx.to_flat_state(abstract)
    ]
    state = nnx.from_flat_state(placed)

    def body(state, x, real):
        mixture = nnx.merge(graphdef, state)
        return shards.sum_if(mixture.cut, mixture(x, real))

    specs = jax.tree.map(lambda a: a.sharding.spec, state)
    # The outputs of a mixture that nothing cuts are replicated, which the check cannot know of the rank it reads.
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(specs, P(), P()), out_specs=P(), check_vma=False)), state


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def mlp(x, gate, up, down, limit):
    g, u = gate @ x, up @ x
    if limit is not None:
        g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
    return down @ (g * sigmoid(g) * u)


def reference(c: MoEConfig, w: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """One token after another, one expert after another, float64."""
    w = {name: value.astype(np.float64) for name, value in w.items()}
    out = np.zeros(x.shape)
    for t, row in enumerate(x.astype(np.float64)):
        logits = w["gate.weight"] @ row
        if c.scoring == "softmax":
            scores = choice = np.exp(logits) / np.exp(logits).sum()
        else:
            scores = sigmoid(logits)
            choice = scores + w["gate.e_score_correction_bias"]
        if c.groups > 1:
            groups = choice.reshape(c.groups, -1)
            best_two = np.sort(groups, 1)[:, -2:].sum(1)
            for g in np.argsort(-best_two, kind="stable")[c.top_groups :]:
                groups[g] = -np.inf
        ids = np.argsort(-choice, kind="stable")[: c.chosen]
        picked = scores[ids] / (scores[ids].sum() if c.normalise else 1) * c.scale
        for e, weight in zip(ids, picked, strict=True):
            expert = [w[f"experts.{n}_proj.weight"][e] for n in ("gate", "up", "down")]
            out[t] += weight * mlp(row, *expert, c.limit)
        if c.shared_width:
            name = "shared_expert" if c.scoring == "softmax" else "shared_experts"
            y = mlp(row, *(w[f"{name}.{n}_proj.weight"] for n in ("gate", "up", "down")), c.limit)
            out[t] += y * (sigmoid(w["shared_expert_gate.weight"] @ row) if c.scoring == "softmax" else 1)
    return out


@pytest.mark.multidevice
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_is_the_sum_over_each_token_s_experts(mesh_of, kind, tp):
    c, x = KINDS[kind], det((ROWS, D), 3)
    values = weights_of(c)
    run, state = program(c, tp, mesh_of(tp), values)
    assert relative_error(run(state, x, np.ones(ROWS, bool)), reference(c, values, x)) < 2e-6


def test_the_clamp_bites_and_leaves_the_gate_free_below(mesh_of):
    c, x = GROUPED, 4 * det((ROWS, D), 3)
    values = weights_of(c)
    gates = np.einsum("eid,td->tei", values["experts.gate_proj.weight"], x)
    assert (gates > c.limit).any()
    assert (gates < -c.limit).any()
    without = reference(replace(c, limit=None), values, x)
    assert relative_error(reference(c, values, x), without) > 0.1
    run, state = program(c, 2, mesh_of(2), values)
    assert relative_error(run(state, x, np.ones(ROWS, bool)), reference(c, values, x)) < 2e-6


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_each_device_keeps_whole_experts_where_they_divide_and_a_cut_of_all_where_not(mesh_of, tp):
    def shapes(c):
        _, state = program(c, tp, mesh_of(tp), weights_of(c))
        stack = dict(nnx.to_flat_state(state))["experts", "gate_proj", "weight"].get_value()
        return {s.data.shape for s in stack.addressable_shards}

    assert shapes(GLM) == {(8 // tp, 10, D)}
    if tp <= 2:
        assert shapes(ODD) == {(6 // tp, 10, D)}
    else:
        assert not shards_of(ODD, tp).experts
        assert shards_of(ODD, tp).mlp == (10 % tp == 0)
    wide = replace(ODD, width=24)
    if tp in (4, 8):
        assert shapes(wide) == {(6, 24 // tp, D)}


@pytest.mark.parametrize(
    ("c", "tp", "sums"), [(GLM, 1, 0), (GLM, 2, 1), (GLM, 8, 1), (replace(GLM, shared_width=9), 8, 1), (ODD, 8, 0)]
)
def test_one_sum_over_devices_joins_everything(mesh_of, c, tp, sums):
    run, state = program(c, tp, mesh_of(tp), weights_of(c))
    text = run.lower(state, np.ones((ROWS, D), np.float32), np.ones(ROWS, bool)).as_text()
    assert collectives_in(text) == ({"all_reduce": 1} if sums else {})
    assert shards_of(c, tp).all_reduces(3, 3) - 3 * shards_of(c, tp).heads == 3 * sums


def test_a_shared_expert_that_does_not_divide_is_counted_once(mesh_of):
    c, x = replace(GLM, shared_width=9), det((ROWS, D), 4)
    values = weights_of(c)
    run, state = program(c, 8, mesh_of(8), values)
    assert relative_error(run(state, x, np.ones(ROWS, bool)), reference(c, values, x)) < 2e-6


@pytest.mark.parametrize("tp", [1, 4])
def test_padding_takes_no_expert_and_changes_no_token(mesh_of, tp):
    c, x = NO_SHARED, det((ROWS, D), 5)
    real = np.arange(ROWS) % 3 != 1
    values = weights_of(c)
    run, state = program(c, tp, mesh_of(tp), values)
    clean = np.asarray(run(state, x, real))
    dirty = np.asarray(run(state, np.where(real[:, None], x, np.nan).astype(np.float32), real))
    np.testing.assert_array_equal(clean[real], dirty[real])
    assert not clean[~real].any()
    assert not dirty[~real].any()
    assert relative_error(clean[real], reference(c, values, x[real])) < 2e-6


@pytest.mark.parametrize("groups", [1, 2])
def test_of_equal_experts_the_lower_ids_are_chosen(groups):
    scores = jnp.full((2, 6), 0.5).at[1, 4].set(0.75)
    ids, weights = route(scores, jnp.zeros(6), top_k=2, groups=groups, top_groups=1)
    assert ids.tolist() == [[0, 1], [4, 0 if groups == 1 else 3]]
    np.testing.assert_allclose(weights, [[0.5, 0.5], [0.6, 0.4]], rtol=1e-6)


def test_the_bias_chooses_and_does_not_weigh():
    scores, bias = jnp.array([[0.9, 0.2, 0.1]]), jnp.array([0.0, 0.0, 5.0])
    ids, weights = route(scores, bias, top_k=2, normalise=False)
    assert ids.tolist() == [[2, 0]]
    np.testing.assert_allclose(weights, [[0.1, 0.9]], rtol=1e-6)


def as_file(c: MoEConfig, values: dict[str, np.ndarray], fused: bool) -> dict[str, np.ndarray]:
    """The tensors of a file: experts one by one, or gate and up of all of them in one tensor."""
    tensors = {n: v for n, v in values.items() if not n.startswith("experts.")}
    gate, up, down = (values[f"experts.{n}_proj.weight"] for n in ("gate", "up", "down"))
    if fused:
        tensors |= {"experts.gate_up_proj": np.concatenate([gate, up], 1), "experts.down_proj": down}
    else:
        for e in range(c.experts):
            tensors |= {f"experts.{e}.{n}_proj.weight": v[e] for n, v in (("gate", gate), ("up", up), ("down", down))}
    return {n: np.ascontiguousarray(v.astype(ml_dtypes.bfloat16)) for n, v in tensors.items()}


@pytest.mark.multidevice
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kind", ["glm", "odd", "qwen"])
@pytest.mark.parametrize("fused", [False, True])
def test_experts_load_from_either_form_of_the_file(tmp_path, mesh_of, kind, fused, tp):
    c = replace(KINDS[kind], width=20)
    values = {n: v.astype(ml_dtypes.bfloat16).astype(np.float32) for n, v in weights_of(c).items()}
    checkpoint = Checkpoint(write_folder(tmp_path, as_file(c, values, fused)))
    binding = bind(checkpoint, lambda: MoE(c, dtype=jnp.float32, shards=shards_of(c, tp)), name="moe")
    raise_problems(checkpoint, [binding])
    for path, variable in nnx.to_flat_state(load(checkpoint, binding, mesh_of(tp))):
        np.testing.assert_array_equal(np.asarray(variable.get_value()), values[".".join(map(str, path))])


@pytest.mark.parametrize("tp", [1, 2])
def test_gate_and_up_of_a_dense_mlp_load_from_one_tensor(tmp_path, mesh_of, tp):
    gate, up, down = det((10, D), 1), det((10, D), 2), det((D, 10), 3)
    tensors = {"gate_up_proj.weight": np.concatenate([gate, up]), "down_proj.weight": down}
    checkpoint = Checkpoint(write_folder(tmp_path, tensors))
    shards = Shards.of(tp, heads=2, kv_heads=2, widths=(10,), vocab=2)
    binding = bind(checkpoint, lambda: SwiGLU(D, 10, dtype=jnp.float32, shards=shards), name="mlp")
    raise_problems(checkpoint, [binding])
    state = dict(nnx.to_flat_state(load(checkpoint, binding, mesh_of(tp))))
    np.testing.assert_array_equal(state["gate_proj", "weight"].get_value(), gate)
    np.testing.assert_array_equal(state["up_proj", "weight"].get_value(), up)


def test_a_fused_tensor_of_another_size_is_named_once(tmp_path):
    values = as_file(GLM, weights_of(GLM), fused=True)
    values["experts.gate_up_proj"] = values["experts.gate_up_proj"][:, :19]
    checkpoint = Checkpoint(write_folder(tmp_path, {n: np.ascontiguousarray(v) for n, v in values.items()}))
    binding = bind(checkpoint, lambda: MoE(GLM, dtype=jnp.float32, shards=shards_of(GLM, 1)), name="moe")
    assert binding.problems == [
        "mis-shaped experts.gate_up_proj: the file has [8, 19, 12], the config wants [8, 20, 12]"
    ]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"chosen": 9}, "9 experts a token, but there are only 8"),
        ({"groups": 3}, "8 experts do not divide into n_group = 3"),
        ({"groups": 2, "top_groups": 3}, "topk_group = 3 exceeds n_group = 2"),
        ({"groups": 8, "top_groups": 8}, "leaves one expert a group"),
        ({"groups": 4, "top_groups": 1}, "topk_group = 1 hold 2"),
        ({"limit": 0.0}, "swiglu_limit is 0.0"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(change, text):
    with pytest.raises(CheckpointError, match=text):
        replace(GLM, **change)


def test_a_mixture_on_a_gpu_multiplies_each_row_by_its_own_expert_alone():
    """As lowered for ROCm: three products of experts a mixture, through the kernel and not lax.ragged_dot."""
    mesh, platform = rocm_mesh(8, "gfx950"), Platform("rocm", "gfx950", "")
    family = families()["qwen3_vl_moe"]
    made = language_programs("qwen3_vl_moe", family, mesh, platform, Scope(prefill_tokens=64, max_seqs=1))
    text = next(lower_for_rocm(program, mesh) for program in made if program.name == "decode/1")
    assert "grouped_matmul" in kernels_in(text)
    assert "ragged_dot" not in text
