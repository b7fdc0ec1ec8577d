"""Whether a block is sooner loaded than computed: measured rates, a given prefill rate, and the rule. Pure.

A load of `n` blocks over a path takes `call_s + n × block_bytes / bytes_per_s`, both fitted to what was measured;
computing takes `tokens / prefill_tokens_per_s`. Blocks are loaded from the first on, since an engine can go on only
from a prefix; so the choice is how many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import NamedTuple

from kvbm_core.paths import TransferPath

STALE_S = 30.0
"""A path that carried nothing for so long is measured anew: else a slow moment would end its use for ever."""
_FORGET = 0.98
"""Weight that a measurement keeps at each later one: about the last fifty count."""


@dataclass(slots=True)
class PathRate:
    """Seconds as a line over bytes, by least squares that forget. Not thread-safe."""

    weight: float = 0.0
    bytes_mean: float = 0.0
    seconds_mean: float = 0.0
    bytes_spread: float = 0.0
    together_spread: float = 0.0
    measured_s: float = 0.0

    def add(self, moved_bytes: int, seconds: float, now_s: float) -> None:
        """One call moved so much in so long."""
        self.measured_s = now_s
        self.weight = self.weight * _FORGET + 1.0
        step = 1.0 / self.weight
        off_bytes = moved_bytes - self.bytes_mean
        off_seconds = seconds - self.seconds_mean
        self.bytes_mean += step * off_bytes
        self.seconds_mean += step * off_seconds
        keep = 1.0 - step
        self.bytes_spread = keep * (self.bytes_spread + step * off_bytes * off_bytes)
        self.together_spread = keep * (self.together_spread + step * off_bytes * off_seconds)

    def line(self, now_s: float) -> RateLine | None:
        """The fit; None where nothing was measured within `STALE_S`.

        Where all calls had one size, all of the time is by the byte.
        """
        if not self.bytes_mean or now_s - self.measured_s > STALE_S:
            return None
        flat = self.seconds_mean / self.bytes_mean
        slope = self.together_spread / self.bytes_spread if self.bytes_spread > 0 else flat
        slope = min(max(slope, 0.0), flat)
        return RateLine(call_s=self.seconds_mean - slope * self.bytes_mean, byte_s=slope)


class RateLine(NamedTuple):
    """Seconds of a call: `call_s`, and `byte_s` for each byte."""

    call_s: float
    byte_s: float

    def seconds(self, moved_bytes: int) -> float:
        return self.call_s + self.byte_s * moved_bytes


class Verdict(StrEnum):
    """Why so many leading blocks are loaded and not more."""

    ALL = "all"
    """Loading everything there is comes soonest, or nothing speaks against it."""
    RECOMPUTE_IS_SOONER = "recompute_is_sooner"
    OVER_BUDGET = "over_budget"
    """More would take longer than the caller waits."""
    NOTHING_THERE = "nothing_there"


class LoadPlan(NamedTuple):
    """Load the leading `blocks` and compute the rest. Seconds are estimates; `load_s` is 0 where nothing is known."""

    blocks: int
    verdict: Verdict
    load_s: float
    recompute_s: float
    """Of the blocks that the plan loads: what loading them spares."""
    unmeasured: tuple[TransferPath, ...] = ()
    """Paths that carried nothing lately: their loads are taken to cost nothing, so that they get measured."""

    @property
    def reason(self) -> str:
        """A sentence for a log or `explain`."""
        spared = f"{self.recompute_s * 1e3:.1f} ms of prefill" if self.recompute_s else "an unknown prefill"
        guess = f"; not measured lately: {', '.join(self.unmeasured)}" if self.unmeasured else ""
        return f"load {self.blocks}: {self.load_s * 1e3:.1f} ms against {spared} ({self.verdict}){guess}"


def plan_load(
    places: Sequence[tuple[TransferPath, ...]],
    rates: Mapping[TransferPath, RateLine],
    *,
    block_bytes: int,
    block_tokens: int,
    prefill_tokens_per_s: float = 0.0,
    budget_s: float = inf,
    batch_blocks: int = 1,
) -> LoadPlan:
    """How many of the leading blocks to load.

    `places`: for each block, in order, the paths that its bytes take, none where it is on the device already.
    `prefill_tokens_per_s` of 0 is unknown: all that the budget allows is loaded. A call moves `batch_blocks`.
    """
    unmeasured = tuple(sorted({path for paths in places for path in paths if path not in rates}))
    prefill_s = block_tokens / prefill_tokens_per_s if prefill_tokens_per_s else 0.0
    load_s = _load_seconds(places, rates, block_bytes, batch_blocks)
    affordable = sum(1 for seconds in load_s if seconds <= budget_s)
    best = affordable if not prefill_s else _soonest(load_s[:affordable], len(places), prefill_s)
    if not places:
        verdict = Verdict.NOTHING_THERE
    elif best == len(places):
        verdict = Verdict.ALL
    elif best == affordable:
        verdict = Verdict.OVER_BUDGET
    else:
        verdict = Verdict.RECOMPUTE_IS_SOONER
    return LoadPlan(best, verdict, load_s[best - 1] if best else 0.0, best * prefill_s, unmeasured)


def _soonest(load_s: Sequence[float], blocks: int, prefill_s: float) -> int:
    """How many to load so that all `blocks` are there soonest; the most among equals, which spares the device."""
    totals = [blocks * prefill_s, *(seconds + (blocks - k) * prefill_s for k, seconds in enumerate(load_s, 1))]
    return max(k for k, total in enumerate(totals) if total <= min(totals))


def _load_seconds(
    places: Sequence[tuple[TransferPath, ...]],
    rates: Mapping[TransferPath, RateLine],
    block_bytes: int,
    batch_blocks: int,
) -> list[float]:
    """Seconds until block 0, 0 … 1, … are loaded: each path's bytes, and a call of each path for every batch."""
    total = 0.0
    moved: dict[TransferPath, int] = {}
    seconds = []
    for paths in places:
        for path in paths:
            if (rate := rates.get(path)) is not None:
                total += rate.byte_s * block_bytes
                if moved.get(path, 0) % batch_blocks == 0:
                    total += rate.call_s
                moved[path] = moved.get(path, 0) + 1
        seconds.append(total)
    return seconds
