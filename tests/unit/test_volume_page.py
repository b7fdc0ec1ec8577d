"""What the pages of volumes work out."""

from __future__ import annotations

from sample_reader import SampleReader
from sample_volumes import AGES_S, TOUCHES

from advisor.views import Check
from advisor.volume_views import HeatBin
from advisor.web.page_volumes import age_label, agents_named, heat_rows, touches_label, volume_figures


def bins(begins: tuple[float, ...], blocks: int) -> list[HeatBin]:
    ends = [*begins[1:], None]
    return [HeatBin(at_least=begin, below=end, blocks=blocks) for begin, end in zip(begins, ends, strict=True)]


def test_bins_are_named_by_what_is_in_them() -> None:
    assert [touches_label(each) for each in bins(TOUCHES, 1)] == [
        "0", "1", "2 to 3", "4 to 7", "8 to 15", "16 to 31", "32 to 63", "64 to 127", "128 and more",
    ]
    ages = [age_label(each) for each in bins(AGES_S, 1)]
    assert [ages[0], ages[2], ages[-1]] == ["under 1.0 s", "10 s to 100 s", "11 d 13 h and more"]


def test_histogram_shares_are_of_all_and_widths_of_the_longest() -> None:
    first, second, *_ = bins(TOUCHES, 0)
    rows = heat_rows(
        [first.model_copy(update={"blocks": 30}), second.model_copy(update={"blocks": 10})], touches_label
    )
    assert [(row.share, row.width) for row in rows] == [(0.75, 1.0), (0.25, 1 / 3)]
    assert [row.width for row in heat_rows(bins(TOUCHES, 0), touches_label)] == [0.0] * len(TOUCHES)


def test_figures_count_what_is_away_and_past_its_watermark() -> None:
    one, two, *_ = SampleReader().volume_views
    volumes = [
        one.model_copy(update={"fill": 0.95, "outgoing": 3}), two.model_copy(update={"state": "away: unplugged"}),
        two.model_copy(update={"state": "agent unreachable: no answer"}),
    ]
    figures = volume_figures(volumes)
    assert (figures.total, figures.away, figures.past_high, figures.leaving) == (3, 2, 1, 3)
    assert volume_figures([]).fill is None


def test_agents_are_those_of_the_checks_and_of_the_volumes() -> None:
    checks = [Check(name="agent host-9", ok=True, text="answers"), Check(name="log", ok=True, text="")]
    assert agents_named(checks, SampleReader().volume_views) == ["host-7", "host-9"]
