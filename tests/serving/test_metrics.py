"""What is counted, under our names and under vLLM's."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.metrics import Metrics
from serving.protocol import Usage
from serving.vllm_names import TWINS

# Names on vLLM's metrics page that mean the same here.
VLLM = {
    "vllm:num_requests_running": 3,
    "vllm:num_requests_waiting": 2,
    "vllm:kv_cache_usage_perc": 0.75,
    "vllm:num_preemptions_total": 1,
    "vllm:prompt_tokens_total": 12,
    "vllm:generation_tokens_total": 7,
    "vllm:prefix_cache_queries_total": 12,
    "vllm:prefix_cache_hits_total": 8,
    "vllm:iteration_tokens_total_sum": 40,
    "vllm:request_prompt_tokens_sum": 12,
    "vllm:request_generation_tokens_sum": 7,
    "vllm:request_params_n_sum": 2,
    "vllm:request_params_max_tokens_sum": 99,
    "vllm:time_to_first_token_seconds_sum": 0.5,
    "vllm:inter_token_latency_seconds_sum": 0.25,
    "vllm:e2e_request_latency_seconds_sum": 2.0,
    "vllm:request_queue_time_seconds_sum": 0.125,
    "vllm:request_prefill_time_seconds_sum": 0.375,
    "vllm:request_decode_time_seconds_sum": 1.5,
    "vllm:request_inference_time_seconds_sum": 1.875,
}


@pytest.fixture
def samples() -> dict[str, float]:
    """Samples by name and labels, of a server that served one request."""
    metrics = Metrics("org/model")
    metrics.set_queue(running=3, waiting=2)
    metrics.set_pages(used=3, total=4)
    metrics.preempted(1)
    metrics.prefix_cache(queries=12, hits=8)
    metrics.step(40)
    metrics.asked(n=2, max_tokens=99)
    metrics.first_token(0.5)
    metrics.token_gap(0.25)
    metrics.phases(queue=0.125, prefill=0.375, decode=1.5)
    metrics.finished("stop", seconds=2.0, usage=Usage(12, 7, 4))
    metrics.finished("error", seconds=0.0, usage=Usage(0, 0, 0))
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            assert (sample.name, labels) not in found, "a series is there twice"
            found[sample.name, labels] = sample.value
    return found


def test_vllms_names_have_the_same_values_and_the_models_name(samples):
    for name, value in VLLM.items():
        assert samples[name, "engine=0,model_name=org/model"] == value, name


def test_ends_are_told_by_reason_and_a_fault_is_no_success(samples):
    label = "engine=0,finished_reason={},model_name=org/model"
    assert samples["vllm:request_success_total", label.format("stop")] == 1
    assert samples["vllm:request_success_total", label.format("length")] == 0
    assert ("vllm:request_success_total", label.format("error")) not in samples
    assert samples["vitstripe_request_finished_total", "reason=error"] == 1


def test_memory_is_asked_for_at_each_scrape():
    metrics, used = Metrics(), [5]
    metrics.watch_memory("0", lambda: {"bytes_in_use": used[0], "bytes_limit": 9})
    used[0] = 7
    text = metrics.render().decode()
    assert 'vitstripe_device_memory_bytes{device="0",kind="in_use"} 7.0' in text
    assert 'vitstripe_device_memory_bytes{device="0",kind="limit"} 9.0' in text


def test_every_twin_has_a_metric_of_ours(samples):
    ours = {name for name, _ in samples}
    for name in TWINS:
        assert any(f"vitstripe_{name}{end}" in ours for end in ("", "_total", "_count")), name
