"""The read side of the service: `advisor.views` made from the folded state, each answer one consistent moment."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import pairwise

from advisor.changed_settings import BACK
from advisor.compaction_view import compactions_view
from advisor.entries import (
    CompactionStep,
    DeletionStep,
    EntryKind,
    LayoutEntry,
    LogEntry,
    Measurement,
    MoveStep,
    OperatorEntry,
    SettingsEntry,
    Tick,
    VolumeEntry,
    decode_control,
)
from advisor.fold import Fold, ProducerState
from advisor.index import INDEX_FULL, BlockRow
from advisor.log_desk import LogDesk
from advisor.log_queries import EntryFilter, LogQueries
from advisor.moment import Moment, by_speed
from advisor.move_views import moves_view
from advisor.policies.loading import LoadAdvice, advise_load, namespace_of
from advisor.service import AdvisorService
from advisor.shadow_views import comparison_view, policies_view
from advisor.views import (
    BlockPage,
    BlockView,
    Check,
    CompactionsView,
    ComparisonView,
    EventsPage,
    EventView,
    LoadAdviceView,
    LoadBlockView,
    MovesView,
    OriginView,
    PlacementView,
    PoliciesView,
    ProducerView,
    Sample,
    Summary,
    TierView,
    VolumeView,
)
from advisor.volume_picture import Ways, volume_view
from advisor.wording import bytes_text, duration_text
from event_plane import wire
from event_plane.schema import DEPTH_UNKNOWN, Batch, BatchKind, EventType
from event_plane.transport import Connection

SILENT_S = 60.0
"""A producer whose last batch is older is shown as silent."""
BEHIND_S_MAX = 10.0
"""Past this age of the oldest unapplied entry the service is not ready."""
RATE_SECONDS = 5
PAGE_ROWS_MAX = 1 << 21
"""Rows of the index that a page of blocks looks at."""
EVENTS_S = 0.3
EVENTS_STEP_ENTRIES = 4_096
"""A page of events looks through the log for so long, and where it has no index, by so many positions at a time."""


class ServiceReader:
    """`advisor.views.AdvisorReader` over a running service."""

    def __init__(self, service: AdvisorService, log: LogDesk | None = None) -> None:
        """`log` is its caller's to close; without one, whoever asks for events ends with the process."""
        self._service = service
        self._log = LogDesk(service) if log is None else log
        self._version = version("kvadvisor")

    # -- whole

    def summary(self) -> Summary:
        service = self._service
        checks = self.checks()
        with service.lock.shared():
            fold = service.fold
            moment = Moment.of(fold, service.behind_s(), service.queue_entries())
            totals = fold.index.totals()
            return Summary(
                version=self._version,
                term=service.term,
                position=fold.position,
                now_us=fold.now_us,
                uptime_s=time.monotonic() - service.started_s,
                events_total=moment.events,
                events_per_s=self._events_per_s(),
                behind_s=moment.behind_s,
                queue_entries=moment.queue_entries,
                blocks=moment.blocks,
                block_bytes=sum(figures.block_bytes for figures in totals.by_tier.values()),
                tiers=[
                    TierView(tier=tier, blocks=figures.blocks, block_bytes=figures.block_bytes)
                    for tier, figures in totals.by_tier.items()
                ],
                origin=_origin(moment),
                fast_hit_ratio=_ratio(moment.reads_fast, moment.reads_all),
                moves_open=len(fold.moves.open),
                moves_total=sum(fold.moves.counts.values()),
                moved_bytes_total=fold.moves.moved_bytes,
                refusals_total=fold.refusals_total,
                skipped_records=dict(fold.skipped),
                ready=all(check.ok for check in checks),
                paused="" in fold.paused,
            )

    def _events_per_s(self) -> float:
        recent = list(self._service.samples)[-(RATE_SECONDS + 1) :]
        if len(recent) < 2:
            return 0.0
        (first_s, first), (last_s, last) = recent[0], recent[-1]
        return (last.events - first.events) / max(1, last_s - first_s)

    def samples(self, seconds: int = 300) -> list[Sample]:
        recent = list(self._service.samples)[-(seconds + 1) :]
        samples = []
        for (_, before), (at_s, now) in pairwise(recent):
            samples.append(
                Sample(
                    time_s=at_s,
                    position=now.position,
                    events_per_s=now.events - before.events,
                    fast_hit_ratio=_ratio(now.reads_fast - before.reads_fast, now.reads_all - before.reads_all),
                    moves_per_s=now.moves_done - before.moves_done,
                    queue_entries=now.queue_entries,
                    behind_s=now.behind_s,
                    blocks=now.blocks,
                    origin=_origin(now),
                )
            )
        return samples

    def checks(self) -> list[Check]:
        service = self._service
        behind_s = service.behind_s()
        failure = service.failure
        checks = [
            Check(
                name="service",
                ok=failure is None and not service.stopping.is_set(),
                text="running" if failure is None else f"stopped by a fault: {failure}; see its output, start it again",
            ),
            Check(
                name="lag",
                ok=behind_s <= BEHIND_S_MAX,
                text=f"the fold is {duration_text(behind_s)} behind the log"
                + ("" if behind_s <= BEHIND_S_MAX else ": give it more processor time, or fewer sources"),
            ),
        ]
        checkpointer = service.checkpointer
        if checkpointer is not None:
            text = "; ".join([checkpointer.text(), *service.passed_over])
            checks.append(Check(name="checkpoint", ok=not checkpointer.problem, text=text))
        if service.retention is not None and service.retention.problem:
            text = f"the log is not cut for now: {service.retention.problem}"
            checks.append(Check(name="retention", ok=True, text=text))
        if text := self._changed_text():
            checks.append(Check(name="settings", ok=True, text=text))
        if skipped := service.fold.skipped[INDEX_FULL]:
            text = f"the index is full, {skipped} Stores were skipped: raise index_memory_bytes_max and start again"
            checks.append(Check(name="index", ok=True, text=text))
        thread = service.log_thread
        heard_s = dict(thread.figures.heard_s) if thread is not None else {}
        connections = thread.connections() if thread is not None else {}
        for source in service.settings.sources:
            connection = connections.get(source.name, Connection())
            text = _heard_text(source.url, heard_s.get(source.name))
            # Where nothing can be told of the connection, an engine that is away looks like one without work.
            away = connection.connected is False
            checks.append(Check(name=f"source {source.name}", ok=not away, text=connection.problem if away else text))
        for name, figures in service.hook_figures.items():
            text = f"{figures.calls} calls, {figures.failures} failed, {figures.dropped} lost for its slowness"
            if figures.last_failure:
                text += f"; last failure: {figures.last_failure}"
            checks.append(Check(name=f"hook {name}", ok=True, text=text))
        return [*checks, *self._agent_checks(), *self._volume_checks()]

    def _changed_text(self) -> str:
        """What is not as the settings' file says, or became so; empty for nothing."""
        service = self._service
        with service.lock.shared():
            changed = ", ".join(sorted(service.fold.changed_settings))
        return f"not as the file says, changed by an operator: {changed}; {BACK} goes back" if changed else (
            service.settings_note
        )

    def _agent_checks(self) -> list[Check]:
        """An agent that is away is no fault where all that is known of it are optional volumes."""
        service = self._service
        unreachable = service.unreachable
        with service.lock.shared():
            known: dict[str, list[bool]] = {}
            for volume in service.fold.volumes.values():
                known.setdefault(volume.agent, []).append(volume.optional)
        checks = []
        for agent in sorted({a.name for a in service.settings.agents} | set(unreachable)):
            why = unreachable.get(agent)
            optional = bool(known.get(agent)) and all(known[agent])
            remedy = "its volumes are optional" if optional else "start it, or mend command_url in [[agents]]"
            text = "answers" if why is None else f"{why}: {remedy}"
            checks.append(Check(name=f"agent {agent}", ok=why is None or optional, text=text))
        return checks

    def _volume_checks(self) -> list[Check]:
        """Volumes that are away while their agents answer."""
        service = self._service
        with service.lock.shared():
            away = [v for v in service.fold.volumes.values() if v.away and v.agent not in service.unreachable]
        return [
            Check(
                name=f"volume {volume.volume_id}",
                ok=volume.optional,
                text=f"away: {volume.away}: "
                + ("it is optional" if volume.optional else "bring its medium back, or unregister it"),
            )
            for volume in away
        ]

    # -- lists

    def volumes(self) -> list[VolumeView]:
        service = self._service
        unreachable = service.unreachable
        with service.lock.shared():
            fold = service.fold
            ways = Ways(fold.moves.open.values())
            return [volume_view(fold, each, ways, unreachable.get(each.agent)) for each in by_speed(fold)]

    def blocks(
        self,
        *,
        after: str | None = None,
        limit: int = 100,
        volume: str | None = None,
        tier: int | None = None,
        tenant: str | None = None,
        hash_prefix: str | None = None,
        namespace_id: int | None = None,
        touches: tuple[int, int] | None = None,
        age_s: tuple[float, float] | None = None,
    ) -> BlockPage:
        start = _parse_cursor(after) if after is not None else -1
        with self._service.lock.shared():
            fold = self._service.fold
            place = None
            if volume is not None:
                if volume not in fold.volumes:
                    return BlockPage(blocks=[], next_cursor=None)
                place = fold.volumes[volume].place
            namespaces = namespaces_of(fold, tenant, namespace_id)
            now_us = fold.now_us
        last_touch_us = None
        if age_s is not None:
            last_touch_us = (now_us - round(age_s[1] * 1e6), now_us - round(age_s[0] * 1e6))
        blocks, next_row = fold.index.page(
            start,
            limit,
            place=place,
            tier=tier,
            namespace_ids=namespaces,
            hash_prefix=hash_prefix or "",
            touches=touches,
            last_touch_us=last_touch_us,
            rows_max=PAGE_ROWS_MAX,
        )
        with self._service.lock.shared():
            # Looked up anew: a row that was freed meanwhile may be another tenant's block by now.
            fresh = [now for block in blocks if (now := fold.index.again(block)) is not None]
            # One call for all: a call into the index's tables costs more than the counting.
            children = fold.index.child_counts([block.row for block in fresh])
            views = [block_view(fold, *each) for each in zip(fresh, children, strict=True)]
        return BlockPage(
            blocks=views,
            next_cursor=None if next_row is None else str(next_row),
            scanned_all=next_row is None or len(blocks) == limit,
        )

    def moves(
        self,
        limit: int = 50,
        *,
        after: str | None = None,
        state: str | None = None,
        kind: str | None = None,
        volume: str | None = None,
        tenant: str | None = None,
    ) -> MovesView:
        with self._service.lock.shared():
            return moves_view(
                self._service.fold, limit, after=after, state=state, kind=kind, volume=volume, tenant=tenant
            )

    def compactions(self, limit: int = 50) -> CompactionsView:
        with self._service.lock.shared():
            return compactions_view(self._service.fold, limit)

    def producers(self) -> list[ProducerView]:
        service = self._service
        thread = service.log_thread
        seen = dict(thread.figures.seen_s) if thread is not None else {}
        resends = dict(thread.intake.resends) if thread is not None else {}
        moment = time.monotonic()
        with service.lock.shared():
            placed: Counter[int] = Counter()
            figures = service.fold.index.totals().by_place
            for key, place in zip(service.fold.index.places, figures, strict=False):
                placed[key.producer] += place.blocks
            return [
                _producer_view(
                    producer_id,
                    state,
                    placed[producer_id],
                    resends.get(producer_id, 0),
                    moment - seen[producer_id] if producer_id in seen else None,
                )
                for producer_id, state in sorted(service.fold.producers.items(), key=lambda item: item[1].name)
            ]

    def policies(self) -> PoliciesView:
        with self._service.lock.shared():
            return policies_view(self._service.fold)

    def comparison(self) -> ComparisonView:
        with self._service.lock:
            return comparison_view(self._service.fold)

    def load_advice(
        self,
        hashes: Sequence[int],
        *,
        block_tokens: int,
        namespace_id: int | None = None,
        tenant: str | None = None,
        group: int = 0,
        prefill_tokens_per_s: float | None = None,
    ) -> LoadAdviceView:
        with self._service.lock.shared():
            fold = self._service.fold
            volumes = [volume.as_read() for volume in fold.volumes.values() if not volume.away]
            allowed = namespaces_of(fold, tenant, namespace_id)
            known = list(fold.namespaces) if allowed is None else allowed
            # Another tenant's namespace, when a tenant is given, is as one that has none of the blocks.
            looked_in = namespace_of(fold.index, volumes, known, group, hashes)
            advice = advise_load(
                fold.index,
                volumes,
                looked_in,
                group,
                hashes,
                block_tokens,
                fold.limits.prefill_tokens_per_s if prefill_tokens_per_s is None else prefill_tokens_per_s,
            )
        return _load_view(looked_in if namespace_id is None else namespace_id, hashes, advice)

    async def events(
        self,
        from_position: int | None = None,
        limit: int = 100,
        kind: str | None = None,
        *,
        producer: int | None = None,
        source: str = "",
        until_position: int | None = None,
    ) -> EventsPage:
        wanted = EntryFilter(None if kind is None else EntryKind(kind), producer, source, until_position)
        if from_position is None:
            return await _newest_events(self._log.queries, limit, wanted)
        return await _events_from(self._log.queries, from_position, limit, wanted)


