"""The gates: the same questions asked in two ways, and whether the answers are the same."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scripts.lib.accuracy.models import IMAGES, Direct, over_http, served
from scripts.lib.accuracy.questions import Question, tally
from scripts.lib.accuracy.statistics import mcnemar, paired_interval
from scripts.lib.server_process import serving
from serving.config import EngineConfig
from vitbatch import BucketLadder

_ROWS = "indexer_rows_total"
LEVEL = 0.01
"""A row fails when chance makes a split as unequal as its own less often than this. There are dozens of rows."""


@dataclass(frozen=True)
class Size:
    """How much is asked. tps: devices. ladders: of vision buckets, None the chosen one. stripes: (merge, rows) pairs.
    chunks: prompt tokens a pass. capacity: requests computed at once. longest: tokens of Recall's prompt and answer.
    float8: fields of EngineConfig, the caches that are kept in float8 together."""

    tps: tuple[int, ...]
    ladders: tuple[BucketLadder | None, ...]
    stripes: tuple[tuple[str, int], ...]
    chunks: tuple[int, ...]
    capacity: int
    longest: int
    float8: tuple[tuple[str, ...], ...]


@dataclass
class Compared:
    """One row: `before` and `after` say how the questions were asked. equal: the answers must be the same, all of
    them; otherwise as many must be right, within what chance explains. note: what shows that both ways were taken."""

    gate: str
    model: str
    before: str
    after: str
    asked: int
    right_before: int
    right_after: int
    changed: int
    lost: int
    gained: int
    p: float
    interval: tuple[float, float]
    equal: bool
    note: str
    tasks: dict[str, tuple[int, int]]
    examples: list[dict[str, str]] = field(default_factory=list)
    fault: str = ""

    @property
    def problem(self) -> str:
        if self.fault:
            return self.fault
        if self.equal and self.changed:
            return f"{self.changed} answers changed; none may"
        if not self.equal and self.p < LEVEL:
            return f"{self.lost} right answers lost, {self.gained} gained: chance does so in {self.p:.2g} of cases"
        return ""


@dataclass(frozen=True)
class Asked:
    """Answers, and how they came about."""

    how: str
    answers: list[str]


def compare(
    gate: str,
    model: str,
    questions: Sequence[Question],
    before: Asked,
    after: Asked,
    *,
    equal: bool = False,
    note: str = "",
    fault: str = "",
) -> Compared:
    rows = list(zip(questions, before.answers, after.answers, strict=True))
    was, now = [q.answer == a for q, a, _ in rows], [q.answer == b for q, _, b in rows]
    both = sum(a and b for a, b in zip(was, now, strict=True))
    lost, gained = sum(was) - both, sum(now) - both
    examples = [
        {"task": q.task, "question": q.text, "right": q.answer, "before": a, "after": b} for q, a, b in rows if a != b
    ]
    return Compared(
        gate,
        model,
        before.how,
        after.how,
        asked=len(rows),
        right_before=sum(was),
        right_after=sum(now),
        changed=len(examples),
        lost=lost,
        gained=gained,
        p=mcnemar(lost, gained),
        interval=paired_interval(both, lost, gained, len(rows) - both - lost - gained),
        equal=equal,
        note=note,
        tasks=tally(list(questions), before.answers),
        examples=examples[:20],
        fault=fault,
    )


def ladder_name(ladder: BucketLadder | None) -> str:
    return "chosen ladder" if ladder is None else "ladder " + " ".join(map(str, ladder.buckets))


def sight_config(size: Size, tp: int, **changes: Any) -> EngineConfig:
    fixed = {"tp": tp, "max_model_len": 1024, "max_seqs": size.capacity, "prefill_tokens": size.chunks[-1]}
    return EngineConfig(**(fixed | {"prefix_cache": False, "page_size": 64} | changes))


def recall_config(size: Size, tp: int, **changes: Any) -> EngineConfig:
    return sight_config(size, tp, **({"max_model_len": size.longest} | changes))


def images_batched(
    folder: Path, questions: Sequence[Question], size: Size, keep: Callable[[Asked], None] = lambda asked: None
) -> Iterator[Compared]:
    """Gate 1. Only the encoder's calls differ in the first row of a mesh and ladder; the second compares with the first
    mesh and ladder. keep: gets the answers of that one, each request's images in a call of their own."""
    gate, plain = "1 images a request, or of all requests", None
    for tp in size.tps:
        for ladder in size.ladders:
            with served(folder, sight_config(size, tp), replace(IMAGES, ladder=ladder)) as model:
                where = f"tp {tp}, {ladder_name(ladder)}"
                model.set_batching("never")
                alone = Asked(f"per request, {where}", model.answers(questions))
                calls = model.metric("vit_calls_total")
                model.set_batching("always")
                together = Asked("batched", model.answers(questions))
                batched = model.metric("vit_calls_total") - calls
                images = sum(len(q.images) for q in questions)
                note = f"{images} images in {calls:.0f} and in {batched:.0f} calls"
                fault = "" if batched < calls else f"nothing was batched: {note}"
                yield compare(gate, folder.name, questions, alone, together, note=note, fault=fault)
                if plain is None:
                    plain = alone
                    keep(alone)
                else:
                    yield compare(gate, folder.name, questions, plain, Asked(f"batched, {where}", together.answers))


