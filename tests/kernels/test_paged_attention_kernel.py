"""The paged attention kernels against float64, interpreted and on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serving.models.paged_attention import paged_attention
from serving.models.paged_attention.reference import paged_attention_reference
from serving.models.paged_attention.tiles import DecodeTile, ExtendTile, decode_tile, extend_tile
from serving.models.paged_attention.triton import paged_attention_triton
from tests.helpers import relative_error
from vitstripe.platform import Platform, platform_of

CPU = Platform("cpu", "", "")
CUDA = Platform("cuda", "", "")
DECODE, EXTEND = DecodeTile(16, 32, 4, 1), ExtendTile(64, 16, 4, 1)
SCALE = 0.2

_kernel = jax.jit(paged_attention_triton, static_argnames=("scale", "platform", "tile", "interpret"))
_plain = jax.jit(paged_attention_reference, static_argnames="scale")


class Pass:
    """A pass over requests of `lengths` keys: the last `rows` tokens of each, in tiles of `tile_rows`; pages in any
    order, NaN in everything that no row sees, numbers that are no page behind each request's last one."""

    def __init__(
        self, lengths, rows, tile_rows, *, page=16, heads=6, kv=2, dim=16, dtype=jnp.float32, padding=0, seed=0
    ):
        draw = np.random.default_rng(seed)
        self.page, self.kv, self.spans, at = page, kv, [], 0
        for length, count in zip(lengths, rows, strict=True):
            self.spans.append((at, count, length))
            at += -(-count // tile_rows) * tile_rows
        total = at + padding * tile_rows
        round_ = lambda x: np.array(jnp.asarray(x, dtype).astype(jnp.float32))  # noqa: E731
        self.q = round_(draw.normal(size=(total, heads, dim)) * 2)
        self.lengths, self.tiles = np.zeros(total, np.int32), np.zeros(total // tile_rows, np.int32)
        most = max(-(-n // page) for n in lengths) + 1
        pages = draw.permutation(sum(-(-n // page) for n in lengths) + 3).astype(np.int32)
        self.table, used = np.full((len(lengths), most), 10**9, np.int32), 0
        self.k = np.full((len(pages), page, kv, dim), np.nan, np.float32)
        self.v = self.k.copy()
        for r, (start, count, length) in enumerate(self.spans):
            self.lengths[start : start + count] = np.arange(length - count, length) + 1 if count else 0
            self.tiles[start // tile_rows : -(-(start + count) // tile_rows)] = r
            for i in range(-(-length // page)):
                self.table[r, i], used = pages[used], used + 1
                here = slice(0, min(page, length - i * page))
                for cache, size in ((self.k, 2), (self.v, 1)):
                    cache[self.table[r, i], here] = round_(draw.normal(size=(here.stop, kv, dim)) * size)
        self.dtype = dtype

    def arrays(self):
        parts = [jnp.asarray(x, self.dtype) for x in (self.q, self.k, self.v)]
        return *parts, *(jnp.asarray(x) for x in (self.lengths, self.tiles, self.table))

    def exact(self, kv_heads=None) -> np.ndarray:
        """float64."""
        q, k, v = (x.astype(np.float64) for x in (self.q, self.k, self.v))
        out, group = np.zeros(q.shape), q.shape[1] // (self.kv if kv_heads is None else len(kv_heads))
        for r, (start, count, _) in enumerate(self.spans):
            for t in range(start, start + count):
                column = np.arange(self.lengths[t])
                if not len(column):
                    continue
                where = self.table[r, column // self.page], column % self.page
                for h in range(q.shape[1]):
                    key_head = h // group if kv_heads is None else kv_heads[h // group]
                    s = SCALE * k[where][:, key_head] @ q[t, h]
                    p = np.exp(s - s.max())
                    out[t, h] = p @ v[where][:, key_head] / p.sum()
        return out

    def run(self, tile, kv_heads=None, **options) -> np.ndarray:
        heads = np.arange(self.kv, dtype=np.int32) if kv_heads is None else np.asarray(kv_heads, np.int32)
        options = {"platform": CPU, "interpret": True, **options}
        out = _kernel(*self.arrays(), jnp.asarray(heads), scale=SCALE, tile=tile, **options)
        return np.asarray(out.astype(jnp.float32))

    def plain(self) -> np.ndarray:
        return np.asarray(_plain(*self.arrays(), scale=SCALE).astype(jnp.float32))


def decode(lengths, **options) -> Pass:
    return Pass(lengths, [1] * len(lengths), 1, **options)


LENGTHS = [1, 15, 16, 33, 64, 97, 101]


@pytest.mark.parametrize("page", [8, 24, 32])
def test_a_decode_row_sees_all_of_its_request_and_nothing_else(page):
    case = decode(LENGTHS, page=page)
    want = case.exact()
    assert relative_error(case.run(DECODE), want) < 3e-6
    assert relative_error(case.plain(), want) < 3e-6


@pytest.mark.parametrize("page", [8, 24, 32])
@pytest.mark.parametrize("tile", [EXTEND, ExtendTile(16, 32, 4, 1)], ids=["four tiles", "part of a tile"])
def test_extended_rows_see_what_lies_before_them_in_their_request(page, tile):
    case = Pass([70, 9, 33, 5, 100], [19, 9, 1, 5, 24], 4, page=page, padding=3)
    want = case.exact()
    assert relative_error(case.run(tile), want) < 3e-6
    assert relative_error(case.plain(), want) < 3e-6


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (6, 2), (5, 1), (32, 2)], ids=str)
def test_any_number_of_query_heads_may_share_a_key_head(heads):
    query, kv = heads
    row = decode([20, 41], heads=query, kv=kv)
    assert relative_error(row.run(DECODE), row.exact()) < 3e-6
    rows = Pass([20, 41], [9, 13], 8, heads=query, kv=kv)
    assert relative_error(rows.run(EXTEND), rows.exact()) < 3e-6


def test_wide_heads_run_in_tiles_of_their_own():
    for case, tile in ((decode([20, 41], dim=256), decode_tile), (Pass([70, 9], [19, 9], 16, dim=256), extend_tile)):
        for platform in (CUDA, Platform("rocm", "gfx942", ""), Platform("rocm", "gfx950", "")):
            assert tile(platform, 256) != tile(platform, 128)
        assert relative_error(case.run(tile(CUDA, 256)), case.exact()) < 3e-6


@pytest.mark.parametrize("kv_heads", [[1], [0, 1, 1], [1, 0, 1, 0, 0, 1]], ids=str)
def test_replicated_key_heads_are_taken_by_name(kv_heads):
    row = decode([20, 41])
    assert relative_error(row.run(DECODE, kv_heads), row.exact(kv_heads)) < 3e-6
    rows = Pass([20, 41], [9, 13], 8)
    assert relative_error(rows.run(EXTEND, kv_heads), rows.exact(kv_heads)) < 3e-6
    got = paged_attention(*rows.arrays(), scale=SCALE, kv_heads=jnp.asarray(kv_heads))
    assert relative_error(got, rows.exact(kv_heads)) < 3e-6


def test_rows_without_keys_are_zero():
    rows = decode([3, 20, 7])
    rows.lengths[[0, 2]] = 0
    got = rows.run(DECODE)
    assert not got[[0, 2]].any()
    assert relative_error(got[1], rows.exact()[1]) < 3e-6
    nothing = Pass([20], [0], 4, padding=5)
    assert not nothing.run(EXTEND).any()


def among_others(alone: Pass, rows: int, tile_rows: int, others: float) -> tuple[Pass, int]:
    """The only request of `alone` between two whose keys and queries are `others`, and where its rows start."""
    length = alone.spans[0][2]
    shape = {"page": alone.page, "heads": alone.q.shape[1], "kv": alone.kv, "dim": alone.q.shape[2]}
    crowd = Pass([90, length, 5], [min(2 * rows, 90), rows, 1], tile_rows, dtype=alone.dtype, seed=4, **shape)
    at = crowd.spans[1][0]
    crowd.q[:] = crowd.k[:] = crowd.v[:] = others
    crowd.q[at : at + rows] = alone.q[:rows]
    for i in range(-(-length // alone.page)):
        for there, here in ((crowd.k, alone.k), (crowd.v, alone.v)):
            there[crowd.table[1, i]] = here[alone.table[0, i]]
    return crowd, at


@pytest.mark.parametrize("tile", [DECODE, EXTEND], ids=["decode", "extend"])
def test_a_request_among_others_of_nan_gives_the_bits_it_gives_among_numbers(tile):
    rows, tile_rows = (1, 1) if tile is DECODE else (13, 4)
    alone = Pass([61], [rows], tile_rows, seed=3)
    got = []
    for others in (np.nan, 0.7):
        crowd, at = among_others(alone, rows, tile_rows, others)
        got.append(crowd.run(tile)[at : at + rows])
    np.testing.assert_array_equal(*got)
    assert relative_error(got[0], alone.exact()[:rows]) < 3e-6


def test_the_number_of_requests_changes_no_bit_of_a_row():
    many = decode([100 + 3 * i for i in range(11)])
    few = decode([100 + 3 * i for i in range(11)])
    few.q, few.lengths, few.tiles = few.q[4:7], few.lengths[4:7], few.tiles[4:7]
    np.testing.assert_array_equal(few.run(DECODE), many.run(DECODE)[4:7])


def test_bfloat16_stays_within_a_hundredth():
    for case, tile in (
        (decode(LENGTHS, dtype=jnp.bfloat16), DECODE),
        (Pass([70, 9, 33], [19, 9, 1], 4, dtype=jnp.bfloat16), EXTEND),
    ):
        got, want = case.run(tile), case.exact()
        assert np.linalg.norm(got - want) < 1e-2 * np.linalg.norm(want)


def called(case: Pass, platform: Platform) -> str:
    """The program of a dispatched call, as lowered from here."""
    fn = jax.jit(lambda *a: paged_attention(*a, scale=SCALE, platform=platform))
    return str(fn.trace(*case.arrays()).jaxpr)


def test_kernels_are_taken_on_gpus_for_what_they_serve():
    served = decode([20, 41], dim=64, dtype=jnp.bfloat16)
    for platform in (CUDA, Platform("rocm", "gfx942", ""), Platform("rocm", "gfx950", "")):
        text = called(served, platform)
        assert "paged_decode" in text
        assert "paged_combine" in text
        assert "paged_extend" in called(Pass([20, 41], [9, 13], 16, dim=128, dtype=jnp.bfloat16), platform)
        assert "paged_extend" in called(Pass([20, 41], [9, 13], 16, dim=256, dtype=jnp.bfloat16), platform)
    assert "pallas_call" not in called(served, CPU)
    assert "pallas_call" not in called(decode([20, 41], dim=64), CUDA)  # float32
    assert "pallas_call" not in called(decode([20, 41], dim=96, dtype=jnp.bfloat16), CUDA)


def test_tiles_that_cannot_run_are_refused():
    with pytest.raises(ValueError, match=r"DecodeTile.part is 32, less than a block of 64 keys"):
        DecodeTile(64, 32, 4, 1)
    with pytest.raises(ValueError, match=r"ExtendTile.queries is 96"):
        ExtendTile(96, 64, 4, 1)
    with pytest.raises(ValueError, match="3 warps"):
        DecodeTile(64, 64, 3, 1)
    with pytest.raises(ValueError, match="takes an ExtendTile"):
        Pass([20], [9], 8).run(DECODE)
    with pytest.raises(ValueError, match="takes a DecodeTile"):
        decode([20]).run(EXTEND)
    with pytest.raises(ValueError, match="12 rows a tile"):
        Pass([20], [9], 12).run(EXTEND)
    with pytest.raises(ValueError, match="32 query heads a key head are over the 16 rows"):
        Pass([20], [9], 4, heads=32, kv=1).run(ExtendTile(16, 16, 4, 1))


GPU_SHAPES = [(32, 8, 128), (16, 8, 128), (8, 1, 64), (32, 2, 64), (16, 4, 256), (8, 1, 256)]


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv", "dim"), GPU_SHAPES)
@pytest.mark.parametrize("page", [16, 64])
def test_on_a_gpu_decode_stays_within_a_hundredth(heads, kv, dim, page):
    case = decode([1, 63, 64, 65, 511, 512, 513, 2100, 700], page=page, heads=heads, kv=kv, dim=dim, dtype=jnp.bfloat16)
    options = {"platform": platform_of(jax.devices()[0]), "interpret": False}
    got, want = case.run(None, **options), case.exact()
    assert np.linalg.norm(got - want) < 1e-2 * np.linalg.norm(want)
    np.testing.assert_array_equal(case.run(None, **options), got)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv", "dim"), GPU_SHAPES)
@pytest.mark.parametrize("page", [16, 64])
def test_on_a_gpu_extend_stays_within_a_hundredth(heads, kv, dim, page):
    spans = [700, 40, 129, 3, 300], [120, 40, 17, 3, 1]
    case = Pass(*spans, 16, page=page, heads=heads, kv=kv, dim=dim, dtype=jnp.bfloat16, padding=3)
    options = {"platform": platform_of(jax.devices()[0]), "interpret": False}
    got, want = case.run(None, **options), case.exact()
    assert np.linalg.norm(got - want) < 1e-2 * np.linalg.norm(want)
    np.testing.assert_array_equal(case.run(None, **options), got)


@pytest.mark.gpu
def test_on_a_gpu_the_number_of_requests_changes_no_bit_of_a_row():
    options = {"platform": platform_of(jax.devices()[0]), "interpret": False}
    shape = {"heads": 32, "kv": 8, "dim": 128, "page": 64, "dtype": jnp.bfloat16}
    many = decode([1000 + 37 * i for i in range(13)], **shape)
    few = decode([1000 + 37 * i for i in range(13)], **shape)
    few.q, few.lengths, few.tiles = few.q[4:7], few.lengths[4:7], few.tiles[4:7]
    np.testing.assert_array_equal(few.run(None, **options), many.run(None, **options)[4:7])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 45])
def test_on_a_gpu_a_request_among_others_of_nan_gives_the_bits_it_gives_alone(rows):
    options = {"platform": platform_of(jax.devices()[0]), "interpret": False}
    tile_rows = 1 if rows == 1 else 16
    alone = Pass([1061], [rows], tile_rows, heads=32, kv=8, dim=128, page=64, dtype=jnp.bfloat16, seed=3)
    crowd, at = among_others(alone, rows, tile_rows, np.nan)
    np.testing.assert_array_equal(crowd.run(None, **options)[at : at + rows], alone.run(None, **options)[:rows])
