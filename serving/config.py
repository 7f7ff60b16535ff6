"""Settings of the engine. Everything that decides a program's shape is here and fixed before the first compile."""

from dataclasses import dataclass

from vitstripe.selftest import DEFAULT_SECONDS

ROW_TILE = 16
"""Rows of one request are padded to a multiple of this in a prefill pass (serving.models.step)."""

STATE_CHUNK = 64
"""The same for decoders that keep a state a request: rows that their recurrence takes in one go. What public
implementations of the delta rule use; a multiple of ROW_TILE."""

CACHE_DTYPES = ("auto", "float8")
"""How an indexer's keys are cached, and latents: in the dtype of the weights, or in the platform's float8."""


@dataclass(frozen=True)
class EngineConfig:
    """Limits and switches of one engine. Raises ValueError naming the field.

    tp: devices on the mesh axis. max_model_len: tokens a request may hold, prompt and answer. page_size: tokens a cache
    page. max_seqs: requests computed at once. prefill_tokens: most rows of one prefill pass. cache_tokens: tokens the
    paged cache holds (None: from free device memory, or max_seqs * max_model_len on a CPU). prefix_cache: keep the
    pages of what was computed for requests that begin alike; never done where the decoder keeps a state a request.
    index_keys: "auto" keeps an indexer's keys in the dtype of the weights, "float8" in the platform's float8, one scale
    a key, with queries and keys rotated (Hadamard) before they are rounded. latent_cache: the same of the latents that
    are attended to, one scale a token; rotated columns stay in the dtype of the weights.
    max_queue: requests that may wait. max_queue_tokens: prompt tokens that may wait (None: half of max_queue requests
    of full length). step_seconds: a device call that takes longer is taken for dead. dp_encoder: deal images over the
    mesh. indexer_stripes: stripe the indexer's rows. stripe_rows: rows a stripe. merge: how stripes are put together.
    stripe_min_keys: mean keys a row from which a pass is striped (None: by merge and link). max_held_image_bytes:
    prepared pixels that all requests together may hold on the host.
    """

    tp: int = 1
    max_model_len: int = 4096
    page_size: int = 64
    max_seqs: int = 16
    prefill_tokens: int = 512
    cache_tokens: int | None = None
    prefix_cache: bool = True
    index_keys: str = "auto"
    latent_cache: str = "auto"
    max_queue: int = 256
    max_queue_tokens: int | None = None
    step_seconds: float = 300.0
    dp_encoder: bool = True
    indexer_stripes: bool = True
    stripe_rows: int = 64
    merge: str = "pmax"
    stripe_min_keys: int | None = None
    max_held_image_bytes: int = 2 << 30

    def __post_init__(self):
        positive = ("tp", "max_model_len", "page_size", "max_seqs", "prefill_tokens", "max_queue", "stripe_rows")
        for name in (*positive, "max_held_image_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.prefill_tokens % ROW_TILE:
            raise ValueError(f"prefill_tokens is {self.prefill_tokens}; it must be a multiple of {ROW_TILE}")
        if self.cache_tokens is not None and self.cache_tokens < self.max_model_len:
            raise ValueError(
                f"cache_tokens is {self.cache_tokens}, less than max_model_len {self.max_model_len}: "
                f"one request could never finish"
            )
        if self.max_queue_tokens is not None and self.max_queue_tokens < 1:
            raise ValueError(f"max_queue_tokens is {self.max_queue_tokens}; it must be at least 1")
        if not 0 < self.step_seconds < float("inf"):
            raise ValueError(f"step_seconds is {self.step_seconds}; it must be a positive number of seconds")
        if self.stripe_min_keys is not None and self.stripe_min_keys < 0:
            raise ValueError(f"stripe_min_keys is {self.stripe_min_keys}; it must not be negative")
        for name in ("index_keys", "latent_cache"):
            if getattr(self, name) not in CACHE_DTYPES:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(CACHE_DTYPES)}")
        if self.merge not in ("pmax", "all_gather"):
            raise ValueError(f"merge is {self.merge!r}; it must be 'pmax' or 'all_gather'")

    @property
    def queue_tokens(self) -> int:
        """Prompt tokens that may wait; one request may always, however long."""
        return self.max_queue_tokens or max(1, self.max_queue // 2) * self.max_model_len

    @property
    def first_run_seconds(self) -> float:
        """What a program's first run may take; it may start a library on every device, which no step does."""
        return max(self.step_seconds, DEFAULT_SECONDS)

    @property
    def pages_per_seq(self) -> int:
        """Pages that the longest request needs."""
        return -(-self.max_model_len // self.page_size)

    @property
    def token_buckets(self) -> tuple[int, ...]:
        """Row counts of prefill passes, ascending: prefill_tokens and its quarters down to 64 rows."""
        sizes, size = [], self.prefill_tokens
        while size >= 64 and size % ROW_TILE == 0:
            sizes.append(size)
            size //= 4
        return tuple(reversed(sizes or [self.prefill_tokens]))

    @property
    def batch_buckets(self) -> tuple[int, ...]:
        """Request counts of decode passes, ascending: max_seqs and its quarters down to 1."""
        sizes, size = [self.max_seqs], self.max_seqs
        while size > 1:
            size = max(1, size // 4)
            sizes.append(size)
        return tuple(reversed(sizes))


def bucket_for(buckets: tuple[int, ...], size: int) -> int:
    """The smallest bucket that holds `size`. Raises ValueError when none does."""
    for bucket in buckets:
        if size <= bucket:
            return bucket
    raise ValueError(f"{size} is over the largest bucket {buckets[-1]}")
