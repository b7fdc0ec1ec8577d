"""An `AdvisorReader` over plain values, with a service's morning in it. Tests change its attributes and look again."""

from __future__ import annotations

import math
from collections.abc import Sequence

from advisor.moves import OPEN_STATES
from advisor.settings import PolicySettings
from advisor.views import (
    BlockPage,
    BlockView,
    Check,
    CompactionsView,
    CompactionView,
    ComparedPolicy,
    ComparisonView,
    EventsPage,
    EventView,
    LayoutView,
    LoadAdviceView,
    LoadBlockView,
    MovesView,
    MoveView,
    OriginView,
    PlacementView,
    PoliciesView,
    PolicyFigures,
    ProducerView,
    RefusalView,
    Sample,
    Summary,
    TierView,
    VolumeLayoutView,
    VolumeView,
)

NOW_S = 1_764_440_651
NOW_US = NOW_S * 1_000_000
BLOCK_BYTES = 16_384


def block_hash(number: int) -> str:
    return f"{(number * 0x9E3779B97F4A7C15F39CC0605CEDC835) % 2**128:032x}"


def _summary() -> Summary:
    return Summary(
        version="0.1.0", term=4, position=18_204_551, now_us=NOW_US, uptime_s=11_130.0,
        events_total=9_320_114, events_per_s=2_124.6, behind_s=0.42, queue_entries=12,
        blocks=8_412_345, block_bytes=137_827_860_480,
        tiers=[
            TierView(tier=1, blocks=256, block_bytes=256 * BLOCK_BYTES),
            TierView(tier=2, blocks=512, block_bytes=512 * BLOCK_BYTES),
            TierView(tier=3, blocks=7_203, block_bytes=7_203 * BLOCK_BYTES),
        ],
        origin=OriginView(recomputed=20_000, g1=36_000, g2=16_000, g3=21_000, g4=7_000),
        fast_hit_ratio=0.6238, moves_open=3, moves_total=1_204, moved_bytes_total=48_211_000_000,
        refusals_total=77, skipped_records={"unknown event type": 3}, ready=True, paused=False,
    )


def _volume(**changes: object) -> VolumeView:
    base = VolumeView(
        id="nvme-a", kind="slab", agent="host-7", tier=3, speed_rank=1, blocks=835, block_bytes=835 * BLOCK_BYTES,
        capacity_blocks=1_024, fill=835 / 1_024, high_watermark=0.92, low_watermark=0.8, reads=48_112,
        read_bytes_per_s=4.21e9, write_bytes_per_s=6.04e8, incoming=24, state="healthy",
    )
    return base.model_copy(update=changes)


def _volumes() -> list[VolumeView]:
    return [
        _volume(),
        _volume(id="nvme-b", speed_rank=2, blocks=4_750, block_bytes=4_750 * BLOCK_BYTES, capacity_blocks=8_192,
                fill=4_750 / 8_192, reads=9_204, read_bytes_per_s=3.7e9, write_bytes_per_s=4.1e8, incoming=0),
        _volume(id="lustre-01", kind="directory", tier=4, speed_rank=3, blocks=41_000, block_bytes=41_000 * BLOCK_BYTES,
                capacity_blocks=96_000, fill=41 / 96, reads=2_310, read_bytes_per_s=1.1e9, write_bytes_per_s=2e8,
                incoming=0, state="slow since 17:52:10: p99 38 ms, promotions held"),
        _volume(id="s3-archive", kind="object", tier=4, speed_rank=4, blocks=182_000, block_bytes=182_000 * BLOCK_BYTES,
                capacity_blocks=500_000, fill=0.364, reads=0, read_bytes_per_s=None,
                write_bytes_per_s=None, incoming=0),
    ]


def _move(number: int, **changes: object) -> MoveView:
    base = MoveView(
        id=f"{18_204_000 + number}-{number}", kind="promote", state="kept", hash=block_hash(number),
        tenant="support-bot", source="lustre-01", target="nvme-a", block_bytes=BLOCK_BYTES,
        reason="3rd touch in 40 s; nvme-a has room",
        planned_us=NOW_US - (number + 2) * 1_000_000, changed_us=NOW_US - number * 2_000_000, note="",
    )
    return base.model_copy(update=changes)


