"""What the operator allows the planner: the `policy` section of the settings, as the fold reads it."""

from __future__ import annotations

import msgspec


class VolumeBudget(msgspec.Struct, frozen=True, kw_only=True):
    """What moves may write to one volume. 0: no limit."""

    volume: str
    bytes_per_s: float = 0.0
    moves_per_s: float = 0.0


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """The most that moves may bring a tenant to hold on a volume. 0: no limit."""

    tenant: str
    volume: str
    blocks: int = 0
    block_bytes: int = 0


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Field for field `advisor.settings.PolicySettings`. Counts are blocks, sizes bytes; 0 is no limit in rates."""

    admission: str = "auto"
    eviction: str = "auto"
    """`auto`: the one that goes with the admission."""
    promote_moves_max: int = 64
    demote_moves_max: int = 64
    delete_moves_max: int = 1_024
    """Open moves of deletions that people order, beside `moves_open_max`."""
    moves_open_max: int = 256
    moves_bytes_max: int = 1 << 30
    bytes_per_s: float = 0.0
    moves_per_s: float = 0.0
    moves_per_block: float = 0.0
    """Promotions for each block seen for the first time: the budget of `kvadvisor replay --fast`."""
    move_cost: float = 0.1
    """What a second of a volume's time spent on a move counts for, in seconds that a reader waits."""
    second_worth: float = 0.0
    """What a second saved is worth, in the unit of `cost_per_gb_moved`; 0: that cost is not weighed."""
    hysteresis_s: float = 600.0
    hysteresis_gain: float = 2.0
    """A block dropped less than `hysteresis_s` ago needs so many times the value it left with."""
    pressure_ratio: float = 0.25
    """A volume that reads or writes slower than this share of its known rate is left alone; 0: never."""
    prefill_tokens_per_s: float = 0.0
    """How fast an engine computes; 0: not known, and no advice is given to recompute."""
    dry_run: bool = False
    """Plans are made and shown, and never carried out."""
    approve: bool = False
    """A plan waits until a person approves it; deletes that people ordered do not."""
    approve_within_s: float = 600.0
    """Not decided for so long, it lapses."""
    compaction: bool = True
    compaction_bytes_per_s: float = float(32 << 20)
    """What compactions may write to one volume; 0: no limit."""
    compaction_spread: float = 2.0
    """Chains that lie in so many times the pieces that they need are laid out."""
    compaction_dead_share: float = 0.25
    """A volume gives back what is dead from this share of what it holds on."""
    compaction_interval_s: float = 600.0
    """Rest of a volume after a round over its chains."""
    budgets: tuple[VolumeBudget, ...] = ()
    quotas: tuple[Quota, ...] = ()

    def budget_of(self, volume: str) -> VolumeBudget | None:
        return next((budget for budget in self.budgets if budget.volume == volume), None)
