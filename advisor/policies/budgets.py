"""What moves may cost: token buckets in the fold's time, the worth of a move, back-pressure."""

from __future__ import annotations

import math

import msgspec

from advisor.policies.limits import Limits
from advisor.policies.plan import Volume
from advisor.policies.rules.admission import BUCKET_START_BLOCKS
from advisor.wording import bytes_text

BURST_S = 10.0
"""A bucket holds what comes in so long, and never less than 64 moves or their bytes."""
BURST_MOVES_MIN = 64
DAY_S = 86_400.0
ENDURANCE_BURST_S = 3_600.0
PER_BLOCK = "moves per block"
HORIZON_S = 600.0
"""Hits that a move is expected to bring are counted so far ahead."""


class Bucket(msgspec.Struct):
    """Tokens that come at a rate up to a burst. A debt is paid off before anything is spent."""

    level: float
    filled_us: int

    def fill(self, rate: float, burst: float, now_us: int) -> None:
        earned = rate * max(0, now_us - self.filled_us) / 1e6
        self.level = max(self.level, min(burst, self.level + earned))
        self.filled_us = now_us


class Purse:
    """What one plan may still spend. `buckets` are the fold's, by what they limit, and are drawn from."""

    def __init__(self, limits: Limits, open_moves: int, buckets: dict[str, Bucket], now_us: int) -> None:
        self.moves = max(0, limits.moves_open_max - open_moves)
        self.bytes = limits.moves_bytes_max
        self._limits = limits
        self._buckets = buckets
        self._now_us = now_us

    def earn(self, blocks: int) -> None:
        """Blocks were seen for the first time."""
        if self._limits.moves_per_block > 0:
            bucket = self._buckets.setdefault(PER_BLOCK, Bucket(BUCKET_START_BLOCKS, self._now_us))
            bucket.level += blocks * self._limits.moves_per_block

    def refusal(self, target: Volume | None, copied_bytes: int, *, promotion: bool) -> str:
        """Why a move that writes so much to `target` cannot be paid for; empty where it can."""
        if self.moves < 1 or copied_bytes > self.bytes:
            return "the budget of open moves or bytes is spent"
        if promotion and self._limits.moves_per_block > 0 and self._buckets[PER_BLOCK].level < 1.0:
            return f"the budget of {self._limits.moves_per_block:g} moves for each block seen is spent"
        if target is None or copied_bytes == 0:
            return ""
        for name, rate, need, said in self._rates(target, copied_bytes):
            if self._filled(name, rate, need).level < need:
                return f"the budget of {said} is spent"
        if target.endurance_bytes_per_day > 0:
            bucket = self._endurance(target)
            if bucket.level < copied_bytes:
                return f"{target.volume_id} was written its {bytes_text(target.endurance_bytes_per_day)} a day"
        return ""

    def spend(self, target: Volume | None, copied_bytes: int, *, promotion: bool) -> None:
        """Pay for a move that `refusal` had nothing against."""
        self.moves -= 1
        self.bytes -= copied_bytes
        if promotion and self._limits.moves_per_block > 0:
            self._buckets[PER_BLOCK].level -= 1.0
        if target is None or copied_bytes == 0:
            return
        for name, rate, need, _ in self._rates(target, copied_bytes):
            self._filled(name, rate, need).level -= need
        if target.endurance_bytes_per_day > 0:
            self._endurance(target).level -= copied_bytes

    def blocks_left(self, target: Volume, block_bytes: float) -> float:
        """Promotions of blocks of that size that the budgets would pay for now; infinite where none is in force."""
        size = max(1, int(block_bytes))
        left = [self._filled(name, rate, need).level / need for name, rate, need, _ in self._rates(target, size)]
        if self._limits.moves_per_block > 0:
            left.append(self._buckets[PER_BLOCK].level)
        if target.endurance_bytes_per_day > 0:
            left.append(self._endurance(target).level / size)
        return min(left, default=math.inf)

    def allowance(self, target: Volume, block_bytes: float, blocks_seen: int, since_us: int) -> tuple[float, float]:
        """Blocks that may have come to a volume since `since_us`, when so many were seen first, and the largest burst.

        `block_bytes`: of one block. Both are infinite where no limit is in force.
        """
        limits, own = self._limits, self._limits.budget_of(target.volume_id)
        moves = [limits.moves_per_s, own.moves_per_s if own is not None else 0.0]
        sizes = [
            limits.bytes_per_s, own.bytes_per_s if own is not None else 0.0, target.endurance_bytes_per_day / DAY_S
        ]  # fmt: skip
        rates = [rate for rate in moves if rate > 0] + [rate / max(1.0, block_bytes) for rate in sizes if rate > 0]
        elapsed_s = max(0, self._now_us - since_us) / 1e6
        earned = [rate * elapsed_s for rate in rates]
        if limits.moves_per_block > 0:
            earned.append(blocks_seen * limits.moves_per_block)
        return min(earned, default=math.inf), min((_burst(rate, 0.0) for rate in rates), default=math.inf)

    def is_tight(self) -> bool:
        """Some limit that is in force lets fewer than a burst's half through now."""
        if self._limits.moves_per_block > 0 and self._buckets[PER_BLOCK].level < BUCKET_START_BLOCKS / 2:
            return True
        return any(
            self._filled(name, rate, 0.0).level < _burst(rate, 0.0) / 2
            for name, rate in (("all bytes", self._limits.bytes_per_s), ("all moves", self._limits.moves_per_s))
            if rate > 0
        )

    def _rates(self, target: Volume, copied_bytes: int) -> list[tuple[str, float, float, str]]:
        limits, volume = self._limits, target.volume_id
        own = limits.budget_of(volume)
        rows = [
            ("all bytes", limits.bytes_per_s, float(copied_bytes), f"{bytes_text(limits.bytes_per_s)}/s of all moves"),
            ("all moves", limits.moves_per_s, 1.0, f"{limits.moves_per_s:g} moves/s"),
        ]
        if own is not None:
            rate = bytes_text(own.bytes_per_s)
            rows += [
                (f"{volume} bytes", own.bytes_per_s, float(copied_bytes), f"{rate}/s to {volume}"),
                (f"{volume} moves", own.moves_per_s, 1.0, f"{own.moves_per_s:g} moves/s to {volume}"),
            ]
        return [row for row in rows if row[1] > 0]

    def _filled(self, name: str, rate: float, need: float) -> Bucket:
        burst = _burst(rate, need)
        bucket = self._buckets.setdefault(name, Bucket(burst, self._now_us))
        bucket.fill(rate, burst, self._now_us)
        return bucket

    def _endurance(self, target: Volume) -> Bucket:
        return endurance_bucket(self._buckets, target, self._now_us)


