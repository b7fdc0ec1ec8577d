"""How the service ends: its state is that of its log, nobody is left waiting, and a fault is one clear error."""

from __future__ import annotations

import itertools
import sqlite3
import threading
import time
from pathlib import Path

import pytest

from advisor.entries import OperatorEntry
from advisor.errors import LogError
from advisor.fold import Fold
from advisor.log import SqlLog
from advisor.pipeline import StoppedError
from advisor.service import AdvisorService
from advisor.settings import AdvisorSettings


def folded(directory: Path) -> Fold:
    log, fold = SqlLog(directory / "log.db", read_only=True), Fold()
    for entry in log.read():
        fold.apply(entry)
    log.close()
    return fold


def submit_until_refused(service: AdvisorService, begun: threading.Event) -> None:
    for number in itertools.count():
        if isinstance(service.submit(OperatorEntry("test", "pause")).exception(60), StoppedError):
            return
        if number == 20:
            begun.set()


def test_state_at_the_end_is_that_of_the_log_whatever_is_submitted_meanwhile(tmp_path: Path) -> None:
    for _ in range(5):
        begun = threading.Event()
        with AdvisorService(AdvisorSettings(directory=tmp_path, tick_interval_s=3_600)) as service:
            submitter = threading.Thread(target=submit_until_refused, args=(service, begun))
            submitter.start()
            assert begun.wait(60)
        submitter.join()
        assert folded(tmp_path).digest() == service.fold.digest()


def test_entry_that_cannot_be_logged_ends_the_service_and_leaves_nobody_waiting(tmp_path: Path) -> None:
    service = AdvisorService(AdvisorSettings(directory=tmp_path, tick_interval_s=3_600))
    with service:
        # The one tick of this hour first: it would take the position that is taken below.
        while not service.fold.now_us:
            time.sleep(0.01)
        taken = service.submit(OperatorEntry("test", "pause")).result() + 1
        other = sqlite3.connect(tmp_path / "log.db")
        with other:
            other.execute(
                "INSERT INTO entries SELECT ?, kind, source, producer, epoch, sequence, foreign_crc, recorded_us,"
                " payload FROM entries WHERE position = ?",
                (taken, taken - 1),
            )
        other.close()
        with pytest.raises(StoppedError):
            service.submit(OperatorEntry("test", "resume")).result(60)
        with pytest.raises(LogError, match=rf"position {taken} of .*log\.db is taken"):
            service.wait(60)
    with pytest.raises(StoppedError):
        service.submit(OperatorEntry("test", "resume")).result(60)
    assert service.fold.position == taken - 1
