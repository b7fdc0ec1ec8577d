"""What asks for a person: named, with what to do, since when, and the page that helps. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from urllib.parse import quote

from advisor.plan_views import PendingPlanView
from advisor.views import Check, ProducerView, Summary, VolumeView
from advisor.volume_views import ScrubView
from advisor.web import formats

NAMED_MAX = 3
"""Producers named in one alert; the page that it links to has all."""

FULL_PATIENCE_S = 60.0
"""To be past the high watermark for a while is how room is made."""

_PAGES = dict.fromkeys(("source", "agent", "hook"), "/producers#connections")
"""The page that helps with a check, by the first word of its name."""

_EXPECTED = ("healthy", "paused", "being drained", "drained", "agent unreachable")
"""How a volume's state begins where nobody is needed, or where the agent's own check says it."""


@dataclass(frozen=True, slots=True)
class Alert:
    """`key` is the same as long as it is the same trouble. `since_us`: when it was first noticed; 0 before that.
    `patience_s`: told from that age on only.
    """

    key: str
    title: str
    text: str
    page: str
    since_us: int = 0
    patience_s: float = 0.0


class Noticed:
    """Since when each alert is there, from one look to the next. What is gone and comes again begins anew."""

    def __init__(self) -> None:
        self._since_us: dict[str, int] = {}

    def look(self, alerts: Sequence[Alert], now_us: int) -> list[Alert]:
        """Those to be told now, with `since_us`, the oldest first."""
        self._since_us = {alert.key: self._since_us.get(alert.key, now_us) for alert in alerts}
        dated = (replace(alert, since_us=self._since_us[alert.key]) for alert in alerts)
        told = [alert for alert in dated if now_us - alert.since_us >= alert.patience_s * 1e6]
        return sorted(told, key=lambda alert: alert.since_us)


def alerts_of(
    summary: Summary,
    checks: Sequence[Check],
    volumes: Sequence[VolumeView],
    producers: Sequence[ProducerView],
    pending: PendingPlanView | None = None,
    scrubs: Sequence[ScrubView] = (),
) -> list[Alert]:
    """Failing checks, volumes and their last scrubs, producers, a plan that waits, and a pause that somebody forgot: of
    all, not of those that a page shows."""
    failing = [check for check in checks if not check.ok]
    told = {check.name for check in failing}
    return [
        *(_of_check(check) for check in failing),
        *(alert for volume in volumes for alert in _of_volume(volume, told)),
        *(alert for scrub in scrubs for alert in _of_scrub(scrub)),
        *_of_producers(producers),
        *_of_plan(pending),
        *_of_pause(summary),
    ]


def _of_check(check: Check) -> Alert:
    kind, _, name = check.name.partition(" ")
    page = volume_page(name) if kind == "volume" else _PAGES.get(kind, "")
    return Alert(f"check {check.name}", f"{check.name} fails", check.text, page)


def volume_page(volume_id: str) -> str:
    """The address of a volume's page."""
    return f"/volumes/{quote(volume_id, safe='')}"


def _of_volume(volume: VolumeView, told: set[str]) -> Iterator[Alert]:
    page = volume_page(volume.id)
    if f"volume {volume.id}" not in told and not volume.state.startswith(_EXPECTED) and not _may_be_away(volume):
        word = "away" if volume.state.startswith("away") else "not healthy"
        text = f"{volume.state}. While it is away nothing moves to or from it: see its medium and agent {volume.agent}."
        yield Alert(f"volume {volume.id}", f"{volume.id} is {word}", text, page)
    if volume.fill > volume.high_watermark:
        text = (
            f"{formats.percent(volume.fill)} full, above {formats.percent(volume.high_watermark)}: blocks leave by "
            "themselves, and come as fast. Raise its capacity or policy.moves_per_s, or see why its moves do not end."
        )
        title = f"{volume.id} stays past its high watermark"
        yield Alert(f"full {volume.id}", title, text, page, patience_s=FULL_PATIENCE_S)


def _of_scrub(scrub: ScrubView) -> Iterator[Alert]:
    key, page = f"scrub {scrub.volume}", volume_page(scrub.volume)
    if scrub.state == "failed":
        text = f"{scrub.reason or 'it gave no reason'}. Mend that and scrub again."
        yield Alert(key, f"The scrub of {scrub.volume} failed", text, page)
    elif scrub.corrupt_blocks or scrub.unreadable_blocks:
        text = (
            f"Corrupt blocks, which were freed: {formats.count(scrub.corrupt_blocks)}; unreadable ones: "
            f"{formats.count(scrub.unreadable_blocks)}; good ones: {formats.count(scrub.good_blocks)}. "
            "Look at its medium; a clean scrub ends this."
        )
        yield Alert(key, f"The scrub of {scrub.volume} found faults", text, page)


def _of_plan(pending: PendingPlanView | None) -> Iterator[Alert]:
    if pending is not None:
        moves, lapses = formats.counted(pending.moves_total, "moves"), formats.moment(pending.lapses_us)
        text = f"{moves}. Approve or reject it by {lapses} UTC, when it lapses; no other plan is made meanwhile."
        yield Alert(f"plan {pending.id}", f"Plan {pending.id} waits for a person", text, "/moves")


def _may_be_away(volume: VolumeView) -> bool:
    return volume.optional and volume.state.startswith("away")


def _of_producers(producers: Sequence[ProducerView]) -> Iterator[Alert]:
    partial = [producer for producer in producers if producer.state == "partial"]
    if not partial:
        return
    names = ", ".join(formats.short_name(producer.name) for producer in partial[:NAMED_MAX])
    if len(partial) > NAMED_MAX:
        names += f" and {formats.count(len(partial) - NAMED_MAX)} more"
    title = "A producer is partial" if len(partial) == 1 else f"{formats.count(len(partial))} producers are partial"
    text = f"{names}: {partial[0].note or 'something was missed'}. Only a part of what it placed is known."
    yield Alert("partial", title, text, "/producers?state=partial")


def _of_pause(summary: Summary) -> Iterator[Alert]:
    if summary.paused:
        text = "No move is planned or begun, on no volume. Resume it on the page of moves when what it was for is done."
        yield Alert("paused", "Planning is paused", text, "/moves")
