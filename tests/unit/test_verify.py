"""`kvadvisor verify` finds what is wrong with a folder, and only that: small real logs and slabs, made by hand."""

from __future__ import annotations

import re
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from advisor.checkpoint import Taken
from advisor.cli import main
from advisor.entries import Control, EntryKind, LogEntry, MoveStep, NewEntry, Tick, VolumeEntry, control_entry
from advisor.fold import Fold
from advisor.intake import Cursors
from advisor.log import SqlLog
from advisor.log_lock import WriterLock
from advisor.moves import MoveKind, Trigger
from event_plane import wire
from event_plane.connect import open_publisher, open_subscriber
from event_plane.schema import Namespace, producer_id
from event_plane.transport import Message
from storage_agent.agent import StorageAgent
from storage_agent.config import load_settings
from storage_agent.port import BlockKey, PutBlock
from storage_agent.slab_file import open_slab
from storage_agent.slab_scan import reports

NAMESPACE = Namespace(tenant="acme")
AGENT = """
name = "agent-1"
command_url = "tcp://127.0.0.1:7001"
event_url = "zmq+tcp://127.0.0.1:7002"
allowed_roots = ["."]
[[volumes]]
id = "fast"
path = "fast.slab"
capacity_blocks = 4
block_bytes_max = 100
[[volumes]]
id = "slow"
path = "slow.slab"
speed_rank = 1
capacity_blocks = 6
block_bytes_max = 100
"""


def key(number: int) -> BlockKey:
    return BlockKey(NAMESPACE.namespace_id, 0, number)


class Life:
    """One life of an agent on the folder's volumes, and of the advisor that logs what the agent says."""

    def __init__(self, folder: Path) -> None:
        (folder / "agent.toml").write_text(AGENT)
        self.settings = load_settings(folder / "agent.toml")
        plane = f"memory://{folder.name}-{time.monotonic_ns()}"
        self._subscriber = open_subscriber("agent", plane)
        self._publisher = open_publisher(plane, producer=producer_id("agent-1"))
        self._log = SqlLog(folder / "log.db")
        self.fold = Fold()
        for entry in self._log.read():
            self.fold.apply(entry)
        self.agent = StorageAgent("agent-1", publisher=self._publisher, allowed_roots=[folder])
        for volume in self.settings.volumes:
            self.agent.register_volume(volume)
        self.log_events()

    def log_events(self) -> None:
        last = self._publisher.flush()
        logged = -1
        while logged < last:
            for received in self._subscriber.receive(64):
                if isinstance(received, Message):
                    batch = wire.decode(received.payload)
                    logged = batch.sequence
                    facts = (batch.producer, batch.epoch, batch.sequence)
                    self._append(NewEntry(EntryKind.BATCH, received.payload, *facts, source="agent"))

    def log(self, control: Control) -> None:
        self._append(control_entry(control))

    def log_volumes(self) -> None:
        for volume in self.settings.volumes:
            self.log(VolumeEntry(msgspec.to_builtins(volume), "agent-1", self._publisher.producer))

    def _append(self, entry: NewEntry) -> None:
        position = self._log.append([entry], 0)
        self.fold.apply(LogEntry(position, entry.kind, entry.payload, source=entry.source))

    def put(self, volume: str, *numbers: int) -> None:
        blocks = [PutBlock(key(n), NAMESPACE, memoryview(b"%030d" % n)) for n in numbers]
        assert all(outcome.result.ok for outcome in self.agent.put(volume, blocks))

    def delete(self, volume: str, *numbers: int) -> None:
        assert all(o.result.ok for o in self.agent.delete("", volume, [key(n) for n in numbers]).outcomes)

    def demote_one(self, *triggers: Trigger) -> int:
        """Plan the demotion that a full fast volume needs, and log these steps of it. Returns the block's number."""
        self.log(Tick(now_us=self.fold.now_us + 1))
        (move,) = self.fold.moves.open.values()
        assert move.kind is MoveKind.DEMOTE
        for trigger in triggers:
            self.log(MoveStep(trigger, [move.move_id]))
        return move.key.sequence_hash

    def cut(self) -> None:
        self._log.prune(self._log.last_position() - 1)

    def end(self) -> None:
        self.agent.close()
        self._publisher.close()
        self._subscriber.close()
        self._log.close()