async def _newest_events(queries: LogQueries, limit: int, wanted: EntryFilter) -> EventsPage:
    found: list[LogEntry] = []
    at = None if wanted.until is None else wanted.until + 1
    kinds = () if wanted.kind is None else (wanted.kind,)
    until_s = time.monotonic() + EVENTS_S
    is_complete = False
    while len(found) < limit and not is_complete and time.monotonic() < until_s:
        stretch = await queries.before(at, kinds)
        at, is_complete = stretch.reached, stretch.is_complete
        found += filter(wanted.admits, stretch.entries)
    if len(found) > limit:
        found, at, is_complete = found[:limit], found[limit - 1].position, False
    return EventsPage(
        events=[event_view(entry) for entry in reversed(found)],
        next_position=None,
        earlier_until=None if is_complete or at is None else at - 1,
    )


async def _events_from(queries: LogQueries, at: int, limit: int, wanted: EntryFilter) -> EventsPage:
    last = await queries.last_position()
    end = last if wanted.until is None else min(last, wanted.until)
    # Only the position and the kind have an index.
    step = EVENTS_STEP_ENTRIES if wanted.producer is not None or wanted.source else max(end, 1)
    found: list[LogEntry] = []
    until_s = time.monotonic() + EVENTS_S
    while at <= end and len(found) < limit and time.monotonic() < until_s:
        step_end = min(at + step - 1, end)
        found += await queries.page(at, limit - len(found), replace(wanted, until=step_end))
        at = found[-1].position + 1 if len(found) == limit else step_end + 1
    return EventsPage(events=[event_view(entry) for entry in found], next_position=at if at <= end else None)


