"""The paged cache of index keys, one a full layer: [P, page, D]. Slot s is row s % page of page s // page."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

_INT32_SLOTS = 2**31


def require_addressable(pages: Array) -> None:
    """Raises ValueError if a slot number of the cache would not fit int32."""
    if pages.shape[0] * pages.shape[1] >= _INT32_SLOTS:
        raise ValueError(
            f"a cache of {pages.shape[0]} pages of {pages.shape[1]} keys has {pages.shape[0] * pages.shape[1]} slots; "
            f"slot numbers are int32, so it must have fewer than {_INT32_SLOTS}"
        )


def store_keys(
    pages: Float[Array, "P page D"], keys: Float[Array, "T D"], slots: Int32[Array, "T"]
) -> Float[Array, "P page D"]:
    """Writes keys[t] to slot slots[t], in the cache's dtype. Donate `pages`, and the update is in place.

    A slot below 0 or past the end drops its key: padding tokens carry -1. No slot may be named twice.
    """
    require_addressable(pages)
    num_pages, page_size, dim = pages.shape
    total = num_pages * page_size
    # A negative index would count from the end and overwrite a live key; out of range it is dropped.
    slots = jnp.where(slots < 0, total, slots)
    flat = pages.reshape(total, dim).at[slots].set(keys.astype(pages.dtype), mode="drop")
    return flat.reshape(pages.shape)


def gather_keys(pages: Float[Array, "P page D"], page_ids: Int32[Array, "n"]) -> Float[Array, "n*page D"]:
    """The keys of the given pages, one page after another. A page id outside the cache gives zeros."""
    page_ids = jnp.where(page_ids < 0, pages.shape[0], page_ids)
    found = pages.at[page_ids].get(mode="fill", fill_value=0)
    return found.reshape(-1, pages.shape[2])
