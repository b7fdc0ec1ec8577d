"""Moves while something happens: a slow volume, a cancel, a pause, a volume or agent that goes and comes back."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from advisor.actions import ServiceActions
from advisor.errors import ActionRefused, NothingSuch
from advisor.movers.agent import AgentMover
from advisor.movers.callback import CallbackMover
from advisor.movers.port import MoveCommand, Phase
from advisor.moves import MoveKind, MoveState
from advisor.reader import ServiceReader
from advisor.service import AdvisorService
from advisor.settings import AgentSettings
from advisor.views import VolumeView
from storage_agent.port import CommandOutcome, Outcome, Result
from storage_agent.service import AgentService
from tests.moving import NAMESPACE, Storage, agrees, eventually, folded, plan, running, settings_for, settle, used

ROOM = {"capacity_blocks": 64}


class GatedMover(AgentMover):
    """Holds each command of a way until its gate is opened."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage.agent)
        self.gates: dict[tuple[str, str], threading.Event] = defaultdict(threading.Event)
        self.held: list[MoveCommand] = []

    def carry_out(self, command: MoveCommand) -> CommandOutcome:
        self.held.append(command)
        assert self.gates[command.source, command.target].wait(60)
        return super().carry_out(command)

    def open_all(self) -> None:
        for way in list(self.gates):
            self.gates[way].set()


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    opened = Storage(tmp_path, {"fast": ROOM, "middle": ROOM, "slow": ROOM})
    yield opened
    opened.close()


def read(service: AdvisorService, storage: Storage, *numbers: int) -> None:
    storage.get(*numbers)
    eventually(lambda: used(service) >= set(numbers), "what was read is known")


def state(service: AdvisorService, number: int) -> MoveState | None:
    """Of a block's last move."""
    with service.lock:
        moves = service.fold.moves
        known = [m for m in (*moves.finished, *moves.open.values()) if m.key.sequence_hash == number]
        return known[-1].state if known else None


def volume_view(service: AdvisorService, volume: str) -> VolumeView:
    (view,) = [each for each in ServiceReader(service).volumes() if each.id == volume]
    return view


def test_a_stuck_volume_holds_up_no_other_and_its_moves_can_be_cancelled(tmp_path: Path, storage: Storage) -> None:
    mover = GatedMover(storage)
    mover.gates["middle", "fast"].set()
    with running(AdvisorService(settings_for(tmp_path, [storage]), movers={"agent": mover})) as service:
        actions = ServiceActions(service)
        storage.put("slow", 1, 2)
        storage.put("middle", 3)
        eventually(lambda: agrees(service, storage), "what was put")
        read(service, storage, 1, 3)
        moves = {move.key.sequence_hash: move for move in plan(service)}
        assert {move.target for move in moves.values()} == {"fast"}
        eventually(lambda: state(service, 3) is MoveState.KEPT, "the other volume's move")
        eventually(lambda: state(service, 1) is MoveState.COPYING and len(mover.held) == 2, "the stuck one")
        assert storage.get(1, 3) == ["slow", "fast"], "a get during a move works"

        assert actions.cancel("ann", moves[1].move_id).cancelled == [moves[1].move_id]
        assert (moves[1].state, moves[1].note) == (MoveState.ABORTED, "cancelled by ann")
        with pytest.raises(NothingSuch, match=rf"move '{moves[1].move_id}' is not open"):
            actions.cancel("ann", moves[1].move_id)
        mover.gates["slow", "fast"].set()  # the agent copies all the same: a copy more, and nothing freed
        eventually(lambda: folded(service, "fast") == {1, 3}, "what the agent did is known")
        assert storage.held("slow") == {1, 2}

        mover.gates["slow", "fast"].clear()
        read(service, storage, 2)
        plan(service)
        eventually(lambda: state(service, 2) is MoveState.COPYING, "one more under way")
        assert len(actions.cancel_all("ann").cancelled) == 1
        assert service.fold.moves.open == {}
        assert actions.cancel_all("ann").cancelled == []
        mover.open_all()
        eventually(lambda: agrees(service, storage), "the end")
        assert service.fold.skipped["illegal move step"] == 0
    assert service.failure is None


def test_a_paused_volume_begins_no_move_and_what_is_under_way_ends(tmp_path: Path, storage: Storage) -> None:
    mover = GatedMover(storage)
    with running(AdvisorService(settings_for(tmp_path, [storage]), movers={"agent": mover})) as service:
        actions = ServiceActions(service)
        storage.put("slow", 1, 2, 3)
        eventually(lambda: agrees(service, storage), "what was put")
        read(service, storage, 1)
        plan(service)
        eventually(lambda: state(service, 1) is MoveState.COPYING, "one under way")
        read(service, storage, 2)
        (waiting,) = plan(service)
        assert actions.pause("ann", "fast").volumes == ["fast"]
        mover.open_all()
        eventually(lambda: state(service, 1) is MoveState.KEPT, "what was under way")
        read(service, storage, 3)
        (elsewhere,) = plan(service)
        assert elsewhere.target == "middle", "to a paused volume nothing is planned"
        settle_all_but(service, waiting.move_id, mover)
        assert waiting.state is MoveState.PLANNED
        assert volume_view(service, "fast").state == "paused by an operator"
        assert actions.pause("ann").paused
        read(service, storage, 1)
        assert plan(service) == []
        with pytest.raises(NothingSuch, match="volume 'tape' is not registered: name one of fast, middle, slow"):
            actions.resume("ann", "tape")
        actions.resume("ann")
        actions.resume("ann", "fast")
        settle(service)
        assert waiting.state is MoveState.KEPT