def _load_view(namespace_id: int, hashes: Sequence[int], advice: LoadAdvice) -> LoadAdviceView:
    return LoadAdviceView(
        namespace_id=f"{namespace_id:016x}" if namespace_id else "",
        load_blocks=sum(block.load for block in advice.blocks),
        first_token_s=advice.first_token_s,
        recompute_s=advice.recompute_s,
        reason=advice.reason,
        blocks=[
            LoadBlockView(hash=f"{h:032x}", load=b.load, volume=b.volume, seconds=b.seconds, reason=b.reason)
            for h, b in zip(hashes, advice.blocks, strict=True)
        ],
    )


def _heard_text(url: str, heard_s: float | None) -> str:
    if heard_s is None:
        return f"nothing received yet from {url}: is the engine running with KV events on?"
    return f"last message {time.monotonic() - heard_s:.0f} s ago"


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _origin(moment: Moment) -> OriginView:
    g1, g2, g3, g4 = moment.hits_by_tier
    return OriginView(recomputed=moment.recomputed, g1=g1, g2=g2, g3=g3, g4=g4)


def namespaces_of(fold: Fold, tenant: str | None, namespace_id: int | None) -> list[int] | None:
    """Ids of a tenant's namespaces, or of the one that is given if it is the tenant's; None: of all."""
    if tenant is None:
        return None if namespace_id is None else [namespace_id]
    owned = (each for each, namespace in fold.namespaces.items() if namespace.tenant == tenant)
    return [each for each in owned if namespace_id in (None, each)]


