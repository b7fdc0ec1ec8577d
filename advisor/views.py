"""What the REST API, the pages and the demo's status view show: typed pictures of the advisor's state at one moment.

Units are in the names. 128-bit hashes are 32 hex digits, u64 ids 16, so that no JSON reader rounds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from advisor.settings import PolicySettings, ShadowSettings

DRY = "dry"
"""Shown as the state of a move that a dry run planned."""
OPEN = "open"
"""Asked for as a move's state: any that it has not ended in."""


class View(BaseModel):
    model_config = ConfigDict(frozen=True)


class TierView(View):
    tier: int
    blocks: int
    block_bytes: int


class OriginView(View):
    """Where prompt state came from, in blocks since the start: recomputed, or found in a tier.

    Only what engines tell: one that says nothing of the blocks that it finds again, as vLLM, adds to none of these.
    """

    recomputed: int
    g1: int
    g2: int
    g3: int
    g4: int


class Summary(View):
    version: str
    term: int
    position: int
    now_us: int
    """Last tick's time; 0 before the first."""
    uptime_s: float
    events_total: int
    events_per_s: float
    behind_s: float
    """Age of the oldest entry that is logged but not yet applied."""
    queue_entries: int
    blocks: int
    block_bytes: int
    tiers: list[TierView]
    origin: OriginView
    fast_hit_ratio: float | None
    """Blocks read from the fastest volume over blocks read from any volume; None before the first read."""
    moves_open: int
    moves_total: int
    moved_bytes_total: int
    refusals_total: int
    skipped_records: dict[str, int]
    ready: bool
    paused: bool


class VolumeView(View):
    id: str
    kind: str
    agent: str
    tier: int
    speed_rank: int
    blocks: int
    block_bytes: int
    capacity_blocks: int
    fill: float
    high_watermark: float
    low_watermark: float
    reads: int
    """Blocks read from it (Access records of its agent)."""
    read_bytes_per_s: float | None
    """Measured by moves, smoothed; None before the first."""
    write_bytes_per_s: float | None
    incoming: int
    """Open moves into it: waiting, not ready."""
    state: str
    """`healthy`, or a sentence that says what is wrong: `away: …` where it cannot be used now."""
    optional: bool = False
    """It may be away without that being a fault."""
    draining: bool = False
    """All of its blocks are to leave, and none comes."""
    paused: bool = False
    """By itself; where everything is, `summary` says so."""
    outgoing: int = 0
    """Open moves that free a block there."""


class PlacementView(View):
    place: str
    """A volume's id, or `producer-name/location`."""
    tier: int
    references: int
    block_bytes: int
    uses: int = 0
    """Uses there since it came."""
    last_use_us: int = 0
    """Of its last use there, or when it came; whole seconds."""


class BlockView(View):
    hash: str
    namespace_id: str
    tenant: str
    model: str
    group: int
    depth: int | None
    parent_hash: str
    block_tokens: int
    touches: int
    last_touch_us: int
    children: int
    placements: list[PlacementView]


class BlockPage(View):
    blocks: list[BlockView]
    next_cursor: str | None
    """Give it as `after` for the next page; None at the end."""
    scanned_all: bool = True
    """False: the page is short because only so many blocks are looked at for one, and more may match: go on."""


class MoveView(View):
    id: str
    kind: str
    """promote, demote, drop or delete."""
    state: str
    """Of the move's table; `dry` where a dry run planned it."""
    hash: str
    tenant: str
    source: str
    target: str
    """Empty where the move has no target (drop, delete)."""
    block_bytes: int
    reason: str
    planned_us: int
    changed_us: int
    note: str
    """Why it was aborted, else empty."""

    @property
    def cursor(self) -> str:
        """Its place in the list of moves: when it changed, when it was planned, its id."""
        return f"{self.changed_us}.{self.planned_us}.{self.id}"


class RefusalView(View):
    at_us: int
    hash: str
    tenant: str
    volume: str
    reason: str


class PauseView(View):
    """What is paused now."""

    paused: bool
    """Everything."""
    volumes: list[str]
    """Paused by themselves; they stay so when everything is resumed."""


class CancelView(View):
    cancelled: list[str]
    still_open: list[str]
    """Past their switch: they end by themselves."""


class MovesView(View):
    moves: list[MoveView]
    """Newest first."""
    refusals: list[RefusalView]
    """Newest first; on the first page alone."""
    next_cursor: str | None = None
    """Give it as `after` for the next page; None at the end. A move that changes meanwhile is on the first page again.
    """

    def first(self, limit: int) -> MovesView:
        """Its first rows, as a page."""
        if len(self.moves) <= limit:
            return self.model_copy(update={"refusals": self.refusals[:limit]})
        return MovesView(
            moves=self.moves[:limit], refusals=self.refusals[:limit], next_cursor=self.moves[limit - 1].cursor
        )


