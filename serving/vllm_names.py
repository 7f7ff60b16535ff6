"""The server's counts under vLLM's names, where the meaning is the same, so that its dashboards can be used.

Nothing is counted twice: a scrape reads our own metrics and writes them again.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

Source = Callable[[], Iterator[Metric]]


@dataclass(frozen=True)
class Twin:
    """vLLM's name without its prefix, and labels that it calls otherwise (ours -> theirs).

    without: label values whose samples vLLM does not have.
    """

    name: str
    labels: Mapping[str, str] | None = None
    without: frozenset[str] = frozenset()


# Our name, without prefix -> vLLM's. Counters have "_total" appended on the wire, in both.
TWINS: dict[str, Twin] = {
    "num_requests_running": Twin("num_requests_running"),
    "num_requests_waiting": Twin("num_requests_waiting"),
    "kv_usage_ratio": Twin("kv_cache_usage_perc"),
    "prefix_cache_queries": Twin("prefix_cache_queries"),
    "prefix_cache_hits": Twin("prefix_cache_hits"),
    "num_preemptions": Twin("num_preemptions"),
    "prompt_tokens": Twin("prompt_tokens"),
    "generation_tokens": Twin("generation_tokens"),
    "request_finished": Twin("request_success", {"reason": "finished_reason"}, frozenset({"error"})),
    "iteration_tokens": Twin("iteration_tokens_total"),
    "request_prompt_tokens": Twin("request_prompt_tokens"),
    "request_generation_tokens": Twin("request_generation_tokens"),
    "request_params_n": Twin("request_params_n"),
    "request_params_max_tokens": Twin("request_params_max_tokens"),
    "time_to_first_token_seconds": Twin("time_to_first_token_seconds"),
    "inter_token_latency_seconds": Twin("inter_token_latency_seconds"),
    "e2e_request_latency_seconds": Twin("e2e_request_latency_seconds"),
    "request_queue_time_seconds": Twin("request_queue_time_seconds"),
    "request_prefill_time_seconds": Twin("request_prefill_time_seconds"),
    "request_decode_time_seconds": Twin("request_decode_time_seconds"),
    "request_inference_time_seconds": Twin("request_inference_time_seconds"),
}


class VllmNames(Collector):
    """Args: source: gives our metrics. prefix: of their names, with its underscore. model: value of `model_name`, by
    which the dashboards filter."""

    def __init__(self, source: Source, prefix: str, model: str):
        self._source, self._prefix, self._model = source, prefix, model

    def describe(self) -> list[Metric]:
        return []  # the registry must not ask for the values to know the names

    def collect(self) -> Iterator[Metric]:
        for metric in self._source():
            twin = TWINS.get(metric.name.removeprefix(self._prefix))
            if twin is not None:
                yield self._renamed(metric, twin)

    def _renamed(self, metric: Metric, twin: Twin) -> Metric:
        name = f"vllm:{twin.name}"
        renamed = Metric(name, metric.documentation, metric.type)
        names = twin.labels or {}
        for sample in metric.samples:
            if sample.name.endswith("_created") or twin.without & set(sample.labels.values()):
                continue
            labels = {names.get(label, label): value for label, value in sample.labels.items()}
            labels |= {"engine": "0", "model_name": self._model}
            renamed.samples.append(Sample(name + sample.name.removeprefix(metric.name), labels, sample.value))
        return renamed
