"""A real advisor and agent: a plan is approved over the API and the block moves; changed settings outlive a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from advisor.access.doorkeeper import Doorkeeper
from advisor.access.identity import Identity, Scope
from advisor.api.app import create_app
from advisor.api.parts import AdminParts
from advisor.errors import SettingsError
from advisor.exposition import render_metrics
from advisor.hooks import Hook, PlanMade
from advisor.movers.agent import AgentMover
from advisor.movers.port import MoveCommand
from advisor.plan_actions import ServicePlans
from advisor.policies.admission import BUILT_IN
from advisor.policies.registry import policy_named
from advisor.policy_changes import ServicePolicies
from advisor.reader import ServiceReader
from advisor.service import AdvisorService
from advisor.settings import AdvisorSettings
from storage_agent.errors import CommandRefused
from storage_agent.port import CommandOutcome
from tests.moving import Storage, agrees, eventually, folded, plan, running, settings_for, settle, used

ROOM = {"capacity_blocks": 64}


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    opened = Storage(tmp_path, {"fast": ROOM, "slow": ROOM})
    yield opened
    opened.close()


class Told(Hook):
    def __init__(self) -> None:
        self.plans: list[PlanMade] = []

    def on_plan(self, plan: PlanMade) -> None:
        self.plans.append(plan)


class Client:
    """The admin view of a running service, for ann."""

    def __init__(self, service: AdvisorService) -> None:
        parts = AdminParts(
            reader=ServiceReader(service),
            metrics=lambda: b"",
            doorkeeper=Doorkeeper(anonymous=Identity("ann", Scope.ADMIN)),
            plans=ServicePlans(service),
            policies=ServicePolicies(service),
        )
        self._transport = httpx.ASGITransport(create_app(parts))

    def ask(self, method: str, path: str, status: int = 200, **options: Any) -> Any:
        async def send() -> httpx.Response:
            async with httpx.AsyncClient(transport=self._transport, base_url="http://127.0.0.1") as client:
                return await client.request(method, path, **options)

        answer = asyncio.run(send())
        assert answer.status_code == status, answer.text
        return answer.json()


def service_of(storage: Storage, settings: AdvisorSettings) -> AdvisorService:
    return AdvisorService(settings, agents={storage.name: storage.agent})


def sentences(client: Client, kind: str) -> list[str]:
    return [event["text"] for event in client.ask("GET", f"/api/v1/events?kind={kind}")["events"]]


def read(service: AdvisorService, storage: Storage, *numbers: int) -> None:
    storage.get(*numbers)
    eventually(lambda: used(service) >= set(numbers), "what was read is known")


def test_a_plan_waits_over_a_restart_is_approved_and_its_block_moves(tmp_path: Path, storage: Storage) -> None:
    settings = settings_for(tmp_path, [storage], approve=True)
    with running(service_of(storage, settings)) as service:
        client = Client(service)
        storage.put("slow", 1, 2)
        eventually(lambda: agrees(service, storage), "what was put")
        read(service, storage, 1)
        assert plan(service) == []
        assert b"kvadvisor_moves_waiting 1.0" in render_metrics(service, ServiceReader(service))
        pending = client.ask("GET", "/api/v1/plan")["pending"]
        assert [(int(move["hash"], 16), move["target"]) for move in pending["moves"]] == [(1, "fast")]
        assert pending["lapses_us"] - pending["planned_us"] == 600_000_000
    told_plans = Told()
    again = AdvisorService(settings, agents={storage.name: storage.agent}, hooks={"told": told_plans})
    with running(again) as service:
        client = Client(service)
        path = f"/api/v1/plan/{pending['id']}"
        assert client.ask("GET", "/api/v1/plan")["pending"] == pending
        assert client.ask("POST", "/api/v1/plan/7/approve", 409, json={})["detail"].startswith("plan 7 is not known")
        told = client.ask("POST", f"{path}/approve", json={})
        assert (told["state"], told["actor"], told["moves"], told["left_out"]) == (
            "approved", "ann", [f"{pending['id']}-0"], 0,
        )  # fmt: skip
        eventually(lambda: told_plans.plans, "hooks are told of it")
        assert [(p.position, p.dry, len(p.moves)) for p in told_plans.plans] == [(int(pending["id"]), False, 1)]
        settle(service)
        eventually(lambda: folded(service, "fast") == {1}, "the block that was approved")
        assert storage.held("fast") == {1}
        assert "is approved already: none waits now" in client.ask("POST", f"{path}/reject", 409, json={})["detail"]

        read(service, storage, 2)
        assert client.ask("POST", "/api/v1/plan/apply", json={})["moves_opened"] == 1
        settle(service)
        eventually(lambda: storage.held("fast") == {1, 2}, "the plan that was applied")
        assert sentences(client, "operator") == [f"ann: approve plan {pending['id']}", "ann: plan now and carry it out"]
        assert service.fold.skipped == {}


class RefusingOnce(AgentMover):
    """An agent that refuses its first command."""

    has_refused = False

    def carry_out(self, command: MoveCommand) -> CommandOutcome:
        if not self.has_refused:
            self.has_refused = True
            raise CommandRefused("the agent is being looked after")
        return super().carry_out(command)


def test_an_aborted_move_is_tried_again(tmp_path: Path, storage: Storage) -> None:
    settings = settings_for(tmp_path, [storage])
    with running(AdvisorService(settings, movers={storage.name: RefusingOnce(storage.agent)})) as service:
        client = Client(service)
        storage.put("slow", 1)
        eventually(lambda: agrees(service, storage), "what was put")
        read(service, storage, 1)
        (first,) = plan(service)
        settle(service)
        (shown,) = client.ask("GET", "/api/v1/moves?state=aborted&volume=fast")["moves"]
        assert (shown["id"], shown["note"]) == (first.move_id, "the agent is being looked after")
        fresh = client.ask("POST", f"/api/v1/moves/{first.move_id}/retry", json={})
        assert fresh["reason"] == f"retried by ann; {first.reason}"
        settle(service)
        eventually(lambda: folded(service, "fast") == {1}, "the second try")
        assert storage.held("fast") == {1}
        again = client.ask("POST", f"/api/v1/moves/{first.move_id}/retry", 409, json={})["detail"]
        assert again.endswith("not possible any more: promote: fast or a faster volume holds it already")
        kept = client.ask("POST", f"/api/v1/moves/{fresh['id']}/retry", 409, json={})["detail"]
        assert f"move {fresh['id']} is not aborted" in kept
        assert client.ask("POST", "/api/v1/moves/9-9/retry", 404, json={})["detail"].startswith("move '9-9'")


def test_changed_settings_outlive_a_restart_until_the_file_changes(tmp_path: Path, storage: Storage) -> None:
    settings = settings_for(tmp_path, [storage], moves_per_s=20.0)
    with running(service_of(storage, settings)) as service:
        client = Client(service)
        patch = {"dry_run": True, "moves_per_s": 5, "shadow": [{"name": "calm", "policy": {"admission": "touch-3"}}]}
        told = client.ask("PATCH", "/api/v1/policies", json=patch)
        assert told["changed_here"] == ["dry_run", "moves_per_s", "shadow"]
        assert client.ask("PATCH", "/api/v1/policies", json={"moves_per_s": None})["policy"]["moves_per_s"] == 20.0
        told = client.ask("PATCH", "/api/v1/policies", json={"moves_per_s": 20})
        assert told["changed_here"] == ["dry_run", "shadow"]
        assert service.fold.limits.dry_run
        assert sentences(client, "operator") == [
            "ann: settings, moves_per_s 20.0 → 5.0; dry_run false → true; shadow none → calm",
            "ann: settings, moves_per_s 5.0 → 20.0",
        ]
    with running(service_of(storage, settings)) as service:
        client = Client(service)
        told = client.ask("GET", "/api/v1/policies")
        assert (told["changed_here"], told["shadows"]) == (["dry_run", "shadow"], ["calm"])
        assert (told["policy"]["dry_run"], told["file_policy"]["dry_run"]) == (True, False)
        ready = {check["name"]: check["text"] for check in client.ask("GET", "/readyz")["checks"]}
        assert ready["settings"].startswith("not as the file says, changed by an operator: dry_run, shadow; DELETE")
    changed = settings_for(tmp_path, [storage], moves_per_s=21.0)
    with running(service_of(storage, changed)) as service:
        client = Client(service)
        told = client.ask("GET", "/api/v1/policies")
        assert (told["changed_here"], told["policy"]["dry_run"], told["policy"]["moves_per_s"]) == ([], False, 21.0)
        assert "dry_run, shadow, is the file's again" in service.settings_note
        client.ask("PATCH", "/api/v1/policies", json={"dry_run": True})
        assert client.ask("DELETE", "/api/v1/policies/changes")["changed_here"] == []
        assert not service.fold.limits.dry_run


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """An admission `of-a-package` is installed; `undo` takes it away."""
    monkeypatch.setitem(BUILT_IN, "of-a-package", BUILT_IN["always"])
    policy_named.cache_clear()
    yield monkeypatch
    policy_named.cache_clear()


def test_a_start_without_the_package_of_a_changed_policy_says_what_to_do(
    tmp_path: Path, storage: Storage, package: pytest.MonkeyPatch
) -> None:
    with running(service_of(storage, settings_for(tmp_path, [storage]))) as service:
        Client(service).ask("PATCH", "/api/v1/policies", json={"admission": "of-a-package"})
    package.undo()
    policy_named.cache_clear()
    with pytest.raises(SettingsError, match=r"policy\.admission = 'of-a-package', as an operator changed it"):
        service_of(storage, settings_for(tmp_path, [storage])).start()
    with running(service_of(storage, settings_for(tmp_path, [storage], admission="touch-2"))) as service:
        assert service.fold.limits.admission == "touch-2"
