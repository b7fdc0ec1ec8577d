"""What a move must gain, by what blocks are worth (see `hazard`)."""

from __future__ import annotations

from advisor.index.jit import rule

MARGIN = 0.1
"""Expected uses that a move must bring: so much more the block that enters is worth than nothing, or what goes."""
LEARNING_S = 30.0
"""Nothing moves by worth before: what a few seconds teach would spend the bucket's start on the wrong blocks."""
BATCH_SHARE = 0.2
"""Of the bucket, what a batch may spend: the rest waits for better blocks."""
SAVING_MARGIN = 0.28
SAVING_HORIZON_S = 240.0
"""The margin where moves are dear, and how far ahead a use then counts at most."""
PROMISE = 0.5
"""A block used twice is protected from one used once while it is worth this share of it."""
PRICE_MEMORY = 0.8


@rule
def worth_swapping(entering: float, leaving: float, margin: float) -> bool:
    return entering - leaving > margin


@rule
def protected(entering_touches: int, entering: float, leaving_touches: int, leaving: float) -> bool:
    """The scan guard: what is used once and never again must not push out what is used."""
    return entering_touches < 2 and leaving_touches >= 2 and leaving >= PROMISE * entering


@rule
def price_after(price: float, seen: float) -> float:
    """The running price of a move; `price` 0: none yet."""
    return seen if price == 0.0 else PRICE_MEMORY * price + (1.0 - PRICE_MEMORY) * seen
