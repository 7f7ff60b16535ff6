"""The device side of the engine: weights, caches and compiled programs, and one method a kind of pass."""

import logging
import os
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from dsa_indexer import IndexerConfig, StripeConfig, engages
from serving.batch import Packer, following_tokens, samples_after, samples_of
from serving.config import EngineConfig, bucket_for
from serving.indexer_check import check_indexer, check_passes
from serving.lm import SEAT_COLUMNS, LanguageModel, LmShapes, PassOutput
from serving.models.decoder import Selection
from serving.models.step import Step
from serving.protocol import SamplingParams, Submission
from serving.sampling import SampleArgs, Sampled, seat_entries
from serving.scheduler import Chunk
from serving.sequence import Sequence
from vitbatch import VisionEncoder
from vitstripe.platform import platform_of_mesh
from vitstripe.program import Program
from vitstripe.selftest import bounded

logger = logging.getLogger("serving.runner")

# Mean keys a row from which striping pays for its merge on a GPU link; on a CPU there is no link to pay for.
# Source: break-even of scoring and selection against an all-reduce (twice the bytes of an all-gather) at half of
# peak xGMI bandwidth on eight MI355X, computed from published kernel rates; not measured by this project.
_GPU_MIN_MEAN_KEYS = {"pmax": 8192, "all_gather": 4096}

Progress = Callable[[int, int, str], None]
"""Called with (programs compiled, programs in all, what is next); from any thread."""


@dataclass(frozen=True)
class ProgramTime:
    """Seconds one program took to compile and to run once."""

    name: str
    compile_seconds: float
    run_seconds: float


def free_memory(mesh: Mesh) -> int | None:
    """Bytes that are free on the device that has least, None where no device says so."""
    stats = [d.memory_stats() for d in mesh.devices.flat] if mesh.devices.flat[0].platform == "gpu" else []
    return min((s["bytes_limit"] - s["bytes_in_use"] for s in stats if s), default=None)


