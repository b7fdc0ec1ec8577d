"""The stream of a running service, its log read from the disk: cut, and gone on with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from served import serving
from test_stream import Event, events_of

from advisor.entries import OperatorEntry
from advisor.reader import ServiceReader
from advisor.service import AdvisorService
from advisor.settings import AdvisorSettings, LogSettings


def operators(events: Iterator[Event]) -> Iterator[tuple[str, str]]:
    """Ids and sentences of operators' entries."""
    for event in events:
        if event["event"] == "entry" and json.loads(event["data"])["kind"] == "operator":
            yield event["id"], json.loads(event["data"])["text"]


@pytest.mark.parametrize("kind", ["sql", "segments"])
def test_what_operators_did_meanwhile_is_told(tmp_path: Path, kind: str) -> None:
    settings = AdvisorSettings(directory=tmp_path, log=LogSettings(kind=kind))
    with AdvisorService(settings) as service, serving(ServiceReader(service)) as served:
        url = f"{served.url}api/v1/stream"
        with httpx.stream("GET", url, timeout=60) as answer:
            seen = next(event["id"] for event in events_of(answer.iter_lines()) if event["event"] == "summary")
        for actor in ("ann", "bob"):
            service.submit(OperatorEntry(actor, "pause")).result()
        with httpx.stream("GET", url, timeout=60, headers={"Last-Event-ID": seen}) as answer:
            told = operators(events_of(answer.iter_lines()))
            missed = [next(told), next(told)]
            service.submit(OperatorEntry("cid", "resume")).result()
            assert next(told)[1] == "cid: resume all moves"
    assert [text for _, text in missed] == ["ann: pause all moves", "bob: pause all moves"]
    assert int(seen) < int(missed[0][0]) < int(missed[1][0])
