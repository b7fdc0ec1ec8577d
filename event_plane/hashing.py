"""Tokens → token hash → sequence hash.

Salt and token hash are those of `compute_block_hash_for_seq` in the package `ai-dynamo-runtime` 1.6.1, bit for bit; the
low half of a sequence hash chains them. The high half is keyed by a secret of the namespace, so that nobody without it
can forge a block that another tenant would hit.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

Tokens = Sequence[int] | npt.NDArray[np.integer]
"""One-dimensional token ids, each a u32."""

BASE_SEED = 1337
SECRET_BYTES_MAX = 64
_U64 = 0xFFFF_FFFF_FFFF_FFFF
_PAIR = struct.Struct("<QQ")


def salt(adapter: str = "", namespace: str = "") -> int:
    """u64 seed of the token hashes of one adapter and namespace. An empty string counts as absent."""
    seed = BASE_SEED
    if adapter:
        seed += xxhash.xxh3_64_intdigest(adapter.encode(), 0)
    if namespace:
        seed += xxhash.xxh3_64_intdigest(namespace.encode(), 1)
    return seed & _U64


def token_hash(tokens: Tokens, salt: int = BASE_SEED) -> int:
    """u64 hash of one block's own tokens. Raises `ValueError` for a token that is no u32."""
    return xxhash.xxh3_64_intdigest(little_endian_u32(tokens), salt)


class SequenceHasher:
    """Hashes one growing sequence block by block. Not thread-safe; tokens short of a block wait for the next call."""

    def __init__(self, salt: int, secret: bytes, block_tokens: int, *, after: int = 0) -> None:
        """`salt` is a u64, `secret` the namespace's key of at most 64 bytes. `after` is the 128-bit sequence hash of
        the block that the next one follows, 0 at the root. Raises `ValueError` naming a bad one."""
        if not 0 <= salt <= _U64:
            raise ValueError(f"salt {salt} is no u64: take it from hashing.salt()")
        if len(secret) > SECRET_BYTES_MAX:
            raise ValueError(f"namespace secret has {len(secret)} bytes: at most {SECRET_BYTES_MAX} are a BLAKE2b key")
        if block_tokens < 1:
            raise ValueError(f"block_tokens {block_tokens} must be at least 1")
        if after < 0 or after >> 128:
            raise ValueError(f"after = {after:#x} is no sequence hash: it has at most 128 bits")
        self._salt = salt
        self._secret = secret
        self._block_bytes = 4 * block_tokens
        self._partial = b""
        # A block's sequence hash is all that the chain needs of what came before it.
        self._low: int | None = after & _U64 if after else None
        self._high = after >> 64

    def extend(self, tokens: Tokens) -> list[int]:
        """128-bit sequence hashes (high << 64 | low) of the blocks that `tokens` complete, in order."""
        waiting = self._partial + little_endian_u32(tokens)
        whole_bytes = len(waiting) - len(waiting) % self._block_bytes
        hashes = [self._next(waiting[at : at + self._block_bytes]) for at in range(0, whole_bytes, self._block_bytes)]
        self._partial = waiting[whole_bytes:]
        return hashes

    def _next(self, block: bytes) -> int:
        own = xxhash.xxh3_64_intdigest(block, self._salt)
        self._low = own if self._low is None else xxhash.xxh3_64_intdigest(_PAIR.pack(self._low, own), BASE_SEED)
        keyed = hashlib.blake2b(self._high.to_bytes(8, "little") + block, digest_size=8, key=self._secret)
        self._high = int.from_bytes(keyed.digest(), "little")
        return self._high << 64 | self._low


def sequence_hashes(tokens: Tokens, block_tokens: int, salt: int, secret: bytes) -> list[int]:
    """128-bit sequence hashes of the full blocks of `tokens`, root first; a partial last block has none."""
    return SequenceHasher(salt, secret, block_tokens).extend(tokens)


def little_endian_u32(tokens: Tokens) -> bytes:
    """Four bytes a token. Raises `ValueError` for a token that is no u32, or tokens of another shape than one row."""
    array = np.asarray(tokens)
    if array.size == 0:
        return b""
    if array.ndim != 1 or array.dtype.kind not in "ui":
        raise ValueError(f"tokens have shape {array.shape} and dtype {array.dtype}: give one dimension of integers")
    if array.dtype != np.uint32:
        lowest, highest = int(array.min()), int(array.max())
        if lowest < 0 or highest > 0xFFFF_FFFF:
            raise ValueError(f"token {lowest if lowest < 0 else highest} is no u32")
    return array.astype("<u4", copy=False).tobytes()
