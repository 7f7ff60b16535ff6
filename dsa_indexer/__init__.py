"""The DeepSeek-sparse-attention (DSA) indexer: which keys each query row attends to, with its rows striped over a mesh.

Shape letters: M query rows, N keys, H index heads, D index head dimension, K selected keys a row, S rows a stripe,
R requests or (in a rotary width) rotary dimensions, P pages, B decode requests, T tokens.
"""

from dsa_indexer.config import IndexerConfig, StripeConfig
from dsa_indexer.indexer import Indexer
from dsa_indexer.key_cache import gather_keys, store_keys
from dsa_indexer.paged import topk_paged
from dsa_indexer.replicated import topk_rows
from dsa_indexer.rows import RowBatch, to_paged, to_ragged
from dsa_indexer.sparse_mla import sparse_mla
from dsa_indexer.striped import striped_topk_rows, striped_topk_rows_local
from dsa_indexer.stripes import engages

__all__ = [
    "Indexer",
    "IndexerConfig",
    "RowBatch",
    "StripeConfig",
    "engages",
    "gather_keys",
    "sparse_mla",
    "store_keys",
    "striped_topk_rows",
    "striped_topk_rows_local",
    "to_paged",
    "to_ragged",
    "topk_paged",
    "topk_rows",
]
