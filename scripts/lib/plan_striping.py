"""Predicts what striping the indexer's rows is worth for a model, its prompts and a machine.

Needs the project's packages; `scripts/plan_striping` brings them, or run this file in an environment of your own.
"""

import argparse
import json
import sys
from dataclasses import fields, replace
from pathlib import Path

from dsa_indexer import StripeConfig
from dsa_indexer.config import MERGES
from dsa_indexer.plan import MI355X, PRESETS, Plan, Rates, Work, plan

LEGEND = """\
arithmetic: rows, pairs (of a row and a key it sees), balance (busiest device over the mean), bytes through one device's
            links; all of them exact
assumed:    the rates above, each reached in full with nothing overlapped; so every time, and break-even, the mean
            keys a row at which striping neither gains nor costs
floor:      matrix products, attention and indexing of the prefill, evenly spread and nothing else: below any real time
            to the first token, so the share of a real one is smaller
not in it:  launches, the gather of the keys, other traffic on the links. `saved` is what cutting the rows before the
            query projection would bring on top of the gain"""


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/plan_striping",
        description="Pairs, bytes, balance, break-even and predicted gain of striping the indexer's rows over devices. "
        "No accelerator is used, and no constant is fitted to an end-to-end measurement.",
        epilog="example: scripts/plan_striping --prompts 8192 50000 --stripe 512 --plot gain.png",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--model", default="glm-5.2", help=f"config.json or its folder, or one of: {', '.join(PRESETS)}"
    )
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=[50000], metavar="TOKENS", help="new tokens of each prompt"
    )
    parser.add_argument("--packed", action="store_true", help="the prompts share passes, instead of one plan for each")
    parser.add_argument("--prefix", type=int, default=0, metavar="TOKENS", help="cached tokens before each prompt")
    parser.add_argument("--chunk", type=int, default=32768, metavar="ROWS", help="rows of a prefill pass")
    parser.add_argument("--tp", type=int, default=8, help="devices")
    parser.add_argument("--stripe", type=int, default=64, metavar="ROWS", help="rows of a stripe")
    parser.add_argument("--merge", choices=MERGES, default="pmax")
    for field in fields(Rates):
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            type=float,
            default=getattr(MI355X, field.name),
            metavar="PER_SECOND",
            help="rate of one device, for MI355X unless given; see dsa_indexer/plan.py",
        )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw gain over prompt length (extra `plots`)")
    return parser.parse_args(arguments)


def model_work(name: str) -> Work:
    """Raises ValueError if the model is no preset and no readable config.json, or lacks a field."""
    if name in PRESETS:
        return Work.from_hf(PRESETS[name])
    path = Path(name)
    try:
        config = json.loads((path / "config.json" if path.is_dir() else path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} is no preset ({', '.join(PRESETS)}) and no config.json: {error}") from error
    return Work.from_hf(config.get("text_config", config))


def report(title: str, found: Plan) -> str:
    lines = [
        title,
        f"{'rows':>7} {'pairs':>9} {'balance':>8} {'MB merged':>10} {'break-even':>11} {'replicated':>11} "
        f"{'striped':>9} {'gain':>9} {'saved':>9}   a layer, ms",
    ]
    for p in found.passes:
        times = "".join(f" {1e3 * t:>9.3f}" for t in (p.striped, p.gain, p.saved_projection))
        lines.append(
            f"{p.rows:>7} {p.pairs:>9.2e} {p.balance:>8.3f} {p.merge_bytes / 1e6:>10.1f} {p.break_even:>11.0f} "
            f"{1e3 * p.replicated:>11.3f}{times}"
        )
    lines.append(
        f"gain: {1e3 * found.gain_layer:.3f} ms a layer, {found.gain_prompt:.4f} s a prompt over {found.layers} "
        f"layers, {100 * found.share:.2f} % of a prefill floor of {found.prefill_floor:.3f} s"
    )
    return "\n".join(lines)


def as_json(found: Plan) -> dict:
    passes = [{field.name: getattr(p, field.name) for field in fields(p)} | {"gain": p.gain} for p in found.passes]
    totals = {name: getattr(found, name) for name in ("gain_layer", "gain_prompt", "share", "prefill_floor", "layers")}
    return totals | {"passes": passes}


def draw(path: Path, options: argparse.Namespace, work: Work, rates: Rates) -> None:
    """Gain over prompt length, a line a merge and stripe. Raises ValueError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib; install the extra: pip install '.[plots]'") from error
    axes = (figure := Figure(figsize=(7, 4.5), layout="constrained")).add_subplot()
    lengths = [2**i for i in range(11, 18)]
    for merge in MERGES:
        for stripe in sorted({64, 512, options.stripe}):
            stripes = StripeConfig(rows=stripe, merge=merge)
            plans = [
                plan([n], work, rates, tp=options.tp, prefix=options.prefix, chunk=options.chunk, stripes=stripes)
                for n in lengths
            ]
            axes.plot(lengths, [p.gain_prompt for p in plans], marker="o", label=f"{merge}, {stripe} rows a stripe")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("symlog", linthresh=1e-3)
    axes.set_xlabel("new tokens of the prompt")
    axes.set_ylabel("predicted gain a prompt (s)")
    axes.set_title(f"{options.model}, {options.tp} devices, prefix {options.prefix}; rates are assumed")
    axes.legend()
    figure.savefig(path, dpi=150, format=path.suffix.removeprefix(".") or "png")


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        work = model_work(options.model)
        rates = replace(MI355X, **{field.name: getattr(options, field.name) for field in fields(Rates)})
        stripes = StripeConfig(rows=options.stripe, merge=options.merge)
        print(f"{options.model}, {options.tp} devices, {stripes.rows} rows a stripe, merge {stripes.merge}")
        print("rates a device: " + ", ".join(f"{f.name} {getattr(rates, f.name):.3g}/s" for f in fields(rates)) + "\n")
        found = {}
        for prompts in [options.prompts] if options.packed else [[n] for n in options.prompts]:
            title = f"prompt of {' + '.join(map(str, prompts))} tokens after {options.prefix} cached ones"
            found[title] = plan(
                prompts, work, rates, tp=options.tp, prefix=options.prefix, chunk=options.chunk, stripes=stripes
            )
            print(report(title, found[title]) + "\n")
        print(LEGEND)
        if options.json:
            options.json.write_text(json.dumps({title: as_json(p) for title, p in found.items()}, indent=2) + "\n")
        if options.plot:
            draw(options.plot, options, work, rates)
            print(f"\nwrote {options.plot}")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
