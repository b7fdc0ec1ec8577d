"""What a recorded stream holds, counted in bounded memory; and the page that shows it."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.web.stream_page import CHART_HEIGHT, rate_spans, render_stream
from event_plane.parquet_rows import RecordedBatch
from event_plane.schema import (
    LOCATION_ALL,
    NAMESPACE_ALL,
    RECORD_DTYPE,
    Batch,
    BatchKind,
    Namespace,
    Records,
    SnapshotRange,
)
from event_plane.stream_report import (
    BINS_MAX,
    EPOCHS_MAX,
    NAMES_MAX,
    OTHERS,
    PRODUCERS_MAX,
    RateSeries,
    Report,
    StreamReport,
)
from event_plane.wire import encode
from tests.examples import examples

NOBODY = np.empty(0, RECORD_DTYPE)


def records(*events: tuple[int, int, int, int]) -> Records:
    """Of (type, tier, location index, namespace index)."""
    made = np.zeros(len(events), RECORD_DTYPE)
    for row, event in zip(made, events, strict=True):
        row["event_type"], row["tier"], row["storage_location"], row["namespace"] = event
    return made


def report_of(*batches: Batch, received_us: int = 0) -> Report:
    stream = StreamReport()
    for batch in batches:
        stream.add(RecordedBatch(batch, f"p{batch.producer}", received_us=received_us))
    return stream.report()


def numbered(*sequences: int, producer: int = 7, epoch: int = 1) -> list[Batch]:
    return [Batch(producer, epoch, sequence, records((1, 1, 0, 0))) for sequence in sequences]


def test_events_are_counted_by_type_tier_place_and_namespace() -> None:
    batch = Batch(
        7, 1, 0, records((1, 3, 0, 0), (1, 1, 1, 0), (2, 3, 0, 0), (4, 0, LOCATION_ALL, NAMESPACE_ALL), (77, 9, 5, 6)),
        namespaces=(Namespace(tenant="blue", model="llama", adapter="sql"),), locations=("nvme0", "gpu"),
    )  # fmt: skip
    report = report_of(batch)
    assert report.types == {"store": {"G1": 1, "G3": 1}, "remove": {"G3": 1}, "clear": {"all": 1}, "77": {"9": 1}}
    assert report.locations == {"nvme0": 2, "gpu": 1, "(unknown)": 1, "(every)": 1}
    assert report.namespaces == {"blue/llama/sql": 3, "(unknown)": 1, "(every)": 1}
    assert (report.batches, report.events, report.wire_bytes) == (1, 5, len(encode(batch)))
    assert report.batch_events == {"4": 1}


def test_missing_and_double_batches_of_each_epoch_are_counted() -> None:
    (producer,) = report_of(*numbered(3, 4, 7, 7, 4, 8), *numbered(0, 1, epoch=2)).producers
    first, second = producer.epochs
    assert (first.first_sequence, first.last_sequence, first.gaps, first.missing, first.duplicates) == (3, 8, 1, 2, 2)
    assert (second.epoch, second.first_sequence, second.last_sequence, second.missing) == (2, 0, 1, 0)


def test_lost_batches_count_as_missing_and_heartbeats_have_no_number() -> None:
    lost = Batch(7, 1, 2, NOBODY, BatchKind.LOST, snapshot=SnapshotRange(through=5))
    heartbeat = Batch(7, 1, 6, NOBODY, BatchKind.HEARTBEAT)
    snapshot = Batch(7, 1, 7, NOBODY, BatchKind.SNAPSHOT_END, snapshot=SnapshotRange())
    report = report_of(*numbered(0, 1), lost, *numbered(6), heartbeat, snapshot)
    (epoch,) = report.producers[0].epochs
    assert (epoch.gaps, epoch.missing, epoch.duplicates, epoch.last_sequence, epoch.snapshots) == (1, 4, 0, 7, 1)
    assert report.kinds == {"events": 3, "lost": 1, "heartbeat": 1, "snapshot_end": 1}
    assert report.missing == 4


def test_what_could_be_many_is_bounded_and_the_rest_is_counted() -> None:
    many = PRODUCERS_MAX + 5
    report = report_of(*(batch for producer in range(many) for batch in numbered(0, producer=producer)))
    assert (len(report.producers), report.producers_untold) == (PRODUCERS_MAX, 5)
    report = report_of(*(batch for epoch in range(EPOCHS_MAX + 5) for batch in numbered(0, epoch=epoch)))
    (producer,) = report.producers
    assert (len(producer.epochs), producer.epochs_untold, producer.lives) == (EPOCHS_MAX, 5, EPOCHS_MAX + 5)
    assert producer.epochs[-1].epoch == EPOCHS_MAX + 4
    places = tuple(f"gpu{n}" for n in range(NAMES_MAX + 5))
    wide = Batch(7, 1, 0, records(*((1, 1, n, 0) for n in range(len(places)))), locations=places)
    assert report_of(wide).locations[OTHERS] == 5


def test_rates_are_counted_at_the_times_of_reception() -> None:
    stream = StreamReport()
    for at_us, events in ((1_000_000, 2), (1_000_500, 1), (1_003_000, 4)):
        stream.add(RecordedBatch(Batch(7, 1, 0, records(*[(1, 3, 0, 0)] * events), timestamp_us=5), received_us=at_us))
    report = stream.report()
    assert (report.first_us, report.last_us, report.span_s) == (1_000_000, 1_003_000, 0.003)
    assert [sum(counts) for counts in report.rates.events] == [3, 0, 0, 4]
    assert [counts[2] for counts in report.rates.events] == [3, 0, 0, 4]


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 2**62), st.integers(0, 9)), min_size=1, max_size=60))
def test_bins_stay_few_and_lose_no_event_whatever_the_times(counted: list[tuple[int, int]]) -> None:
    series = RateSeries()
    for at_us, events in counted:
        series.add(at_us, [events, 0, 0, 0, 0])
    assert len(series.counts) <= BINS_MAX
    assert sum(each[0] for each in series.counts) == sum(events for _, events in counted)
    # Twice as wide a bin only where the time needs it.
    reach_us = max(at_us - counted[0][0] for at_us, _ in counted)
    assert series.bin_us == 1_000 or series.bin_us * BINS_MAX // 2 <= reach_us


def test_page_is_self_contained_and_says_the_figures() -> None:
    report = report_of(*numbered(0, 1, 4), received_us=1_700_000_000_000_000)
    page = render_stream(report, "<b>.parquet")
    assert "&lt;b&gt;.parquet" in page
    assert "<b>.parquet" not in page
    assert not re.search(r"<(script|link|img)|@import|url\(", page)
    assert 'class="num warn">2</td>' in page
    assert "2023-11-14T22:13:20.000Z" in page


def test_page_of_an_empty_recording_says_so() -> None:
    assert "Nothing in it has a time and an event." in render_stream(StreamReport().report(), "empty.cap")


def test_highest_span_fills_the_chart_and_tiers_are_stacked() -> None:
    batch = Batch(7, 1, 0, records((1, 1, 0, 0), (1, 3, 0, 0)), timestamp_us=10)
    (span,) = rate_spans(report_of(batch).rates)
    assert [(piece.style, piece.y, piece.height) for piece in span.pieces] == [
        ("g1", CHART_HEIGHT / 2, CHART_HEIGHT / 2), ("g3", 0.0, CHART_HEIGHT / 2),
    ]  # fmt: skip


@pytest.mark.parametrize("times", [(0, 0), (5, 5)])
def test_span_of_no_time_is_nothing(times: tuple[int, int]) -> None:
    stream = StreamReport()
    for number, at_us in enumerate(times):
        stream.add(RecordedBatch(Batch(7, 1, number, NOBODY, timestamp_us=at_us)))
    assert stream.report().span_s == 0
