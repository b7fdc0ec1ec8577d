"""Which prefixes of a prompt SGLang can restore, where a model keeps more than one pool of pages. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvbm_core.errors import KvbmError

ALL_PAGES, TRAILING_PAGES = "all_pages", "trailing_pages"
POLICIES = (ALL_PAGES, TRAILING_PAGES)
"""Of SGLang's `PoolHitPolicy`, those that a pool may be asked with."""


@dataclass
class PagesFound:
    """SGLang's `PoolTransferResult`. `kv_hit_pages`: the longest prefix that every pool can restore."""

    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int] = field(default_factory=dict)
    """By pool, the KV pool's too: the longest prefix that it could restore; none of a pool that can restore none."""
    restorable_prefix_pages: list[int] = field(default_factory=list)
    """Every prefix that all pools can restore, in pages: ranks may agree on a shorter one only if it is here."""


@dataclass(frozen=True, slots=True)
class PoolAsked:
    """`there`: which pages of the prefix this pool has. `trailing`: how many at a prefix's end it needs."""

    name: str
    policy: str
    trailing: int
    there: Sequence[bool]


def pages_found(kv_pages: int, pools: Sequence[PoolAsked]) -> PagesFound:
    """`kv_pages`: of the KV pool from the first on. Raises `KvbmError` for a policy that is not in `POLICIES`."""
    restorable = list(range(1, kv_pages + 1))
    longest = {"kv": kv_pages} if kv_pages else {}
    for pool in pools:
        own = _restorable(pool, kv_pages)
        if own:
            longest[pool.name] = max(own)
        restorable = [pages for pages in restorable if pages in own]
    return PagesFound(restorable[-1] if restorable else 0, longest, restorable)


def _restorable(pool: PoolAsked, pages: int) -> set[int]:
    if pool.policy not in POLICIES:
        raise KvbmError(
            f"pool {pool.name!r} is asked with policy {pool.policy!r}, which is none of {', '.join(POLICIES)}: "
            "take a release of SGLang that this connector knows"
        )
    run, own = 0, set()
    for end, is_there in enumerate(pool.there[:pages], 1):
        run = run + 1 if is_there else 0
        if run >= (end if pool.policy == ALL_PAGES else min(end, max(1, pool.trailing))):
            own.add(end)
    return own
