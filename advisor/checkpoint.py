"""Checkpoints: folded state on disk with its log position, so that a start folds only the log's tail.

A checkpoint is one file, `checkpoints/<position>.kvc`: the index's own file, whose checksums cover it whole, with the
rest of the state and the gate's cursors beside it. The two newest are kept. A damaged one is passed over for the one
before it, and in the end for the log from its beginning; each is said. A log that was cut has no beginning: it is
never cut past the second-newest good checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import xxhash

from advisor.errors import AdvisorError, LogError
from advisor.fold import Fold
from advisor.fold_state import StateError, export_state, restore_state
from advisor.index import INDEX_FULL, ArrayIndex, IndexDamaged, IndexFull, IndexSize
from advisor.index.saved_index import READ_BYTES, Save, read_contents
from advisor.intake import Cursors
from advisor.turnstile import Turnstile

KEPT = 2
SUFFIX = ".kvc"
REFUSED_SUFFIX = ".refused"
"""Added to the name of one that cannot be used; it may be looked at and deleted."""


class CheckpointError(AdvisorError):
    """A checkpoint that cannot be written; the service goes on without it."""


class _Extra(msgspec.Struct, array_like=True):
    position: int
    fold: bytes
    cursors: Cursors
    blocks_max: int
    """Of the index that it was made with."""


class Taken:
    """A checkpoint of one moment, to be written while the fold goes on. Made under the fold's lock."""

    def __init__(self, fold: Fold, cursors: Cursors) -> None:
        self.position = fold.position
        extra = _Extra(fold.position, export_state(fold), cursors, fold.index.size.blocks_max)
        self._extra = msgspec.msgpack.encode(extra)
        self._save: Save = fold.index.begin_save()

    def write(self, folder: Path) -> int:
        """Write it, drop all but the newest `KEPT`, return its bytes. Raises `CheckpointError`."""
        path = checkpoint_path(folder, self.position)
        try:
            with self._save as save:
                folder.mkdir(parents=True, exist_ok=True)
                size = save.write(path, self._extra)
        except OSError as fault:
            raise CheckpointError(
                f"{path} cannot be written ({fault.strerror}): free some space there; a start takes longer meanwhile"
            ) from fault
        for old in _newest_first(folder)[KEPT:]:
            old.unlink(missing_ok=True)
        return size


def positions(folder: Path) -> list[int]:
    """Of the checkpoints in `folder`, newest first, good or not."""
    return [int(path.stem) for path in _newest_first(folder)]


def checkpoint_path(folder: Path, position: int) -> Path:
    return folder / f"{position:020d}{SUFFIX}"


def fault_of(path: Path) -> str:
    """Why a checkpoint cannot be used, empty where it can. Reads it whole, in pieces, and keeps nothing."""
    try:
        with open(path, "rb", buffering=0) as file:
            contents = read_contents(path, file)
            for name, section in contents.sections.items():
                digest = xxhash.xxh3_64()
                left = section.rows * section.row_bytes
                while left and (piece := file.read(min(left, READ_BYTES))):
                    digest.update(piece)
                    left -= len(piece)
                if left or digest.intdigest() != section.checksum:
                    return f"{path} was altered or cut: the checksum of its {name} is not theirs"
        msgspec.msgpack.decode(contents.extra, type=_Extra)
    except (OSError, IndexDamaged, msgspec.MsgspecError) as fault:
        return str(fault)
    return ""


def load_newest(
    folder: Path,
    size: IndexSize,
    last_position: int,
    lock: Turnstile,
    *,
    first_position: int = 1,
    set_aside: bool = True,
) -> tuple[Fold, Cursors, list[str]]:
    """The state of the newest good checkpoint that the log's entries follow, or an empty one.

    The log holds `first_position` to `last_position`. The list says, a sentence each, which newer ones were passed over
    and why; with `set_aside` those that no start can use are renamed.
    """
    passed_over: list[str] = []
    for path in _newest_first(folder):
        try:
            index, extra = ArrayIndex.load(path, size, lock=lock)
            saved = msgspec.msgpack.decode(extra, type=_Extra)
            if saved.position > last_position:
                raise StateError(f"it is of position {saved.position}, the log ends at {last_position}")
            fold = Fold(index)
            restore_state(fold, saved.fold)
        except IndexFull as fault:
            passed_over.append(f"checkpoint {path.name} is not used: {fault}")
            continue
        except (OSError, IndexDamaged, StateError, msgspec.MsgspecError) as fault:
            # Out of the way: it would count as one of the two kept, and one of another log would seem to fit later.
            if set_aside:
                with contextlib.suppress(OSError):
                    path.replace(path.with_name(path.name + REFUSED_SUFFIX))
            passed_over.append(f"checkpoint {path.name} is not used: {fault}")
            continue
        if saved.position < first_position - 1:
            why = f"the log was cut: it begins at position {first_position}"
            passed_over.append(f"checkpoint {path.name} is not used: {why}")
            continue
        if fold.skipped[INDEX_FULL] and saved.blocks_max < size.blocks_max:
            why = "blocks were skipped under the smaller index limit that it was made with"
            if first_position > 1:
                told = "the log was cut and cannot be folded again, they come back when they are stored again"
                passed_over.append(f"checkpoint {path.name} lacks blocks: {why}; {told}")
                return fold, saved.cursors, passed_over
            passed_over.append(f"checkpoint {path.name} is not used: {why}")
            continue
        return fold, saved.cursors, passed_over
    return Fold(ArrayIndex(size, lock=lock)), Cursors(), passed_over


def cut_without_checkpoint(place: object, first: int, folder: Path, passed_over: Sequence[str]) -> LogError:
    """Why a log that begins at `first` cannot be folded."""
    why = f" ({'; '.join(passed_over)})" if passed_over else ""
    return LogError(
        f"the log {place} was cut and begins at position {first}; what came before is in no checkpoint of {folder} that"
        f" can be used{why}: put a good one back there, restore a backup with `kvadvisor log restore`, or start over in"
        " another directory, which fills as the producers' events come"
    )


def _newest_first(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    named = [path for path in folder.glob(f"*{SUFFIX}") if path.stem.isdecimal()]
    return sorted(named, key=lambda path: int(path.stem), reverse=True)