def selection_striped(folder: Path, questions: Sequence[Question], size: Size) -> Iterator[Compared]:
    """Gate 2. The merge is exact, so every answer must be the same."""
    gate = "2 selection replicated, or striped"
    for tp in (tp for tp in size.tps if tp > 1):
        plain = None
        for merge, rows in size.stripes:
            with served(folder, recall_config(size, tp, merge=merge, stripe_rows=rows)) as model:
                if plain is None:
                    model.set_striping(False)
                    plain = Asked(f"replicated, tp {tp}", model.answers(questions))
                    fault = "the rows went the striped way" if model.metric(_ROWS, path="striped") else ""
                model.set_striping(True)
                striped = Asked(f"stripes of {rows}, {merge}", model.answers(questions))
                count = model.metric(_ROWS, path="striped")
            note, fault = f"{count:.0f} rows striped", fault if count else "no row went the striped way"
            yield compare(gate, folder.name, questions, plain, striped, equal=True, note=note, fault=fault)


def ways_of_prefill(
    folder: Path,
    questions: Sequence[Question],
    size: Size,
    config: Callable[..., EngineConfig],
    plain: Asked | None = None,
) -> Iterator[Compared]:
    """Gate 3: smaller passes, and prompts that are found in the prefix cache. plain: answers of the largest passes
    without that cache, asked anew where None."""
    gate = "3 chunks and prefix cache"
    if plain is None:
        with served(folder, config(size, 1)) as model:
            plain = Asked(f"passes of {size.chunks[-1]}, no prefix cache", model.answers(questions))
    for chunk in size.chunks[:-1]:
        with served(folder, config(size, 1, prefill_tokens=chunk, prefix_cache=True)) as model:
            cold = Asked(f"passes of {chunk}", model.answers(questions))
            before = model.metric("prefix_cache_hits_total")
            warm = Asked(f"passes of {chunk}, from the prefix cache", model.answers(questions, again=True))
            hits = model.metric("prefix_cache_hits_total") - before
        yield compare(gate, folder.name, questions, plain, cold)
        # A prompt of less than a page has nothing that could be kept.
        fault = "" if hits else "nothing was found in the prefix cache"
        yield compare(gate, folder.name, questions, plain, warm, note=f"{hits:.0f} tokens found", fault=fault)


def called_directly(folder: Path, questions: Sequence[Question], size: Size, longest: int) -> Asked:
    direct = Direct(folder, longest, size.chunks[-1])
    return Asked("called directly, one by one", [direct.answer(question) for question in questions])


def through_http(
    folder: Path,
    questions: Sequence[Question],
    size: Size,
    longest: int,
    plain: Asked,
    scratch: Path,
    together: int = 64,
) -> Iterator[Compared]:
    """Gate 4: many clients of a server."""
    flags = ["--model", str(folder), "--max-model-len", str(longest), "--max-seqs", str(size.capacity)]
    flags += ["--prefill-tokens", str(size.chunks[-1]), "--tp", str(size.tps[0])]
    with serving(flags, scratch / f"{folder.name}.log") as server:
        asked = Asked(f"HTTP, {min(together, len(questions))} clients", over_http(server.port, questions, together))
        counts = server.metrics()
    compiles = counts['compiles_total{stage="after_ready"}']
    fault = f"{compiles:.0f} programs were compiled after ready" if compiles else ""
    yield compare("4 through the server", folder.name, questions, plain, asked, note=" ".join(flags[-2:]), fault=fault)


def caches_in_float8(folder: Path, questions: Sequence[Question], size: Size) -> Iterator[Compared]:
    """Gate 5: index keys and latents in the dtype of the weights, and one of them or both in the platform's float8."""
    plain, full = None, 0
    for kept in ((), *size.float8):
        with served(folder, recall_config(size, 1, **dict.fromkeys(kept, "float8"))) as model:
            lm = model.engine._runner.lm
            formats = lm.decoder.formats
            dtypes = {form.jax_dtype or lm.dtype for form in (formats.index_keys, formats.latents)}
            what = " and ".join(name.replace("_", " ") for name in kept)
            asked = Asked(f"{what or 'caches'} in {min(dtypes, key=lambda d: d.itemsize)}", model.answers(questions))
            page = lm.bytes_per_page()
        if plain is None:
            plain, full = asked, page
            continue
        note = f"{full} and {page} bytes a page"
        fault = "" if page < full else f"nothing was cached in float8: {note}"
        yield compare("5 caches in float8", folder.name, questions, plain, asked, note=note, fault=fault)


FULL_LADDERS = (None, BucketLadder((576,)), BucketLadder((256, 576, 2304)), BucketLadder((640,), tiny=(256, 1024)))
FULL_STRIPES = tuple((merge, rows) for merge in ("pmax", "all_gather") for rows in (32, 64, 128, 256, 512))
FULL_FLOAT8 = (("index_keys",), ("latent_cache",), ("index_keys", "latent_cache"))
FULL = Size((1, 2), FULL_LADDERS, FULL_STRIPES, (128, 512, 2048), 64, 8448, FULL_FLOAT8)
SHORT = Size((1, 2), FULL_LADDERS[1:2], (("pmax", 32),), (64, 192), 4, 320, FULL_FLOAT8[2:])