def _moves() -> MovesView:
    return MovesView(
        moves=[
            _move(1),
            _move(2, kind="demote", state="verified", source="nvme-a", target="s3-archive", tenant="agents",
                  reason="untouched for 52 min; nvme-a is above its high watermark of 92 %"),
            _move(3, state="copying", source="s3-archive", target="nvme-b", tenant="agents",
                  reason="2nd touch; 512 blocks of this prefix are already on nvme-b"),
            _move(4, kind="drop", state="freed", source="nvme-b", target="", tenant="rag-legal",
                  reason="coldest leaf; a verified copy is on s3-archive"),
            *(_move(3, id=f"more-{number}", hash=block_hash(1_000 + number), kind="promote", state="copying",
                    source="s3-archive", target="nvme-b", tenant="agents", reason="3rd touch; beside its parent")
              for number in range(40)),
            _move(6, state="aborted", tenant="code", reason="4th touch in 2 min",
                  note="the copy's checksum was wrong; lustre-01 still holds it"),
        ],
        refusals=[
            RefusalView(at_us=NOW_US - 10_000_000, hash=block_hash(5), tenant="misc", volume="nvme-a",
                        reason="seen once; would displace hotter blocks"),
        ],
    )


def _compactions() -> CompactionsView:
    before = LayoutView(
        held_bytes=90_000_000, live_bytes=60_000_000, reclaimable_bytes=22_000_000, objects=210, objects_least=15,
        chains=64, chain_blocks=1_024, extents=800, extents_least=70.0, spread=800 / 70,
    )  # fmt: skip
    after = before.model_copy(update={"extents": 72, "spread": 72 / 70})
    gather = CompactionView(
        id="77-compaction-0", volume="s3-archive", kind="gather", state="done",
        reason="64 chains of 16 blocks lie in 800 pieces, 70 would do", note="", planned_us=NOW_US - 9_000_000,
        changed_us=NOW_US, blocks=1_000, commands=4, commands_done=4, moved_blocks=960, moved_bytes=960 * BLOCK_BYTES,
        freed_bytes=0, extents_before=800, extents_after=72, seconds=3.5, before=before, after=after,
    )  # fmt: skip
    reclaim = gather.model_copy(update={"id": "80-compaction-0", "kind": "reclaim", "state": "running", "after": None})
    archive = VolumeLayoutView(volume="s3-archive", as_of_us=NOW_US, layout=after, note="rests")
    return CompactionsView(compactions=[reclaim, gather], volumes=[archive])


def _producer(number: int, **changes: object) -> ProducerView:
    base = ProducerView(
        id=f"{0xA11CE000 + number:016x}", name=f"vllm · pod-{number}", state="live", note="", epoch="00000000000000a1",
        sequence=48_201 + number, blocks=2_411, batches=48_202, events=1_204_881, gaps=0, resends=0, epochs_closed=0,
        lag_s=0.31,
    )
    return base.model_copy(update=changes)


def _producers() -> list[ProducerView]:
    return [
        _producer(3),
        _producer(4, gaps=1, resends=17, lag_s=0.4),
        _producer(7, name="agent · host-7", blocks=5_585, events=91_220, lag_s=0.2),
        _producer(9, name="sglang · pod-9", state="partial", lag_s=None,
                  note="attached late; whole again at its next epoch"),
        _producer(2, name="kvbm · rack-2", state="silent", note="nothing heard for 41 s: is it running?", lag_s=41.2),
    ]


def _samples(count: int = 300) -> list[Sample]:
    """Waves, so that a chart of them has a shape; origin counts only ever grow."""
    samples = []
    recomputed = g1 = g2 = g3 = g4 = 0
    for index in range(count):
        slow, fast = math.sin(index / 45), math.sin(index / 7)
        g1 += round(72 + 9 * slow)
        g2 += round(32 + 5 * fast)
        g3 += round(42 - 8 * slow)
        g4 += round(14 + 3 * math.cos(index / 30))
        recomputed += round(40 + 10 * math.cos(index / 60))
        samples.append(
            Sample(
                time_s=NOW_S - count + index + 1, events_per_s=2_100 + 420 * slow + 130 * fast,
                fast_hit_ratio=0.55 + 0.12 * slow + 0.03 * fast, moves_per_s=max(0.0, 4 + 3 * fast),
                queue_entries=round(12 + 8 * fast), behind_s=0.4 + 0.2 * fast, blocks=8_300_000 + 370 * index,
                origin=OriginView(recomputed=recomputed, g1=g1, g2=g2, g3=g3, g4=g4),
            )
        )
    return samples