def make(folder: Path) -> Life:
    """Four blocks on the fast volume, two on the slow one, all logged."""
    life = Life(folder)
    life.log_volumes()
    life.put("fast", 1, 2, 3, 4)
    life.put("slow", 5, 6)
    life.log_events()
    return life


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "kept"
    made.mkdir()
    return made


class Verified:
    """What the command said and ended with."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        capsys.readouterr()
        try:
            main(["verify", str(folder)])
        except SystemExit as ended:
            self.status = ended.code
        self.out, self.err = capsys.readouterr()

    def row(self, name: str) -> list[int]:
        """A row's figures, fast then slow."""
        line = next(line for line in self.out.splitlines() if re.search(rf"^\W*{name}", line))
        return [int(figure) for figure in re.findall(r"\d+", line)]


def zero_slot(folder: Path, volume: int, number: int) -> None:
    """Erase a block's header behind the agent's back, and the saved table that still has it."""
    descriptor = load_settings(folder / "agent.toml").volumes[volume]
    slab = open_slab(descriptor, Path(descriptor.path))
    slab.erase_headers([report.slot for report in reports(slab) if report.key == key(number)])
    assert slab.table_path is not None
    slab.table_path.unlink()
    slab.close()


def test_log_and_volumes_that_agree_are_clean(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(folder).end()
    done = Verified(folder, capsys)
    assert (done.status, done.err) == (0, "")
    assert (done.row("live"), done.row("free"), done.row("in the log")) == ([4, 2], [0, 4], [4, 2])
    assert "nothing lost, nothing doubled, nothing leaked" in done.out


def test_cut_log_is_verified_from_its_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    life = make(folder)
    moved = life.demote_one(Trigger.BEGIN, Trigger.VERIFY, Trigger.SWITCH)
    Taken(life.fold, Cursors()).write(folder / "checkpoints")
    life.delete("fast", moved)
    life.cut()
    life.end()
    seen = Verified(folder, capsys)
    assert (seen.status, seen.err) == (0, ""), seen.out
    assert seen.row("gone as a logged move said") == [1, 0]
    (checkpoint,) = (folder / "checkpoints").iterdir()
    checkpoint.write_bytes(checkpoint.read_bytes()[:-1])
    seen = Verified(folder, capsys)
    assert seen.status == 2
    assert "was cut and begins at position" in seen.err
    assert checkpoint.exists(), "it changes nothing"


def test_slot_that_vanished_is_lost(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(folder).end()
    zero_slot(folder, 1, 5)
    done = Verified(folder, capsys)
    assert (done.status, done.row("lost")) == (1, [0, 1])
    assert f"lost on slow: {5:032x} of namespace {NAMESPACE.namespace_id:016x}" in done.out
    assert done.err == f"kvadvisor: 1 fault in {folder}: keep it as it is and report this, it should not happen\n"


def test_flipped_payload_byte_is_lost_and_its_slot_leaked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(folder).end()
    with (folder / "fast.slab").open("r+b") as slab:
        slab.seek(5 * 4096)  # the first slot's payload
        slab.write(b"x")
    done = Verified(folder, capsys)
    # No put was cut off: the slab was closed in order.
    assert (done.status, done.row("lost"), done.row("leaked"), done.row("torn")) == (1, [1, 0], [1, 0], [0, 0])


def test_block_stored_before_its_volume_was_known_can_be_lost(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    life = Life(folder)
    life.put("fast", 1, 2)
    life.log_events()
    life.end()
    assert Verified(folder, capsys).row("in the log") == [2, 0]
    zero_slot(folder, 0, 2)
    assert Verified(folder, capsys).row("lost") == [1, 0]


def test_volume_whose_file_is_gone_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(folder).end()
    (folder / "slow.slab").unlink()
    done = Verified(folder, capsys)
    assert (done.status, done.row("in the log"), done.row("lost")) == (1, [4, 2], [0, 0])
    sentence = (
        f"kvadvisor: volume slow: its file {folder / 'slow.slab'} is not there; put it back, or start its agent,"
        " which makes an empty one\n"
    )
    assert done.err == sentence
    zero_slot(folder, 0, 1)
    done = Verified(folder, capsys)
    assert (done.status, done.row("lost")) == (1, [1, 0])
    assert done.err.startswith(f"{sentence}kvadvisor: 1 fault in {folder}: keep it as it is")


def test_one_key_in_two_slots_is_doubled(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    life = make(folder)
    life.end()
    # A slot's header says its number, so a double has to be put: into a slab that has forgotten the first.
    descriptor = life.settings.volumes[1]
    path = Path(descriptor.path)
    slab = open_slab(descriptor, path)
    (offset,) = (slab.superblock.slot_offset(report.slot) for report in reports(slab) if report.key == key(5))
    slab.close()
    first_copy = path.read_bytes()[offset : offset + 8192]
    zero_slot(folder, 1, 5)
    again = Life(folder)
    again.put("slow", 7, 5)
    again.delete("slow", 7)
    again.log_events()
    again.end()
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(first_copy)
    done = Verified(folder, capsys)
    assert (done.status, done.row("doubled"), done.row("lost")) == (1, [0, 1], [0, 0])
    assert f"doubled on slow: {5:032x}" in done.out


def test_slots_unknown_to_the_log_are_reported_and_no_fault(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    life = make(folder)
    life.put("slow", 7)
    life.end()
    done = Verified(folder, capsys)
    assert (done.status, done.row("unknown to the log")) == (0, [0, 1])


def test_put_that_was_cut_off_is_torn_and_no_fault(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    life = make(folder)
    # The slab is open, as after a kill: a header without its payload.
    with (folder / "slow.slab").open("r+b") as slab:
        slab.seek(4 * 4096 + 5 * 8192)
        slab.write(b"KVABLCK\0")
    kept = folder.with_name("killed")
    shutil.copytree(folder, kept)
    life.end()
    done = Verified(kept, capsys)
    assert (done.status, done.row("torn"), done.row("leaked")) == (0, [0, 1], [0, 0])


def test_source_freed_after_a_logged_switch_is_explained(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    life = make(folder)
    number = life.demote_one(Trigger.BEGIN, Trigger.VERIFY)
    life.put("slow", number)
    life.log_events()
    (move,) = life.fold.moves.open
    life.log(MoveStep(Trigger.SWITCH, [move]))
    life.delete("fast", number)
    life.end()
    done = Verified(folder, capsys)
    assert (done.status, done.row("gone as a logged move said"), done.row("lost")) == (0, [1, 0], [0, 0])


def test_source_freed_before_the_switch_was_logged_is_lost(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    life = make(folder)
    number = life.demote_one(Trigger.BEGIN, Trigger.VERIFY)
    life.delete("fast", number)
    life.end()
    done = Verified(folder, capsys)
    assert (done.status, done.row("lost")) == (1, [1, 0])


@pytest.mark.parametrize("in_one_batch", [True, False])
def test_excuse_of_a_switch_ends_with_the_remove(
    folder: Path, capsys: pytest.CaptureFixture[str], in_one_batch: bool
) -> None:
    life = make(folder)
    number = life.demote_one(Trigger.BEGIN, Trigger.VERIFY, Trigger.SWITCH)
    life.delete("fast", number)
    if not in_one_batch:
        life.log_events()
    life.put("fast", number)
    life.log_events()
    life.end()
    assert Verified(folder, capsys).status == 0
    zero_slot(folder, 0, number)
    done = Verified(folder, capsys)
    assert (done.status, done.row("lost"), done.row("gone as a logged move said")) == (1, [1, 0], [0, 0])


def test_services_own_directory_is_verified_by_the_volumes_in_its_log(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(folder).end()
    apart = folder.with_name("advisor")
    apart.mkdir()
    for file in folder.glob("log.db*"):
        file.rename(apart / file.name)
    done = Verified(apart, capsys)
    assert (done.status, done.row("live")) == (0, [4, 2])
    zero_slot(folder, 0, 1)
    assert Verified(apart, capsys).row("lost") == [1, 0]


# -- folders that cannot be verified


def refusal(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    done = Verified(folder, capsys)
    assert (done.status, done.out) == (2, "")
    (sentence,) = done.err.splitlines()
    assert sentence.startswith("kvadvisor: ")
    return sentence


def test_folder_that_is_not_there_or_a_file_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing-here is no folder: give the one of" in refusal(folder / "nothing-here", capsys)
    (folder / "file").write_text("x")
    assert "file is no folder" in refusal(folder / "file", capsys)


def test_folder_of_something_else_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "letter.txt").write_text("Dear")
    assert "holds neither log.db nor agent.toml: it was made by something else" in refusal(folder, capsys)


def test_empty_folder_has_nothing_to_lose(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Verified(folder, capsys).status == 0


def test_demo_killed_before_it_wrote_its_settings_has_nothing_to_lose(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    WriterLock(folder / "demo").release()
    (folder / "agent.toml.part").write_text("name = ")
    assert Verified(folder, capsys).status == 0


def test_log_killed_before_its_first_transaction_is_an_empty_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(folder).end()
    for file in folder.glob("log.db*"):
        file.unlink()
    for begun in (b"", None):
        if begun is None:
            (folder / "log.db").unlink()
            connection = sqlite3.connect(folder / "log.db")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.close()
        else:
            (folder / "log.db").write_bytes(begun)
        done = Verified(folder, capsys)
        assert (done.status, done.row("unknown to the log")) == (0, [4, 2]), done.err
        assert "has no log: nothing doubled, nothing leaked, and nobody can say what is lost" in done.out


def test_log_of_another_program_or_no_database_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "log.db").write_text("Dear diary, this is no database at all")
    assert "log.db: the file is no SQLite database" in refusal(folder, capsys)
    (folder / "log.db").unlink()
    connection = sqlite3.connect(folder / "log.db")
    connection.execute("CREATE TABLE songs (name TEXT)")
    connection.close()
    assert "log.db holds no log: check the directory" in refusal(folder, capsys)


def test_damaged_entry_of_the_log_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(folder).end()
    connection = sqlite3.connect(folder / "log.db")
    (position,) = connection.execute("SELECT max(position) FROM entries WHERE kind = 'batch'").fetchone()
    connection.execute("UPDATE entries SET payload = substr(payload, 1, 150) WHERE position = ?", (position,))
    connection.commit()
    connection.close()
    sentence = refusal(folder, capsys)
    assert f"entry {position} of {folder / 'log.db'}" in sentence


def test_slab_that_is_none_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(folder).end()
    (folder / "fast.slab").write_bytes(b"\0" * 100_000)
    assert "fast.slab is not a slab" in refusal(folder, capsys)


def test_settings_that_cannot_be_read_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(folder).end()
    (folder / "agent.toml").write_text(AGENT.replace("speed_rank", "speed_rnak"))
    assert "speed_rnak" in refusal(folder, capsys)
    (folder / "agent.toml").write_text(AGENT.replace('"fast.slab"', '"../fast.slab"'))
    shutil.copy(folder / "fast.slab", folder.parent)
    assert "lies outside the allowed roots" in refusal(folder, capsys)


def test_log_in_use_is_refused_naming_the_process(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(folder).end()
    program = (
        "import sys, time; from pathlib import Path; from advisor.log_lock import WriterLock\n"
        "lock = WriterLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    )
    for name in ("log.db", "demo"):
        with subprocess.Popen(
            [sys.executable, "-c", program, str(folder / name)], stdout=subprocess.PIPE, text=True
        ) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            assert f"{name} is in use by process {holder.pid} on" in refusal(folder, capsys)
            holder.kill()
        assert Verified(folder, capsys).status == 0