def _parse_cursor(cursor: str) -> int:
    if not (cursor.isascii() and cursor.isdecimal() and len(cursor) <= 10):
        raise ValueError(f"cursor {cursor!r} is none of ours: use next_cursor of the page before")
    return int(cursor)


def place_name(fold: Fold, place: int) -> str:
    """A volume's id, or `producer-name/location`. The caller holds the fold's lock."""
    key = fold.index.places[place]
    if fold.index.is_volume(place):
        return key.location
    producer = fold.producers.get(key.producer)
    return f"{producer.name if producer is not None else f'{key.producer:016x}'}/{key.location}"


def block_view(fold: Fold, block: BlockRow, children: int) -> BlockView:
    """The caller holds the lock."""
    namespace = fold.namespaces.get(block.key.namespace_id)
    return BlockView(
        hash=f"{block.key.sequence_hash:032x}",
        namespace_id=f"{block.key.namespace_id:016x}",
        tenant=namespace.tenant if namespace is not None else "",
        model=namespace.model if namespace is not None else "",
        group=block.key.group,
        depth=None if block.depth == DEPTH_UNKNOWN else block.depth,
        parent_hash=_parent_hash(fold, block),
        block_tokens=block.block_tokens,
        touches=block.touches,
        last_touch_us=block.last_touch_us,
        children=children,
        placements=[
            PlacementView(
                place=place_name(fold, placed.place),
                tier=fold.index.places[placed.place].tier,
                references=placed.references,
                block_bytes=placed.block_bytes,
                uses=placed.uses,
                last_use_us=placed.last_use_us,
            )
            for placed in sorted(block.placements, key=lambda placed: fold.index.places[placed.place])
        ],
    )


