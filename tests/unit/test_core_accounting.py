"""Columns and latencies: sums are those of their parts, and quantiles bound what was measured."""

from __future__ import annotations

from collections import Counter
from math import ceil, inf

from hypothesis import given, settings
from hypothesis import strategies as st

from event_plane.schema import Tier
from kvbm_core.accounting import LATENCY_BOUNDS_S, Accounts, Latency, RequestAccount
from kvbm_core.paths import TransferPath
from tests.examples import examples

blocks = st.integers(0, 1_000)
accounts = st.builds(
    RequestAccount,
    asked=blocks,
    ready=blocks,
    absent=blocks,
    found=st.dictionaries(st.sampled_from([Tier.G2, Tier.G3]), blocks).map(Counter),
    loaded=st.dictionaries(st.sampled_from(["G2", "disk"]), blocks).map(Counter),
    bytes_moved=st.dictionaries(st.sampled_from(list(TransferPath)), blocks).map(Counter),
    load_seconds=st.dictionaries(st.sampled_from(list(TransferPath)), st.integers(0, 100).map(float)),
)


@settings(max_examples=examples(30))
@given(st.lists(accounts, max_size=5))
def test_totals_are_the_sums_of_the_requests_columns(parts: list[RequestAccount]) -> None:
    kept = Accounts()
    for part in parts:
        kept.served(part)
    total = kept.totals().requests
    assert total.asked == sum(part.asked for part in parts)
    assert total.ready == sum(part.ready for part in parts)
    assert total.absent == sum(part.absent for part in parts)
    for tier in (Tier.G2, Tier.G3):
        assert total.found[tier] == sum(part.found[tier] for part in parts)
    for source in ("G2", "disk"):
        assert total.loaded[source] == sum(part.loaded[source] for part in parts)
    for path in TransferPath:
        assert total.bytes_moved[path] == sum(part.bytes_moved[path] for part in parts)
        assert total.load_seconds.get(path, 0.0) == sum(part.load_seconds.get(path, 0.0) for part in parts)


@settings(max_examples=examples(50))
@given(st.lists(st.floats(0, 100), min_size=1, max_size=60), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_bounds_the_measured_one_within_a_factor_of_two(seconds: list[float], share: float) -> None:
    latency = Latency()
    for each in seconds:
        latency.add(each)
    measured = sorted(seconds)[ceil(share * len(seconds)) - 1]
    bound = latency.quantile_s(share)
    assert measured <= bound <= max(2 * measured, LATENCY_BOUNDS_S[0])
    assert (latency.count, latency.seconds) == (len(seconds), sum(seconds))


def test_what_takes_longer_than_any_bucket_has_no_bound() -> None:
    latency = Latency()
    assert latency.quantile_s(0.99) == 0.0
    latency.add(1e6)
    assert latency.quantile_s(0.99) == inf


def test_totals_are_a_copy() -> None:
    kept = Accounts()
    kept.failed(TransferPath.HOST_TO_DISK, "full", 3)
    before = kept.totals()
    kept.failed(TransferPath.HOST_TO_DISK, "full")
    assert before.paths[TransferPath.HOST_TO_DISK].failures == {"full": 3}
    assert kept.totals().paths[TransferPath.HOST_TO_DISK].failures == {"full": 4}
