"""The command line: flags -> settings, with errors a person understands."""

import argparse
import json
from pathlib import Path
from typing import Any

from serving.api.limits import Limits
from serving.config import EngineConfig
from serving.models.config import text_config
from vitbatch import EncoderConfig

DEMO_FOLDER = Path(__file__).parent / "assets" / "digits_vlm"
_DEFAULT_CONTEXT = 8192

# --mm-process-config's names -> EncoderConfig's
_IMAGE_BOUNDS = {
    "min_pixels": "min_pixels",
    "max_pixels": "max_image_pixels",
    "min_image_tokens": "min_image_tokens",
    "max_image_tokens": "max_image_tokens",
}


class UsageError(ValueError):
    """A flag's value cannot be used; the text says which and why."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m serving",
        description="Serves a vision-language or text checkpoint over an OpenAI-compatible HTTP API.",
        epilog="example: python -m serving --model demo --tp 2 --port 8000   then: curl -s localhost:8000/ready   "
        "`python -m serving doctor` says what this machine has.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument(
        "--model",
        required=True,
        metavar="PATH",
        help="checkpoint folder (Hugging Face or Orbax), or 'demo' for the embedded digit reader",
    )
    p.add_argument("--served-model-name", metavar="NAME", help="name in the API (default: the folder's name)")
    p.add_argument("--host", default="127.0.0.1", help="address to listen on")
    p.add_argument("--port", type=int, default=8000, help="port to listen on")

    g = p.add_argument_group("devices")
    g.add_argument("--tp", type=int, default=1, help="devices to spread the model over; on a CPU they are made")
    g.add_argument(
        "--dp-encoder",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="deal the images of all requests of a step over the devices",
    )
    g.add_argument(
        "--indexer-stripes",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let each device select keys for its own stripes of the rows (sparse-attention models, tp > 1)",
    )
    g.add_argument("--stripe-rows", type=int, default=64, help="rows a stripe")
    g.add_argument("--merge", choices=("pmax", "all_gather"), default="pmax", help="how the stripes are put together")
    g.add_argument(
        "--stripe-min-keys",
        type=int,
        metavar="KEYS",
        help="stripe a prefill pass whose rows see at least so many keys on average (default: 8192 on a GPU with pmax, "
        "4096 with all_gather, always on a CPU)",
    )

    g = p.add_argument_group("capacity")
    g.add_argument(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help=f"longest prompt and answer together (default: the checkpoint's limit, at most {_DEFAULT_CONTEXT})",
    )
    g.add_argument("--max-seqs", type=int, default=16, help="requests computed at once")
    g.add_argument("--max-queue", type=int, default=256, help="requests that may wait; more get 503")
    g.add_argument("--prefill-tokens", type=int, default=512, help="prompt tokens computed in one pass")
    g.add_argument("--page-size", type=int, default=64, help="tokens a cache page")
    g.add_argument(
        "--cache-tokens",
        type=int,
        metavar="TOKENS",
        help="tokens the paged cache holds (default: what fits in free device memory)",
    )

    g = p.add_argument_group("images")
    g.add_argument(
        "--mm-process-config",
        default="{}",
        metavar="JSON",
        help='bounds on resized images, e.g. \'{"image": {"min_image_tokens": 16, "max_image_tokens": 1024}}\'',
    )
    g.add_argument(
        "--limit-mm-data-per-request", default='{"image": 8}', metavar="JSON", help="images a request may carry"
    )
    g.add_argument(
        "--mm-batching",
        choices=("auto", "always", "never"),
        default="auto",
        help="whether images of several requests share an encoder call; auto follows the platform",
    )
    g = p.add_argument_group("shutdown")
    g.add_argument("--drain-seconds", type=float, default=30.0, help="time running requests get on shutdown")
    return p


def _object(text: str, flag: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{flag} is not JSON ({error}): {text}") from error
    if not isinstance(value, dict) or set(value) - {"image"}:
        raise UsageError(f'{flag} must be an object with the one key "image", got: {text}')
    return value


def _whole_number(value: Any, flag: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{flag} is {value!r}; it must be a whole number of at least 1")
    return value


def encoder_config(args: argparse.Namespace) -> EncoderConfig:
    flag = "--mm-process-config"
    image = _object(args.mm_process_config, flag).get("image", {})
    if not isinstance(image, dict) or set(image) - set(_IMAGE_BOUNDS):
        raise UsageError(f"{flag}: image takes {', '.join(_IMAGE_BOUNDS)}, got {image!r}")
    bounds: dict[str, Any] = {_IMAGE_BOUNDS[k]: _whole_number(v, f"{flag} image.{k}") for k, v in image.items()}
    try:
        return EncoderConfig(dp_encoder=args.dp_encoder, batching=args.mm_batching, **bounds)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from error


def limits(args: argparse.Namespace) -> Limits:
    flag = "--limit-mm-data-per-request"
    image = _object(args.limit_mm_data_per_request, flag).get("image", 8)
    return Limits(max_images=_whole_number(image, f"{flag} image"))


def engine_config(args: argparse.Namespace, checkpoint_config: dict[str, Any]) -> EngineConfig:
    own = text_config(checkpoint_config).get("max_position_embeddings")
    own = own if isinstance(own, int) and own > 0 else _DEFAULT_CONTEXT
    wanted = args.max_model_len
    if wanted is not None and wanted > own:
        raise UsageError(f"--max-model-len is {wanted}, over the checkpoint's max_position_embeddings {own}")
    try:
        return EngineConfig(
            tp=args.tp,
            max_model_len=min(own, _DEFAULT_CONTEXT) if wanted is None else wanted,
            page_size=args.page_size,
            max_seqs=args.max_seqs,
            prefill_tokens=args.prefill_tokens,
            cache_tokens=args.cache_tokens,
            max_queue=args.max_queue,
            dp_encoder=args.dp_encoder,
            indexer_stripes=args.indexer_stripes,
            stripe_rows=args.stripe_rows,
            merge=args.merge,
            stripe_min_keys=args.stripe_min_keys,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
