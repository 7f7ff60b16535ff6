"""The paged cache of index keys, one a full layer: [P, page, D]. Slot s is row s % page of page s // page.

float8 keys have a second array of float32 scales, [P, page], under the same slots; store and gather serve both.
In a cache of pooled keys a slot is a pool.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, UInt8

_INT32_SLOTS = 2**31
_SCALE_BYTES = 4


def require_addressable(pages: Array) -> None:
    """Raises ValueError if a slot number of the cache would not fit int32."""
    if pages.shape[0] * pages.shape[1] >= _INT32_SLOTS:
        raise ValueError(
            f"a cache of {pages.shape[0]} pages of {pages.shape[1]} keys has {pages.shape[0] * pages.shape[1]} slots; "
            f"slot numbers are int32, so it must have fewer than {_INT32_SLOTS}"
        )


def store_keys(
    pages: Float[Array, "P page *D"], keys: Float[Array, "T *D"], slots: Int32[Array, "T"]
) -> Float[Array, "P page *D"]:
    """Writes keys[t] (or scales[t]) to slot slots[t], in the cache's dtype. Donate `pages`, and the update is in place.

    A slot below 0 or past the end drops its key: padding tokens carry -1. No slot may be named twice.
    Raises ValueError for a cache whose slots do not fit int32, and for a float8 cache given keys of another dtype (or
    the reverse), which would lose the scale.
    """
    require_addressable(pages)
    if pages.dtype != keys.dtype and 1 in (pages.dtype.itemsize, keys.dtype.itemsize):
        raise ValueError(
            f"keys are {keys.dtype} and the cache is {pages.dtype}; float8 keys are scaled, so a cast would change "
            f"their meaning: use encode_keys with the cache's format"
        )
    num_pages, page_size, *rest = pages.shape
    total = num_pages * page_size
    # A negative index would count from the end and overwrite a live key; out of range it is dropped.
    slots = jnp.where(slots < 0, total, slots)
    # Indexed by slot, not by element: offsets past 2^31 are the compiler's to address, in 64 bits.
    flat = pages.reshape(total, *rest).at[slots].set(keys.astype(pages.dtype), mode="drop")
    return flat.reshape(pages.shape)


def gather_keys(pages: Float[Array, "P page *D"], page_ids: Int32[Array, "n"]) -> Float[Array, "n*page *D"]:
    """The keys (or scales) of the given pages, one page after another. A page id outside the cache gives zeros."""
    page_ids = jnp.where(page_ids < 0, pages.shape[0], page_ids)
    found = pages.at[page_ids].get(mode="fill", fill_value=0)
    return found.reshape(-1, *pages.shape[2:])


def pack_pages(keys: Float[Array, "P page D"], scales: Float32[Array, "P page"]) -> UInt8[Array, "P bytes"]:
    """float8 keys and scales in the byte layout other engines exchange: bytes = page * (D + 4).

        [ key 0 | key 1 | ... | key page-1 | scale 0 | ... | scale page-1 ]    a page; scales: little-endian float32

    132 bytes a key at D = 128 (the layout of DeepGEMM's paged kernels). Raises ValueError if keys are not float8.
    """
    if keys.dtype.itemsize != 1:
        raise ValueError(f"keys are {keys.dtype}; only float8 keys have the packed layout")
    num_pages, page_size, dim = keys.shape
    key_bytes = lax.bitcast_convert_type(keys, jnp.uint8).reshape(num_pages, page_size * dim)
    scale_bytes = lax.bitcast_convert_type(scales, jnp.uint8).reshape(num_pages, page_size * _SCALE_BYTES)
    return jnp.concatenate([key_bytes, scale_bytes], 1)


def unpack_pages(
    packed: UInt8[Array, "P bytes"], *, head_dim: int, dtype
) -> tuple[Float[Array, "P page D"], Float32[Array, "P page"]]:
    """The inverse of `pack_pages`. dtype: which float8 the bytes are; they do not say so themselves.

    Raises ValueError if the width is not a whole number of keys or dtype is not float8.
    """
    num_pages, width = packed.shape
    page_size, rest = divmod(width, head_dim + _SCALE_BYTES)
    if rest:
        raise ValueError(f"a page has {width} bytes; with head_dim = {head_dim} a key takes {head_dim + _SCALE_BYTES}")
    if jnp.dtype(dtype).itemsize != 1:
        raise ValueError(f"dtype is {jnp.dtype(dtype)}; only float8 keys have the packed layout")
    split = page_size * head_dim
    keys = lax.bitcast_convert_type(packed[:, :split], dtype).reshape(num_pages, page_size, head_dim)
    scales = packed[:, split:].reshape(num_pages, page_size, _SCALE_BYTES)
    return keys, lax.bitcast_convert_type(scales, jnp.float32)
