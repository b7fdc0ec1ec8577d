"""A real service, agent and log: all that happened to a block is read back from the log, in pieces and in one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from advisor.access.doorkeeper import Doorkeeper
from advisor.access.identity import LOCAL
from advisor.api.app import create_app
from advisor.api.parts import AdminParts
from advisor.audit_desk import ServiceAudit
from advisor.audit_views import AuditPage
from advisor.block_desk import ServiceBlocks
from advisor.block_views import BlockStep, HistoryPage
from advisor.deletion_desk import ServiceDeletions
from advisor.deletions import Scope
from advisor.entries import LogEntry, OperatorEntry
from advisor.log_desk import LogDesk
from advisor.reader import ServiceReader
from advisor.service import AdvisorService
from advisor.settings import LogSettings
from advisor.views import EventsPage
from tests.moving import NAMESPACE, Storage, agrees, eventually, plan, running, settings_for, settle, used

Answer = TypeVar("Answer")

ROOM = {"capacity_blocks": 64}
BLOCK, OTHER = 7, 8


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    opened = Storage(tmp_path, {"fast": ROOM, "slow": ROOM})
    yield opened
    opened.close()


@pytest.fixture(params=["sql", "segments"])
def service(request: pytest.FixtureRequest, tmp_path: Path, storage: Storage) -> Iterator[AdvisorService]:
    settings = settings_for(tmp_path, [storage]).model_copy(update={"log": LogSettings(kind=request.param)})
    with running(AdvisorService(settings, agents={storage.name: storage.agent})) as running_service:
        yield running_service


def asked(service: AdvisorService, question: Callable[[LogDesk], Awaitable[Answer]]) -> Answer:
    async def answered() -> Answer:
        log = LogDesk(service)
        try:
            return await question(log)
        finally:
            await log.close()

    return asyncio.run(answered())


def history(service: AdvisorService, number: int = BLOCK, **options: Any) -> HistoryPage:
    return asked(service, lambda log: ServiceBlocks(service, log).history(number, **options))


def audit(service: AdvisorService, **options: Any) -> AuditPage:
    return asked(service, lambda log: ServiceAudit(log).page(**options))


def events(service: AdvisorService, *options: Any, **more: Any) -> EventsPage:
    return asked(service, lambda log: ServiceReader(service, log).events(*options, **more))


def in_pieces(service: AdvisorService, **options: Any) -> list[BlockStep]:
    found: list[BlockStep] = []
    before: str | None = None
    while True:
        page = history(service, before=before, limit=1, **options)
        found += page.steps
        before = page.next_before
        if page.complete:
            return found


def entries(service: AdvisorService) -> list[LogEntry]:
    return asked(service, lambda log: log.queries.page(1, 1_000))


def undisturbed(service: AdvisorService, question: Callable[[], EventsPage]) -> tuple[list[LogEntry], EventsPage]:
    """All entries and an answer between which none came: what an agent measured is logged at any time."""
    while True:
        before, page = entries(service), question()
        if len(entries(service)) == len(before):
            return before, page


def test_put_use_move_and_deletion_are_told_with_their_reasons(service: AdvisorService, storage: Storage) -> None:
    storage.put("slow", BLOCK, OTHER)
    eventually(lambda: agrees(service, storage), "what was put")
    storage.get(BLOCK)
    eventually(lambda: used(service) >= {BLOCK}, "its use")
    (move,) = plan(service)
    settle(service)
    eventually(lambda: agrees(service, storage), "its copy")
    deletion, _ = ServiceDeletions(service).order(Scope(namespace_id=NAMESPACE.namespace_id, prefix=BLOCK), "ann")

    def is_done() -> bool:
        plan(service)
        return ServiceDeletions(service).get(deletion.id).state == "done"

    eventually(is_done, "the deletion")
    eventually(lambda: agrees(service, storage), "its copies are known to be gone")

    page = history(service)
    assert page.complete
    oldest_first = [(step.kind, step.place, step.move) for step in reversed(page.steps)]
    assert oldest_first[:2] == [("stored", "slow", ""), ("accessed", "slow", "")]
    of_move = [step.kind for step in reversed(page.steps) if step.move == move.move_id]
    assert of_move[:2] == ["planned", "moved"]
    # The agent's answers may be in the log before its events.
    assert set(of_move[2:]) >= {"moved", "stored"}
    assert ("stored", "fast", move.move_id) in oldest_first
    assert {place for kind, place, _ in oldest_first if kind == "removed"} == {"fast", "slow"}
    texts = {step.kind: step.text for step in page.steps}
    assert move.reason in next(step.text for step in page.steps if step.move == move.move_id and step.kind == "planned")
    assert "its deletion was ordered" in "; ".join(step.text for step in page.steps if step.kind == "deletion")
    assert texts["accessed"] == "used once"
    (first,) = [step for step in page.steps if step.place == "slow" and step.kind == "stored"]
    assert (first.text, first.tier, first.namespace_id) == ("copied there, 512 B", 3, f"{NAMESPACE.namespace_id:016x}")
    at = {entry.position: entry.recorded_us for entry in entries(service)}
    assert all(step.position is not None and at[step.position] == step.time_us for step in page.steps)
    assert [step.position for step in page.steps] == sorted((step.position or 0 for step in page.steps), reverse=True)

    pieces = in_pieces(service)
    assert [(s.position, s.kind, s.place) for s in pieces] == [(s.position, s.kind, s.place) for s in page.steps]
    assert [s.kind for s in reversed(history(service, OTHER).steps)] == ["stored"]
    assert history(service, 99).steps == []


@pytest.mark.parametrize("service", ["sql"], indirect=True)
def test_pages_show_a_running_service(service: AdvisorService, storage: Storage) -> None:
    storage.put("slow", BLOCK)
    eventually(lambda: agrees(service, storage), "what was put")

    async def shown(log: LogDesk) -> list[str]:
        parts = AdminParts(
            ServiceReader(service, log), lambda: b"", doorkeeper=Doorkeeper(anonymous=LOCAL),
            blocks=ServiceBlocks(service, log), audit=ServiceAudit(log),
        )  # fmt: skip
        door = httpx.ASGITransport(create_app(parts))
        async with httpx.AsyncClient(transport=door, base_url="http://127.0.0.1") as client:
            answers = [await client.get(path) for path in ("/blocks?tenant=acme", f"/blocks/{BLOCK:032x}", "/settings")]
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        return [answer.text for answer in answers]

    blocks, block, settings = asked(service, shown)
    assert f"{BLOCK:032x}" in blocks
    assert "copied there, 512 B" in block
    assert "This is all that the log says" in block
    assert "settings-in-force" in settings


@pytest.mark.parametrize("service", ["sql"], indirect=True)
def test_a_tenant_is_told_of_its_own_blocks_alone(service: AdvisorService, storage: Storage) -> None:
    storage.put("slow", BLOCK)
    eventually(lambda: agrees(service, storage), "what was put")
    blocks = ServiceBlocks(service, LogDesk(service))
    (own,) = blocks.named(BLOCK, tenant="acme")
    assert (own.block.hash, [placed.place for placed in own.block.placements]) == (f"{BLOCK:032x}", ["slow"])
    assert blocks.named(BLOCK, tenant="other") == blocks.named(99, tenant="other") == []
    assert blocks.named(BLOCK, namespace_id=1) == []
    (stored,) = history(service, tenant="acme").steps
    assert (stored.kind, stored.position, stored.move) == ("stored", None, "")
    assert history(service, tenant="other") == history(service, 99, tenant="other")


def test_blocks_and_events_and_the_audit_are_found_by_their_filters(
    service: AdvisorService, storage: Storage
) -> None:
    storage.put("slow", *range(1, 21))
    eventually(lambda: agrees(service, storage), "what was put")
    storage.get(*range(1, 6))
    eventually(lambda: used(service) >= set(range(1, 6)), "uses")
    reader = ServiceReader(service)
    assert len(reader.blocks(touches=(1, 9)).blocks) == 5
    assert len(reader.blocks(age_s=(0, 3_600)).blocks) == 5
    never_used = reader.blocks(touches=(0, 0), age_s=(3_600, 1e10)).blocks
    assert (len(never_used), {block.last_touch_us for block in never_used}) == (15, {0})
    assert reader.blocks(namespace_id=5).blocks == []
    assert len(reader.blocks(namespace_id=NAMESPACE.namespace_id, tenant="acme", limit=7).blocks) == 7

    for actor, action in (("ann", "pause"), ("bob", "pause"), ("ann", "resume")):
        service.submit(OperatorEntry(actor, action, "slow")).result()
    newest = audit(service, limit=2).entries
    assert [(entry.actor, entry.action, entry.what) for entry in newest] == [
        ("ann", "resume", "slow"), ("bob", "pause", "slow"),
    ]  # fmt: skip
    rest = audit(service, before=newest[-1].position)
    assert [entry.action for entry in rest.entries] == ["pause", "settings-in-force"]
    assert (rest.complete, rest.next_before) == (True, None)
    assert [e.action for e in audit(service, actor="ann").entries] == ["resume", "pause"]

    batches = [entry for entry in entries(service) if entry.producer is not None]
    producer = batches[0].producer
    page = events(service, producer=producer)
    assert [event.position for event in page.events] == [entry.position for entry in batches]
    assert page.earlier_until is None
    page = events(service, 1, limit=1, producer=producer, until_position=batches[0].position)
    assert [event.position for event in page.events] == [batches[0].position]
    assert page.next_position is None
    everything, page = undisturbed(service, lambda: events(service, limit=2))
    assert [event.position for event in page.events] == [entry.position for entry in everything[-2:]]
    assert page.earlier_until == everything[-3].position
    assert events(service, 1, source="nobody").events == []
