"""A simulation's files: a trace of requests, a capture of messages, a recording of decoded events."""

from __future__ import annotations

import gzip
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from advisor.recorded import Reading, read_recorded
from advisor.simulation.engine import SimulatedEngine
from advisor.simulation.faults import with_faults
from advisor.simulation.requests import SimulatedRequest, simulate_requests
from advisor.simulation.workload import Workload, WorkloadError
from event_plane import wire
from event_plane.parquet import write_parquet
from event_plane.part_file import PartFile
from event_plane.recording import CaptureRecorder, frames_of
from event_plane.transport import Message

SUFFIXES = (".jsonl", ".jsonl.gz", ".cap", ".parquet")
_SOURCE = "simulated"
_TOPIC = b"kv-events"


@dataclass(slots=True)
class Summary:
    """What was simulated. `faults`: messages lost, doubled or reordered; `refused`: why a recording lacks batches."""

    requests: int = 0
    accesses: int = 0
    input_tokens: int = 0
    by_tenant: Counter[str] = field(default_factory=Counter)
    events: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    _seen: set[int] = field(default_factory=set)

    @property
    def blocks(self) -> int:
        """Different ones."""
        return len(self._seen)

    def counting(self, requests: Iterable[SimulatedRequest]) -> Iterator[SimulatedRequest]:
        for request in requests:
            self.requests += 1
            self.accesses += len(request.block_ids)
            self.input_tokens += request.input_tokens
            self._seen.update(request.block_ids)
            self.by_tenant[request.tenant] += 1
            yield request


def write_simulation(path: Path, workload: Workload, seed: int, engine_blocks: int) -> Summary:
    """Write what `path`'s name says (`SUFFIXES`): the same bytes for the same arguments.

    `engine_blocks`: the cache of the engine whose events a capture or recording holds. Raises `WorkloadError` for
    another name, `RecordingError` where the file cannot be written.
    """
    summary = Summary()
    requests = summary.counting(simulate_requests(workload, seed))
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        _write_trace(path, requests)
    elif path.suffix == ".cap":
        _write_capture(path, requests, workload, seed, engine_blocks, summary)
    elif path.suffix == ".parquet":
        with tempfile.TemporaryDirectory() as folder:
            capture = Path(folder) / f"{_SOURCE}.cap"
            _write_capture(capture, requests, workload, seed, engine_blocks, summary)
            reading = Reading()
            write_parquet(path, read_recorded(capture, reading))
            summary.refused = reading.refused
    else:
        raise WorkloadError(f"{path} is no name for a simulation: end it in {', '.join(SUFFIXES)}")
    return summary


def _write_trace(path: Path, requests: Iterable[SimulatedRequest]) -> None:
    part = PartFile(path)
    encoder = msgspec.json.Encoder()
    try:
        if path.suffix == ".gz":
            # Neither name nor time, or the bytes would not be the same again.
            with gzip.GzipFile("", "wb", fileobj=part.file, mtime=0) as packed:
                packed.writelines(encoder.encode(request) + b"\n" for request in requests)
        else:
            part.file.writelines(encoder.encode(request) + b"\n" for request in requests)
        size_bytes = part.file.tell()
    except OSError as error:
        part.discard()
        raise part.unwritable(error) from error
    part.finish(size_bytes)


def _write_capture(
    path: Path,
    requests: Iterable[SimulatedRequest],
    workload: Workload,
    seed: int,
    engine_blocks: int,
    summary: Summary,
) -> None:
    with CaptureRecorder(path) as recorder:
        engine = SimulatedEngine(engine_blocks, workload.restarts)
        messages = _messages(engine, requests, summary)
        for message in with_faults(messages, workload.faults, seed, summary.faults):
            recorder.write(frames_of(message, numbered=True))


def _messages(engine: SimulatedEngine, requests: Iterable[SimulatedRequest], summary: Summary) -> Iterator[Message]:
    for batch in engine.batches(requests):
        summary.events += len(batch.records)
        yield Message(_SOURCE, _TOPIC, batch.sequence, wire.encode(batch))
