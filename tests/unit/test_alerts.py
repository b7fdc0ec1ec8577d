"""What asks for a person on the overview, and since when."""

from __future__ import annotations

from sample_plans import SamplePlans
from sample_reader import SampleReader
from sample_volumes import SampleVolumes

from advisor.api.picture import take_picture
from advisor.views import Check
from advisor.web.alerts import Alert, Noticed


def alerts(reader: SampleReader) -> dict[str, Alert]:
    return {alert.key: alert for alert in take_picture(reader).alerts}


def test_each_trouble_links_to_the_page_that_helps() -> None:
    reader = SampleReader()
    healthy, past, slow, away = reader.volume_views
    reader.volume_views = [
        healthy, past.model_copy(update={"fill": 0.97}), slow, away.model_copy(update={"state": "away: unplugged"}),
    ]
    reader.check_views = [
        Check(name="source vllm", ok=False, text="not connected"), Check(name="log", ok=False, text="the disk is full"),
        Check(name="lag", ok=True, text="0.4 s"),
    ]
    reader.summary_view = reader.summary_view.model_copy(update={"paused": True})
    found = alerts(reader)
    assert {key: alert.page for key, alert in found.items()} == {
        "check source vllm": "/producers#connections", "check log": "", "full nvme-b": "/volumes/nvme-b",
        "volume lustre-01": "/volumes/lustre-01", "volume s3-archive": "/volumes/s3-archive",
        "partial": "/producers?state=partial", "paused": "/moves",
    }
    assert "97.0 % full, above 92.0 %" in found["full nvme-b"].text
    assert found["volume s3-archive"].title == "s3-archive is away"


def test_an_optional_volume_and_one_that_a_check_names_are_told_once_or_not_at_all() -> None:
    reader = SampleReader()
    first, second, *_ = reader.volume_views
    reader.producer_views = []
    reader.volume_views = [
        first.model_copy(update={"state": "away: unplugged", "optional": True}),
        second.model_copy(update={"state": "away: unplugged"}),
        second.model_copy(update={"id": "held", "state": "paused by an operator"}),
        second.model_copy(update={"id": "far", "state": "agent unreachable: no answer"}),
    ]
    reader.check_views = [Check(name="volume nvme-b", ok=False, text="away: unplugged; plug it in")]
    assert list(alerts(reader)) == ["check volume nvme-b"]
    assert alerts(reader)["check volume nvme-b"].page == "/volumes/nvme-b"


def test_a_plan_that_waits_and_scrubs_that_found_faults_or_failed_are_told() -> None:
    reader, desk = SampleReader(), SampleVolumes()
    reader.producer_views, reader.volume_views = [], reader.volume_views[:2]
    failed = {"volume": "nvme-b", "state": "failed", "reason": "its agent left"}
    desk.scrubs["nvme-b"] = desk.scrubs["nvme-a"].model_copy(update=failed)
    found = {alert.key: alert for alert in take_picture(reader, SamplePlans(), desk).alerts}
    assert list(found) == ["scrub nvme-a", "scrub nvme-b", "plan 40"]
    faults = "Corrupt blocks, which were freed: 1; unreadable ones: 0; good ones: 834."
    assert found["scrub nvme-a"].text.startswith(faults)
    assert found["scrub nvme-b"].text == "its agent left. Mend that and scrub again."
    assert found["plan 40"].page == "/moves"
    desk.scrubs = {"nvme-a": desk.scrubs["nvme-a"].model_copy(update={"corrupt_blocks": 0})}
    assert take_picture(reader, None, desk).alerts == []


def test_what_mends_itself_is_told_when_it_lasts() -> None:
    noticed, full = Noticed(), Alert("full a", "a", "", "", patience_s=60.0)
    assert noticed.look([full], 0) == []
    assert noticed.look([full], 59_000_000) == []
    assert [alert.since_us for alert in noticed.look([full], 60_000_000)] == [0]


def test_many_partial_producers_are_one_alert() -> None:
    reader = SampleReader()
    one = reader.producer_views[3]
    reader.producer_views = [one.model_copy(update={"id": f"{n:016x}", "name": f"pod-{n}"}) for n in range(1_000)]
    alert = alerts(reader)["partial"]
    assert alert.title == "1.00 k producers are partial"
    assert alert.text.startswith("pod-0, pod-1, pod-2 and 997 more: attached late")


def test_since_when_is_kept_from_look_to_look_and_begins_anew_after_it_went() -> None:
    noticed = Noticed()
    full, away = Alert("full a", "a", "", ""), Alert("volume b", "b", "", "")
    assert [alert.since_us for alert in noticed.look([full], 10)] == [10]
    both = noticed.look([away, full], 20)
    assert [(alert.key, alert.since_us) for alert in both] == [("full a", 10), ("volume b", 20)]
    assert noticed.look([away], 30)[0].since_us == 20
    assert [alert.since_us for alert in noticed.look([full], 40)] == [40]
