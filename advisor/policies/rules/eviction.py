"""Who leaves first: the key of each block of the fast tier, smallest first."""

from __future__ import annotations

from advisor.index.jit import rule

LRU, LRU_LEAF, LFUDA_LEAF, VALUE = range(4)
"""VALUE: whatever the admission ranks by, leaves first."""

NAMES = {"lru": LRU, "lru-leaf": LRU_LEAF, "lfuda-leaf": LFUDA_LEAF, "value": VALUE}

_TURNS = 4_294_967_296.0


@rule
def leaves_only(rule: int) -> bool:
    """A block goes after its descendants."""
    return rule != LRU


@rule
def eviction_key(rule: int, inflation: float, touches: int, turn: int, value: float) -> float:
    """LFU with ageing: touches over `inflation`, the last evicted block's touches and inflation; ties to the older use.

    `turn` counts uses, up to 2^32.
    """
    if rule == LFUDA_LEAF:
        return (inflation + touches) * _TURNS + turn
    if rule == VALUE:
        return value
    return float(turn)


@rule
def inflation_of(rule: int, key: float) -> float:
    """What the key of the block that was evicted adds to the keys to come."""
    return float(int(key / _TURNS)) if rule == LFUDA_LEAF else 0.0