def endurance_bucket(buckets: dict[str, Bucket], target: Volume, now_us: int) -> Bucket:
    """What may be written to a volume that bears so much a day, filled up to now."""
    rate = target.endurance_bytes_per_day / DAY_S
    burst = rate * ENDURANCE_BURST_S
    bucket = buckets.setdefault(f"{target.volume_id} endurance", Bucket(burst, now_us))
    bucket.fill(rate, burst, now_us)
    return bucket


def _burst(rate: float, need: float) -> float:
    return max(rate * BURST_S, BURST_MOVES_MIN * max(1.0, need))


def pressed(volume: Volume, limits: Limits) -> str:
    """Why a volume is left alone for now; empty where it is not."""
    if volume.rates_trusted and limits.pressure_ratio > 0 and volume.strain < limits.pressure_ratio:
        return f"{volume.volume_id} is busy: it runs at {volume.strain:.0%} of its known rate"
    return ""


def saved_s(size: int, source: Volume, target: Volume) -> float | None:
    """Seconds a reader saves a hit; None where a rate is not known."""
    if not (source.read_bytes_per_s and target.read_bytes_per_s):
        return None
    return size / source.read_bytes_per_s - size / target.read_bytes_per_s


def expected_hits(score: float, now_s: float, half_life_s: float) -> float:
    """Touches within `HORIZON_S` at the rate that a decayed score says."""
    if score < -1e8:
        return 0.0
    faded: float = 2.0 ** min(60.0, score - now_s / half_life_s)
    return faded * math.log(2.0) / half_life_s * HORIZON_S


def loss(size: int, hits: float, source: Volume, target: Volume, limits: Limits) -> str:
    """Why a move costs more than it gains, in seconds; empty where it does not, or where that is not known."""
    gain_a_hit_s = saved_s(size, source, target)
    if limits.move_cost <= 0 or gain_a_hit_s is None or not (source.rates_trusted and target.rates_trusted):
        return ""
    if gain_a_hit_s <= 0:
        return f"{target.volume_id} reads no faster than {source.volume_id}, so a copy there saves nothing"
    assert source.read_bytes_per_s is not None
    write_rate = target.write_bytes_per_s or target.read_bytes_per_s
    assert write_rate is not None
    cost_s = limits.move_cost * (size / source.read_bytes_per_s + size / write_rate)
    if limits.second_worth > 0:
        cost_s += size / 1e9 * (target.cost_per_gb_moved + source.cost_per_gb_moved) / limits.second_worth
    if gain_a_hit_s * hits >= cost_s:
        return ""
    return (
        f"est. {hits:.2g} hits in 10 min save {1000 * gain_a_hit_s * hits:.3g} ms, "
        f"the move costs {1000 * cost_s:.3g} ms"
    )
