"""Volumes operated through a running service and a real agent: drained, registered, resized, scrubbed, unregistered."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from advisor.entries import EntryKind
from advisor.errors import ActionRefused, FieldRefused, NothingSuch
from advisor.moves import MoveState
from advisor.open_log import open_log
from advisor.reader import ServiceReader, event_view
from advisor.service import AdvisorService
from advisor.settings import AgentSettings
from advisor.views import Check
from advisor.volume_desk import ServiceVolumes
from storage_agent.client import AgentClient
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import AgentUnreachable
from storage_agent.port import ScrubReport
from storage_agent.service import AgentService
from tests.moving import BLOCK_BYTES, Storage, agrees, eventually, folded, plan, running, settings_for, settle

ROOM = {"capacity_blocks": 64}
BLOCKS = tuple(range(1, 31))


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    opened = Storage(tmp_path, {"fast": ROOM, "slow": ROOM})
    yield opened
    opened.close()


@contextmanager
def serving(folder: Path, storage: Storage, **policy: object) -> Iterator[AdvisorService]:
    url = f"ipc://{folder}/commands"
    agents = [
        AgentSettings(name="agent", command_url=url, timeout_s=60),
        AgentSettings(name="array", command_url=f"ipc://{folder}/plans", mover="published"),
    ]
    settings = settings_for(folder, [storage], agents=agents, **policy)
    with AgentService(storage.agent, url), running(AdvisorService(settings)) as service:
        eventually(lambda: len(service.fold.volumes) >= len(storage.agent.volumes()), "its volumes are known")
        yield service


def described(folder: Path, **fields: object) -> VolumeDescriptor:
    facts = {"id": "extra", "path": str(folder / "extra.slab"), "capacity_blocks": 16, "block_bytes_max": BLOCK_BYTES}
    return VolumeDescriptor(**{**facts, **fields})  # type: ignore[arg-type]


def check(service: AdvisorService, name: str) -> Check | None:
    return next((each for each in ServiceReader(service).checks() if each.name == name), None)


def aborted(service: AdvisorService) -> list[str]:
    """Why moves were aborted."""
    with service.lock:
        return [move.note for move in service.fold.moves.finished if move.state is MoveState.ABORTED]


def said(service: AdvisorService) -> list[str]:
    """What people did, by the log of a service that has stopped."""
    with closing(open_log(service.settings)) as log:
        return [event_view(entry).text for entry in log.read() if entry.kind is EntryKind.OPERATOR]


@pytest.mark.parametrize(("drained", "other"), [("fast", "slow"), ("slow", "fast")])
def test_a_volume_is_drained_over_a_restart_and_can_then_be_unregistered(
    tmp_path: Path, storage: Storage, drained: str, other: str
) -> None:
    storage.put(drained, *BLOCKS)
    storage.put(other, 1, 2)
    with serving(tmp_path, storage, demote_moves_max=8) as service:
        volumes = ServiceVolumes(service)
        eventually(lambda: agrees(service, storage), "what was put")
        with pytest.raises(ActionRefused, match=rf"{drained} holds 30 blocks, 15\.4 kB, .* drain it first"):
            volumes.unregister("ann", drained)
        assert volumes.drain("ann", drained).volume.draining
        assert {move.source for move in plan(service)} == {drained}
        settle(service)
        assert aborted(service) == []
        eventually(lambda: agrees(service, storage) and len(folded(service, drained)) == 22, "the first have left")
        view = volumes.get(drained)
        assert view.drain is not None
        assert (view.drain.blocks_at_start, view.drain.blocks_left) == (30, 22)
        assert storage.get(*BLOCKS).count("") == 0
    with serving(tmp_path, storage, demote_moves_max=8) as service:
        volumes = ServiceVolumes(service)
        for _ in range(6):
            plan(service)
            settle(service)
            assert aborted(service) == []
            eventually(lambda: agrees(service, storage), "what has left is known")
            assert storage.get(*BLOCKS).count("") == 0
        assert storage.held(drained) == set()
        assert storage.held(other) == set(BLOCKS)
        assert volumes.get(drained).volume.state == "drained: it holds no block"
        gone = volumes.unregister("bob", drained)
        assert (gone.agent, gone.blocks) == ("agent", 0)
        with pytest.raises(NothingSuch, match=f"{drained!r} is not registered: name one of {other}"):
            volumes.get(drained)
        assert [each.descriptor.id for each in storage.agent.volumes()] == [other]
    assert service.failure is None
    assert said(service) == [
        f"ann: drain {drained}",
        f"bob: unregister {drained}, empty, asked of agent agent",
        f"bob: unregister {drained}, empty, done by agent agent",
    ]


def test_a_volume_is_registered_and_changed_and_what_may_not_be_is_refused(tmp_path: Path, storage: Storage) -> None:
    with serving(tmp_path, storage) as service:
        volumes = ServiceVolumes(service)
        with pytest.raises(FieldRefused, match=r"agent agent: .* path '/etc/x' .* lies outside") as refused:
            volumes.register("ann", "agent", described(tmp_path, path="/etc/x"))
        assert (refused.value.field, refused.value.value) == ("descriptor.path", "'/etc/x'")
        with pytest.raises(FieldRefused, match="kind 'faulty' loses blocks on purpose") as refused:
            volumes.register("ann", "agent", described(tmp_path, kind="faulty", options={"inner": "slab"}))
        assert (refused.value.field, "allow_faulty = true" in refused.value.remedy) == ("descriptor.kind", True)
        with pytest.raises(NothingSuch, match="agent 'nobody' is not in the settings: name one of agent, array"):
            volumes.register("ann", "nobody", described(tmp_path))
        with pytest.raises(ActionRefused, match="agent array is an array that moves blocks by itself"):
            volumes.register("ann", "array", described(tmp_path))
        view = volumes.register("ann", "agent", described(tmp_path, optional=True, low_watermark=0.5))
        assert (view.volume.id, view.volume.capacity_blocks, view.volume.blocks) == ("extra", 16, 0)
        assert view.health is not None
        assert (view.health.slots_free, view.health.degraded) == (16, "")
        storage.put("extra", *range(1, 9))
        eventually(lambda: len(folded(service, "extra")) == 8, "what was put there")
        assert service.look("agent")
        writes = volumes.get("extra").write
        assert writes.transfers >= 1
        assert writes.transfer_p50_s is not None
        assert 0 < writes.transfer_p50_s <= (writes.transfer_p99_s or 0)

        assert volumes.change("ann", "extra", capacity_blocks=32, high_watermark=0.75).volume.capacity_blocks == 32
        with pytest.raises(ActionRefused, match="agent agent: "):
            volumes.change("ann", "extra", capacity_blocks=4, high_watermark=0.9)
        view = volumes.get("extra")
        assert (view.volume.high_watermark, view.volume.low_watermark) == (0.75, 0.5), "nothing was changed"
        with pytest.raises(ActionRefused, match=r"low_watermark 0\.8 and high_watermark 0\.75 must satisfy"):
            volumes.change("ann", "extra", low_watermark=0.8)
        with pytest.raises(ActionRefused, match="extra is not being drained"):
            volumes.undrain("ann", "extra")
        assert sum(each.blocks for each in view.heat.by_touches) == view.heat.looked_at == 8
        assert view.written.today_bytes >= 0

        gone = volumes.unregister("ann", "extra", force=True)
        assert (gone.blocks, gone.block_bytes) == (8, 8 * BLOCK_BYTES)
        assert "extra" not in service.fold.volumes, "an optional one that was taken is not away: it is gone"
    assert service.failure is None
    asked, done, refused = (f"{word} agent agent" for word in ("asked of", "done by", "refused by"))
    starts = [
        f"ann: register extra, {asked}",
        f"ann: register extra, {refused}: path: ",
        f"ann: register extra, {asked}",
        f"ann: register extra, {refused}: kind: ",
        f"ann: register extra, {asked}",
        f"ann: register extra, {done}",
        f"ann: resize extra, to 32 blocks, {asked}",
        f"ann: resize extra, to 32 blocks, {done}",
        "ann: watermarks extra, 0.5 to 0.75 of its capacity",
        f"ann: resize extra, to 4 blocks, {asked}",
        f"ann: resize extra, to 4 blocks, {refused}: ",
        f"ann: unregister extra, with 8 blocks on it, {asked}",
        f"ann: unregister extra, with 8 blocks on it, {done}",
    ]
    assert [text[: len(start)] for text, start in zip(said(service), starts, strict=True)] == starts


def test_an_order_that_the_agent_did_not_answer_is_logged_as_not_known(
    tmp_path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object, **__: object) -> None:
        raise AgentUnreachable("no answer in 1 s")

    with serving(tmp_path, storage) as service:
        monkeypatch.setattr(AgentClient, "register_volume", lost)
        with pytest.raises(ActionRefused, match="no answer in 1 s"):
            ServiceVolumes(service).register("ann", "agent", described(tmp_path))
    assert said(service) == [
        "ann: register extra, asked of agent agent",
        "ann: register extra, agent agent gave no answer: whether it was done is not known",
    ]


def test_no_volume_lies_in_the_advisors_own_directory_or_around_it(tmp_path: Path, storage: Storage) -> None:
    with serving(tmp_path, storage) as service:
        volumes = ServiceVolumes(service)
        own = service.settings.directory
        (tmp_path / "link").symlink_to(own)
        before = sorted(own.rglob("*.sqlite"))
        for path in (own, own.parent, own / "x.slab", tmp_path / "link" / "x.slab", own / ".." / own.name / "x"):
            with pytest.raises(FieldRefused, match="in, or above, the advisor's own directory") as refused:
                volumes.register("mallory", "agent", described(tmp_path, path=str(path)))
            assert refused.value.field == "descriptor.path"
        assert sorted(own.rglob("*.sqlite")) == before
        assert not (own / "x.slab").exists()
    assert said(service) == []


def test_a_scrub_runs_beside_the_rest_one_at_a_time(
    tmp_path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    scrub = storage.agent.scrub

    def held_up(command_id: str, volume: str, *, term: int) -> ScrubReport:
        assert go_on.wait(60)
        return scrub(command_id, volume, term=term)

    monkeypatch.setattr(storage.agent, "scrub", held_up)
    storage.put("slow", 1, 2, 3)
    with serving(tmp_path, storage) as service:
        volumes = ServiceVolumes(service)
        with pytest.raises(NothingSuch, match="slow was not scrubbed since the service started"):
            volumes.scrub_of("slow")
        assert volumes.scrub("ann", "slow").state == "running"
        with pytest.raises(ActionRefused, match="slow is being scrubbed for ann: wait for its end"):
            volumes.scrub("bob", "slow")
        assert volumes.scrub("bob", "fast").state == "running"
        assert volumes.drain("ann", "fast").volume.draining, "nothing waits for a scrub"
        go_on.set()
        eventually(lambda: volumes.scrub_of("slow").state == "done", "the scrub's end")
        done = volumes.scrub_of("slow")
        assert (done.actor, done.good_blocks, done.corrupt_blocks, done.good_bytes) == ("ann", 3, 0, 3 * BLOCK_BYTES)
        assert done.ended_us is not None
        eventually(lambda: volumes.scrub_of("fast").state == "done", "the other's")
        assert volumes.scrub("bob", "slow").state == "running", "and again"
        eventually(lambda: volumes.scrub_of("slow").state == "done", "its end")


def test_readiness_fails_while_a_volume_that_is_not_optional_is_away(tmp_path: Path, storage: Storage) -> None:
    with serving(tmp_path, storage) as service:
        storage.agent.register_volume(described(tmp_path, optional=True))
        service.look("agent")
        for volume in ("slow", "extra"):
            os.rename(tmp_path / f"{volume}.slab", tmp_path / f"{volume}.elsewhere")

        def away(volume: str) -> bool:
            return service.look("agent") and bool(service.fold.volumes[volume].away)

        eventually(lambda: away("slow") and away("extra"), "the files are missed")
        failing, optional = check(service, "volume slow"), check(service, "volume extra")
        assert failing is not None
        assert optional is not None
        assert not failing.ok
        assert "slow.slab is not there" in failing.text
        assert failing.text.endswith("bring its medium back, or unregister it")
        assert optional.ok
        answers = check(service, "agent agent")
        assert answers is not None
        assert answers.ok
        os.rename(tmp_path / "slow.elsewhere", tmp_path / "slow.slab")
        eventually(lambda: not away("slow"), "it is back")
        assert check(service, "volume slow") is None
