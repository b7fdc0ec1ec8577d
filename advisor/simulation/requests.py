"""The requests of a synthetic workload, by time."""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import msgspec

from advisor.simulation.contexts import BlockNumbers, Context
from advisor.simulation.workload import Burst, TenantLoad, Workload

ANSWERED_TOKENS_PER_S = 50.0
"""A turn cannot follow before the answer to the last one has been written."""

_LENGTH_SPREAD = 0.5
_PAUSE_SPREAD = 1.0
_LONGEST_TIMES_MEDIAN = 8.0
_BACK_WITHIN_S = 1.0
"""Whoever waited for a restart asks again within so long of it."""


class SimulatedRequest(msgspec.Struct, frozen=True, rename={
    "timestamp_ms": "timestamp", "input_tokens": "input_length", "output_tokens": "output_length",
    "block_ids": "hash_ids",
}):  # fmt: skip
    """One request, with what an engine knows of it beyond its tokens. As JSON a line of a Mooncake trace."""

    timestamp_ms: int
    input_tokens: int
    output_tokens: int
    block_ids: list[int]
    session_id: str
    tenant: str
    priority: int


@dataclass(slots=True)
class _Tenant:
    """`texts` numbers its shared texts; `popularity` is cumulative."""

    load: TenantLoad
    bursts: list[Burst]
    arrivals: Random
    system_text: int
    document_texts: range
    popularity: list[float]
    sessions: int = 0


@dataclass(slots=True)
class _Session:
    tenant: _Tenant
    number: int
    random: Random
    turns_left: int
    context: Context | None = None

    def name(self) -> str:
        return f"{self.tenant.load.name}-{self.number}"


@dataclass(order=True, slots=True)
class _Due:
    at_s: float
    order: int
    tenant: _Tenant = field(compare=False)
    session: _Session | None = field(compare=False)
    """None: a new session begins."""


def simulate_requests(workload: Workload, seed: int) -> Iterator[SimulatedRequest]:
    """Every request of `workload`, by time. Each session draws from its own seed: tenants do not disturb each other."""
    return _Simulation(workload, seed).run()


class _Simulation:
    def __init__(self, workload: Workload, seed: int) -> None:
        self._workload = workload
        self._seed = seed
        self._numbers = BlockNumbers()
        self._texts = itertools.count()
        self._order = itertools.count()
        self._due: list[_Due] = []
        self._end_s = workload.minutes * 60
        for load in workload.tenants:
            self._expect_session(self._tenant(load), 0.0)

    def run(self) -> Iterator[SimulatedRequest]:
        while self._due:
            due = heapq.heappop(self._due)
            if due.session is None:
                self._expect_session(due.tenant, due.at_s)
                self._push(due.at_s, self._begun(due.tenant))
            elif (back_s := self._back_s(due.at_s, due.session)) is not None:
                self._push(back_s, due.session)
            else:
                yield self._turn(due.session, due.at_s)

    def _tenant(self, load: TenantLoad) -> _Tenant:
        weights = [rank**-load.zipf_exponent for rank in range(1, load.documents + 1)]
        system_text = next(self._texts)
        first = next(self._texts)
        self._texts = itertools.count(first + load.documents)
        return _Tenant(
            load,
            [burst for burst in self._workload.bursts if not burst.tenants or load.name in burst.tenants],
            Random(f"{self._seed}/{load.name}"),
            system_text,
            range(first, first + load.documents),
            list(itertools.accumulate(weights)),
        )

    def _expect_session(self, tenant: _Tenant, now_s: float) -> None:
        """Arrivals come one by one at random, at the highest rate there is; a share of them is let in (thinning)."""
        most = math.prod(max(burst.times, 1.0) for burst in tenant.bursts)
        rate_per_s = tenant.load.sessions_per_minute / 60 * most
        while now_s < self._end_s:
            now_s += tenant.arrivals.expovariate(rate_per_s)
            times = math.prod(b.times for b in tenant.bursts if b.at_s <= now_s < b.at_s + b.for_s)
            if tenant.arrivals.random() * most < times:
                self._push(now_s, None, tenant)
                return

    def _begun(self, tenant: _Tenant) -> _Session:
        tenant.sessions += 1
        random = Random(f"{self._seed}/{tenant.load.name}/{tenant.sessions}")
        one_turn = tenant.load.one_turn_share > 0 and random.random() < tenant.load.one_turn_share
        return _Session(tenant, tenant.sessions, random, 1 if one_turn else _geometric(random, tenant.load.turns_mean))

    def _push(self, at_s: float, session: _Session | None, tenant: _Tenant | None = None) -> None:
        owner = session.tenant if session is not None else tenant
        assert owner is not None
        if at_s < self._end_s:
            heapq.heappush(self._due, _Due(at_s, next(self._order), owner, session))

    def _back_s(self, at_s: float, session: _Session) -> float | None:
        for restart in self._workload.restarts:
            if restart.at_s <= at_s < restart.at_s + restart.for_s:
                return restart.at_s + restart.for_s + session.random.uniform(0.0, _BACK_WITHIN_S)
        return None

    def _turn(self, session: _Session, now_s: float) -> SimulatedRequest:
        load, random = session.tenant.load, session.random
        if session.context is None:
            session.context = self._opening(session)
        context = session.context
        context.append(next(self._texts), _length(random, load.turn_tokens))
        answer_tokens = _length(random, load.answer_tokens)
        request = SimulatedRequest(
            int(now_s * 1000),
            context.tokens,
            answer_tokens,
            context.block_ids(),
            session.name(),
            load.name,
            load.priority,
        )
        session.turns_left -= 1
        if load.keeps_context:
            context.append(next(self._texts), answer_tokens)
        else:
            session.context = None
        if session.turns_left and context.tokens + load.turn_tokens <= load.context_tokens_max:
            self._push(now_s + answer_tokens / ANSWERED_TOKENS_PER_S + _pause_s(random, load.think_s), session)
        return request

    def _opening(self, session: _Session) -> Context:
        tenant, random = session.tenant, session.random
        load = tenant.load
        context = Context(self._numbers)
        context.append(tenant.system_text, load.system_tokens)
        for text in _drawn(tenant, random):
            context.append(text, load.document_tokens)
        if load.own_tokens:
            context.append(next(self._texts), _length(random, load.own_tokens))
        return context


def _drawn(tenant: _Tenant, random: Random) -> list[int]:
    """Different documents, in the order drawn."""
    drawn: dict[int, None] = {}
    while len(drawn) < tenant.load.documents_drawn:
        rank = bisect(tenant.popularity, random.random() * tenant.popularity[-1])
        drawn[tenant.document_texts[min(rank, len(tenant.document_texts) - 1)]] = None
    return list(drawn)


def _length(random: Random, median_tokens: int) -> int:
    return max(1, int(_log_normal(random, median_tokens, _LENGTH_SPREAD)))


def _pause_s(random: Random, median_s: float) -> float:
    return _log_normal(random, median_s, _PAUSE_SPREAD)


def _log_normal(random: Random, median: float, spread: float) -> float:
    return median * min(_LONGEST_TIMES_MEDIAN, math.exp(random.gauss(0.0, spread)))


def _geometric(random: Random, mean: float) -> int:
    """At least 1."""
    if mean <= 1:
        return 1
    return 1 + int(math.log(1.0 - random.random()) / math.log(1.0 - 1.0 / mean))
