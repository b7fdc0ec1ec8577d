"""A trace in memory: which request used which blocks, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from advisor.caches import RequestTrace
from advisor.path_hashes import NO_HASH, path_hash
from event_plane.recording import read_trace
from event_plane.schema import RECORD_DTYPE, Records, Tier


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """Of a trace: uses (`accesses`) of different `blocks`; tokens and bytes of a whole one, 0: not told."""

    requests: int
    accesses: int
    blocks: int
    input_tokens: int
    block_tokens: int
    block_bytes: int
    span_s: float


@dataclass(frozen=True, slots=True)
class Trace:
    """A parsed trace. Request i has the blocks `ends[i - 1]` … `ends[i]` of `records` and `hashes`, root to leaf.

    `records` are templates that say which block it is; `hashes` u8 (n, 2) are its halves, low half first.
    """

    timestamps_ms: list[float]
    input_tokens: list[int]
    block_tokens: list[int]
    ends: list[int]
    records: Records
    hashes: npt.NDArray[np.uint64]
    block_bytes: int = 0
    """Of a whole block; 0: nobody told."""
    priorities: tuple[int, ...] = ()
    """By request, 0 where not told; empty: of a recording."""

    @property
    def requests(self) -> int:
        return len(self.ends)

    @property
    def accesses(self) -> int:
        return len(self.records)

    def as_requests(self) -> RequestTrace:
        """The trace as `advisor.caches` replays it."""
        return RequestTrace.of(self.hashes, self.ends, self.records["depth"], self.input_tokens, self.block_tokens)

    def facts(self) -> RequestFacts:
        """What there is to say of it before it is replayed."""
        return RequestFacts(
            requests=self.requests,
            accesses=self.accesses,
            blocks=self.as_requests().blocks,
            input_tokens=sum(self.input_tokens),
            block_tokens=max(self.block_tokens, default=0),
            block_bytes=self.block_bytes,
            span_s=(self.timestamps_ms[-1] - self.timestamps_ms[0]) / 1000 if self.requests else 0.0,
        )

    def low_hashes(self, requests: RequestTrace, present: npt.NDArray[np.bool_]) -> list[int]:
        """Low 64 bits of the hashes of those blocks of `requests` that are present, sorted."""
        lows = np.empty(requests.blocks, np.uint64)
        lows[requests.ids] = self.hashes[:, 0]
        kept: list[int] = np.sort(lows[present]).tolist()
        return kept


class TraceRequests:
    """Takes requests one by one, by time, and becomes a `Trace`."""

    def __init__(self) -> None:
        self._timestamps_ms: list[float] = []
        self._input_tokens: list[int] = []
        self._block_tokens: list[int] = []
        self._ends: list[int] = []
        self._hashes: list[bytes] = []

    def add(self, timestamp_ms: float, input_tokens: int, block_tokens: int, hashes: Sequence[bytes]) -> None:
        """`hashes`: 16 bytes for each block, root first. `block_tokens`: of each block but the last."""
        self._hashes += hashes
        self._timestamps_ms.append(timestamp_ms)
        self._input_tokens.append(input_tokens)
        self._block_tokens.append(block_tokens)
        self._ends.append(len(self._hashes))

    def trace(self, block_bytes: int = 0) -> Trace:
        ends = np.asarray(self._ends, np.int64)
        lengths = np.diff(ends, prepend=0)
        firsts = np.repeat(ends - lengths, lengths)
        depths = np.arange(len(self._hashes)) - firsts
        pairs = np.frombuffer(b"".join(self._hashes), np.uint64).reshape(-1, 2)
        parents = np.roll(pairs, 1, axis=0)
        parents[depths == 0] = 0
        input_tokens, block_tokens = (np.asarray(each, np.int64) for each in (self._input_tokens, self._block_tokens))
        tokens = np.repeat(block_tokens, lengths)
        tokens[ends[lengths > 0] - 1] = (input_tokens - (lengths - 1) * block_tokens)[lengths > 0]
        records = np.zeros(len(self._hashes), RECORD_DTYPE)
        records["tier"] = Tier.G3
        records["depth"] = depths
        records["sequence_hash_lo"], records["sequence_hash_hi"] = pairs[:, 0], pairs[:, 1]
        records["parent_hash_lo"], records["parent_hash_hi"] = parents[:, 0], parents[:, 1]
        records["block_tokens"] = np.clip(tokens, 0, 0xFFFF)
        records["hits"] = 1
        return Trace(
            self._timestamps_ms, self._input_tokens, self._block_tokens, self._ends, records, pairs, block_bytes
        )


def load_trace(path: Path) -> Trace:
    """Read a trace, its requests by time. A block is the same only if its whole path is: its hash chains over the path.

    Raises `RecordingError` naming the line.
    """
    known: dict[tuple[bytes, int], bytes] = {}
    requests = TraceRequests()
    priorities: list[int] = []
    for request in sorted(read_trace(path), key=lambda request: request.timestamp_ms):
        priorities.append(request.priority)
        hashes: list[bytes] = []
        parent = NO_HASH
        for block_id in request.block_ids:
            block_hash = known.get((parent, block_id))
            if block_hash is None:
                block_hash = known[parent, block_id] = path_hash(parent, block_id)
            hashes.append(block_hash)
            parent = block_hash
        requests.add(request.timestamp_ms, request.input_tokens, request.block_tokens, hashes)
    return replace(requests.trace(), priorities=tuple(priorities))
