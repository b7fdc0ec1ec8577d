"""Metadata for a peer: whole it comes through, and nothing damaged reaches NIXL, which it would end the process of."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage_agent.errors import TransferError
from storage_agent.nixl_metadata import open_metadata, seal_metadata
from tests.examples import examples


@settings(max_examples=examples(100), deadline=None)
@given(st.binary(max_size=300), st.sampled_from(["", "1.5.1"]))
def test_what_is_sealed_comes_through(metadata: bytes, release: str) -> None:
    assert open_metadata(seal_metadata(metadata, release), "1.5.1") == metadata


@settings(max_examples=examples(150), deadline=None)
@given(st.binary(max_size=100), st.data())
def test_what_is_damaged_is_refused(metadata: bytes, data: st.DataObject) -> None:
    sealed = seal_metadata(metadata, "1.5.1")
    at = data.draw(st.integers(0, len(sealed) - 1))
    flipped = bytearray(sealed)
    flipped[at] ^= data.draw(st.integers(1, 255))
    for damaged in (bytes(flipped), sealed[:at], sealed + b"x", metadata):
        with pytest.raises(TransferError, match="are damaged"):
            open_metadata(damaged, "1.5.1")


def test_another_release_of_nixl_is_named() -> None:
    with pytest.raises(TransferError, match=r"the peer has NIXL 1\.5\.1, here is 1\.6\.0; install one release"):
        open_metadata(seal_metadata(b"m", "1.5.1"), "1.6.0")
