"""What the overview works out from a picture."""

from __future__ import annotations

import pytest
from sample_parts import sample_parts
from sample_reader import SampleReader

from advisor.api.picture import take_picture
from advisor.views import MovesView, OriginView
from advisor.web.figures import (
    SPARK_HEIGHT,
    SPARK_WIDTH,
    activities,
    reused_share,
    savings,
    six_figures,
    spark_points,
    tier_shares,
)
from advisor.web.pages import Pages


def points_of(text: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, _, y in (point.partition(",") for point in text.split())]


def test_spark_spans_the_box_with_the_highest_value_on_top() -> None:
    assert points_of(spark_points([0, 10, 5])) == [(0, 24), (48, 2), (96, 13)]


def test_spark_leaves_out_seconds_without_a_value_and_keeps_their_place() -> None:
    assert [x for x, _ in points_of(spark_points([None, 1, None, 2]))] == [32, 96]


def test_spark_of_equal_values_is_a_middle_line_and_of_one_is_nothing() -> None:
    assert {y for _, y in points_of(spark_points([3, 3, 3]))} == {SPARK_HEIGHT / 2}
    assert spark_points([3]) == ""
    assert spark_points([None, None]) == ""
    assert max(x for x, _ in points_of(spark_points([1, 2]))) == SPARK_WIDTH


def test_reused_share_is_none_before_the_first_prompt_block() -> None:
    assert reused_share(OriginView(recomputed=0, g1=0, g2=0, g3=0, g4=0)) is None
    assert reused_share(OriginView(recomputed=20, g1=36, g2=16, g3=21, g4=7)) == 0.8


def test_six_figures_of_a_working_service() -> None:
    figures = six_figures(take_picture(SampleReader()))
    assert [(figure.label, figure.value, figure.note) for figure in figures] == [
        ("Ingest", "2.12 k", "events/s"),
        ("Behind by", "0.4 s", "12 queued"),
        ("Blocks", "8.41 M", "138 GB"),
        ("Readers saved", "18.6 min", "est., by faster reads"),
        ("Moved", "48.2 GB", "1.20 k moves"),
        ("Prompt state reused", "80.0 %", "of prompt blocks"),
    ]
    assert "8\u202f412\u202f345 blocks" in figures[2].exact
    assert [figure.label for figure in figures if not figure.spark] == ["Readers saved"]


def test_savings_without_a_comparison_are_of_the_reads_against_the_slowest_volume_timed() -> None:
    reader = SampleReader()
    reader.comparison_view = SampleReader.empty().comparison_view
    fast, _, slow, untimed = reader.volume_views
    reader.volume_views = [
        fast.model_copy(update={"reads": 1_000, "blocks": 10, "block_bytes": 10_000, "read_bytes_per_s": 1e6}),
        slow.model_copy(update={"reads": 50, "blocks": 10, "block_bytes": 10_000, "read_bytes_per_s": 1e5}),
        untimed,
    ]
    saved = savings(take_picture(reader))
    assert saved.seconds == pytest.approx(1_000 * (0.01 - 0.001))
    assert slow.id in saved.says
    reader.volume_views = [fast, untimed]
    assert savings(take_picture(reader)).seconds is None


def test_tiers_stand_beside_one_another_and_tell_waiting_from_ready() -> None:
    shares = tier_shares(take_picture(SampleReader()))
    assert [(share.tier, share.blocks, share.waiting, share.found) for share in shares] == [
        (1, 256, 0, 36_000), (2, 512, 0, 16_000), (3, 7_203, 24, 21_000),
    ]
    assert [share.left for share in shares] == pytest.approx([0, 256 / 7_971, 768 / 7_971])
    assert sum(share.width for share in shares) == pytest.approx(1)


def test_six_figures_of_an_empty_service_have_no_sparkline_and_no_false_ratio() -> None:
    figures = six_figures(take_picture(SampleReader.empty()))
    assert [figure.value for figure in figures] == ["0", "0 s", "0", "–", "0 B", "–"]
    assert not any(figure.spark for figure in figures)


def test_blocks_of_an_engine_that_tells_neither_sizes_nor_hits_make_no_false_figures() -> None:
    reader = SampleReader.empty()
    reader.summary_view = reader.summary_view.model_copy(update={"blocks": 239, "events_total": 2_995})
    figures = {figure.label: (figure.value, figure.note) for figure in six_figures(take_picture(reader))}
    assert figures["Blocks"] == ("239", "size not told")
    assert figures["Prompt state reused"] == ("–", "not told by this engine")
    fragments = Pages(sample_parts()).fragments(take_picture(reader))
    assert fragments["origin"].strip() == "not told by this engine"


def test_moves_and_refusals_are_one_list_newest_first() -> None:
    lines = activities(SampleReader().moves_view, 12)
    assert [line.state for line in lines] == ["kept", "verified", "copying", "freed", "refused", "aborted"]
    assert [line.tone for line in lines] == ["settled", "open", "open", "settled", "stopped", "stopped"]
    assert [line.at_us for line in lines] == sorted((line.at_us for line in lines), reverse=True)
    assert len(activities(SampleReader().moves_view, 2)) == 2


def test_like_moves_of_one_plan_are_one_line_with_their_sum() -> None:
    move = SampleReader().moves_view.moves[0]
    others = [
        move.model_copy(update={"id": "a", "hash": "a" * 32, "tenant": "agents", "reason": "4th touch in 9 s"}),
        move.model_copy(update={"id": "b", "hash": "b" * 32, "changed_us": move.changed_us + 1}),
        move.model_copy(update={"id": "c", "state": "copying"}),
        move.model_copy(update={"id": "d", "planned_us": move.planned_us - 1}),
    ]
    lines = activities(MovesView(moves=[move, *others], refusals=[]), 12)
    assert [(line.id, line.blocks) for line in lines] == [("move-b", 3), ("move-c", 1), ("move-d", 1)]
    assert lines[0].block_bytes == 3 * move.block_bytes
    assert lines[0].tenants == ["agents", "support-bot"]
    assert lines[0].reason == move.reason
    assert lines[0].other_reasons == ["4th touch in 9 s"]


def test_many_refusals_leave_room_for_the_moves() -> None:
    view = SampleReader().moves_view
    refusals = [view.refusals[0].model_copy(update={"at_us": 10**16 + n}) for n in range(20)]
    lines = activities(MovesView(moves=view.moves, refusals=refusals), 12)
    assert [line.at_us - 10**16 for line in lines if line.state == "refused"] == [19, 18, 17, 16]
    assert len(lines) == 4 + len(activities(MovesView(moves=view.moves, refusals=[]), 12))


def test_refusals_of_one_moment_for_one_volume_are_one_line() -> None:
    refusal = SampleReader().moves_view.refusals[0]
    other_volume = refusal.model_copy(update={"volume": "nvme-b"})
    lines = activities(MovesView(moves=[], refusals=[refusal, refusal, other_volume]), 12)
    assert [(line.target, line.blocks, line.state) for line in lines] == [
        ("nvme-a", 2, "refused"), ("nvme-b", 1, "refused"),
    ]
