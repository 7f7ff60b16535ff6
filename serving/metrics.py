"""What the server counts, for Prometheus.

One registry a `Metrics` object, so that tests and several servers in one process do not share counts. No label carries
anything that a client chose.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from serving.protocol import Usage

_PREFIX = "vitstripe"
_STAGES = ("before_ready", "after_ready")
_PATHS = ("replicated", "striped")
_REASONS = ("stop", "length", "abort", "error")
_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_COUNTS = tuple(map(float, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)))
_RATIOS = tuple(tenth / 10 for tenth in range(11))


class Metrics:
    """Every counter of the server. Methods may be called from any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._running = self._gauge("num_requests_running", "Requests that hold a slot")
        self._waiting = self._gauge("num_requests_waiting", "Requests in the queue")
        self._pages_used = self._gauge("kv_pages_used", "Cache pages in use")
        self._pages_total = self._gauge("kv_pages", "Cache pages in all")

        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From the request's arrival to its first token", _LATENCY
        )
        self._token_gap = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of one request", _TOKEN_LATENCY
        )
        self._end_to_end = self._histogram(
            "e2e_request_latency_seconds", "From the request's arrival to its end", _LATENCY
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests, images included")
        self._generation_tokens = self._counter("generation_tokens", "Generated tokens of finished requests")
        self._image_tokens = self._counter("image_tokens", "Image tokens among the prompt tokens")
        self._finished = self._counter(
            "request_finished", "Requests that reached the engine, by how they ended", "reason"
        )
        self._http = self._counter("http_responses", "HTTP responses", "route", "code")

        self._vit_calls = self._counter("vit_calls", "Calls of the vision encoder")
        self._vit_images = self._histogram("vit_images_per_call", "Images in one call of the vision encoder", _COUNTS)
        self._vit_lanes = self._histogram("vit_lanes_filled", "Devices that had an image in one call", _COUNTS)
        self._vit_padding = self._histogram(
            "vit_padded_patch_ratio", "Padded share of the patches of one call", _RATIOS
        )
        self._cache_hits = self._counter("encoder_cache_hits", "Images whose rows were found in the cache")
        self._cache_misses = self._counter("encoder_cache_misses", "Images that had to be encoded")
        self._cache_evictions = self._counter("encoder_cache_evictions", "Images dropped from the cache")
        self._compiles = self._counter("compiles", "Compiled programs; any after ready is a fault", "stage")
        self._indexer_rows = self._counter("indexer_rows", "Query rows of the sparse-attention indexer", "path")

        # A series that is not there cannot be alerted on: start the known ones at zero.
        for reason in _REASONS:
            self._finished.labels(reason)
        for stage in _STAGES:
            self._compiles.labels(stage)
        for path in _PATHS:
            self._indexer_rows.labels(path)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"{_PREFIX}_{name}", text, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{_PREFIX}_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{_PREFIX}_{name}", text, buckets=buckets, registry=self.registry)

    # The engine's side

    def set_queue(self, *, running: int, waiting: int) -> None:
        self._running.set(running)
        self._waiting.set(waiting)

    def set_pages(self, *, used: int, total: int) -> None:
        self._pages_used.set(used)
        self._pages_total.set(total)

    def vit_call(self, *, images: int, lanes_filled: int, padded_ratio: float) -> None:
        """One call of the vision encoder; `padded_ratio` is padded patches over all patches of the call."""
        self._vit_calls.inc()
        self._vit_images.observe(images)
        self._vit_lanes.observe(lanes_filled)
        self._vit_padding.observe(padded_ratio)

    def encoder_cache(self, *, hits: int = 0, misses: int = 0, evictions: int = 0) -> None:
        """What was added since the last call."""
        self._cache_hits.inc(hits)
        self._cache_misses.inc(misses)
        self._cache_evictions.inc(evictions)

    def compile(self, stage: str, count: int = 1) -> None:
        """`stage` is before_ready or after_ready."""
        self._compiles.labels(stage).inc(count)

    def indexer_rows(self, path: str, rows: int) -> None:
        """`path` is replicated or striped."""
        self._indexer_rows.labels(path).inc(rows)

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

    def http_response(self, route: str, code: int) -> None:
        """`route` is a path of the server's own table, never what the client sent."""
        self._http.labels(route, str(code)).inc()

    def render(self) -> bytes:
        """Prometheus' text exposition."""
        return generate_latest(self.registry)
