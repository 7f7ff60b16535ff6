"""scripts/accuracy: asks the embedded models held-out questions in many ways and compares the answers."""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

GATES = ("images", "selection", "prefill", "http", "keys")
_EPILOG = """\
gates
  images      sight: encoded per request against batched across requests, on several meshes and bucket ladders
  selection   recall: keys selected by every device against striped over them; no answer may change
  prefill     chunk sizes, and prompts found in the prefix cache
  http        64 clients of a server against the decoder called by hand
  keys        recall: index keys and latents in the dtype of the weights against each and both in float8

examples
  scripts/accuracy                                     the embedded models, on 1 and 2 devices
  scripts/accuracy --short                             a dozen questions a gate, few settings
  scripts/accuracy --tp 1,2,4,8 --gate images          one gate, more devices
  scripts/accuracy --model sight=./sight --json a.json other models of the same kind, and every number in a file
"""


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/accuracy",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--short", action="store_true", help="a dozen questions a gate, few settings")
    parser.add_argument("--gate", action="append", choices=GATES, help="only this gate; may be given again")
    parser.add_argument("--tp", default=None, metavar="N,N", help="devices (default 1,2; on a CPU they are made)")
    parser.add_argument("--questions", type=int, help="a gate (default 240; 12 with --short)")
    parser.add_argument("--longest", type=int, help="tokens of Recall's texts at most (default 8192; 256 with --short)")
    parser.add_argument("--seed", type=int, default=0, help="of the questions")
    parser.add_argument(
        "--model", action="append", default=[], metavar="NAME=FOLDER", help="sight=FOLDER or recall=FOLDER"
    )
    parser.add_argument("--json", metavar="FILE", help="writes every row there; - is standard output")
    parser.add_argument("--compilation-cache", metavar="FOLDER", help="of compiled programs (default: a temporary one)")
    return parser.parse_args(argv)


def folders(named: list[str]) -> dict[str, Path]:
    """The models' folders. Raises ValueError for what is none."""
    from serving.cli import model_folder

    given = dict(one.partition("=")[::2] for one in named)
    if wrong := [one for one in named if one.partition("=")[0] not in ("sight", "recall") or "=" not in one]:
        raise ValueError(f"--model {wrong[0]}: write sight=FOLDER or recall=FOLDER")
    return {name: Path(given[name]) if name in given else model_folder(name) for name in ("sight", "recall")}


def compared(args: argparse.Namespace, models: dict[str, Path], tps: tuple[int, ...], scratch: Path) -> Iterator[Any]:
    from scripts.lib.accuracy import gates
    from scripts.lib.accuracy.questions import recall_questions, sight_questions

    longest = args.longest or (256 if args.short else 8192)
    # Room for the answer, in whole pages.
    size = replace(gates.SHORT if args.short else gates.FULL, tps=tps, longest=-(-(longest + 64) // 64) * 64)
    count = args.questions or (12 if args.short else 240)
    lengths = tuple(n for n in (256, 512, 1024, 2048, 4096, 8192) if n <= longest) or (longest,)
    wanted = args.gate or GATES
    # The short form asks Recall only what needs it: every model and mesh costs half a minute of compiling.
    wants_sight = bool(set(wanted) & {"images", "prefill", "http"})
    wants_recall = bool(set(wanted) & {"selection", "keys"}) or (
        not args.short and bool(set(wanted) & {"prefill", "http"})
    )
    pictures = sight_questions(models["sight"], count, args.seed) if wants_sight else []
    texts = recall_questions(models["recall"], count, args.seed, lengths) if wants_recall else []
    kept: list[gates.Asked] = []
    if "images" in wanted:
        yield from gates.images_batched(models["sight"], pictures, size, kept.append)
    if "selection" in wanted:
        yield from gates.selection_striped(models["recall"], texts, size)
    # The short form asks the engine of the first gate no second time, and takes its answers for the direct ones.
    plain = kept[0] if args.short and kept and tps[0] == 1 else None
    if "prefill" in wanted:
        yield from gates.ways_of_prefill(models["sight"], pictures, size, gates.sight_config, plain)
        if not args.short:
            yield from gates.ways_of_prefill(models["recall"], texts, size, gates.recall_config)
    if "http" in wanted:
        asked = [(models["sight"], pictures, 1024)]
        if not args.short:
            asked.append((models["recall"], texts, size.longest))
        for folder, questions, room in asked:
            direct = plain or gates.called_directly(folder, questions, size, room)
            yield from gates.through_http(folder, questions, size, room, direct, scratch)
    if "keys" in wanted:
        yield from gates.caches_in_float8(models["recall"], texts, size)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    began = time.perf_counter()
    try:
        tps = tuple(sorted({int(n) for n in (args.tp or "1,2").split(",")}))
    except ValueError:
        print(f"error: --tp {args.tp}: write numbers of devices, such as 1,2", file=sys.stderr)
        return 2
    try:
        models = folders(args.model)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        # The same programs are made in many settings, and by the server that is started.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = args.compilation_cache or f"{scratch}/compiled"
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        # That server needs memory of the same GPU.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        import jax
        from rich.console import Console

        from scripts.lib.accuracy.report import as_json, show

        jax.config.update("jax_num_cpu_devices", max(tps))
        console = Console(stderr=args.json == "-", highlight=False, width=None if sys.stdout.isatty() else 200)
        rows = []
        try:
            for row in compared(args, models, tps, Path(scratch)):
                rows.append(row)
                seconds = time.perf_counter() - began
                console.print(
                    f"[dim]{seconds:6.1f} s  {row.model}: {row.before} | {row.after}: {row.changed} of {row.asked} "
                    f"changed {row.problem}[/dim]"
                )
        except (ValueError, FileNotFoundError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        device = jax.devices()[0]
        about = {
            "models": {name: str(folder) for name, folder in models.items()},
            "device": f"{device.device_kind} ({device.platform})",
            "jax": jax.__version__,
            "seed": args.seed,
            "seconds": round(time.perf_counter() - began, 1),
        }
        show(console, rows)
        if args.json:
            text = json.dumps(as_json(rows, about), indent=1)
            print(text) if args.json == "-" else Path(args.json).write_text(text + "\n", encoding="utf-8")
    problems = [row for row in rows if row.problem]
    for row in problems:
        console.print(f"[red]FAILED[/red] {row.gate}, {row.model}, {row.after}: {row.problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
