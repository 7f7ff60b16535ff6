"""The command line: flags -> settings, with errors a person understands."""

import argparse
import difflib
import json
import logging
import threading
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from serving.api.keys import Keys
from serving.api.limits import Limits
from serving.api.remote import ImageHosts
from serving.chat import REASONING_PARSERS, TOOL_PARSERS
from serving.config import CACHE_DTYPES, EngineConfig
from serving.models.config import text_config
from serving.profiling import Profiler
from vitbatch import EncoderConfig

logger = logging.getLogger(__name__)

_ASSETS = Path(__file__).parent / "assets"
DIGITS_FOLDER = _ASSETS / "digits_vlm"
_SIGHT_FOLDER = _ASSETS / "sight"
EMBEDDED = {
    "demo": _SIGHT_FOLDER,
    "sight": _SIGHT_FOLDER,
    "recall": _ASSETS / "recall",
    "digits": DIGITS_FOLDER,
}
"""Names that --model takes beside folders -> their folders, inside the package."""
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


_EPILOG = """\
examples:
  python -m serving --model demo --tp 2                      the embedded model of pictures on two (host) devices
  python -m serving --model ./Qwen3-VL-8B --max-seqs 64 --api-key-file keys.txt
  python -m serving --config server.toml --port 8001         flags from a file, one of them replaced
  python -m serving doctor                                   what this machine has, and what does not fit

then:
  curl -s localhost:8000/ready
  curl -s localhost:8000/openapi.json                        every route, its fields and its limits
"""


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults where there are any; the examples as they are written."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is argparse.SUPPRESS:
            return action.help
        return super()._get_help_string(action)


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The flags of a command line and of the file that it names.

    Raises:
        UsageError: the file cannot be used, or no model is named.
    """
    p = parser()
    args = p.parse_args(argv)
    if args.config is not None:
        args = p.parse_args([*_file_flags(args.config, p), *argv])
    if args.model is None:
        raise UsageError("no --model is given; name a checkpoint folder, or 'demo' for the embedded model of pictures")
    return args


def model_folder(model: str) -> Path:
    """The folder that --model names. Raises UsageError for an embedded model that this copy of the package lacks."""
    folder = EMBEDDED.get(model, Path(model))
    if model in EMBEDDED and (Path(model) / "config.json").is_file():
        logger.warning("--model %s is the embedded model; write ./%s for the folder of that name", model, model)
    if model in EMBEDDED and not (folder / "config.json").is_file():
        there = ", ".join(name for name, one in EMBEDDED.items() if (one / "config.json").is_file()) or "none"
        raise UsageError(
            f"the embedded model {model!r} is not in this copy of the package (embedded models here: {there}); "
            f"name another, or write ./{model} for a folder of that name"
        )
    return folder


def _file_flags(file: str, p: argparse.ArgumentParser) -> list[str]:
    """The flags in a TOML file, as a command line would have them."""
    try:
        settings = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeError) as error:
        raise UsageError(f"--config {file}: not readable as TOML ({error})") from error
    actions = {action.option_strings[0].removeprefix("--"): action for action in p._actions if action.option_strings}
    known = actions.keys() - {"config", "-h"}
    flags: list[str] = []
    for key, value in settings.items():
        name = key.replace("_", "-")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, cutoff=0.0)
            raise UsageError(f"--config {file}: {key!r} is not a setting; the nearest one is {near[0]!r}")
        flags += _flag(name, value, actions[name], file)
    return flags


def _flag(name: str, value: Any, action: argparse.Action, file: str) -> list[str]:
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise UsageError(f"--config {file}: {name} is {value!r}; it must be true or false")
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, dict) and action.metavar == "JSON":
        return [f"--{name}={json.dumps(value, default=str)}"]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UsageError(f"--config {file}: {name} is {value!r}; it must be a text or a number")
    return [f"--{name}={value}"]


def port(text: str) -> int:
    number = int(text)
    if not 0 <= number < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text} is not a port; choose one from 1 to 65535, or 0 for any that is free")
    return number


def seconds(text: str) -> float:
    number = float(text)
    if not 0 <= number <= threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"{text} is not a time; give a number of seconds, 0 or more")
    return number


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m serving",
        usage="python -m serving --model PATH [flags]\n       python -m serving doctor",
        description="Serves a vision-language or text checkpoint over an OpenAI-compatible HTTP API.",
        epilog=_EPILOG,
        formatter_class=_Help,
        allow_abbrev=False,
    )
    p.add_argument(
        "--config",
        metavar="FILE",
        help="TOML file of flags without their dashes, e.g. `max-seqs = 64`; flags on the command line win "
        "(default: none)",
    )
    p.add_argument(
        "--model",
        metavar="PATH",
        help="checkpoint folder (Hugging Face or Orbax), or an embedded model: 'sight' (or 'demo') answers about drawn "
        "pictures, 'recall' finds what a text said, 'digits' reads a digit",
    )
    p.add_argument("--served-model-name", metavar="NAME", help="name in the API (default: the folder's name)")
    p.add_argument("--host", default="127.0.0.1", help="address to listen on")
    p.add_argument("--port", metavar="PORT", type=port, default=8000, help="port to listen on")
    p.add_argument(
        "--page",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="serve a page at / to ask the model from a browser; the page is open, what it asks needs a key as ever",
    )

    g = p.add_argument_group("devices")
    g.add_argument(
        "--tp", metavar="DEVICES", type=int, default=1, help="devices to spread the model over; on a CPU they are made"
    )
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
    g.add_argument("--stripe-rows", metavar="ROWS", type=int, default=64, help="rows a stripe")
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
    g.add_argument("--max-seqs", metavar="REQUESTS", type=int, default=16, help="requests computed at once")
    g.add_argument(
        "--max-queue", metavar="REQUESTS", type=int, default=256, help="requests that may wait; more get 429"
    )
    g.add_argument(
        "--max-queue-tokens",
        type=int,
        metavar="TOKENS",
        help="prompt tokens that may wait; more get 429 (default: half of --max-queue requests of full length)",
    )
    g.add_argument(
        "--prefill-tokens", metavar="TOKENS", type=int, default=512, help="prompt tokens computed in one pass"
    )
    g.add_argument("--page-size", metavar="TOKENS", type=int, default=64, help="tokens a cache page")
    g.add_argument(
        "--cache-tokens",
        type=int,
        metavar="TOKENS",
        help="tokens the paged cache holds (default: what fits in free device memory)",
    )

    g.add_argument(
        "--prefix-cache",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep cache pages for requests that begin alike, images included; off for models with a state a request",
    )
    g.add_argument(
        "--index-keys",
        choices=CACHE_DTYPES,
        default="auto",
        help="how the keys are cached that an indexer scores (sparse-attention models: GLM-5, GLM-5.3, DeepSeek-V3.2). "
        "auto: in the dtype of the weights; float8: about half of bfloat16's bytes, a byte a number and a scale a key, "
        "with queries in float8, too: now and then a row selects other keys near its last rank",
    )
    g.add_argument(
        "--latent-cache",
        choices=CACHE_DTYPES,
        default="auto",
        help="how the latents are cached that those models attend to. auto: in the dtype of the weights; float8: about "
        "half of bfloat16's bytes, a byte a number and a scale a token, columns that are rotated as before",
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
    g.add_argument(
        "--image-hosts",
        metavar="HOSTS",
        help="hosts that images may be fetched from, e.g. 'img.example,cdn.example:8443' (default: none; images come "
        "as data URIs)",
    )
    g = p.add_argument_group("answers")
    g.add_argument(
        "--tool-parser",
        choices=TOOL_PARSERS,
        default="auto",
        help="how the model writes tool calls; auto: as its chat template shows, or else by its family",
    )
    g.add_argument(
        "--reasoning-parser",
        choices=REASONING_PARSERS,
        default="auto",
        help="whether <think> blocks become reasoning_content; auto: where the chat template knows them",
    )

    g = p.add_argument_group(
        "access", "Keys are sent as `Authorization: Bearer KEY`. /health, /ready and /metrics are open to everybody."
    )
    g.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="API keys, one a line; any of them opens the model (default: none needed; or VITSTRIPE_API_KEY)",
    )
    g.add_argument(
        "--api-key", metavar="KEY", help="the same, but other users of this machine see it in the list of processes"
    )
    g.add_argument(
        "--admin-key-file",
        metavar="FILE",
        help="another key, for the routes that control the server, /start_profile and the like, which are closed "
        "without one (default: none; or VITSTRIPE_ADMIN_KEY)",
    )
    g.add_argument("--admin-key", metavar="KEY", help="the same, as seen by other users")

    g = p.add_argument_group("profiling")
    g.add_argument(
        "--profile-dir", metavar="FOLDER", help="where /start_profile writes its traces (default: no traces are made)"
    )
    g.add_argument(
        "--profile-seconds",
        metavar="SECONDS",
        type=seconds,
        default=60.0,
        help="a trace ends by itself after this time",
    )

    g = p.add_argument_group("shutdown")
    g.add_argument(
        "--step-seconds",
        metavar="SECONDS",
        type=float,
        default=300.0,
        help="a device call that takes longer ends the server",
    )
    g.add_argument(
        "--drain-seconds", metavar="SECONDS", type=seconds, default=30.0, help="time running requests get on shutdown"
    )
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
    # What the watchdog waits for is not dead to clients and probes.
    return Limits(max_images=_whole_number(image, f"{flag} image"), heartbeat_seconds=args.step_seconds)


def image_hosts(args: argparse.Namespace) -> ImageHosts | None:
    """None: nothing is fetched."""
    if args.image_hosts is None:
        return None
    try:
        return ImageHosts.parse(args.image_hosts)
    except ValueError as error:
        raise UsageError(f"--image-hosts: {error}") from error


def keys(args: argparse.Namespace, environ: Mapping[str, str]) -> Keys:
    try:
        return Keys.read(
            environ,
            api=args.api_key,
            api_file=args.api_key_file,
            admin=args.admin_key,
            admin_file=args.admin_key_file,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def profiler(args: argparse.Namespace, quietly: Callable[[Callable[[], None]], None]) -> Profiler | None:
    """None: no traces are made."""
    if args.profile_dir is None:
        return None
    try:
        return Profiler(args.profile_dir, limit=args.profile_seconds, quietly=quietly)
    except ValueError as error:
        raise UsageError(f"--profile-dir: {error}") from error


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
            prefix_cache=args.prefix_cache,
            index_keys=args.index_keys,
            latent_cache=args.latent_cache,
            max_queue=args.max_queue,
            max_queue_tokens=args.max_queue_tokens,
            step_seconds=args.step_seconds,
            dp_encoder=args.dp_encoder,
            indexer_stripes=args.indexer_stripes,
            stripe_rows=args.stripe_rows,
            merge=args.merge,
            stripe_min_keys=args.stripe_min_keys,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
