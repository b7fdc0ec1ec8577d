"""A directory volume on a FUSE file system: bindfs, where it is installed and may mount."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage_agent.block_header import BlockHeader
from storage_agent.kinds import prepare
from storage_agent.port import Result
from storage_agent.volume import Volume
from storage_agent.volume_contract import VolumeCase, VolumeContract, block, held, payload, read, results


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A folder that is another one seen through FUSE; the other is `beneath`, beside it."""
    bindfs, fusermount = shutil.which("bindfs"), shutil.which("fusermount3")
    if bindfs is None or fusermount is None:
        pytest.skip("bindfs is not installed")
    beneath, mount = tmp_path / "beneath", tmp_path / "mounted"
    beneath.mkdir()
    mount.mkdir()
    made = subprocess.run([bindfs, beneath, mount], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"bindfs cannot mount here: {made.stderr.strip()}")
    yield mount
    subprocess.run([fusermount, "-u", mount], check=True)


class TestDirectoryOnFuse(VolumeContract):
    @pytest.fixture
    def case(self, mounted: Path) -> VolumeCase:
        folder = mounted / "contract"

        def damage(volume: Volume, header: BlockHeader) -> None:
            """Through the mount, which has the bytes in its cache."""
            number = header.key.sequence_hash >> 64
            for path in [*folder.glob("*.segment"), *folder.glob("*.writing")]:
                place = path.read_bytes().find(payload(number))
                if place > 0:
                    with path.open("r+b") as file:
                        file.seek(place + 77)
                        file.write(b"\xff")

        return VolumeCase(kind="directory", path=folder, damage=damage)


def test_a_view_beside_the_mount_reads_what_was_written_through_it(mounted: Path) -> None:
    beneath = VolumeCase(
        kind="directory-view", path=mounted.with_name("beneath") / "contract", options={"look_s": 0.0}
    )
    owner_case = VolumeCase(kind="directory", path=mounted / "contract")
    with owner_case.opened() as owner:
        assert results(owner.put([block(1), block(2)])) == [Result.STORED] * 2
        kind, opening = prepare(beneath.descriptor(), [mounted.with_name("beneath")])
        view = kind.open(opening)
        try:
            assert read(view, 1, 2)[1] == {1: payload(1), 2: payload(2)}
            owner.put([block(3)])
            assert read(view, 3)[1] == {3: payload(3)}
        finally:
            view.close()
        assert held(owner) == {1, 2, 3}
