"""Sizes and places of one block manager. No disk tier is on by default: `volumes` is empty."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from event_plane.hashing import salt
from event_plane.schema import Namespace
from kvbm_core.errors import ConfigError

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "int8": 1}
"""Element types of a block and their sizes in bytes."""

BLOCKS_MAX = 1 << 24
BLOCK_BYTES_MAX = 64 * 1024 * 1024
SECRET_CHARACTERS_MIN = 16


class KvbmConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a block is, how many there are, and where copies go. Raises `ConfigError` when a number cannot work.

    A block holds `[layers, outer, page_tokens, heads × head_dim]` elements of `dtype`; `outer` is 2 for keys and
    values and 1 for MLA. `volumes` are tried in order when a block is put (the next one when one is full);
    `tenant_volumes` overrides them for a tenant.
    """

    layers: int
    outer: int = 2
    page_tokens: int = 16
    heads: int
    head_dim: int
    dtype: str = "float16"
    alignment_bytes: int = 1
    """A block starts at a multiple of this in its pool."""
    device_blocks: int
    host_blocks: int
    reuse: Literal["lru", "fifo"] = "lru"
    duplicates: Literal["allow", "reject"] = "reject"
    volumes: tuple[str, ...] = ()
    tenant_volumes: dict[str, tuple[str, ...]] = {}
    offload_queue_blocks: int = 4_096
    transfer_blocks: int = 32
    """Blocks of one copy or one call to the storage agent."""
    hash_secret: str
    """Keys the high half of every sequence hash, so that nobody forges another tenant's block."""
    model: str = ""
    revision: str = ""
    adapter: str = ""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("layers", 1, 1_024),
            ("outer", 1, 2),
            ("page_tokens", 1, 65_535),
            ("heads", 1, 4_096),
            ("head_dim", 1, 65_536),
            ("alignment_bytes", 1, 1 << 21),
            ("device_blocks", 1, BLOCKS_MAX),
            ("host_blocks", 1, BLOCKS_MAX),
            ("offload_queue_blocks", 1, BLOCKS_MAX),
            ("transfer_blocks", 1, 4_096),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{name} = {value} is out of range: set it from {low} to {high}")
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype = {self.dtype!r} is unknown: set one of {', '.join(DTYPE_BYTES)}")
        if self.alignment_bytes % DTYPE_BYTES[self.dtype] and self.alignment_bytes != 1:
            raise ConfigError(
                f"alignment_bytes = {self.alignment_bytes} splits an element of {self.dtype}: "
                f"set a multiple of {DTYPE_BYTES[self.dtype]}"
            )
        if self.block_bytes > BLOCK_BYTES_MAX:
            raise ConfigError(
                f"a block of {self.block_bytes} bytes is larger than {BLOCK_BYTES_MAX}: "
                f"lower page_tokens, now {self.page_tokens}"
            )
        if len(self.hash_secret) < SECRET_CHARACTERS_MIN:
            raise ConfigError(
                f"hash_secret has {len(self.hash_secret)} characters: set at least {SECRET_CHARACTERS_MIN} random ones"
            )
        for where, volumes in (("volumes", self.volumes), *self.tenant_volumes.items()):
            if len(set(volumes)) != len(volumes):
                raise ConfigError(f"volumes of {where!r} name one twice: {', '.join(volumes)}; name each once")

    @property
    def inner(self) -> int:
        """Elements of one token, one layer and one outer: heads × head_dim."""
        return self.heads * self.head_dim

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, without padding between blocks."""
        return self.layers * self.outer * self.page_tokens * self.inner * DTYPE_BYTES[self.dtype]

    def volumes_of(self, tenant: str) -> tuple[str, ...]:
        """Volumes that a tenant's blocks are put to, in the order to try them."""
        return self.tenant_volumes.get(tenant, self.volumes)

    def namespace_of(self, tenant: str) -> Namespace:
        """The namespace of a tenant's blocks."""
        return Namespace(
            tenant=tenant,
            model=self.model,
            revision=self.revision,
            adapter=self.adapter,
            kv_dtype=self.dtype,
            block_tokens=self.page_tokens,
            hash_root=f"{self.salt_of(tenant):016x}",
        )

    def salt_of(self, tenant: str) -> int:
        """u64 seed of a tenant's token hashes."""
        return salt(self.adapter, tenant)

    def secret_of(self, tenant: str) -> bytes:
        """32 bytes that key a tenant's sequence hashes: BLAKE2b of the tenant's name under `hash_secret`."""
        key = hashlib.blake2b(self.hash_secret.encode(), digest_size=32).digest()
        return hashlib.blake2b(tenant.encode(), key=key, digest_size=32).digest()
