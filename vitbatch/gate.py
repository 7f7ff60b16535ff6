"""When the images of several requests share one encoder call."""

from dataclasses import dataclass

from vitbatch.config import require_batching


@dataclass(frozen=True)
class BatchDecision:
    """batched: whether images of several requests go into one call. reason: why, fit for a log."""

    batched: bool
    reason: str


def decide_batching(platform: str, *, dp_encoder: bool, tp: int, batching: str = "auto") -> BatchDecision:
    """Whether a caller should put the images of several requests into one call.

    platform: `vitstripe.platform.Platform.kind`. tp: width of the mesh axis that lanes are dealt over. batching:
    "always" and "never" overrule the table, so that both paths can be measured.

        platform    data-parallel encoder    tp     batched
        cuda, cpu   any                      any    yes
        rocm        on                       > 1    yes
        rocm        on                       1      no
        rocm        off                      any    no
        other       any                      any    no

    The rows for CUDA and ROCm are those of sglang's cross-request batching: on ROCm without several lanes there is
    nothing to distribute, and batching measured slower there. Raises ValueError for tp below 1 or another setting.
    """
    require_batching(batching)
    if tp < 1:
        raise ValueError(f"tp is {tp}; it must be at least 1")
    where = f"{platform}, data-parallel encoder {'on' if dp_encoder else 'off'}, tp {tp}"
    if batching != "auto":
        return BatchDecision(batching == "always", f"batching is {batching!r} ({where})")
    if platform in ("cuda", "cpu"):
        return BatchDecision(True, f"one call of many images is faster than many calls ({where})")
    if platform != "rocm":
        return BatchDecision(False, f"batching was never measured on {platform} ({where})")
    if not dp_encoder:
        return BatchDecision(False, f"without the data-parallel encoder there are no lanes to fill ({where})")
    if tp == 1:
        return BatchDecision(False, f"one device leaves nothing to distribute ({where})")
    return BatchDecision(True, f"the images of a call fill {tp} lanes ({where})")


def batches_across_requests(platform: str, *, dp_encoder: bool, tp: int, batching: str = "auto") -> bool:
    """`decide_batching` without the reason."""
    return decide_batching(platform, dp_encoder=dp_encoder, tp=tp, batching=batching).batched
