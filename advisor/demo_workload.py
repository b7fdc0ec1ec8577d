"""What the demo's engine is asked: chats, agents and scans of several tenants, or the requests of a trace.

Pure and seeded: the same settings and seed give the same requests. Time is virtual; it only orders the requests.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.uint32]
"""One-dimensional token ids."""

VOCABULARY_TOKENS = 32_000
TRACE_TENANT = "trace"


class TenantSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tenant's habits. Every prompt starts with the tenant's `system_tokens` (a system prompt, or tool prompts).

    `chat` and `agent` sessions go on with one of `documents` shared ones, picked by Zipf, then grow by a turn and its
    answer up to `turns_max` times with `think_s` between turns on average. A `scan` reads a document of its own once.
    """

    name: str
    kind: Literal["chat", "agent", "scan"]
    sessions: int
    """How many go on at a time."""
    system_tokens: int
    documents: int = 1
    document_tokens: int
    zipf_exponent: float = 1.0
    turns_max: int = 1
    turn_tokens: int = 16
    answer_tokens: int = 16
    think_s: float = 10.0


DEFAULT_TENANTS = (
    TenantSettings(
        name="acme", kind="chat", sessions=12, system_tokens=64, documents=60, document_tokens=96, turns_max=8,
        turn_tokens=32, answer_tokens=40, think_s=20.0,
    ),
    TenantSettings(
        name="borealis", kind="chat", sessions=8, system_tokens=96, documents=40, document_tokens=128, turns_max=6,
        turn_tokens=24, answer_tokens=48, think_s=15.0,
    ),
    TenantSettings(
        name="forge", kind="agent", sessions=3, system_tokens=192, documents=40, document_tokens=256, turns_max=14,
        turn_tokens=48, answer_tokens=32, think_s=4.0,
    ),
    TenantSettings(
        name="harbor", kind="agent", sessions=2, system_tokens=160, documents=30, document_tokens=192, turns_max=12,
        turn_tokens=64, answer_tokens=24, think_s=5.0,
    ),
    TenantSettings(
        name="ledger", kind="scan", sessions=1, system_tokens=32, document_tokens=384, think_s=8.0,
    ),
)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, and the tokens that the engine will answer with."""

    tenant: str
    kind: str
    prompt: Tokens
    answer: Tokens


@dataclass(slots=True)
class _Session:
    """One conversation, task or scan: what was said so far and how many turns are left."""

    tenant: TenantSettings
    number: int
    context: Tokens
    turns_left: int


class Workload:
    """Endless requests of several tenants."""

    def __init__(self, tenants: Sequence[TenantSettings], seed: int) -> None:
        self._seed = seed
        self._random = np.random.default_rng(seed)
        self._popularity = {tenant.name: _zipf(tenant) for tenant in tenants}
        self._started = 0
        self._due: list[tuple[float, int, _Session]] = []
        for tenant in tenants:
            for _ in range(tenant.sessions):
                self._start(tenant, self._random.uniform(0.0, tenant.think_s))

    def requests(self) -> Iterator[Request]:
        """The next request of whichever session is due first, for ever."""
        while True:
            due_s, _, session = heapq.heappop(self._due)
            yield self._turn(session)
            due_s += self._random.exponential(session.tenant.think_s)
            if session.turns_left:
                heapq.heappush(self._due, (due_s, session.number, session))
            else:
                self._start(session.tenant, due_s)

    def _start(self, tenant: TenantSettings, due_s: float) -> None:
        self._started += 1
        number = self._started
        if tenant.kind == "scan":
            document = f"scan {number}"
        else:
            rank = int(np.searchsorted(self._popularity[tenant.name], self._random.random()))
            document = f"document {min(rank, tenant.documents - 1)}"
        context = np.concatenate(
            [
                self._text(tenant.name, "system", tenant.system_tokens),
                self._text(tenant.name, document, tenant.document_tokens),
            ]
        )
        turns = 1 if tenant.kind == "scan" else int(self._random.integers(1, tenant.turns_max + 1))
        heapq.heappush(self._due, (due_s, number, _Session(tenant, number, context, turns)))

    def _turn(self, session: _Session) -> Request:
        tenant = session.tenant
        turn = f"session {session.number} turn {session.turns_left}"
        asked = self._text(tenant.name, f"{turn} asked", self._length(tenant.turn_tokens))
        answer = self._text(tenant.name, f"{turn} answered", self._length(tenant.answer_tokens))
        prompt = np.concatenate([session.context, asked])
        session.context = np.concatenate([prompt, answer])
        session.turns_left -= 1
        return Request(tenant.name, tenant.kind, prompt, answer)

    def _length(self, typical_tokens: int) -> int:
        """Half to one and a half of the typical length, at least one token."""
        return int(self._random.integers(max(1, typical_tokens // 2), typical_tokens + typical_tokens // 2 + 1))

    def _text(self, tenant: str, name: str, tokens: int) -> Tokens:
        """The tokens of a named text, the same whenever it is asked for."""
        key = hashlib.blake2b(f"{self._seed}/{tenant}/{name}".encode(), digest_size=16).digest()
        generator = np.random.Generator(np.random.Philox(key=np.frombuffer(key, dtype=np.uint64)))
        return generator.integers(0, VOCABULARY_TOKENS, tokens, dtype=np.uint32)


def trace_requests(block_ids_of_requests: Iterable[Sequence[int]], page_tokens: int) -> Iterator[Request]:
    """A trace's requests scaled down: each block id becomes one block of `page_tokens` tokens that only it has."""
    nothing = np.empty(0, dtype=np.uint32)
    for block_ids in block_ids_of_requests:
        first = np.asarray(block_ids, dtype=np.uint64) * page_tokens
        tokens = (first[:, np.newaxis] + np.arange(page_tokens, dtype=np.uint64)).astype(np.uint32)
        yield Request(TRACE_TENANT, "trace", tokens.reshape(-1), nothing)


def _zipf(tenant: TenantSettings) -> npt.NDArray[np.float64]:
    """Cumulative probabilities of the tenant's documents, the most popular first."""
    weights = np.arange(1, tenant.documents + 1, dtype=np.float64) ** -tenant.zipf_exponent
    cumulative: npt.NDArray[np.float64] = np.cumsum(weights / weights.sum())
    return cumulative
