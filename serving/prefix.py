"""Keys of cache pages: equal keys mean equal contents, so that requests may share what they have in common.

A page's cached rows depend on the tokens up to its end, on their rotary positions and on the pixels behind their image
placeholders. Its key is a hash chained over all of them:

    key[i] = H(key[i-1], ids of page i, positions of page i, (where it starts, content key) of each image in page i)
"""

import hashlib

import numpy as np

from serving.sequence import Sequence

_DIGEST_BYTES = 32


def extend_keys(seq: Sequence, page_size: int) -> list[bytes]:
    """The keys of all pages that the known tokens of a request fill, in order; made once a page and kept with it."""
    keys = seq.page_keys
    for page in range(len(keys), len(seq.tokens) // page_size):
        previous = keys[-1] if keys else _root(seq)
        keys.append(_key(seq, page * page_size, (page + 1) * page_size, previous))
    return keys


def _root(seq: Sequence) -> bytes:
    """Requests with different salts share nothing."""
    return hashlib.blake2b(seq.submission.cache_salt.encode(), digest_size=_DIGEST_BYTES, person=b"salt").digest()


def _key(seq: Sequence, start: int, stop: int, previous: bytes) -> bytes:
    digest = hashlib.blake2b(previous, digest_size=_DIGEST_BYTES, person=b"page")
    digest.update(np.asarray(seq.tokens[start:stop], np.int32).tobytes())
    digest.update(np.ascontiguousarray(seq.positions_of(start, stop), np.int32).tobytes())
    for i in seq.images_in(start, stop):
        span = seq.images[i]
        key = span.image.key
        # Lengths first, so that no two lists of images run together into the same bytes.
        digest.update(np.asarray([span.start - start, span.image.num_tokens, len(key)], np.int64).tobytes())
        digest.update(key)
    return digest.digest()
