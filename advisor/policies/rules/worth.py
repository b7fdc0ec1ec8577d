"""What a move must gain, by what blocks are worth (see `hazard`)."""

from __future__ import annotations

from advisor.index.jit import rule

LEAST_WORTH = 0.02
"""Expected uses below which a block is not worth a move."""
SWAP_MARGIN = 0.02
"""By how much the block that enters must be worth more than the one that goes."""
PROMISE = 0.5
"""A block used twice is protected from one used once while it is worth this share of it."""
PRICE_MEMORY = 0.8


@rule
def worth_swapping(entering: float, leaving: float) -> bool:
    return entering - leaving > SWAP_MARGIN


@rule
def protected(entering_touches: int, entering: float, leaving_touches: int, leaving: float) -> bool:
    """The scan guard: what is used once and never again must not push out what is used."""
    return entering_touches < 2 and leaving_touches >= 2 and leaving >= PROMISE * entering


@rule
def price_after(price: float, seen: float) -> float:
    """The running price of a move; `price` 0: none yet."""
    return seen if price == 0.0 else PRICE_MEMORY * price + (1.0 - PRICE_MEMORY) * seen