def _blocks() -> list[BlockView]:
    return [
        BlockView(
            hash=block_hash(number), namespace_id="00000000000000f1", tenant="agents" if number % 2 else "support-bot",
            model="demo-4l", group=0, depth=number, parent_hash=block_hash(number - 1) if number else "0" * 32,
            block_tokens=16, touches=number + 1, last_touch_us=NOW_US - number, children=1,
            placements=[PlacementView(place="nvme-a", tier=3, references=1, block_bytes=BLOCK_BYTES)],
        )
        for number in range(250)
    ]


def _events() -> list[EventView]:
    return [
        EventView(position=number, recorded_us=NOW_US, kind="tick" if number % 5 == 0 else "batch",
                  source="" if number % 5 == 0 else "vllm", producer="00000000a11ce003", epoch="00000000000000a1",
                  sequence=None if number % 5 == 0 else number, text=f"entry {number}")
        for number in range(1, 301)
    ]


def _compared(name: str, admission: str, share: float, moves: int) -> ComparedPolicy:
    """An hour in 180 steps, after five hours."""

    def figures(hours: int) -> PolicyFigures:
        uses, promoted = 180_000 * hours, moves * hours // 2
        found = round(uses * share)
        return PolicyFigures(
            uses=uses, used_bytes=uses * BLOCK_BYTES, found=found, found_bytes=found * BLOCK_BYTES, found_share=share,
            saved_s=found * 0.002, moves=moves * hours, moved_bytes=promoted * BLOCK_BYTES, promoted=promoted,
            promoted_used=round(promoted * share),
            precision=share, bounced=promoted // 50, ping_pong=0.02,
        )

    is_live = name == "live"
    return ComparedPolicy(
        name=name, admission=admission, eviction="value", since_start=figures(5), last_hour=figures(1),
        found_each=[share + 0.05 * math.sin(step / 9) for step in range(180)], fast_blocks=835,
        known_blocks=0 if is_live else 48_000, left_out=0, memory_bytes=0 if is_live else 32_400_000,
    )


def _comparison() -> ComparisonView:
    return ComparisonView(
        began_us=NOW_US - 5 * 3_600_000_000, note="", fastest="nvme-a",
        times_us=[NOW_US - (179 - step) * 20_000_000 for step in range(180)],
        policies=[
            _compared("live", "auto", 0.62, 1_200), _compared("second-touch", "touch-2", 0.66, 900),
            _compared("calm", "ranked", 0.57, 300),
        ],
    )