class ProducerView(View):
    id: str
    name: str
    state: str
    """`live`, `partial` (something was missed; see `note`) or `silent`."""
    note: str
    epoch: str
    sequence: int
    blocks: int
    batches: int
    events: int
    gaps: int
    resends: int
    epochs_closed: int
    lag_s: float | None
    """Seconds since its last batch was logged; None if not seen in this run of the service."""
    snapshots: int = 0
    """Snapshots taken for all that it has placed."""


class EventView(View):
    position: int
    recorded_us: int
    kind: str
    source: str
    producer: str
    epoch: str
    sequence: int | None
    text: str
    """One sentence: what the entry says."""


class EventsPage(View):
    events: list[EventView]
    """Ascending. Fewer than asked for where what is looked through for one answer held no more of them."""
    next_position: int | None
    """Give it as `from_position` for what follows; None at the end."""
    earlier_until: int | None = None
    """Of the newest entries: give it as `until_position` for those before; None where nothing older is kept."""


class Sample(View):
    """One second of the service, for charts."""

    time_s: int
    position: int = 0
    """Of the log, when it was taken."""
    events_per_s: float
    fast_hit_ratio: float | None
    """Over that second's reads; None where there were none."""
    moves_per_s: float
    queue_entries: int
    behind_s: float
    blocks: int
    origin: OriginView
    """Counts since the start, as of that second: the difference of two samples is what happened between them."""


class Check(View):
    name: str
    ok: bool
    text: str
    """What, since when and what to do where it is not ok."""


class LoadBlockView(View):
    """Advice on one block of a prompt."""

    hash: str
    load: bool
    """False: compute it."""
    volume: str
    """Where to load it from; empty where it is computed."""
    seconds: float | None
    """To load it alone, or to compute it; None where a rate is not known."""
    reason: str


class LoadAdviceView(View):
    """How much of a prompt is worth loading: the leading blocks with `load`."""

    namespace_id: str
    """Empty where no block is known."""
    load_blocks: int
    first_token_s: float | None
    """When all volumes are read at once and the rest is computed then."""
    recompute_s: float | None
    """When everything is computed."""
    reason: str
    blocks: list[LoadBlockView]


class AdvisorActions(Protocol):
    """What a person may have the service do. Thread-safe; each is logged with its `actor`.

    Raises `advisor.errors.NothingSuch` where there is no such move or volume, `ActionRefused` where it cannot be done.
    """

    def pause(self, actor: str, volume: str = "") -> PauseView:
        """No move is planned or begun, on one volume or (empty) on all; what is under way ends."""
    def resume(self, actor: str, volume: str = "") -> PauseView: ...
    def cancel(self, actor: str, move_id: str) -> CancelView:
        """Abort one open move; its block stays where it is."""
    def cancel_all(self, actor: str) -> CancelView:
        """Of open compactions too."""
    def cancel_compaction(self, actor: str, compaction_id: str) -> CancelView:
        """Abort an open compaction; a command that is under way ends, and every block stays readable."""


class PoliciesView(View):
    """What the live planner goes by, and what it could go by."""

    policy_version: str
    policy: PolicySettings
    """In force: as the log's newest settings have it."""
    eviction: str
    """In force, where the settings say `auto` too."""
    admissions: list[str]
    evictions: list[str]
    shadows: list[str]
    changed_here: list[str] = []
    """Fields of `policy`, and `shadow`, that an operator changed while the service ran; the others are the file's."""
    file_policy: PolicySettings = PolicySettings()
    """As the service's file and environment have it."""
    shadow: list[ShadowSettings] = []
    """In force."""


class PolicyFigures(View):
    """One policy on the stream. A use is one of a block that volumes hold, found where the fastest volume has it."""

    uses: int
    used_bytes: int
    found: int
    found_bytes: int
    found_share: float | None
    """None before the first use."""
    saved_s: float | None
    """Est. seconds that readers saved against the slowest volume, below 0 where it reads faster than the others; None
    where no rates were known."""
    moves: int
    """Of all kinds, carried out."""
    moved_bytes: int
    promoted: int
    """Moves to the fastest volume."""
    promoted_used: int
    """Of those, whose block was used before it left."""
    precision: float | None
    """Their share; None before the first."""
    bounced: int
    """Moves to the fastest volume of a block that had left it less than 10 minutes before."""
    ping_pong: float | None
    """Their share."""