def settle_all_but(service: AdvisorService, move_id: str, mover: GatedMover) -> None:
    def rest() -> bool:
        mover.open_all()
        return set(service.fold.moves.open) == {move_id}

    eventually(rest, "the end of all other moves")


def test_past_its_switch_a_move_is_not_cancelled(tmp_path: Path) -> None:
    small = {"capacity_blocks": 4, "high_watermark": 0.6, "low_watermark": 0.3}
    storage = Storage(tmp_path, {"fast": small, "slow": ROOM})
    entered, leaving = threading.Event(), threading.Event()

    class Slow(AgentMover):
        def carry_out(self, command: MoveCommand) -> CommandOutcome:
            if command.phase is Phase.FREE:
                entered.set()
                assert leaving.wait(60)
            return super().carry_out(command)

    try:
        movers = {"agent": Slow(storage.agent)}
        with running(AdvisorService(settings_for(tmp_path, [storage]), movers=movers)) as service:
            actions = ServiceActions(service)
            storage.put("fast", 1, 2, 3)
            eventually(lambda: agrees(service, storage), "what was put")
            moves = plan(service)
            assert {move.kind for move in moves} == {MoveKind.DEMOTE}
            assert entered.wait(60)
            switched = [move for move in moves if move.state is MoveState.SWITCHED]
            with pytest.raises(ActionRefused, match="past its switch it cannot be cancelled"):
                actions.cancel("ann", switched[0].move_id)
            assert set(actions.cancel_all("ann").still_open) == {move.move_id for move in switched}
            leaving.set()
            settle(service)
            eventually(lambda: agrees(service, storage), "the end")
            assert storage.held("fast") | storage.held("slow") == {1, 2, 3}
            assert service.fold.skipped["illegal move step"] == 0
    finally:
        leaving.set()
        storage.close()


def test_a_required_volume_lost_in_a_move_is_marked_and_the_move_aborted_and_back_it_serves(
    tmp_path: Path, storage: Storage
) -> None:
    mover = GatedMover(storage)
    settings = settings_for(tmp_path, [storage], tick_s=0.05)
    with AdvisorService(settings, movers={"agent": mover}) as service:
        storage.put("slow", 1)
        eventually(lambda: agrees(service, storage), "what was put")
        storage.get(1)
        eventually(lambda: state(service, 1) is MoveState.COPYING, "a copy under way")
        file = tmp_path / "fast.slab"
        file.rename(tmp_path / "unplugged")
        eventually(lambda: volume_view(service, "fast").state.startswith("away: "), "the volume marked")
        assert state(service, 1) is MoveState.ABORTED
        assert str(file) in volume_view(service, "fast").state
        mover.gates.default_factory = opened
        mover.open_all()
        assert storage.get(1) == ["slow"]
        (tmp_path / "unplugged").rename(file)
        eventually(lambda: volume_view(service, "fast").state == "healthy", "the volume back")
        # Used again and again: a use that is told while the volume comes back may be counted before it is there.
        eventually(lambda: storage.get(1) and 1 in storage.held("fast"), "promoted at last")
        eventually(lambda: agrees(service, storage), "what is there is known")
        assert service.fold.skipped["illegal move step"] == 0


def opened() -> threading.Event:
    gate = threading.Event()
    gate.set()
    return gate


def ready(service: AdvisorService) -> bool:
    return all(check.ok for check in ServiceReader(service).checks() if check.name.startswith("agent"))


def advised(service: AdvisorService, *hashes: int) -> list[str]:
    """Where to load blocks from; empty: compute."""
    advice = ServiceReader(service).load_advice(hashes, block_tokens=16, namespace_id=NAMESPACE.namespace_id)
    return [block.volume for block in advice.blocks]