class SampleReader:
    """Every attribute may be replaced at any time; `blocks` pages by number, and its cursor is `after-N`."""

    def __init__(self) -> None:
        self.summary_view = _summary()
        self.volume_views = _volumes()
        self.block_views = _blocks()
        self.moves_view = _moves()
        self.producer_views = _producers()
        self.sample_views = _samples()
        self.check_views = [
            Check(name="log", ok=True, text="writable"), Check(name="fold", ok=True, text="0.4 s behind"),
        ]
        self.event_views = _events()
        self.comparison_view = _comparison()
        self.compactions_view = _compactions()
        self.summaries_read = 0
        self.scans_short = False
        """Pages of blocks end early."""

    @classmethod
    def empty(cls) -> SampleReader:
        """A service in its first second: nothing heard, nothing registered."""
        reader = cls()
        zero = OriginView(recomputed=0, g1=0, g2=0, g3=0, g4=0)
        reader.summary_view = Summary(
            version="0.1.0", term=1, position=1, now_us=0, uptime_s=0.8, events_total=0, events_per_s=0.0, behind_s=0.0,
            queue_entries=0, blocks=0, block_bytes=0, tiers=[], origin=zero, fast_hit_ratio=None, moves_open=0,
            moves_total=0, moved_bytes_total=0, refusals_total=0, skipped_records={}, ready=True, paused=False,
        )
        reader.volume_views, reader.block_views, reader.producer_views = [], [], []
        reader.sample_views, reader.event_views = [], []
        reader.moves_view = MovesView(moves=[], refusals=[])
        reader.compactions_view = CompactionsView(compactions=[], volumes=[])
        reader.comparison_view = ComparisonView(began_us=0, note="", fastest="", times_us=[], policies=[])
        return reader

    def summary(self) -> Summary:
        self.summaries_read += 1
        return self.summary_view

    def volumes(self) -> list[VolumeView]:
        return self.volume_views

    def blocks(
        self, *, after: str | None = None, limit: int = 100, volume: str | None = None, tier: int | None = None,
        tenant: str | None = None, hash_prefix: str | None = None, namespace_id: int | None = None,
        touches: tuple[int, int] | None = None, age_s: tuple[float, float] | None = None,
    ) -> BlockPage:
        start = 0
        if after is not None:
            name, _, number = after.partition("-")
            if name != "after" or not number.isdecimal():
                raise ValueError(f"cursor {after!r} is none of ours: use next_cursor of the page before")
            start = int(number)
        found = [
            block for block in self.block_views
            if (volume is None or any(placement.place == volume for placement in block.placements))
            and (tier is None or any(placement.tier == tier for placement in block.placements))
            and (tenant is None or block.tenant == tenant)
            and (hash_prefix is None or block.hash.startswith(hash_prefix))
            and (namespace_id is None or int(block.namespace_id, 16) == namespace_id)
            and (touches is None or touches[0] <= block.touches <= touches[1])
            and (age_s is None or age_s[0] <= (NOW_US - block.last_touch_us) / 1e6 <= age_s[1])
        ]
        if self.scans_short:
            return BlockPage(blocks=found[start : start + 1], next_cursor=f"after-{start + 1}", scanned_all=False)
        end = start + limit
        return BlockPage(blocks=found[start:end], next_cursor=f"after-{end}" if end < len(found) else None)

    def moves(
        self, limit: int = 50, *, after: str | None = None, state: str | None = None, kind: str | None = None,
        volume: str | None = None, tenant: str | None = None,
    ) -> MovesView:  # fmt: skip
        moves = [
            move
            for move in self.moves_view.moves
            if (state in (None, move.state) or (state == "open" and move.state in OPEN_STATES))
            and kind in (None, move.kind)
            and (volume is None or volume in (move.source, move.target)) and tenant in (None, move.tenant)
        ]  # fmt: skip
        if after is None:
            return MovesView(moves=moves, refusals=self.moves_view.refusals).first(limit)
        places = [move.cursor for move in moves]
        if after not in places:
            raise ValueError(f"cursor {after!r} is none of ours: use next_cursor of the page before")
        return MovesView(moves=moves[places.index(after) + 1 :], refusals=[]).first(limit)

    def compactions(self, limit: int = 50) -> CompactionsView:
        view = self.compactions_view
        return CompactionsView(compactions=view.compactions[:limit], volumes=view.volumes)

    def producers(self) -> list[ProducerView]:
        return self.producer_views

    def samples(self, seconds: int = 300) -> list[Sample]:
        return self.sample_views[-seconds:]

    def checks(self) -> list[Check]:
        return self.check_views

    def policies(self) -> PoliciesView:
        return PoliciesView(
            policy_version="tiering-5", policy=PolicySettings(admission="auto", moves_per_s=20.0), eviction="value",
            admissions=["always", "auto", "touch-2"], evictions=["lru", "value"], shadows=["second-touch", "calm"],
        )  # fmt: skip

    def comparison(self) -> ComparisonView:
        return self.comparison_view

    def load_advice(
        self, hashes: Sequence[int], *, block_tokens: int, namespace_id: int | None = None, tenant: str | None = None,
        group: int = 0, prefill_tokens_per_s: float | None = None,
    ) -> LoadAdviceView:  # fmt: skip
        """The first half from nvme-a."""
        self.asked_to_load = (list(hashes), block_tokens, namespace_id, tenant, group, prefill_tokens_per_s)
        half = (len(hashes) + 1) // 2
        blocks = [
            LoadBlockView(
                hash=f"{h:032x}", load=at < half, volume="nvme-a" if at < half else "", seconds=0.002, reason="16.4 kB"
            )
            for at, h in enumerate(hashes)
        ]
        return LoadAdviceView(
            namespace_id="00000000000000aa", load_blocks=half, first_token_s=0.01, recompute_s=0.02,
            reason=f"load {half} of {len(hashes)} blocks", blocks=blocks,
        )  # fmt: skip

    async def events(
        self, from_position: int | None = None, limit: int = 100, kind: str | None = None, *,
        producer: int | None = None, source: str = "", until_position: int | None = None,
    ) -> EventsPage:
        found = [
            event for event in self.event_views
            if kind in (None, event.kind) and source in ("", event.source)
            and (producer is None or int(event.producer, 16) == producer)
            and (until_position is None or event.position <= until_position)
        ]
        if from_position is None:
            shown = found[-limit:]
            earlier = shown[0].position - 1 if len(found) > limit else None
            return EventsPage(events=shown, next_position=None, earlier_until=earlier)
        found = [event for event in found if event.position >= from_position]
        more = found[limit].position if len(found) > limit else None
        return EventsPage(events=found[:limit], next_position=more)
