"""The DeepSeek-sparse-attention (DSA) indexer: which keys each query row attends to, with its rows striped over a mesh.

Shape letters: M query rows, N keys, H index heads, D index head dimension, K selected keys a row, S rows a stripe,
R requests or (in a rotary width) rotary dimensions, P pages, B decode requests, T tokens.
"""

from dsa_indexer.check import check_kernels
from dsa_indexer.config import IndexerConfig, StripeConfig
from dsa_indexer.indexer import Indexer
from dsa_indexer.key_cache import gather_keys, pack_pages, store_keys, unpack_pages
from dsa_indexer.paged import topk_paged
from dsa_indexer.pooled import ClosedPools, PooledIndexer, PoolTail, expand_pools
from dsa_indexer.programs import IndexerShapes, LatentShape, programs
from dsa_indexer.projection import project_rows
from dsa_indexer.quant import KeyFormat, encode_keys, encode_queries
from dsa_indexer.replicated import topk_rows
from dsa_indexer.rope import Yarn, inverse_frequencies, rope_tables
from dsa_indexer.rows import RowBatch, to_paged, to_ragged
from dsa_indexer.sparse_mla import LatentRows, encode_latents, sparse_mla
from dsa_indexer.striped import (
    striped_topk_projected,
    striped_topk_projected_local,
    striped_topk_rows,
    striped_topk_rows_local,
)
from dsa_indexer.stripes import engages
from dsa_indexer.topk import ForcedTokens

__all__ = [
    "ClosedPools",
    "ForcedTokens",
    "Indexer",
    "IndexerConfig",
    "IndexerShapes",
    "KeyFormat",
    "LatentRows",
    "LatentShape",
    "PoolTail",
    "PooledIndexer",
    "RowBatch",
    "StripeConfig",
    "Yarn",
    "check_kernels",
    "encode_keys",
    "encode_latents",
    "encode_queries",
    "engages",
    "expand_pools",
    "gather_keys",
    "inverse_frequencies",
    "pack_pages",
    "programs",
    "project_rows",
    "rope_tables",
    "sparse_mla",
    "store_keys",
    "striped_topk_projected",
    "striped_topk_projected_local",
    "striped_topk_rows",
    "striped_topk_rows_local",
    "to_paged",
    "to_ragged",
    "topk_paged",
    "topk_rows",
    "unpack_pages",
]