def _parent_hash(fold: Fold, block: BlockRow) -> str:
    if block.parent < 0:
        return ""
    key = fold.index.key_of(block.parent)
    return "" if key is None else f"{key.sequence_hash:032x}"


def _producer_view(
    producer_id: int, state: ProducerState, blocks: int, resends: int, lag_s: float | None
) -> ProducerView:
    word = "partial" if state.partial else "silent" if lag_s is None or lag_s > SILENT_S else "live"
    return ProducerView(
        id=f"{producer_id:016x}",
        name=state.name,
        state=word,
        note=state.note,
        epoch=f"{state.epoch:x}",
        sequence=state.sequence,
        blocks=blocks,
        batches=state.batches,
        events=state.events,
        gaps=state.gaps,
        resends=resends,
        epochs_closed=state.epochs_closed,
        snapshots=state.snapshots,
        lag_s=lag_s,
    )


def event_view(entry: LogEntry) -> EventView:
    """A log entry as the API shows it, with a sentence."""
    return EventView(
        position=entry.position,
        recorded_us=entry.recorded_us,
        kind=str(entry.kind),
        source=entry.source,
        producer="" if entry.producer is None else f"{entry.producer:016x}",
        epoch="" if entry.epoch is None else f"{entry.epoch:x}",
        sequence=entry.sequence,
        text="; ".join(_sentence(entry)),
    )


