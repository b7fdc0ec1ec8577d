"""Metrics: what is rendered, and that each is documented and each that is drawn exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from advisor.metrics import Metrics
from advisor.views import OriginView, ProducerView, Summary, TierView, VolumeView

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"\bkvadvisor_[a-z_]+\b")


def samples(metrics: Metrics) -> dict[str, float]:
    """Each sample's value by its name and labels, as the text format writes them."""
    rendered = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            rendered[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return rendered


def summary(events_total: int = 1234, skipped: dict[str, int] | None = None) -> Summary:
    return Summary(
        version="0.1.0",
        term=1,
        position=77,
        now_us=1,
        uptime_s=1.0,
        events_total=events_total,
        events_per_s=1.0,
        behind_s=0.25,
        queue_entries=3,
        blocks=9,
        block_bytes=900,
        tiers=[TierView(tier=1, blocks=4, block_bytes=400), TierView(tier=3, blocks=5, block_bytes=500)],
        origin=OriginView(recomputed=0, g1=0, g2=0, g3=0, g4=0),
        fast_hit_ratio=None,
        moves_open=2,
        moves_total=8,
        moved_bytes_total=2**40,
        refusals_total=6,
        skipped_records=skipped or {},
        ready=True,
        paused=False,
    )


def volume(name: str, blocks: int) -> VolumeView:
    return VolumeView(
        id=name,
        kind="slab",
        agent="local",
        tier=3,
        speed_rank=0,
        blocks=blocks,
        block_bytes=blocks * 100,
        capacity_blocks=1024,
        fill=blocks / 1024,
        high_watermark=0.9,
        low_watermark=0.75,
        reads=11,
        read_bytes_per_s=None,
        write_bytes_per_s=None,
        incoming=0,
        state="healthy",
    )


def producer(gaps: int) -> ProducerView:
    return ProducerView(
        id="00000000000000ff",
        name="engine",
        state="live",
        note="",
        epoch="1",
        sequence=9,
        blocks=4,
        batches=10,
        events=100,
        gaps=gaps,
        resends=2,
        epochs_closed=0,
        snapshots=3,
        lag_s=None,
    )


def test_one_moment_of_the_service_is_copied() -> None:
    metrics = Metrics()
    metrics.show(summary(skipped={"unknown type": 5}), [volume("fast", 40)], [producer(gaps=1)])
    shown = samples(metrics)
    assert shown["kvadvisor_build_info{version=0.1.0}"] == 1
    assert shown["kvadvisor_ready"] == 1
    assert shown["kvadvisor_planning_paused"] == 0
    assert shown["kvadvisor_events_total"] == 1234
    assert shown["kvadvisor_log_position"] == 77
    assert shown["kvadvisor_queue_entries"] == 3
    assert shown["kvadvisor_behind_seconds"] == 0.25
    assert shown["kvadvisor_skipped_records_total{reason=unknown type}"] == 5
    assert shown["kvadvisor_tier_blocks{tier=G1}"] == 4
    assert shown["kvadvisor_tier_bytes{tier=G3}"] == 500
    assert shown["kvadvisor_volume_blocks{volume=fast}"] == 40
    assert shown["kvadvisor_volume_bytes{volume=fast}"] == 4000
    assert shown["kvadvisor_volume_capacity_blocks{volume=fast}"] == 1024
    assert shown["kvadvisor_volume_reads_total{volume=fast}"] == 11
    assert shown["kvadvisor_moves_open"] == 2
    assert shown["kvadvisor_moved_bytes_total"] == 2**40
    assert shown["kvadvisor_refusals_total"] == 6
    assert shown["kvadvisor_producer_gaps_total{name=engine,producer=00000000000000ff}"] == 1
    assert shown["kvadvisor_producer_resends_total{name=engine,producer=00000000000000ff}"] == 2
    assert shown["kvadvisor_producer_snapshots_total{name=engine,producer=00000000000000ff}"] == 3
    assert shown["kvadvisor_producer_blocks{name=engine,producer=00000000000000ff}"] == 4


def test_volume_that_went_is_no_longer_shown() -> None:
    metrics = Metrics()
    metrics.show(summary(), [volume("fast", 1), volume("slow", 2)], [])
    metrics.show(summary(), [volume("slow", 3)], [])
    shown = samples(metrics)
    assert shown["kvadvisor_volume_blocks{volume=slow}"] == 3
    assert "kvadvisor_volume_blocks{volume=fast}" not in shown


def test_events_are_counted_by_label() -> None:
    metrics = Metrics()
    metrics.batches.add(2, "engine")
    metrics.batches.add(1, "engine")
    metrics.batches.add(1, "core")
    metrics.moves.add(1, "promote", "kept")
    metrics.producer_duplicates.add(4, "ff", "engine")
    metrics.producer_lost.add(7, "ff", "engine")
    shown = samples(metrics)
    assert shown["kvadvisor_batches_total{source=engine}"] == 3
    assert shown["kvadvisor_batches_total{source=core}"] == 1
    assert shown["kvadvisor_moves_total{kind=promote,state=kept}"] == 1
    assert shown["kvadvisor_producer_duplicates_total{name=engine,producer=ff}"] == 4
    assert shown["kvadvisor_producer_lost_batches_total{name=engine,producer=ff}"] == 7


def test_commit_durations_fall_into_buckets() -> None:
    metrics = Metrics()
    for seconds in (0.0004, 0.003, 0.003, 9.0):
        metrics.commit_seconds.observe(seconds)
    shown = samples(metrics)
    assert shown["kvadvisor_log_commit_seconds_bucket{le=0.0005}"] == 1
    assert shown["kvadvisor_log_commit_seconds_bucket{le=0.005}"] == 3
    assert shown["kvadvisor_log_commit_seconds_count"] == 4


def test_two_services_in_one_process_count_apart() -> None:
    first, second = Metrics(), Metrics()
    first.events.add(5)
    assert samples(first)["kvadvisor_events_total"] == 5
    assert samples(second)["kvadvisor_events_total"] == 0


def exposed() -> dict[str, str]:
    """Every metric of ours and its type, counters with the suffix that they are asked for by."""
    return {
        family.name + ("_total" if family.type == "counter" else ""): family.type
        for family in Metrics().registry.collect()
        if family.name.startswith("kvadvisor_")
    }


def test_every_metric_is_documented() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = dict(re.findall(r"^\| `(kvadvisor_\w+)` \| (\w+) \|", page, re.MULTILINE))
    assert rows == exposed()


def test_dashboard_draws_only_metrics_that_exist() -> None:
    known = {name + suffix for name in exposed() for suffix in ("", "_bucket", "_count", "_sum")}
    for dashboard in sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json")):
        panels = json.loads(dashboard.read_text())["panels"]
        queries = [target["expr"] for panel in panels for target in panel.get("targets", [])]
        assert queries
        drawn = {name for query in queries for name in NAME.findall(query)}
        assert drawn <= known
        assert "kvadvisor_ready" in drawn
