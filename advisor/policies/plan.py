"""What a plan is made of: volumes as the planner sees them, proposals, refusals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from advisor.index import BlockRow, Key
from advisor.moves import MoveKind

REFUSALS_PER_PLAN_MAX = 16


@dataclass(frozen=True, slots=True)
class Volume:
    """A registered volume as the planner sees it. Rates in bytes/s, None where neither declared nor measured."""

    volume_id: str
    agent: str
    place: int
    tier: int
    speed_rank: int
    capacity_blocks: int
    high_watermark: float
    low_watermark: float
    read_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None
    rates_trusted: bool = False
    """The rates are declared, or measured over enough bytes to decide by."""
    strain: float = 1.0
    """Newest measured rate over the known one, the lower of reads and writes: below 1 it is busy."""
    cost_per_gb_month: float = 0.0
    cost_per_gb_moved: float = 0.0
    endurance_bytes_per_day: float = 0.0
    """0: no limit."""
    retention_s: float = 0.0
    """Blocks unused for so long leave. 0: they stay."""
    tenants: tuple[str, ...] = ()
    """Whose blocks may come here; empty is everybody's."""
    draining: bool = False
    """All of its blocks are to leave, and none comes."""

    @property
    def order(self) -> tuple[int, float, str]:
        """Fastest first; of equally fast ones the cheapest."""
        return self.speed_rank, self.cost_per_gb_month, self.volume_id

    @property
    def slots_high(self) -> int:
        return int(self.high_watermark * self.capacity_blocks)

    @property
    def slots_low(self) -> int:
        return int(self.low_watermark * self.capacity_blocks)

    def admits(self, tenant: str) -> bool:
        return not self.tenants or tenant in self.tenants


class NamedRow(NamedTuple):
    """What of a block a move needs to know."""

    row: int
    key: Key


@dataclass(frozen=True, slots=True)
class Proposal:
    """A move before it has an id."""

    kind: MoveKind
    block: BlockRow | NamedRow
    source: str
    target: str
    block_bytes: int
    reason: str
    deletion: str = ""
    """The deletion that ordered it; empty where the planner wants it."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A block that could have moved and does not, and why."""

    key: Key
    volume: str
    reason: str


@dataclass(slots=True)
class Plan:
    proposals: list[Proposal] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    refused: int = 0
    """All refusals; `refusals` keeps the first few."""
    stuck: dict[str, str] = field(default_factory=dict)
    """By drained volume: why the last block that was looked at does not leave it."""
    rows: set[int] = field(default_factory=set)
    """Those of `proposals`: a block has one move at a time."""

    def propose(self, proposal: Proposal) -> None:
        assert proposal.block.row not in self.rows
        self.proposals.append(proposal)
        self.rows.add(proposal.block.row)

    def refuse(self, block: BlockRow | NamedRow, volume: str, reason: str) -> None:
        self.refused += 1
        if len(self.refusals) < REFUSALS_PER_PLAN_MAX:
            self.refusals.append(Refusal(block.key, volume, reason))
