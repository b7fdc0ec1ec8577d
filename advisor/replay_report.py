"""What a replay of one file came to, as JSON and as rows of a table; and what of it a later run need not repeat."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from advisor.outputs import replace_json
from advisor.replay import ReplayError, TraceResult, as_json
from advisor.replay_tiers import TierResult
from advisor.tiers import Tiering
from advisor.trace_pictures import COURSE_BINS, TracePictures
from advisor.traces import Trace

Json = dict[str, Any]
TierKey = tuple[str, str, int, float | None]
"""Admission, eviction, fast blocks, budget."""


@dataclass(slots=True)
class Drawn:
    """What only a page shows.

    `bounds`: hit ratio by capacity of who knows the future. `courses`: by policy, or admission and eviction, the share
    of the prompt tokens found at `course_blocks`, and of two tiers at `course_budget`, in equal spans of time.
    """

    pictures: TracePictures
    bounds: list[tuple[int, float]] = field(default_factory=list)
    courses: dict[str, list[float | None]] = field(default_factory=dict)
    course_blocks: int = 0
    course_budget: float | None = None


@dataclass(slots=True)
class FileReport:
    """One file's figures. `live`: low 64 hash bits of the blocks live at its end (of its last result).

    `fingerprint`: equal where the same results would come out again.
    """

    path: str
    format: str
    requests: int = 0
    events: int = 0
    results: list[TraceResult] = field(default_factory=list)
    tiers: list[TierResult] = field(default_factory=list)
    """Results of two tiers, which a report then has instead."""
    live: list[int] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    input_tokens: int = 0
    """Of the requests that are counted."""
    blocks: int = 0
    """Different ones."""
    span_s: float = 0.0
    fingerprint: str = ""
    drawn: Drawn | None = None

    @classmethod
    def of(cls, path: Path, trace: Trace, counted_from: int) -> FileReport:
        """Nothing replayed yet; `counted_from` is the first request that is counted."""
        span_s = (trace.timestamps_ms[-1] - trace.timestamps_ms[0]) / 1000 if trace.requests else 0.0
        return cls(
            str(path),
            "trace",
            trace.requests,
            trace.accesses,
            input_tokens=sum(trace.input_tokens[counted_from:]),
            span_s=span_s,
        )

    def as_json(self) -> Json:
        return {
            "path": self.path,
            "format": self.format,
            "requests": self.requests,
            "events": self.events,
            "input_tokens": self.input_tokens,
            "fingerprint": self.fingerprint,
            "results": self.rows(),
            "live_blocks": len(self.live),
            "refused": self.refused,
        }

    def rows(self) -> list[Json]:
        """Its results, each a dictionary of the same keys."""
        return [as_json(result) for result in self.results] or [tier.as_json() for tier in self.tiers]

    def token_hit_ratio(self, run_tokens: int) -> float:
        return run_tokens / self.input_tokens if self.input_tokens else 0.0


def fingerprint(trace: Trace, settings: Json) -> str:
    """16 hex digits over all that results depend on: the requests, `settings` (as JSON), this version."""
    digest = xxhash.xxh3_64()
    for part in (trace.hashes, *(np.asarray(each) for each in (trace.ends, trace.timestamps_ms))):
        digest.update(np.ascontiguousarray(part).tobytes())
    for tokens in (trace.input_tokens, trace.block_tokens):
        digest.update(np.asarray(tokens, np.int64).tobytes())
    digest.update(json.dumps(settings | {"version": version("kvadvisor")}, sort_keys=True).encode())
    return digest.hexdigest()


def tier_key(job: Tiering | TierResult) -> TierKey:
    """What tells the results of one file and one set of settings apart."""
    return job.admission, job.eviction, job.fast_blocks, job.budget


class Kept:
    """Results that an earlier run wrote to `out`, and where this one writes its own as they come."""

    def __init__(self, out: Path | None) -> None:
        """None: nothing is kept. Raises `ReplayError` where `out` holds something else."""
        self._out = out
        self._files: list[Json] = []
        if out is not None and out.is_file() and out.stat().st_size:
            try:
                self._files = msgspec.json.decode(out.read_bytes(), type=dict[str, list[Json]])["files"]
            except (OSError, msgspec.MsgspecError, KeyError) as error:
                raise ReplayError(f"{out} holds no results to go on from ({error}): choose another place") from error

    def one_tier(self, mark: str) -> dict[tuple[str, int], TraceResult]:
        """By policy and capacity."""
        found = (msgspec.convert(row, TraceResult) for row in self._rows(mark) if "policy" in row)
        return {(result.policy, result.capacity_blocks): result for result in found}

    def two_tier(self, mark: str) -> dict[TierKey, TierResult]:
        found = (msgspec.convert(row, TierResult) for row in self._rows(mark) if "admission" in row)
        return {tier_key(result): result for result in found}

    def write(self, reports: Sequence[FileReport]) -> None:
        """What there is by now and what the earlier run has of files still to come, whole or not at all."""
        if self._out is not None:
            marks = {report.fingerprint for report in reports}
            ahead = [each for each in self._files if each.get("fingerprint") not in marks]
            replace_json(self._out, {"files": [*all_as_json(reports)["files"], *ahead]})

    def _rows(self, mark: str) -> list[Json]:
        return [row for each in self._files if each.get("fingerprint") == mark for row in each.get("results", [])]


def all_as_json(reports: Sequence[FileReport]) -> Json:
    return {"files": [report.as_json() for report in reports]}


def as_csv(reports: Sequence[FileReport]) -> str:
    """One row a result, with its file's name; a figure that has parts has a column for each."""
    rows = [
        {"path": report.path, "requests": report.requests, "input_tokens": report.input_tokens} | _flat(row)
        for report in reports
        for row in report.rows()
    ]
    heads = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, heads, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flat(row: Mapping[str, Any]) -> Json:
    flat: Json = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}_{part}": each for part, each in value.items()}
        else:
            flat[name] = "" if value is None else value
    return flat


def course_of(trace: Trace, run_tokens: Any) -> list[float | None]:
    """Tokens found over prompt tokens in each of `COURSE_BINS` equal spans; None where nothing was asked."""
    arrivals_ms = np.asarray(trace.timestamps_ms)
    span_ms = max(float(arrivals_ms[-1] - arrivals_ms[0]), 1.0)
    bins = np.minimum((arrivals_ms - arrivals_ms[0]) / span_ms * COURSE_BINS, COURSE_BINS - 1).astype(np.int64)
    asked = np.bincount(bins, trace.input_tokens, COURSE_BINS)
    found = np.bincount(bins, run_tokens, COURSE_BINS)
    return [float(f / a) if a else None for f, a in zip(found, asked, strict=True)]
