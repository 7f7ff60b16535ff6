"""What the server counts, for Prometheus.

One registry a `Metrics` object, so that tests and several servers in one process do not share counts. No label carries
anything that a client chose. Where vLLM counts the same, its names are given too (serving.vllm_names).
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric

from serving.protocol import Usage
from serving.vllm_names import VllmNames

M = TypeVar("M", Gauge, Counter, Histogram)

_PREFIX = "vitstripe"
_STAGES = ("before_ready", "after_ready")
_PATHS = ("replicated", "striped")
_DOING = ("plan", "dispatch", "wait", "tell")
_REASONS = ("stop", "length", "abort", "error")
_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_COUNTS = tuple(map(float, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)))
_TOKENS = tuple(map(float, (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)))
_CHOICES = tuple(map(float, (1, 2, 3, 4, 6, 8)))
_RATIOS = tuple(tenth / 10 for tenth in range(11))


class Metrics:
    """Every counter of the server. Methods may be called from any thread."""

    def __init__(self, model_name: str = "") -> None:
        """model_name: what clients call the model; a label of the metrics under vLLM's names."""
        self.registry = CollectorRegistry()
        self._own: list[Gauge | Counter | Histogram] = []
        self._running = self._gauge("num_requests_running", "Requests that hold a slot")
        self._waiting = self._gauge("num_requests_waiting", "Requests in the queue")
        self._pages_used = self._gauge("kv_pages_used", "Cache pages in use")
        self._pages_total = self._gauge("kv_pages", "Cache pages in all")
        self._pages_ratio = self._gauge("kv_usage_ratio", "Cache pages in use, of all, 0 to 1")
        self._preemptions = self._counter("num_preemptions", "Requests that gave their pages back and began again")
        self._spent = self._counter(
            "engine_seconds",
            "What the engine's thread spent its time on; little `wait` means that the devices wait for the host",
            "doing",
        )
        self._step_tokens = self._histogram("iteration_tokens", "Tokens computed in one step of the engine", _TOKENS)

        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From the request's arrival to its first token", _LATENCY
        )
        self._token_gap = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of one request", _TOKEN_LATENCY
        )
        self._end_to_end = self._histogram(
            "e2e_request_latency_seconds", "From the request's arrival to its end", _LATENCY
        )
        self._queue = self._histogram("request_queue_time_seconds", "Waiting for a slot", _LATENCY)
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From having a slot to the first token", _LATENCY
        )
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the last", _LATENCY)
        self._inference = self._histogram("request_inference_time_seconds", "From having a slot to the end", _LATENCY)
        self._request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self._request_generation = self._histogram("request_generation_tokens", "Tokens of an answer", _TOKENS)
        self._params_n = self._histogram("request_params_n", "Answers that a request asks for", _CHOICES)
        self._params_max = self._histogram("request_params_max_tokens", "max_tokens of a request", _TOKENS)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests, images included")
        self._generation_tokens = self._counter("generation_tokens", "Generated tokens of finished requests")
        self._image_tokens = self._counter("image_tokens", "Image tokens among the prompt tokens")
        self._finished = self._counter(
            "request_finished", "Requests that reached the engine, by how they ended", "reason"
        )
        self._http = self._counter("http_responses", "HTTP responses", "route", "code")

        self._rejected = self._counter("requests_rejected", "Requests answered with an error, by its code", "reason")
        self._image_prepare = self._histogram(
            "image_prepare_seconds", "Fetching, decoding and resizing the images of one request", _LATENCY
        )
        self._memory = self._gauge("device_memory_bytes", "Memory of a device, in use and in all", "device", "kind")
        self._image_fetch = self._histogram(
            "image_fetch_seconds", "Fetching one remote image, by how it ended", _LATENCY, "outcome"
        )

        self._vit_calls = self._counter("vit_calls", "Calls of the vision encoder")
        self._vit_images = self._histogram("vit_images_per_call", "Images in one call of the vision encoder", _COUNTS)
        self._vit_lanes = self._histogram("vit_lanes_filled", "Devices that had an image in one call", _COUNTS)
        self._vit_padding = self._histogram(
            "vit_padded_patch_ratio", "Padded share of the patches of one call", _RATIOS
        )
        self._rows_pinned = self._gauge("encoder_rows_pinned", "Rows of the image pool that requests hold")
        self._cache_hits = self._counter("encoder_cache_hits", "Images whose rows were found in the cache")
        self._cache_misses = self._counter("encoder_cache_misses", "Images that had to be encoded")
        self._cache_evictions = self._counter("encoder_cache_evictions", "Images dropped from the cache")
        self._prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self._prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self._compiles = self._counter("compiles", "Compiled programs; any after ready is a fault", "stage")
        self._indexer_rows = self._counter("indexer_rows", "Query rows of the sparse-attention indexer", "path")

        self.registry.register(VllmNames(self._collect_own, f"{_PREFIX}_", model_name))

        # A series that is not there cannot be alerted on: start the known ones at zero.
        for reason in _REASONS:
            self._finished.labels(reason)
        for stage in _STAGES:
            self._compiles.labels(stage)
        for doing in _DOING:
            self._spent.labels(doing)
        for path in _PATHS:
            self._indexer_rows.labels(path)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return self._kept(Gauge(f"{_PREFIX}_{name}", text, labels, registry=self.registry))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return self._kept(Counter(f"{_PREFIX}_{name}", text, labels, registry=self.registry))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return self._kept(Histogram(f"{_PREFIX}_{name}", text, labels, buckets=buckets, registry=self.registry))

    def _kept(self, metric: M) -> M:
        self._own.append(metric)
        return metric

    def _collect_own(self) -> Iterator[Metric]:
        for metric in self._own:
            yield from metric.collect()

    # The engine's side

    def set_queue(self, *, running: int, waiting: int) -> None:
        self._running.set(running)
        self._waiting.set(waiting)

    def set_pages(self, *, used: int, total: int) -> None:
        self._pages_used.set(used)
        self._pages_total.set(total)
        self._pages_ratio.set(used / total if total else 0.0)

    def preempted(self, count: int) -> None:
        self._preemptions.inc(count)

    def step(self, tokens: int) -> None:
        """One step of the engine computed so many tokens."""
        self._step_tokens.observe(tokens)

    def spent(self, doing: str, seconds: float) -> None:
        """Seconds of a step that the engine's thread planned, dispatched, waited for the devices or told tokens; the
        planning of a step that preempts has a wait and a telling in it."""
        self._spent.labels(doing).inc(seconds)

    def phases(self, *, queue: float, prefill: float, decode: float) -> None:
        """Seconds that a request, which made at least one token, spent waiting, until that token, and after it."""
        self._queue.observe(queue)
        self._prefill.observe(prefill)
        self._decode.observe(decode)
        self._inference.observe(prefill + decode)

    def vit_call(self, *, images: int, lanes_filled: int, padded_ratio: float) -> None:
        """One call of the vision encoder; `padded_ratio` is padded patches over all patches of the call."""
        self._vit_calls.inc()
        self._vit_images.observe(images)
        self._vit_lanes.observe(lanes_filled)
        self._vit_padding.observe(padded_ratio)

    def encoder_cache(self, *, hits: int = 0, misses: int = 0, evictions: int = 0, pinned: int = 0) -> None:
        """What was added since the last call, and the rows that are pinned now."""
        self._rows_pinned.set(pinned)
        self._cache_hits.inc(hits)
        self._cache_misses.inc(misses)
        self._cache_evictions.inc(evictions)

    def prefix_cache(self, *, queries: int, hits: int) -> None:
        """The prompt tokens of one request, and how many of them were found."""
        self._prefix_queries.inc(queries)
        self._prefix_hits.inc(hits)

    def compile(self, stage: str, count: int = 1) -> None:
        """`stage` is before_ready or after_ready."""
        self._compiles.labels(stage).inc(count)

    def indexer_rows(self, path: str, rows: int) -> None:
        """`path` is replicated or striped."""
        self._indexer_rows.labels(path).inc(rows)

    def watch_memory(self, device: str, read: Callable[[], Mapping[str, int]]) -> None:
        """Asks for a device's memory at each scrape; `read` gives bytes_in_use and bytes_limit, as jax names them."""
        for kind in ("in_use", "limit"):
            key = f"bytes_{kind}"
            self._memory.labels(device, kind).set_function(lambda key=key: float(read().get(key, 0)))

    # The HTTP side

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def token_gap(self, seconds: float) -> None:
        self._token_gap.observe(seconds)

    def finished(self, reason: str, *, seconds: float, usage: Usage) -> None:
        """A request left the engine; `reason` is stop, length, abort or error."""
        self._finished.labels(reason).inc()
        self._end_to_end.observe(seconds)
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._generation_tokens.inc(usage.completion_tokens)
        self._image_tokens.inc(usage.image_tokens)
        self._request_prompt.observe(usage.prompt_tokens)
        self._request_generation.observe(usage.completion_tokens)

    def asked(self, *, n: int, max_tokens: int) -> None:
        """What a request asks for: answers a prompt, and tokens each."""
        self._params_n.observe(n)
        self._params_max.observe(max_tokens)

    def http_response(self, route: str, code: int) -> None:
        """`route` is a path of the server's own table, never what the client sent."""
        self._http.labels(route, str(code)).inc()

    def rejected(self, reason: str) -> None:
        """`reason` is the code of an error body, of the server's own words."""
        self._rejected.labels(reason).inc()

    def image_prepare(self, seconds: float) -> None:
        self._image_prepare.observe(seconds)

    def image_fetch(self, outcome: str, seconds: float) -> None:
        """`outcome` is ok, refused, unreachable, timeout or abandoned."""
        self._image_fetch.labels(outcome).observe(seconds)

    def render(self) -> bytes:
        """Prometheus' text exposition."""
        return generate_latest(self.registry)
