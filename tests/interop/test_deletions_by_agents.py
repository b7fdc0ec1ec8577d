"""Deletions with a real agent, its volumes on files, and a real service beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from advisor.deletion_desk import ServiceDeletions
from advisor.deletion_views import DeletionView
from advisor.deletions import Scope
from advisor.entries import OperatorEntry
from advisor.errors import ActionRefused, NothingSuch
from advisor.exposition import render_metrics
from advisor.index import Key
from advisor.reader import ServiceReader
from advisor.service import AdvisorService
from event_plane.connect import open_publisher
from event_plane.schema import Namespace, producer_id
from storage_agent.agent import StorageAgent
from storage_agent.client_storage import ClientStorage
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import CommandRefused, RefusalError, StaleTerm
from storage_agent.port import BlockKey, Outcome, PutBlock, Result
from storage_agent.service import AgentService
from tests.moving import BLOCK_BYTES, NAMESPACE, Storage, agrees, eventually, payload, settings_for

OTHER = Namespace(tenant="forge")
VOLUMES = {"fast": {"capacity_blocks": 64}, "slow": {"capacity_blocks": 64}}


def put_of(namespace: Namespace, number: int) -> PutBlock:
    where = BlockKey(namespace.namespace_id, 0, number)
    return PutBlock(where, namespace, memoryview(payload(number)), block_tokens=16)


def put(agent: StorageAgent, volume: str, number: int, namespace: Namespace = NAMESPACE) -> Outcome:
    (outcome,) = agent.put(volume, [put_of(namespace, number)])
    return outcome


class Mending(Storage):
    """Its agent looks for what is lost and back ten times a second."""

    def open(self) -> None:
        self._publisher = open_publisher(self.url, producer=producer_id(self.name), flush_interval_s=0.005)
        self.agent = StorageAgent(
            self.name, publisher=self._publisher, allowed_roots=[self._folder], mend_interval_s=0.1
        )
        self.agent.register_volumes(self.descriptors)


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    made = Mending(tmp_path, VOLUMES)
    yield made
    made.close()


@pytest.fixture
def service(tmp_path: Path, storage: Storage) -> Iterator[AdvisorService]:
    settings = settings_for(tmp_path, [storage]).model_copy(update={"tick_interval_s": 0.1})
    with AdvisorService(settings, agents={storage.name: storage.agent}) as running:
        eventually(lambda: len(running.fold.volumes) == len(VOLUMES), "both volumes")
        yield running


def until(service: AdvisorService, deletion_id: str, state: str) -> DeletionView:
    desk = ServiceDeletions(service)
    eventually(lambda: desk.get(deletion_id).state == state, f"{deletion_id} is {state}")
    return desk.get(deletion_id)


def test_a_tenant_is_gone_from_every_volume_proven_and_refused_until_it_is_enabled(
    service: AdvisorService, storage: Storage
) -> None:
    storage.put("slow", *range(1, 21))
    storage.put("fast", *range(1, 6))
    assert put(storage.agent, "slow", 1, OTHER).result is Result.STORED
    eventually(lambda: agrees(service, storage), "all is known")
    desk = ServiceDeletions(service)
    ordered, fresh = desk.order(Scope(tenant="acme"), "ann")
    assert (fresh, desk.order(Scope(tenant="acme"), "bo")) == (True, (desk.get(ordered.id), False))
    ended = until(service, ordered.id, "done")
    assert (ended.blocks, ended.block_bytes) == (25, 25 * BLOCK_BYTES)
    assert {sweep.volume: (sweep.state, sweep.blocks, sweep.asked) for sweep in ended.volumes} == {
        "fast": ("clear", 5, 5),
        "slow": ("clear", 20, 20),
    }
    assert storage.get(*range(1, 21)) == [""] * 20
    assert storage.held("slow") == {1}, "the other tenant's"

    eventually(lambda: storage.agent.stat().refused_tenants == ["acme"], "the agent knows whom to refuse")
    refused = put(storage.agent, "fast", 7)
    assert (refused.result, "'acme' was deleted" in refused.reason) == (Result.FAILED, True)
    both = storage.agent.put("fast", [put_of(NAMESPACE, 8), put_of(OTHER, 8)])
    assert [outcome.result for outcome in both] == [Result.FAILED, Result.STORED]
    shown = render_metrics(service, ServiceReader(service)).decode()
    for line in ("deletions_open 0.0", "deletion_blocks_total 25.0", "tenants_refused 1.0"):
        assert f"kvadvisor_{line}" in shown
    assert desk.enable("acme", "ann") == []
    eventually(lambda: not storage.agent.stat().refused_tenants, "it is refused no longer")
    assert put(storage.agent, "fast", 7).result is Result.STORED
    with pytest.raises(NothingSuch, match="'acme' is not refused"):
        desk.enable("acme", "ann")


def test_what_an_agent_that_cannot_refuse_takes_is_deleted_again_and_counted(
    service: AdvisorService, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = ServiceDeletions(service)
    until(service, desk.order(Scope(tenant="acme"), "ann")[0].id, "done")
    monkeypatch.setattr(storage.agent, "refusal", lambda key, namespace, volume: None)
    storage.put("slow", 3, 4)
    eventually(lambda: desk.page().deletions[0].again, "it was noticed")
    again = desk.page().deletions[0]
    assert (again.again, again.actor, again.tenant) == (True, "advisor", "acme")
    assert until(service, again.id, "done").blocks == 2
    assert storage.held("slow") == set()
    (refused,) = desk.page().refused
    assert (refused.tenant, refused.returned_blocks) == ("acme", 2)


def test_copies_that_the_advisor_does_not_know_of_are_found_by_asking(
    service: AdvisorService, storage: Storage
) -> None:
    storage.put("slow", 1, 2)
    eventually(lambda: agrees(service, storage), "all is known")
    storage.put("fast", 3)
    eventually(lambda: agrees(service, storage), "all is known")
    place = service.fold.volumes["slow"].place
    desk = ServiceDeletions(service)
    scope = Scope(namespace_id=NAMESPACE.namespace_id, prefix=1)
    with service.lock:  # as if its Store had been lost
        row = service.fold.index.row_of(Key(NAMESPACE.namespace_id, 0, 1))
        assert row is not None
        assert service.fold.index.remove(row, place)
    ended = until(service, desk.order(scope, "ann")[0].id, "done")
    assert [(sweep.found, sweep.blocks) for sweep in ended.volumes if sweep.volume == "slow"] == [(1, 1)]
    assert storage.held("slow") == {2}


def test_a_volume_that_is_away_keeps_a_deletion_open_and_is_finished_when_it_is_back(
    service: AdvisorService, storage: Storage, tmp_path: Path
) -> None:
    storage.put("slow", 1, 2)
    storage.put("fast", 1)
    eventually(lambda: agrees(service, storage), "all is known")
    slab, elsewhere = tmp_path / "slow.slab", tmp_path / "elsewhere"
    slab.rename(elsewhere)
    desk = ServiceDeletions(service)
    ordered = desk.order(Scope(tenant="acme"), "ann")[0]
    waiting = until(service, ordered.id, "waiting")
    assert {sweep.volume: sweep.state for sweep in waiting.volumes} == {"fast": "clear", "slow": "waiting"}
    assert storage.held("fast") == set()
    elsewhere.rename(slab)
    ended = until(service, ordered.id, "done")
    assert storage.held("slow") == set()
    assert {sweep.volume: sweep.blocks for sweep in ended.volumes} == {"fast": 1, "slow": 2}


def test_an_agent_keeps_whom_it_refuses_over_a_restart_and_an_older_advisor_does_not_change_it(tmp_path: Path) -> None:
    state = tmp_path / "agent"
    state.mkdir()

    def agent() -> StorageAgent:
        return StorageAgent("a", publisher=None, allowed_roots=[tmp_path], state_folder=state)

    with agent() as first:
        first.refuse_tenants(["acme", "forge"], term=7)
    with agent() as second:
        assert second.stat().refused_tenants == ["acme", "forge"]
        with pytest.raises(StaleTerm, match="an advisor of term 7 has taken over"):
            second.refuse_tenants([], term=6)
        second.refuse_tenants(["forge"], term=7)
    with agent() as third:
        assert third.stat().refused_tenants == ["forge"]
    (kept,) = state.glob("*.refused")
    kept.write_bytes(b"{}")
    with pytest.raises(RefusalError, match=r"names no refused tenants .*; remove it: the advisor tells again"):
        agent()


def test_orders_that_cannot_be_are_refused_before_they_are_logged(service: AdvisorService) -> None:
    desk = ServiceDeletions(service)
    service.submit(OperatorEntry("ann", "pause")).result()
    ordered = desk.order(Scope(tenant="acme"), "ann")[0]
    until(service, ordered.id, "waiting")
    with pytest.raises(ActionRefused, match=f"deletion {ordered.id} of tenant acme is waiting: wait for its end"):
        desk.enable("acme", "ann")
    for number in range(63):
        desk.order(Scope(namespace_id=number + 1), "ann")
    with pytest.raises(ActionRefused, match="64 deletions are open"):
        desk.order(Scope(tenant="one-too-many"), "ann")
    gone = desk.abandon(ordered.id, "bo")
    assert (gone.state, gone.note) == ("failed", "given up by bo: not proven gone from fast, slow")
    with pytest.raises(NothingSuch, match="has ended"):
        desk.abandon(ordered.id, "bo")


def test_other_processes_cannot_put_a_refused_tenants_blocks_by_leases_or_offers(tmp_path: Path) -> None:
    slab = VolumeDescriptor(id="slab", path=str(tmp_path / "v.slab"), capacity_blocks=8, block_bytes_max=BLOCK_BYTES)
    folder = msgspec.structs.replace(slab, id="folder", kind="directory", path=str(tmp_path / "v"), speed_rank=1)
    agent = StorageAgent("a", publisher=None, allowed_roots=[tmp_path])
    agent.register_volumes([slab, folder])
    agent.refuse_tenants(["acme"])
    with agent, AgentService(agent, f"ipc://{tmp_path}/commands") as served:
        client = ClientStorage(served.command_url)
        try:
            for volume in ("slab", "folder"):
                outcomes = client.put(volume, [put_of(NAMESPACE, 1), put_of(OTHER, 1)])
                assert [outcome.result for outcome in outcomes] == [Result.FAILED, Result.STORED], outcomes
                assert "'acme' was deleted: enable it" in outcomes[0].reason
            client.refuse_tenants([])
            assert agent.stat().refused_tenants == []
            with pytest.raises(CommandRefused, match="at most 1024 can be"):
                client.refuse_tenants([str(number) for number in range(1_025)])
            with pytest.raises(CommandRefused, match="a name has 1 to 256 bytes"):
                client.refuse_tenants(["x" * 257])
        finally:
            client.close()


def test_an_agent_takes_no_block_of_a_tenant_that_a_volume_is_not_for(tmp_path: Path) -> None:
    slab = VolumeDescriptor(
        id="slab", path=str(tmp_path / "v.slab"), capacity_blocks=8, block_bytes_max=BLOCK_BYTES,
        tenants=(OTHER.tenant,),
    )  # fmt: skip
    folder = msgspec.structs.replace(slab, id="folder", kind="directory", path=str(tmp_path / "v"), speed_rank=1)
    agent = StorageAgent("a", publisher=None, allowed_roots=[tmp_path])
    agent.register_volumes([slab, folder])
    blocks = [put_of(NAMESPACE, 1), put_of(OTHER, 1)]
    with agent, AgentService(agent, f"ipc://{tmp_path}/commands") as served:
        client = ClientStorage(served.command_url)
        try:
            for volume in ("slab", "folder"):
                for outcomes in (client.put(volume, blocks), agent.put(volume, blocks)):
                    assert [outcome.result.ok for outcome in outcomes] == [False, True], outcomes
                    assert f"{volume} is not for tenant 'acme'" in outcomes[0].reason
        finally:
            client.close()
