"""Whether memory and log stay flat under a steady stream, for `kvadvisor bench plane`: a process for each kind of log.

`python -m advisor.bench_flat KIND --seconds N` runs an advisor with retention on and a publisher at a steady rate, and
prints one JSON object: what `Flatness` holds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from advisor.bench_throughput import place_of
from advisor.service import AdvisorService
from advisor.settings import AdvisorSettings, LogSettings, SourceSettings

RATE_EVENTS_S = 100_000
RETENTION_BYTES = 1_000_000_000
"""A hundred seconds of the stream: it is cut many times within ten minutes."""
SAMPLE_S = 5.0
WARM_SHARE = 0.3
"""Of the run, before which growth is not counted: the index and the log fill up first."""


@dataclass(frozen=True, slots=True)
class Flatness:
    """Growth is the highest after the warm part over the highest in it."""

    events: int
    seconds: float
    resident_growth: float
    log_bytes_max: int


def watch(kind: str, seconds: float) -> Flatness:
    """Run it here, in a process that does nothing else: its own memory is what is looked at."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvadvisor-bench-")))
        url, resend_url = stack.enter_context(place_of("zmq+ipc", folder))
        settings = AdvisorSettings(
            directory=folder / "state",
            log=LogSettings(kind="segments" if kind == "segments" else "sql", retention_bytes=RETENTION_BYTES),
            sources=(SourceSettings(name="bench", url=url, resend_url=resend_url),),
        )
        service = stack.enter_context(AdvisorService(settings))
        command = [sys.executable, "-m", "advisor.bench_publisher", url, "--rate", str(RATE_EVENTS_S)]
        publisher = stack.enter_context(
            subprocess.Popen([*command, "--seconds", str(seconds)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        )
        assert publisher.stdin is not None
        assert publisher.stdout is not None
        publisher.stdout.readline()
        publisher.stdin.write(b"go\n")
        publisher.stdin.flush()
        samples = _sample(service, folder / "state", seconds)
        publisher.stdin.close()
        warm = max(1, round(len(samples) * WARM_SHARE))
        before = max(resident for resident, _ in samples[:warm])
        after = max(resident for resident, _ in samples[warm:])
        return Flatness(service.fold.events_total, seconds, after / before - 1, max(size for _, size in samples))


def _sample(service: AdvisorService, state: Path, seconds: float) -> list[tuple[int, int]]:
    """(resident bytes, bytes of the log's files), one every `SAMPLE_S`."""
    samples = []
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        if service.wait(SAMPLE_S):
            raise RuntimeError("the service ended by itself")
        samples.append((_resident_bytes(), _log_bytes(state)))
    return samples


def _log_bytes(state: Path) -> int:
    total = 0
    for path in state.rglob("*"):
        if path.is_file() and "checkpoints" not in path.parts:
            try:
                total += path.stat().st_size
            except FileNotFoundError:
                continue
    return total


def _resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("sql", "segments"))
    parser.add_argument("--seconds", type=float, default=600.0)
    asked = parser.parse_args()
    print(json.dumps(asdict(watch(asked.kind, asked.seconds))))


if __name__ == "__main__":
    main()
