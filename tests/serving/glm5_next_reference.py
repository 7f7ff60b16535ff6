"""GLM-5-Next in plain numpy, float64: one request, no cache, one token after another. And small models to run it on."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from serving.models.glm5_next import FAMILY

TINY = {
    "model_type": "glm5_next",
    "hidden_size": 40,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "vocab_size": 96,
    "rms_norm_eps": 1e-2,  # large, so that an eps in the wrong place shows
    "hc_eps": 2e-2,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "num_attention_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 0,
    "v_head_dim": 10,
    "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "indexer_types": ["full", "full", "full", "shared"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    "index_n_heads": 4,
    "index_head_dim": 8,
    "index_topk": 24,
    "index_kpool": 8,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "linear_lower_bound": -5.0,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "swiglu_limit": 0.5,
    "tie_word_embeddings": False,
}
"""Every part at once: a selection that is shared across a layer of linear attention, groups of experts, a clamp that
bites."""


def write_model(folder: Path, config: dict, seed: int = 0) -> Path:
    """A checkpoint folder with random weights, large enough to matter everywhere."""
    rng, tensors = np.random.default_rng(seed), {}
    _, abstract = nnx.split(nnx.eval_shape(lambda: FAMILY.build(config, 1, jnp.float32)))
    for path, variable in nnx.to_flat_state(abstract):
        name = FAMILY.disk_names(".".join(str(part) for part in path))[0]
        shape = tuple(variable.get_metadata("disk_shape"))
        if variable.get_metadata("stacked"):
            names = [name.replace("experts.", f"experts.{e}.") for e in range(shape[0])]
            shape = shape[1:]
        else:
            names = [name]
        for tensor in names:
            values = rng.normal(size=shape)
            if tensor.endswith("norm.weight"):
                values = 1 + 0.2 * values
            elif "conv1d" in tensor or "compress_ape" in tensor or len(shape) == 1:
                values = 0.7 * values
            else:
                values = values * shape[-1] ** -0.5
            if tensor.endswith("A_log"):
                values = values[None, None, :, None]  # as some files have it
            tensors[tensor] = values.astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def rms(x, weight, eps):
    return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def sinkhorn(logits, iterations, eps):
    c = softmax(logits) + eps
    for half_step in range(2 * iterations - 1):
        axis = -2 if half_step % 2 == 0 else -1
        c = c / (c.sum(axis, keepdims=True) + eps)
    return c


class Reference:
    """logits(ids) of a checkpoint folder, and after it the selections of each full layer as lists of tokens."""

    def __init__(self, config: dict, tensors: dict[str, np.ndarray]):
        self.config = config
        self.weights = {name.split("language_model.")[-1]: t.astype(np.float64) for name, t in tensors.items()}

    def logits(self, ids) -> np.ndarray:
        c, w = self.config, self.weights
        h = np.repeat(w["embed_tokens.weight"][np.asarray(ids)][:, None], c["hc_mult"], 1)
        self.selections, chosen = [], None
        for i in range(c["num_hidden_layers"]):
            layer = f"layers.{i}."
            post, comb, x = self.mix(layer + "hc_attn_", h)
            x = rms(x, w[layer + "input_layernorm.weight"], c["rms_norm_eps"])
            if c["layer_types"][i] == "linear_attention":
                y = self.linear(layer + "self_attn.", x)
            else:
                y, chosen = self.sparse(layer + "self_attn.", x, chosen, c["indexer_types"][i])
            h = self.spread(post, comb, y, h)
            post, comb, x = self.mix(layer + "hc_ffn_", h)
            x = rms(x, w[layer + "post_attention_layernorm.weight"], c["rms_norm_eps"])
            mlp = self.experts if c["mlp_layer_types"][i] == "sparse" else self.mlp
            h = self.spread(post, comb, mlp(layer + "mlp.", x), h)
        return rms(h.mean(1), w["norm.weight"], c["rms_norm_eps"]) @ w["lm_head.weight"].T

    def project(self, name, x):
        return x @ self.weights[name + ".weight"].T

    def mix(self, name, h):
        c, n = self.config, self.config["hc_mult"]
        flat = h.reshape(len(h), -1)
        flat = flat / np.sqrt((flat * flat).mean(-1, keepdims=True) + c["rms_norm_eps"])
        fn, base, scale = (self.weights[name + part] for part in ("fn", "base", "scale"))
        maps = flat @ fn.T * np.repeat(scale, [n, n, n * n]) + base
        pre, post, comb = np.split(maps, [n, 2 * n], -1)
        comb = sinkhorn(comb.reshape(-1, n, n), c["hc_sinkhorn_iters"], c["hc_eps"])
        collapsed = np.einsum("tn,tnd->td", sigmoid(pre) + c["hc_eps"], h)
        return 2 * sigmoid(post), comb, collapsed

    def spread(self, post, comb, y, h):
        return post[:, :, None] * y[:, None] + np.einsum("tij,tid->tjd", comb, h)

    def mlp(self, name, x):
        limit = self.config["swiglu_limit"]
        gate, up = self.project(name + "gate_proj", x), self.project(name + "up_proj", x)
        return self.project(name + "down_proj", silu(np.minimum(gate, limit)) * np.clip(up, -limit, limit))

    def experts(self, name, x):
        c, groups = self.config, self.config["n_group"]
        scores = sigmoid(self.project(name + "gate", x))
        choice = scores + self.weights[name + "gate.e_score_correction_bias"]
        y = self.mlp(name + "shared_experts.", x)
        for t, row in enumerate(choice):
            by_group = row.reshape(groups, -1)
            best = np.argsort(-np.sort(by_group, -1)[:, -2:].sum(-1), kind="stable")[: c["topk_group"]]
            if groups > 1:
                row = np.where(np.isin(np.arange(groups), best)[:, None], by_group, -np.inf).ravel()
            ids = np.argsort(-row, kind="stable")[: c["num_experts_per_tok"]]
            weights = scores[t, ids]
            if c["norm_topk_prob"]:
                weights = weights / (weights.sum() + 1e-20)
            for e, weight in zip(ids, weights, strict=True):
                y[t] += weight * c["routed_scaling_factor"] * self.mlp(f"{name}experts.{e}.", x[t : t + 1])[0]
        return y

    def linear(self, name, x):
        c, w = self.config, self.weights
        heads, dim, taps = c["linear_num_heads"], c["linear_head_dim"], c["linear_conv_kernel_dim"]

        def conv(part):
            rows = np.pad(self.project(f"{name}{part}_proj", x), [(taps - 1, 0), (0, 0)])
            kernel = w[f"{name}{part}_conv1d.weight"][:, 0]
            out = np.stack([(rows[t : t + taps] * kernel.T).sum(0) for t in range(len(x))])
            return silu(out).reshape(-1, heads, dim)

        q, k, v = (conv(part) for part in "qkv")
        q, k = (a / np.sqrt((a * a).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
        f = self.project(name + "f_b_proj", self.project(name + "f_a_proj", x)) + w[name + "dt_bias"]
        f, rate = f.reshape(-1, heads, dim), np.exp(w[name + "A_log"].ravel())[:, None]
        bound = c["linear_lower_bound"]
        decay = np.exp(bound * sigmoid(rate * f) if bound is not None else -rate * np.log1p(np.exp(f)))
        beta = sigmoid(self.project(name + "b_proj", x))
        state, out = np.zeros((heads, dim, dim)), np.zeros_like(q)
        for t in range(len(x)):
            state = decay[t][:, :, None] * state
            seen = np.einsum("hkv,hk->hv", state, k[t])
            state = state + np.einsum("hk,hv->hkv", k[t], beta[t][:, None] * (v[t] - seen))
            out[t] = np.einsum("hkv,hk->hv", state, q[t] * dim**-0.5)
        gate = sigmoid(self.project(name + "g_b_proj", self.project(name + "g_a_proj", x))).reshape(out.shape)
        y = rms(out, w[name + "o_norm.weight"], c["rms_norm_eps"]) * gate
        return self.project(name + "o_proj", y.reshape(len(x), -1))

    def sparse(self, name, x, chosen, kind):
        c, w, eps = self.config, self.weights, self.config["rms_norm_eps"]
        heads, nope, value = c["num_attention_heads"], c["qk_nope_head_dim"], c["v_head_dim"]
        low = rms(self.project(name + "q_a_proj", x), w[name + "q_a_layernorm.weight"], eps)
        q = self.project(name + "q_b_proj", low).reshape(len(x), heads, nope)
        latent = rms(self.project(name + "kv_a_proj_with_mqa", x), w[name + "kv_a_layernorm.weight"], eps)
        kv = self.project(name + "kv_b_proj", latent).reshape(len(x), heads, nope + value)
        if kind == "full":
            chosen = self.select(name + "indexer.", x, low)
            self.selections.append(chosen)
        out = np.zeros((len(x), heads, value))
        for t, tokens in enumerate(chosen):
            scores = np.einsum("hd,khd->hk", q[t], kv[tokens, :, :nope]) * nope**-0.5
            out[t] = np.einsum("hk,khd->hd", softmax(scores), kv[tokens, :, nope:])
        return self.project(name + "o_proj", out.reshape(len(x), -1)), chosen

    def select(self, name, x, low):
        c, w, pool = self.config, self.weights, self.config["index_kpool"]
        heads, dim = c["index_n_heads"], c["index_head_dim"]
        q = self.project(name + "wq_b", low).reshape(len(x), heads, dim)
        raw = self.project(name + "wk", x)
        raw = raw - raw.mean(-1, keepdims=True)
        keys = raw / np.sqrt((raw * raw).mean(-1, keepdims=True) + 1e-6)
        keys = keys * w[name + "k_norm.weight"] + w[name + "k_norm.bias"]
        scores = x @ w[name + "index_kpool_compress_gate"].T
        gates = self.project(name + "weights_proj", x) * heads**-0.5
        closed = len(x) // pool * pool
        mix = softmax(scores[:closed].reshape(-1, pool, dim) + w[name + "index_kpool_compress_ape"], 1)
        pooled = (mix * keys[:closed].reshape(-1, pool, dim)).sum(1)
        found = []
        for t in range(len(x)):
            visible = (t + 1) // pool
            similar = np.maximum(q[t] @ pooled[:visible].T * dim**-0.5, 0)
            best = np.argsort(-(gates[t] @ similar), kind="stable")[: c["index_topk"] // pool]
            tail = range(visible * pool, t + 1)
            found.append(sorted([p * pool + j for p in best for j in range(pool)] + list(tail)))
        return found