def _kind_text(batch: Batch) -> str:
    name = batch.kind.name.lower().replace("_", " ")
    if batch.kind is not BatchKind.LOST or batch.snapshot is None:
        return name
    first, through = batch.sequence, batch.snapshot.through
    return f"{name}: batch {first}" if first == through else f"{name}: batches {first}–{through}"


def _sentence(entry: LogEntry) -> Iterator[str]:
    if entry.kind is EntryKind.BATCH:
        batch = wire.decode(entry.payload)
        if batch.kind is not BatchKind.EVENTS:
            yield _kind_text(batch)
        for event_type, count in sorted(Counter(batch.records["event_type"].tolist()).items()):
            known = event_type in EventType.__members__.values()
            yield f"{count} {EventType(event_type).name.lower() if known else f'type {event_type}'}"
        return
    match decode_control(entry.payload):
        case Tick():
            yield "tick: time passed, a plan was made"
        case MoveStep(trigger=trigger, move_ids=move_ids, reason=reason):
            yield f"{len(move_ids)} moves took {trigger}"
            if reason:
                yield reason
        case CompactionStep(compaction=compaction, trigger=trigger, reason=reason, moved_blocks=moved):
            yield f"compaction {compaction} took {trigger}" + (f", {moved} blocks rewritten" if moved else "")
            if reason:
                yield reason
        case LayoutEntry(volume=volume, fragmentation=figures):
            yield f"{volume}: {figures.chains} chains lie in {figures.extents} pieces"
            yield f"{bytes_text(figures.reclaimable_bytes)} can be given back"
        case SettingsEntry(policy_version=policy, term=term, changed=changed):
            yield f"settings of term {term} for policies {policy}"
            if changed:
                yield f"not as the file says: {', '.join(sorted(changed))}"
        case VolumeEntry(descriptor=descriptor, agent=agent, registered=registered, away=away):
            became = f"is away: {away}" if away else "registered" if registered else "unregistered"
            yield f"volume {descriptor.get('id')} of agent {agent} {became}"
        case DeletionStep(deletion=deletion, volume=volume, asked=asked, missing=missing, reason=reason):
            answer = reason or f"of {asked} keys {missing} are not there, {asked - missing} were, and are freed"
            yield f"{deletion} asked {volume}: {answer}"
        case OperatorEntry(actor=actor, action="delete", tenant=tenant, namespace_id=namespace_id, prefix=prefix):
            what = f"tenant {tenant}" if tenant else f"namespace {namespace_id:016x}"
            yield f"{actor}: delete {what}" + (f", prefix {prefix}" if prefix else "")
        case OperatorEntry(actor=actor, action="apply"):
            yield f"{actor}: plan now and carry it out"
        case OperatorEntry(actor=actor, action="approve" | "reject" as action, move=plan):
            yield f"{actor}: {action} plan {plan}"
        case OperatorEntry(actor=actor, action="retry", move=move):
            yield f"{actor}: retry move {move}"
        case OperatorEntry(actor=actor, action="cancel", move=move):
            yield f"{actor}: cancel {move or 'all open moves'}"
        case OperatorEntry(actor=actor, action="abandon", deletion=deletion):
            yield f"{actor}: abandon {deletion}"
        case OperatorEntry(actor=actor, action="enable", tenant=tenant):
            yield f"{actor}: enable tenant {tenant}"
        case OperatorEntry(actor=actor, action="watermarks", volume=volume, low_watermark=low, high_watermark=high):
            yield f"{actor}: watermarks {volume}, {low:.3g} to {high:.3g} of its capacity"
        case OperatorEntry(actor=actor, action=action, volume=volume, detail=""):
            yield f"{actor}: {action} {volume or 'all moves'}"
        case OperatorEntry(actor=actor, action=action, volume=volume, detail=detail):
            yield f"{actor}: {action} {volume}".rstrip() + f", {detail}"
        case Measurement(volume=volume, operation=operation, transferred_bytes=count, seconds=seconds):
            yield f"{volume}: {operation} {bytes_text(count)} in {duration_text(seconds)}"
