"""Runs lm-eval (EleutherAI) over the completions route of a server; its own tasks need no network.

Three small tasks of our own, whose data lies beside them (scripts/lib/eval_tasks), and lm-eval's own niah_single_1:

  vitstripe_choice   scores given endings (loglikelihood), as multiple-choice benchmarks do
  vitstripe_text     scores whole texts (rolling loglikelihood), as perplexity benchmarks do
  vitstripe_write    generates until a stop string
  niah_single_1      finds a number in a long text

What is shown is that the plumbing works; the scores of a small made-up model mean nothing. With --verify the
log-probabilities that lm-eval got are compared with those that the checkpoint's decoder gives when it is run directly.

Any other task of lm-eval can be named, gsm8k for instance; its data comes from the Hugging Face hub. What follows `--`
goes to lm-eval as it is: `-- --apply_chat_template --gen_kwargs max_gen_toks=16384`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.lib.server_process import running_or_serving

TASKS = Path(__file__).parent / "eval_tasks"
OWN = ("vitstripe_choice", "vitstripe_text", "vitstripe_write")
LOCAL = {*OWN, "niah_single_1"}
"""Tasks that need nothing from the hub."""
SECONDS = 3600
"""A request may take as long as this: a long answer among many takes longer than lm-eval's 300 seconds."""
TOLERANCE = 1e-4
"""Of one token's log-probability: float32 sums in another order."""


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/eval_lm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="digits", help="checkpoint folder (with its tokenizer), digits or recall")
    parser.add_argument("--url", help="a running server, e.g. http://localhost:8000; default: start one on --model")
    parser.add_argument("--tasks", help=f"default: {','.join(OWN)} and niah_single_1")
    parser.add_argument("--include", action="append", default=[], help="a folder of task files of your own")
    parser.add_argument("--length", type=int, default=512, help="tokens of the niah tasks' text (default 512)")
    parser.add_argument("--limit", type=int, help="documents a task")
    parser.add_argument("--concurrent", type=int, default=8, help="requests at one time (default 8)")
    parser.add_argument("--out", type=Path, help="folder for lm-eval's report and samples; default: a temporary one")
    parser.add_argument("--verify", action="store_true", help="compare with the decoder run directly (small models)")
    parser.add_argument("--serve", default="", help="further flags of the server that is started, as one string")
    parser.add_argument("more", nargs="*", metavar="LM_EVAL", help="behind --: further arguments of lm-eval's `run`")
    return parser.parse_args(given)


def model_of(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as response:
        return json.load(response)["data"][0]


def evaluate(url: str, folder: Path, tasks: list[str], args: argparse.Namespace, out: Path) -> None:
    """Runs lm-eval's own command line, cut off from the hub where no task needs it."""
    model = model_of(url)
    settings = {
        "model": model["id"],
        "base_url": f"{url}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": folder,
        "tokenized_requests": True,
        "max_length": model["max_model_len"],
        "num_concurrent": args.concurrent,
        "timeout": SECONDS,
    }
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--tasks", ",".join(tasks)]
    command += ["--model_args", ",".join(f"{key}={value}" for key, value in settings.items())]
    command += ["--metadata", json.dumps({"max_seq_lengths": [args.length], "tokenizer": str(folder)})]
    for include in (TASKS, *map(Path, args.include)):
        command += ["--include_path", str(include.resolve())]
    command += ["--output_path", str(out), "--log_samples", "--seed", "1234"]
    if args.limit is not None:
        command += ["--limit", str(args.limit)]
    # Data files of our tasks are named relative to their folder.
    subprocess.run([*command, *args.more], cwd=TASKS, env=environment(tasks), check=True)


def environment(tasks: Sequence[str]) -> dict[str, str]:
    """lm-eval's environment: offline if all of `tasks` need nothing from the hub."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"} if set(tasks) <= LOCAL else {}
    return {"TOKENIZERS_PARALLELISM": "false", **os.environ, **offline, "OPENAI_API_KEY": "none"}


def samples(out: Path, task: str) -> list[dict[str, Any]]:
    files = sorted(out.rglob(f"samples_{task}_*.jsonl"))
    return [json.loads(line) for line in files[-1].read_text(encoding="utf-8").splitlines()] if files else []


def verify(folder: Path, out: Path) -> bool:
    """Compares the loglikelihoods of our own tasks with the decoder's."""
    from transformers import AutoTokenizer

    from scripts.lib.direct_scores import DirectScores

    tokenizer = AutoTokenizer.from_pretrained(folder)
    direct = DirectScores(folder)
    checked, worst, greedy_differs = 0, 0.0, 0
    for task in OWN:
        for sample in samples(out, task):
            for request, response in zip(sample["arguments"].values(), sample["resps"], strict=True):
                if task == "vitstripe_choice":
                    context, ending = request["arg_0"], request["arg_1"]
                    value, greedy = float(response[0][0]), str(response[0][1]) == "True"
                    ids = tokenizer.encode(context + ending, add_special_tokens=False)
                    start = len(tokenizer.encode(context, add_special_tokens=False))
                elif task == "vitstripe_text":
                    value, greedy = float(response[0] if isinstance(response, list) else response), None
                    ids = [tokenizer.eos_token_id, *tokenizer.encode(request["arg_0"], add_special_tokens=False)]
                    start = 1
                else:
                    continue
                expected, is_greedy = direct.of(ids, start)
                worst = max(worst, abs(value - expected) / (len(ids) - start))
                greedy_differs += greedy is not None and greedy != is_greedy
                checked += 1
    print(
        f"verified: {checked} loglikelihoods, largest difference {worst:.1e} a token (allowed {TOLERANCE:.0e}), "
        f"the greedy flag differs in {greedy_differs}"
    )
    return checked > 0 and worst <= TOLERANCE and not greedy_differs


def main() -> int:
    args = arguments()
    from serving.cli import model_folder

    folder = model_folder(args.model).resolve()
    tasks = args.tasks.split(",") if args.tasks else [*OWN, "niah_single_1"]
    with tempfile.TemporaryDirectory() as scratch:
        out = (args.out or Path(scratch)).resolve()
        flags = ["--model", args.model, "--max-model-len", str(args.length + 512), *args.serve.split()]
        with running_or_serving(args.url, flags, Path(scratch) / "server.log") as server:
            evaluate(server.url, folder, tasks, args, out)
        missing = [task for task in tasks if not samples(out, task)]
        if missing:
            print(f"error: no answers were recorded for {', '.join(missing)}", file=sys.stderr)
            return 1
        return 0 if not args.verify or verify(folder, out) else 1


if __name__ == "__main__":
    raise SystemExit(main())