def test_an_optional_agent_that_vanishes_is_no_fault_and_its_return_is_reconciled(tmp_path: Path) -> None:
    near = Storage(tmp_path, {"near": ROOM}, name="near")
    far = Storage(tmp_path, {"far": {**ROOM, "optional": True}}, name="far", rank=1)
    url = f"ipc://{tmp_path}/far.commands"
    agents = (
        AgentSettings(name="near", command_url=f"ipc://{tmp_path}/near.commands"),
        AgentSettings(name="far", command_url=url, timeout_s=0.3, away_after_s=0.2),
    )
    settings = settings_for(tmp_path, [near, far], tick_s=0.05, agents=agents)
    serving_far = AgentService(far.agent, url)
    try:
        with AgentService(near.agent, agents[0].command_url), AdvisorService(settings) as service:
            near.put("near", 1)
            far.put("far", 1, 2, 3)
            eventually(lambda: agrees(service, near) and agrees(service, far), "what was put")
            assert advised(service, 1) == ["near"]
            # Again and again: on a busy machine so hasty a client may have missed an answer.
            eventually(lambda: advised(service, 2) == ["far"], "the far one serves")
            serving_far.close()
            far.close()
            eventually(lambda: volume_view(service, "far").state.startswith("away: agent far is unreachable"), "away")
            assert volume_view(service, "far").optional
            assert ready(service), "an optional volume that is away is no alarm"
            assert [advised(service, n) for n in (1, 2)] == [["near"], [""]], "the others serve, the rest is computed"

            far.open()  # its next life, which has lost a block and got another meanwhile
            far.agent.delete("", "far", [])
            serving_far = AgentService(far.agent, url)
            far.put("far", 4)
            eventually(lambda: volume_view(service, "far").state == "healthy", "back")
            eventually(lambda: agrees(service, far), "reconciled by its snapshot")
            eventually(lambda: advised(service, 4) == ["far"], "the far one serves again")
        assert service.failure is None
    finally:
        serving_far.close()
        near.close()
        far.close()


def test_an_optional_volume_that_its_agent_gives_up_is_away_until_it_is_registered_again(tmp_path: Path) -> None:
    storage = Storage(tmp_path, {"fast": ROOM, "spare": {**ROOM, "optional": True}})
    movers = {"agent": AgentMover(storage.agent)}
    try:
        with AdvisorService(settings_for(tmp_path, [storage], tick_s=0.05), movers=movers) as service:
            storage.put("spare", 1)
            eventually(lambda: agrees(service, storage), "what was put")
            storage.agent.unregister_volume("spare")
            gone = "away: agent agent has no such volume now"
            eventually(lambda: volume_view(service, "spare").state == gone, "away")
            eventually(lambda: advised(service, 1) == [""], "what is away is computed")
            storage.agent.register_volume(storage.descriptors[1])
            eventually(lambda: volume_view(service, "spare").state == "healthy", "back")
            eventually(lambda: agrees(service, storage) and advised(service, 1) == ["spare"], "reconciled")
        assert service.failure is None
    finally:
        storage.close()


def test_as_many_commands_of_one_way_are_under_way_as_the_settings_allow(tmp_path: Path, storage: Storage) -> None:
    mover = GatedMover(storage)
    agents = (AgentSettings(name="agent", command_url="ipc://unused", moves_at_once=2),)
    with running(AdvisorService(settings_for(tmp_path, [storage], agents=agents), movers={"agent": mover})) as service:
        storage.put("slow", 1, 2, 3)
        eventually(lambda: agrees(service, storage), "what was put")
        for block, commands in ((1, 1), (2, 2), (3, 2)):
            read(service, storage, block)
            plan(service)
            eventually(lambda: len(mover.held) >= commands, "the next command")  # noqa: B023
        assert [command.keys[0].sequence_hash for command in mover.held] == [1, 2]
        mover.open_all()
        settle(service)
        eventually(lambda: storage.held("fast") == {1, 2, 3}, "all of them")


def moved_by(answer: Callable[[MoveCommand], object], storage: Storage, folder: Path) -> tuple[MoveState | None, str]:
    """How a promotion ends that a function carries out, and why."""
    mover = CallbackMover(answer, storage.agent.stat)  # type: ignore[arg-type]
    with running(AdvisorService(settings_for(folder, [storage]), movers={"agent": mover})) as service:
        eventually(lambda: agrees(service, storage), "what is stored")
        read(service, storage, 1)
        (move,) = plan(service)
        settle(service)
    assert service.failure is None
    return move.state, move.note


def test_a_function_of_the_embedders_carries_out_moves_and_its_faults_abort_them(tmp_path: Path) -> None:
    storage = Storage(tmp_path, {"fast": ROOM, "slow": ROOM})

    async def copied(command: MoveCommand) -> CommandOutcome:
        return storage.agent.copy(command.command_id, command.keys, command.source, command.target)

    def broken(command: MoveCommand) -> list[Outcome]:
        raise RuntimeError(f"no route to {command.target}")

    try:
        storage.put("slow", 1)
        for answer, why in (
            (broken, "the mover's function raised RuntimeError: no route to fast"),
            (lambda command: None, "with NoneType: return a list with an Outcome for each block"),
            (lambda command: [], "the agent gave no answer"),
            # Freed instead of copied: what does not answer the phase is no success.
            (lambda command: [Outcome(k, Result.DELETED) for k in command.keys], "deleted"),
        ):
            state, note = moved_by(answer, storage, tmp_path)
            assert state is MoveState.ABORTED
            assert note.endswith(why)
            assert storage.held("fast") == set()
        assert moved_by(copied, storage, tmp_path) == (MoveState.KEPT, "")
        assert storage.held("fast") == {1}
    finally:
        storage.close()
