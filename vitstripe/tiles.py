"""What the tile sizes of every attention kernel must satisfy."""


def require_tile(owner: object, **least: int) -> None:
    """Raises ValueError unless each named size of a tile is a power of two of at least what is given here, and its
    `warps` and `stages` are ones that Triton takes."""
    name = type(owner).__name__
    for side, lowest in least.items():
        size = getattr(owner, side)
        if size < lowest or size & (size - 1):
            raise ValueError(f"{name}.{side} is {size}; it must be a power of two of at least {lowest}")
    warps, stages = (getattr(owner, field) for field in ("warps", "stages"))
    if warps not in (1, 2, 4, 8, 16) or stages < 1:
        raise ValueError(f"{name} has {warps} warps and {stages} stages")
