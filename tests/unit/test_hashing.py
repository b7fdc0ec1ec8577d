"""Token and sequence hashes, against values that `ai-dynamo-runtime` 1.6.1 computed for tokens 1 to 32."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import xxhash

from event_plane.hashing import SequenceHasher, salt, sequence_hashes, token_hash

TOKENS = list(range(1, 33))
SECRET = b"a namespace's secret"


@pytest.mark.parametrize(
    ("adapter", "namespace", "hashes"),
    [
        ("", "", [16863443419780771464, 2287610619914608821]),
        ("adapter-a", "", [4377081107200288488, 16216151377791080369]),
        ("", "tenant-a", [8175209796170318505, 13248293275458056256]),
        ("adapter-a", "tenant-a", [6479329714943191495, 174917099412922851]),
    ],
)
def test_token_hashes_equal_the_reference_runtime(adapter: str, namespace: str, hashes: list[int]) -> None:
    seed = salt(adapter=adapter, namespace=namespace)
    assert [token_hash(TOKENS[:16], seed), token_hash(TOKENS[16:], seed)] == hashes


def test_low_half_chains_token_hashes() -> None:
    first, second = 16863443419780771464, 2287610619914608821
    chained = xxhash.xxh3_64_intdigest(first.to_bytes(8, "little") + second.to_bytes(8, "little"), 1337)
    lows = [each & (2**64 - 1) for each in sequence_hashes(TOKENS, 16, salt(), SECRET)]
    assert lows == [first, chained]


def test_high_half_chains_keyed_blake2b() -> None:
    blocks = [np.array(TOKENS[at : at + 16], "<u4").tobytes() for at in (0, 16)]
    first = hashlib.blake2b(bytes(8) + blocks[0], digest_size=8, key=SECRET).digest()
    second = hashlib.blake2b(first + blocks[1], digest_size=8, key=SECRET).digest()
    highs = [(each >> 64).to_bytes(8, "little") for each in sequence_hashes(TOKENS, 16, salt(), SECRET)]
    assert highs == [first, second]


def test_secret_changes_the_high_half_alone() -> None:
    ours, theirs = (sequence_hashes(TOKENS, 16, salt(), secret) for secret in (b"ours", b"theirs"))
    for one, other in zip(ours, theirs, strict=True):
        assert one >> 64 != other >> 64
        assert one & (2**64 - 1) == other & (2**64 - 1)


def test_partial_last_block_has_no_hash() -> None:
    assert sequence_hashes(TOKENS[:31], 16, salt(), SECRET) == sequence_hashes(TOKENS[:16], 16, salt(), SECRET)
    assert sequence_hashes([], 16, salt(), SECRET) == []


@pytest.mark.parametrize("cut", [0, 1, 15, 16, 17, 31])
def test_hashing_piecewise_equals_hashing_at_once(cut: int) -> None:
    hasher = SequenceHasher(salt(), SECRET, 16)
    assert hasher.extend(TOKENS[:cut]) + hasher.extend(TOKENS[cut:]) == sequence_hashes(TOKENS, 16, salt(), SECRET)


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_chain_goes_on_from_the_hash_of_the_block_before(blocks: int) -> None:
    whole = sequence_hashes([*TOKENS, *TOKENS], 16, salt(), SECRET)
    hasher = SequenceHasher(salt(), SECRET, 16, after=whole[blocks - 1])
    assert hasher.extend([*TOKENS, *TOKENS][16 * blocks :]) == whole[blocks:]


@pytest.mark.parametrize("after", [-1, 1 << 128])
def test_a_hash_to_go_on_from_has_128_bits(after: int) -> None:
    with pytest.raises(ValueError, match="no sequence hash"):
        SequenceHasher(salt(), SECRET, 16, after=after)


@pytest.mark.parametrize("dtype", ["<u4", ">u4", "i8", "u2"])
def test_arrays_hash_like_lists(dtype: str) -> None:
    array = np.array(TOKENS, dtype)
    assert sequence_hashes(array, 16, salt(), SECRET) == sequence_hashes(TOKENS, 16, salt(), SECRET)


@pytest.mark.parametrize("tokens", [[-1], [2**32], np.array([-1]), np.array([0.5]), [[1, 2]], [2**70]])
def test_tokens_that_are_no_u32_are_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="token"):
        token_hash(tokens)


@pytest.mark.parametrize(
    ("seed", "secret", "block_tokens", "said"),
    [(-1, b"", 16, "salt -1"), (2**64, b"", 16, "u64"), (0, bytes(65), 16, "65 bytes"), (0, b"", 0, "block_tokens 0")],
)
def test_bad_hasher_settings_are_named(seed: int, secret: bytes, block_tokens: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SequenceHasher(seed, secret, block_tokens)
