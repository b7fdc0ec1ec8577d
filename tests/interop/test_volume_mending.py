"""Media that fail: errors are named, other volumes go on, and a medium that is back is reconciled by itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import VolumeError
from storage_agent.kinds import prepare
from storage_agent.port import PutBlock, Result
from storage_agent.volume import Volume
from tests.contract.transports import wait_for
from tests.disks import loop_mount
from tests.watched_agent import CAPACITY, NAMESPACE, Watched, block, descriptor, key


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path)
    yield made
    made.close()


def test_a_file_that_is_unplugged_is_noticed_and_its_blocks_are_back_with_it(watched: Watched, tmp_path: Path) -> None:
    path, away = tmp_path / "v.slab", tmp_path / "away"
    watched.agent.register_volume(descriptor(path))
    assert watched.put(1, 2) == [Result.STORED] * 2
    assert watched.put(3, volume="other") == [Result.STORED]
    path.rename(away)
    wait_for(lambda: "is not there; bring it back" in watched.stat().degraded)
    assert watched.put(4) == [Result.FAILED]
    assert watched.get(1, 3) == [Result.MISS, Result.HIT], "others go on"
    assert watched.told() == set()
    assert watched.agent.delete("", "v", [key(1)]).outcomes[0].result is Result.FAILED
    with pytest.raises(VolumeError, match="cannot be used now"):
        watched.agent.scrub("", "v")
    assert not path.exists(), "nothing is made in its place"
    away.rename(path)
    wait_for(lambda: watched.stat().degraded == "")
    assert watched.get(1, 2) == [Result.HIT] * 2
    assert watched.told() == {1, 2}
    assert watched.put(4) == [Result.STORED]


def test_a_device_that_vanishes_in_the_midst_of_work_is_opened_again(watched: Watched, tmp_path: Path) -> None:
    """Each opening of a faulty volume has a fresh device that holds out for some calls."""
    options = {"inner": "slab", "vanished_after": 5}
    watched.agent.register_volume(descriptor(tmp_path / "v.slab", kind="faulty", options=options))
    stored: set[int] = set()
    for number in range(12):
        outcome = watched.agent.put("v", [block(number)])[0]
        if outcome.result is Result.STORED:
            stored.add(number)
        else:
            assert "ENODEV" in outcome.reason or "opened again" in outcome.reason
            wait_for(lambda: not watched.stat().degraded)
    assert stored
    wait_for(lambda: not watched.stat().degraded)
    stat, told = watched.stat(), watched.told()
    assert (stat.blocks, stat.blocks + stat.slots_free) == (len(told), CAPACITY), "nothing is held back any more"
    assert told >= stored, "a put that was not acknowledged may be there, whole"
    watched.agent.unregister_volume("v", drain_s=5.0)
    watched.agent.register_volume(descriptor(tmp_path / "v.slab"))
    assert {number for number in range(12) if watched.get(number) == [Result.HIT]} == told


def test_damage_done_while_it_was_away_is_told(watched: Watched, tmp_path: Path) -> None:
    path = tmp_path / "v"
    watched.agent.register_volume(descriptor(path, kind="directory", options={"segment_bytes": 1 << 20}))
    watched.put(1, 2)
    assert watched.told() == {1, 2}
    path.rename(tmp_path / "away")
    wait_for(lambda: "is not there; bring it back" in watched.stat().degraded)
    for segment in (*(tmp_path / "away").glob("*.segment"), *(tmp_path / "away").glob("*.writing")):
        segment.unlink()
    for index in (tmp_path / "away").glob("*.index"):
        index.unlink()
    (tmp_path / "away").rename(path)
    wait_for(lambda: watched.stat().degraded == "")
    assert watched.get(1, 2) == [Result.MISS] * 2
    assert watched.told() == set()


@contextmanager
def small_disk(folder: Path, size_mib: int) -> Iterator[Path]:
    folder.mkdir()
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(folder)]
    made = subprocess.run(mount, check=False, capture_output=True)
    if made.returncode != 0:
        pytest.skip(f"no tmpfs here: {made.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_is_named_and_with_room_the_volume_takes_blocks_again(watched: Watched, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4) as disk:
        watched.agent.register_volume(
            descriptor(disk / "v", kind="directory", options={"segment_bytes": 1 << 20}, capacity_blocks=512)
        )
        assert watched.put(1, 2) == [Result.STORED] * 2
        filler = disk / "filler"
        with filler.open("wb") as file:
            status = os.fstatvfs(file.fileno())
            os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize)
        outcomes = [watched.agent.put("v", [block(n)])[0] for n in range(100, 160)]
        failed = [outcome for outcome in outcomes if outcome.result is not Result.STORED]
        assert failed
        assert any("are needed for a segment" in outcome.reason for outcome in failed)
        assert watched.put(3, volume="other") == [Result.STORED], "others go on"
        filler.unlink()
        wait_for(lambda: not watched.stat().degraded and watched.put(200) in ([Result.STORED], [Result.PRESENT]))
        assert watched.get(1, 2, 200) == [Result.HIT] * 3
        watched.agent.unregister_volume("v", drain_s=5.0)


def test_a_file_system_that_is_taken_away_and_mounted_again(watched: Watched, tmp_path: Path) -> None:
    with loop_mount(tmp_path) as (disk, mount, unmount):
        watched.agent.register_volume(descriptor(disk / "v.slab"))
        assert watched.put(1) == [Result.STORED]
        unmount()
        wait_for(lambda: "is not there; bring it back" in watched.stat().degraded)
        assert watched.put(3, volume="other") == [Result.STORED]
        assert list(disk.iterdir()) == [], "nothing is made on the file system below"
        mount()
        wait_for(lambda: watched.stat().degraded == "")
        assert watched.get(1, 3) == [Result.HIT] * 2
        watched.agent.unregister_volume("v", drain_s=5.0)


def test_a_slow_device_costs_its_deadline_and_the_slots_are_whole_after_the_next_opening(tmp_path: Path) -> None:
    made = descriptor(tmp_path / "v.slab", capacity_blocks=400, block_bytes_max=4096)
    kind, opening = prepare(made, [tmp_path])
    blocks = [PutBlock(key(n), NAMESPACE, memoryview(b"x" * 4096)) for n in range(400)]
    volume = kind.open(replace(opening, deadline_s=0.0))
    late = volume.put(blocks)
    assert {outcome.result for outcome in late} >= {Result.FAILED}
    assert any("no answer from the device" in outcome.reason for outcome in late)
    stat = volume.stat()
    assert "no answer from the device" in stat.degraded
    assert stat.blocks + stat.slots_free < 400, "what may still be written to is held back"
    volume.close()
    kind, opening = prepare(made, [tmp_path])
    opened: list[bool] = []

    def opens() -> bool:
        # The kernel keeps the lock until what is in flight has ended.
        try:
            again = kind.open(opening)
        except VolumeError:
            return False
        stat = again.stat()
        opened.append(stat.blocks + stat.slots_free == 400 and not stat.degraded)
        again.close()
        return True

    wait_for(opens)
    assert opened == [True]


# Coming and going


def test_an_agent_serves_what_it_can_and_the_rest_when_it_is_there(watched: Watched, tmp_path: Path) -> None:
    late = tmp_path / "late"
    stats = watched.agent.register_volumes(
        [descriptor(tmp_path / "v.slab"), descriptor(late / "w.slab", id="w")], absent_ok=True
    )
    assert [stat.mode == "absent" for stat in stats] == [False, True]
    assert "there is no folder" in stats[1].degraded
    assert watched.put(1) == [Result.STORED]
    kind, opening = prepare(descriptor(tmp_path / "w.slab", id="w"), [tmp_path])
    elsewhere = kind.open(opening)
    elsewhere.put([block(7)])
    elsewhere.close()
    late.mkdir()
    (tmp_path / "w.slab").rename(late / "w.slab")
    wait_for(lambda: watched.stat("w").degraded == "")
    assert watched.get(7) == [Result.HIT]
    assert watched.told("w") == {7}


def test_a_volume_that_is_not_valid_is_refused_even_where_absent_ones_are_taken(
    watched: Watched, tmp_path: Path
) -> None:
    with pytest.raises(VolumeError, match="outside the allowed roots"):
        watched.agent.register_volumes([descriptor(Path("/elsewhere/v"))], absent_ok=True)
    with pytest.raises(VolumeError, match="given twice"):
        watched.agent.register_volumes([descriptor(tmp_path / "v"), descriptor(tmp_path / "v")], absent_ok=True)
    assert [stat.descriptor.id for stat in watched.agent.stat().volumes] == ["other"]


def test_a_volume_that_takes_long_to_open_keeps_no_other_waiting(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_open = threading.Event()
    opening = watched.agent._open

    def open_slowly(wanted: VolumeDescriptor) -> Volume:
        if wanted.id == "v":
            assert may_open.wait(60)
        return opening(wanted)

    monkeypatch.setattr(watched.agent._mender, "_reopen", open_slowly)
    paths = {name: tmp_path / f"{name}.slab" for name in ("v", "w")}
    for name, path in paths.items():
        watched.agent.register_volume(descriptor(path, id=name))
        assert watched.put(1, volume=name) == [Result.STORED]
        path.rename(f"{path}.away")
    wait_for(lambda: all("is not there" in watched.stat(name).degraded for name in paths))
    for path in paths.values():
        Path(f"{path}.away").rename(path)
    wait_for(lambda: not watched.stat("w").degraded)
    assert watched.stat("v").degraded
    assert watched.agent.register_volume(descriptor(tmp_path / "more.slab", id="more")).blocks == 0
    with pytest.raises(VolumeError, match="in use"):
        watched.agent.unregister_volume("v")
    may_open.set()
    wait_for(lambda: not watched.stat("v").degraded)
    assert watched.get(1) == [Result.HIT]
    watched.agent.unregister_volume("v", drain_s=30.0)


def test_a_volume_may_be_taken_out_while_it_is_opened_again(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_open, is_opening = threading.Event(), threading.Event()
    opening = watched.agent._open

    def open_slowly(wanted: VolumeDescriptor) -> Volume:
        is_opening.set()
        assert may_open.wait(60)
        return opening(wanted)

    path = tmp_path / "v.slab"
    watched.agent.register_volume(descriptor(path))
    assert watched.put(1) == [Result.STORED]
    path.rename(tmp_path / "away")
    wait_for(lambda: "is not there" in watched.stat().degraded)
    monkeypatch.setattr(watched.agent._mender, "_reopen", open_slowly)
    (tmp_path / "away").rename(path)
    assert is_opening.wait(60)
    with ThreadPoolExecutor() as pool:
        going = pool.submit(watched.agent.unregister_volume, "v", drain_s=60.0)
        wait_for(lambda: "v" not in [volume.descriptor.id for volume in watched.agent.volumes()])
        may_open.set()
        going.result(60)
    assert watched.agent.register_volume(descriptor(path)).blocks == 1, "nobody holds its file any more"