def cache_pages(config: EngineConfig, bytes_per_page: int, free: int | None, *, bytes_per_seat: int = 0) -> int:
    """Pages of the cache: as configured, or what fits in 80 % of `free` bytes a device beside the states of max_seqs
    requests, or, where that is None, enough for max_seqs requests of full length. Raises ValueError when one request of
    max_model_len does not fit."""
    if config.cache_tokens is not None:
        return -(-config.cache_tokens // config.page_size)
    if free is None:
        return config.max_seqs * config.pages_per_seq
    states = config.max_seqs * bytes_per_seat
    pages = max(0, int(free * 0.8) - states) // bytes_per_page
    if pages < config.pages_per_seq:
        beside = f" beside {states / 2**30:.1f} GiB of states of {config.max_seqs} requests" if states else ""
        raise ValueError(
            f"free device memory holds {pages * config.page_size} cache tokens{beside}, less than max_model_len "
            f"{config.max_model_len}; lower max_model_len{' or max_seqs' if states else ''} or raise tp"
        )
    # More than every seat at full length can hold is never used.
    return min(pages, config.max_seqs * config.pages_per_seq)


class Runner:
    """Dispatches passes; who reads what they give waits for it. Not thread-safe: the engine thread owns it. Call
    warm_up before the first pass."""

    def __init__(
        self,
        graphdef: Any,
        abstract: nnx.State,
        state: nnx.State,
        mesh: Mesh,
        config: EngineConfig,
        encoder: VisionEncoder | None,
    ):
        self.config, self.mesh, self.encoder = config, mesh, encoder
        self.weights = tuple(jax.tree.leaves(state))
        sizing = LanguageModel(graphdef, abstract, mesh, config, LmShapes(0))
        pages = cache_pages(config, sizing.bytes_per_page(), free_memory(mesh), bytes_per_seat=sizing.bytes_per_seat())
        pool = (0, 0) if encoder is None else encoder.pool.shape
        self.lm = LanguageModel(graphdef, abstract, mesh, config, LmShapes(pages, *pool))
        self.pages = pages
        self.packer = Packer(config, pages, gather_pages=self.lm.gather_pages)
        self.caches, self.seats, self.latest = self.lm.new_caches(), self.lm.new_seats(), self.lm.new_latest()
        self.programs: dict[str, jax.stages.Compiled] = {}
        self.stripes = stripe_config(config, platform_of_mesh(mesh).kind)
        if len(self.lm.selections) > 1:
            _log_stripes(self.stripes, config, self.lm.decoder.indexer)
        if self.lm.keeps_state:
            logger.info(
                "each of %d requests keeps a state of %.1f MiB on each device; pages without the state that belongs to "
                "them are of no use, so the prefix cache is off",
                config.max_seqs,
                self.lm.bytes_per_seat() / 2**20,
            )

    # -- passes

    def _call(self, name: str, *args: Any) -> Any:
        return self.programs[name](self.weights, *args)

    def selection_for(self, chunks: Seq[Chunk]) -> Selection:
        """How the indexer runs in a prefill pass of these chunks."""
        indexer = self.lm.decoder.indexer
        if len(self.lm.selections) == 1 or indexer is None:
            return self.lm.selections[0]
        rows = sum(c.stop - c.start for c in chunks)
        keys = sum((c.start + 1 + c.stop) * (c.stop - c.start) // 2 for c in chunks)
        pool = indexer.pool or 1
        mean, most = keys / max(rows, 1) / pool, max(c.stop for c in chunks) // pool
        striped, _ = engages(rows, self.config.tp, mean, self.stripes, most_keys=most, k=indexer.selected)
        return self.lm.selections[int(striped)]

    def prefill(self, chunks: Seq[Chunk], selection: Selection) -> Sampled:
        """Computes the chunks; row r of the result is what was sampled after chunk r (meant only for those that finish
        a prompt). Prompt tokens whose log-probabilities are asked for get them."""
        out = self._prefill(chunks, selection)
        if any(c.seq.submission.params.prompt_logprobs is not None for c in chunks):
            self._score(chunks, out.hidden)
        return out.sampled

    def _score(self, chunks: Seq[Chunk], hidden: jax.Array) -> None:
        """Adds to each sequence's `scores` those of the prompt tokens that follow the rows of a prefill pass."""
        rows = hidden.shape[0]
        wanted = max(c.seq.submission.params.prompt_logprobs or 0 for c in chunks)
        scores = self._call(f"score/{rows}", hidden, following_tokens(chunks, rows), np.int32(wanted))
        scores = jax.tree.map(np.asarray, scores)
        at = 0
        for chunk in chunks:
            seq, count = chunk.seq, chunk.seq.submission.params.prompt_logprobs
            if count is not None:
                # After a preemption rows are computed again; what is known of them is told once.
                first, last = max(chunk.start, len(seq.scores)), min(chunk.stop, seq.prompt_length - 1)
                seq.scores += [scores.entry(at + m - chunk.start, count) for m in range(first, last)]
            at += chunk.rows

    def _fill_seat(self, seq: Sequence) -> None:
        """Writes what the request's logits depend on to its seat: prompt and answer so far, bias, ends."""
        prompt, answer = seq.tokens[: seq.prompt_length], seq.tokens[seq.prompt_length :]
        entries = seat_entries(seq.submission.params, prompt, answer, seq.ends)
        for start in range(0, max(len(entries[0]), 1), SEAT_COLUMNS):
            ids, tokens, bias = (part[start : start + SEAT_COLUMNS] for part in entries)
            pad = (0, SEAT_COLUMNS - len(ids))
            ids = np.pad(ids, pad, constant_values=self.lm.decoder.vocab_size)
            columns = (ids, np.pad(tokens, pad), np.pad(bias, pad))
            self.seats = self.programs["seat"](self.seats, np.int32(seq.seat), np.bool_(start == 0), *columns)

    def _splice(self, ids: np.ndarray, pool_index: np.ndarray) -> Any:
        """Hidden rows of token ids and image rows, and their deepstack rows (None where there are none)."""
        name = f"splice/{ids.shape[0]}"
        if self.encoder is None:
            return self._call(name, ids), None
        hidden, deep = self._call(name, ids, self.encoder.pool, pool_index)
        return hidden, deep if self.lm.decoder.num_deepstack else None

    def _prefill(self, chunks: Seq[Chunk], selection: Selection, rows: int | None = None) -> PassOutput:
        """rows: the bucket to run, None for the smallest that holds the chunks."""
        rows = rows or bucket_for(self.config.token_buckets, sum(c.rows for c in chunks))
        ids, pool_index, step = self.packer.extend(chunks, rows)
        inputs = self._splice(ids, pool_index)
        samples = samples_after(chunks, self.config.max_seqs)
        for chunk in chunks:
            if chunk.finishes_prompt and chunk.seq.submission.params.shapes_logits:
                self._fill_seat(chunk.seq)
        return self._pass(self.lm.extend_name(rows, selection), inputs, step, samples)

    def _pass(self, name: str, inputs: Any, step: Step, samples: SampleArgs) -> PassOutput:
        out = self._call(name, inputs, self.caches, step.packed())
        self.caches = out.caches
        return replace(out, sampled=self._sample(out.keeps, out.logits, samples))

    def _sample(self, keeps: Any, logits: Any, samples: SampleArgs) -> Sampled:
        """The tokens stay on the devices, for the next pass and until somebody reads them: on a GPU a copy to the host
        that waits for its pass, however it was begun, holds up every launch behind it."""
        program = self.programs[f"{samples.program}/{logits.shape[0]}"]
        match samples.program:
            case "greedy":
                self.latest, sampled = program(self.latest, keeps, logits)
            case "draw":
                self.latest, sampled = program(self.latest, keeps, logits, samples)
            case _:
                self.latest, sampled, self.seats = program(self.latest, keeps, logits, samples, self.seats)
        return sampled

    def decode(self, seqs: Seq[Sequence]) -> Sampled:
        """Computes each sequence's last token; row r of the result is what was sampled after it for sequence r."""
        size = bucket_for(self.config.batch_buckets, len(seqs))
        step = self.packer.decode(seqs, size)
        return self._pass(f"decode/{size}", self.latest, step, samples_of(seqs, size)).sampled

    # -- start-up

    def warm_up(self, progress: Progress = lambda done, total, name: None) -> list[ProgramTime]:
        """Checks the indexer, compiles every program and runs it once on every device. Raises RuntimeError where the
        indexer's kernels or stripes give other results than plain XLA on one device, and CollectiveHang where a program
        does not come back within the configuration's first_run_seconds."""
        check_indexer(self.lm, self.stripes)
        programs = self.lm.programs()
        compile_seconds: dict[str, float] = {}

        def compile_one(program: Program) -> None:
            begin = time.perf_counter()
            self.programs[program.name] = program.compile()
            compile_seconds[program.name] = time.perf_counter() - begin
            progress(len(compile_seconds), len(programs), "")

        # XLA compiles outside the interpreter lock: one program a core.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, programs))
        seconds: dict[str, float] = {}

        def timed(name: str, run: Callable[[], Any]) -> Any:
            begin = time.perf_counter()
            limit = self.config.first_run_seconds
            out = bounded(lambda: jax.block_until_ready(run()), limit, f"the first run of {name}")
            seconds[name] = time.perf_counter() - begin
            return out

        ways = self.lm.selections
        for rows in self.config.token_buckets:
            chunk = self._made_up_chunk(rows)
            ids, pool_index, _ = self.packer.extend([chunk], rows)
            timed(f"splice/{rows}", partial(self._splice, ids, pool_index))
            passes = [(self.lm.extend_name(rows, how), partial(self._prefill, [chunk], how, rows)) for how in ways]
            outs = [timed(name, run) for name, run in passes]
            timed(f"score/{rows}", partial(self._score, [chunk], outs[0].hidden))
            check_passes([np.asarray(out.logits)[0] for out in outs], rows, self.lm.dtype)
        one_token, told = (self._made_up_chunk(1, logprobs=count).seq for count in (None, 1))
        for size in self.config.batch_buckets:
            timed(f"decode/{size}", partial(self.decode, [one_token] * size))
            nobody = np.full(size, self.config.max_seqs, np.int32)
            logits = np.zeros((size, self.lm.decoder.vocab_size), np.float32)
            timed(f"greedy/{size}", partial(self._sample, nobody, logits, samples_of([], size)))
            timed(f"draw/{size}", partial(self._sample, nobody, logits, samples_of([one_token], size)))
            timed(f"sample/{size}", partial(self._sample, nobody, logits, samples_of([told], size)))
        timed("seat", lambda: self._fill_seat(one_token))
        if never_ran := self.programs.keys() - seconds.keys():
            raise RuntimeError(f"programs that were compiled but not run: {', '.join(sorted(never_ran))}")
        return [ProgramTime(p.name, compile_seconds[p.name], seconds[p.name]) for p in programs]

    def _made_up_chunk(self, rows: int, logprobs: int | None = None) -> Chunk:
        """A chunk of a request that does not exist, on pages that nobody holds yet."""
        length = min(rows, self.config.max_model_len)
        ids = [i % self.lm.decoder.vocab_size for i in range(1, length + 1)]
        params = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, logprobs=logprobs)
        positions = np.broadcast_to(np.arange(length, dtype=np.int32), (3, length))
        seq = Sequence(Submission("warm-up", ids, (), params), lambda event: None, positions, 0, seed=1)
        seq.add_pages(range(-(-length // self.config.page_size)))
        return Chunk(seq, 0, length, self.lm.row_align)


def stripe_config(config: EngineConfig, platform: str) -> StripeConfig:
    """When and how prefill passes are striped on this platform."""
    default = 0 if platform == "cpu" else _GPU_MIN_MEAN_KEYS[config.merge]
    keys = default if config.stripe_min_keys is None else config.stripe_min_keys
    return StripeConfig(rows=config.stripe_rows, merge=config.merge, min_mean_keys=keys)


def _log_stripes(stripes: StripeConfig, config: EngineConfig, indexer: IndexerConfig | None) -> None:
    # The last pass of the longest prompt has the most keys a row that this server can ever see.
    pool = indexer.pool or 1 if indexer else 1
    most = (config.max_model_len - min(config.prefill_tokens, config.max_model_len) // 2) // pool
    reach = "" if most >= stripes.min_mean_keys else f"; with max_model_len {config.max_model_len} none ever has"
    logger.info(
        "indexer rows go in stripes of %d over %d devices, merged by %s, in passes of %d keys a row and more%s",
        stripes.rows,
        config.tp,
        stripes.merge,
        stripes.min_mean_keys,
        reach,
    )


def rows_by_path(chunks: Seq[Chunk], selection: Selection) -> Mapping[str, int]:
    """Real rows of a prefill pass by the way the indexer went."""
    rows = sum(c.stop - c.start for c in chunks)
    return {"striped" if selection.stripe_rows else "replicated": rows}
