"""Who may enter the fast tier: a block's touches, the ghost list, the token bucket that pays for moves."""

from __future__ import annotations

from advisor.index.jit import rule

BUCKET_START_BLOCKS = 200.0
PING_PONG_S = 600.0
"""A block that comes back sooner than this after it was dropped bounced."""


@rule
def touched_enough(touches: int, threshold: int) -> bool:
    """From the `threshold`-th touch; a block's store is its first."""
    return touches >= threshold


@rule
def remembered(now_turn: int, seen_turn: int, span: int) -> bool:
    """The ghost list: first or last seen within the latest `span` blocks that were seen and kept out.

    `seen_turn` 0: never.
    """
    return seen_turn > 0 and now_turn - seen_turn < span


@rule
def affordable(tokens: float) -> bool:
    return tokens >= 1.0


@rule
def bounced(now_s: float, dropped_s: float) -> bool:
    return now_s - dropped_s < PING_PONG_S
