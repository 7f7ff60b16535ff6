"""When the images of several requests share one encoder call."""


def batches_across_requests(platform: str, *, dp_encoder: bool, tp: int) -> bool:
    """Whether a caller should put the images of several requests into one call.

    platform: `vitstripe.platform.Platform.kind`. tp: width of the mesh axis that lanes are dealt over.

    CUDA always batches. ROCm batches only under the data-parallel encoder on more than one device: alone there is
    nothing to distribute, and batching there measured slower upstream (sglang's cross-request batching on HIP). A CPU
    follows ROCm, so that tests exercise its rule. Other platforms do not batch.
    """
    if tp < 1:
        raise ValueError(f"tp is {tp}; it must be at least 1")
    if platform == "cuda":
        return True
    if platform in ("rocm", "cpu"):
        return dp_encoder and tp > 1
    return False
