"""Checkpoints: folded state on disk with its log position, so that a start folds only the log's tail.

A checkpoint is one file, `checkpoints/<position>.kvc`: the index's own file, whose checksums cover it whole, with the
rest of the state and the gate's cursors beside it. The two newest are kept. A damaged one is passed over for the one
before it, and in the end for the log from its beginning; each is said.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from advisor.errors import AdvisorError
from advisor.fold import Fold
from advisor.fold_state import StateError, export_state, restore_state
from advisor.index import INDEX_FULL, ArrayIndex, IndexDamaged, IndexFull, IndexSize
from advisor.index.saved_index import Save
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
        path = folder / f"{self.position:020d}{SUFFIX}"
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


def load_newest(
    folder: Path, size: IndexSize, last_position: int, lock: Turnstile
) -> tuple[Fold, Cursors, list[str]]:
    """The state of the newest good checkpoint at or before `last_position`, or an empty one.

    The list says, a sentence each, which newer ones were passed over and why.
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
            with contextlib.suppress(OSError):
                path.replace(path.with_name(path.name + REFUSED_SUFFIX))
            passed_over.append(f"checkpoint {path.name} is not used: {fault}")
            continue
        if fold.skipped[INDEX_FULL] and saved.blocks_max < size.blocks_max:
            why = "blocks were skipped under the smaller index limit that it was made with"
            passed_over.append(f"checkpoint {path.name} is not used: {why}")
            continue
        return fold, saved.cursors, passed_over
    return Fold(ArrayIndex(size, lock=lock)), Cursors(), passed_over


def _newest_first(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    named = [path for path in folder.glob(f"*{SUFFIX}") if path.stem.isdecimal()]
    return sorted(named, key=lambda path: int(path.stem), reverse=True)
