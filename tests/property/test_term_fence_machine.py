"""The fence of terms over any row of commands, restarts, disks that are full and disks that come back."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from storage_agent import term_fence
from storage_agent.errors import StaleTerm
from storage_agent.term_fence import TermFence
from tests.examples import examples


class FenceMachine(RuleBasedStateMachine):
    """`heard`: the newest term of this life. `kept`: the newest that was written."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kvadvisor-fence-"))
        self.fence = TermFence("a", self.folder)
        self.heard = self.kept = 0
        self.is_full = False

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @rule(term=st.integers(0, 6))
    def command(self, term: int) -> None:
        with patch.object(term_fence, "replace_file", self._full) if self.is_full else nullcontext():
            try:
                self.fence.require(term)
            except StaleTerm:
                assert 0 < term < self.heard
                return
        assert term == 0 or term >= self.heard
        self.heard = max(self.heard, term)
        if term and not self.is_full:
            self.kept = max(self.kept, term)

    @rule()
    def restart(self) -> None:
        self.fence = TermFence("a", self.folder)
        self.heard = self.kept

    @rule(is_full=st.booleans())
    def disk(self, is_full: bool) -> None:
        self.is_full = is_full

    @invariant()
    def another_reader_sees_what_was_kept(self) -> None:
        if self.kept > 1:
            try:
                TermFence("a", self.folder).require(self.kept - 1)
            except StaleTerm:
                return
            raise AssertionError(f"term {self.kept} was forgotten")

    @staticmethod
    def _full(path: Path, parts: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


TestFence = FenceMachine.TestCase
TestFence.settings = settings(max_examples=examples(40), stateful_step_count=20, deadline=None)
