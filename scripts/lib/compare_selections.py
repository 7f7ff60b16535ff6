"""Runs a prompt (on standard input) through the replicated and the striped program of a sparse-attention checkpoint and
compares every selection. usage: python -m scripts.lib.compare_selections CHECKPOINT TP"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from serving.batch import Packer, samples_of
from serving.config import EngineConfig, bucket_for
from serving.lm import LanguageModel, LmShapes
from serving.models import bind_decoder
from serving.models.decoder import Selection
from serving.protocol import SamplingParams, Submission
from serving.scheduler import Chunk
from serving.sequence import Sequence
from serving.tokenizer import Tokenizer
from vitstripe.checkpoint import Checkpoint, load, raise_problems
from vitstripe.mesh import make_mesh


def selections_of(lm: LanguageModel, weights, ids: list[int], how: Selection) -> np.ndarray:
    """int32 [full layers, tokens, k]: what each full layer selects for each token of the prompt."""
    config, pages = lm.config, lm.shapes.pages
    packer, compiled, found = Packer(config, pages, gather_pages=lm.gather_pages), {}, []
    caches, seats = lm.new_caches(), lm.new_seats()
    positions = np.broadcast_to(np.arange(len(ids), dtype=np.int32), (3, len(ids)))
    seq = Sequence(Submission("", ids, (), SamplingParams(1)), lambda event: None, positions, 0, seed=0)
    seq.add_pages(range(pages))
    for start in range(0, len(ids), config.prefill_tokens):
        chunk = Chunk(seq, start, min(start + config.prefill_tokens, len(ids)))
        rows = bucket_for(config.token_buckets, chunk.rows)
        if rows not in compiled:
            compiled[rows] = (lm.splice(rows).compile(), lm.extend(rows, how, keep_selections=True).compile())
        splice, extend = compiled[rows]
        tokens, _, step = packer.extend([chunk], rows)
        samples = samples_of([], config.max_seqs)
        out = extend(weights, (splice(weights, tokens), None), caches, step.packed(), samples, seats)
        caches, seats = out.caches, out.seats
        found.append(np.stack([np.asarray(s)[: chunk.stop - chunk.start] for s in out.selections]))
    return np.concatenate(found, axis=1)


def main() -> None:
    folder, tp = sys.argv[1], int(sys.argv[2])
    jax.config.update("jax_num_cpu_devices", tp)
    checkpoint, mesh = Checkpoint(folder), make_mesh(tp)
    ids = Tokenizer.from_checkpoint(folder).encode_plain(sys.stdin.read())
    config = EngineConfig(tp=tp, max_model_len=checkpoint.config["max_position_embeddings"])
    binding = bind_decoder(checkpoint, tp=tp, dtype=jnp.float32)
    raise_problems(checkpoint, [binding])
    weights = tuple(jax.tree.leaves(load(checkpoint, binding, mesh)))
    lm = LanguageModel(binding.graphdef, binding.abstract, mesh, config, LmShapes(config.pages_per_seq))
    replicated, striped = (selections_of(lm, weights, ids, how) for how in (Selection(None), lm.selections[-1]))
    equal = (replicated == striped).all(-1)
    print(f"{int(equal.sum())} of {equal.size} rows equal")


if __name__ == "__main__":
    main()