class ComparedPolicy(View):
    name: str
    """`live`, or a shadow's."""
    admission: str
    eviction: str
    since_start: PolicyFigures
    last_hour: PolicyFigures
    found_each: list[float | None]
    """Share found between two of `times_us`; None where nothing was used."""
    fast_blocks: int
    """On the fastest volume now."""
    known_blocks: int
    """That a shadow knows of; 0 for the live policy, as the next two."""
    left_out: int
    """Blocks that a shadow had no room for: raise its `blocks_max`."""
    memory_bytes: int


class ComparisonView(View):
    """The live policy and its shadows on one stream; empty where the settings have no shadow."""

    began_us: int
    """First tick of the comparison; 0 before."""
    note: str
    """Why it began anew, else empty."""
    fastest: str
    """The volume that found uses are counted on."""
    times_us: list[int]
    """Every 20 s of the last hour."""
    policies: list[ComparedPolicy]
    """The live one first."""


class LayoutView(View):
    """How blocks of a volume lie, as its agent says. Chains are a sample; an extent is one piece of one."""

    held_bytes: int
    """What blocks and remains of blocks take."""
    live_bytes: int
    reclaimable_bytes: int
    objects: int
    """Files or objects."""
    objects_least: int
    chains: int
    chain_blocks: int
    extents: int
    extents_least: float
    spread: float
    """Extents for each that would do; 1 where nothing is known."""


class CompactionView(View):
    id: str
    volume: str
    kind: str
    """`gather`: chains are brought together; `reclaim`: what is dead is given back."""
    state: str
    """planned, running, done, aborted, or dry."""
    reason: str
    note: str
    """Why it was aborted, else empty."""
    planned_us: int
    changed_us: int
    blocks: int
    """Asked to be brought together."""
    commands: int
    commands_done: int
    moved_blocks: int
    moved_bytes: int
    freed_bytes: int
    extents_before: int
    """Of the chains of its commands so far."""
    extents_after: int
    seconds: float
    """Of its commands."""
    before: LayoutView
    """Of the volume, when it was planned."""
    after: LayoutView | None
    """After its last command."""


class VolumeLayoutView(View):
    volume: str
    as_of_us: int
    """When its agent said so: the figures are told again once they have changed by 2 %, and looked at every 5 ticks or
    30 s. 0: not known."""
    layout: LayoutView
    note: str
    """Why nothing is planned there; empty where something is."""


class CompactionsView(View):
    compactions: list[CompactionView]
    """Open ones, then the newest that ended."""
    volumes: list[VolumeLayoutView]


class AdvisorReader(Protocol):
    """The read side of the service. Thread-safe; each answer is one consistent moment."""

    def summary(self) -> Summary: ...
    def volumes(self) -> list[VolumeView]: ...
    def blocks(
        self, *, after: str | None = None, limit: int = 100, volume: str | None = None, tier: int | None = None,
        tenant: str | None = None, hash_prefix: str | None = None, namespace_id: int | None = None,
        touches: tuple[int, int] | None = None, age_s: tuple[float, float] | None = None,
    ) -> BlockPage:
        """A page in stable order. `touches`, and `age_s` of the last use: least and most; what was never used is older
        than all. Raises `ValueError` for a bad cursor."""
    def moves(
        self, limit: int = 50, *, after: str | None = None, state: str | None = None, kind: str | None = None,
        volume: str | None = None, tenant: str | None = None,
    ) -> MovesView:
        """Open and finished ones that are kept. Raises `ValueError` for a bad cursor."""
    def compactions(self, limit: int = 50) -> CompactionsView: ...
    def producers(self) -> list[ProducerView]: ...
    def samples(self, seconds: int = 300) -> list[Sample]: ...
    def checks(self) -> list[Check]: ...
    def policies(self) -> PoliciesView: ...
    def comparison(self) -> ComparisonView: ...
    def load_advice(
        self, hashes: Sequence[int], *, block_tokens: int, namespace_id: int | None = None, tenant: str | None = None,
        group: int = 0, prefill_tokens_per_s: float | None = None,
    ) -> LoadAdviceView:
        """On a prompt's blocks, root first. Without a namespace, the one that knows the most of them."""
    async def events(
        self, from_position: int | None = None, limit: int = 100, kind: str | None = None, *,
        producer: int | None = None, source: str = "", until_position: int | None = None,
    ) -> EventsPage:
        """Log entries from a position on; the newest `limit` where `from_position` is None."""
