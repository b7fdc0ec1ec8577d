"""How many failed attempts to come in are answered: token buckets by address, and one for all. Pure: time is given."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

ADDRESSES_MAX = 4_096


@dataclass(frozen=True, slots=True)
class Allowance:
    """So many at once, and so many a second after that."""

    burst: float
    per_s: float


PER_ADDRESS = Allowance(burst=10, per_s=0.2)
IN_ALL = Allowance(burst=200, per_s=20)


class Attempts:
    """Counts failures. Those that are good are never asked about, so that nobody is locked out by others' failures."""

    def __init__(self, per_address: Allowance = PER_ADDRESS, in_all: Allowance = IN_ALL) -> None:
        self._per_address = per_address
        self._all = _Bucket(in_all)
        # Insertion order is the order of the last failure.
        self._buckets: dict[str, _Bucket] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    def failed(self, address: str, now_s: float) -> float:
        """Count a failure from `address`. Answers with 0, or the seconds to wait where it was one too many."""
        key = network_of(address)
        bucket = self._buckets.pop(key, None) or _Bucket(self._per_address)
        self._buckets[key] = bucket
        if len(self._buckets) > ADDRESSES_MAX:
            # Who failed longest ago has the fullest bucket, or nearly: it is forgotten at the least cost.
            del self._buckets[next(iter(self._buckets))]
        return max(bucket.take(now_s), self._all.take(now_s))


class _Bucket:
    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self._left = allowance.burst
        self._at_s: float | None = None

    def take(self, now_s: float) -> float:
        """0 where one was left and is taken, else the seconds until there is one."""
        if self._at_s is not None:
            passed_s = max(0.0, now_s - self._at_s)
            self._left = min(self._allowance.burst, self._left + passed_s * self._allowance.per_s)
        self._at_s = now_s if self._at_s is None else max(now_s, self._at_s)
        if self._left >= 1:
            self._left -= 1
            return 0.0
        return (1 - self._left) / self._allowance.per_s


def network_of(address: str) -> str:
    """Whom an address belongs to: itself, or of IPv6 the /64 that one host has whole."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address[:64]
    if parsed.version == 4:
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))
