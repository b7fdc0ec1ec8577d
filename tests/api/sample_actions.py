"""`AdvisorActions` over plain values: two open moves, one of them past its switch, and one volume."""

from __future__ import annotations

from advisor.errors import ActionRefused, NothingSuch
from advisor.views import CancelView, PauseView


class SampleActions:
    def __init__(self) -> None:
        self.paused: set[str] = set()
        self.open = ["7-0", "7-1"]
        self.asked: list[tuple[str, str, str]] = []

    def pause(self, actor: str, volume: str = "") -> PauseView:
        return self._set_pause("pause", actor, volume, self.paused | {volume})

    def resume(self, actor: str, volume: str = "") -> PauseView:
        return self._set_pause("resume", actor, volume, self.paused - {volume})

    def _set_pause(self, action: str, actor: str, volume: str, paused: set[str]) -> PauseView:
        if volume not in ("", "nvme-a"):
            raise NothingSuch(f"volume {volume!r} is not registered: name one of nvme-a")
        self.asked.append((action, actor, volume))
        self.paused = paused
        return PauseView(paused="" in paused, volumes=sorted(paused - {""}))

    def cancel(self, actor: str, move_id: str) -> CancelView:
        if move_id not in self.open:
            raise NothingSuch(f"move {move_id!r} is not open: GET /api/v1/moves lists those that are")
        if move_id == "7-1":
            raise ActionRefused("move 7-1 is switched: past its switch it cannot be cancelled any more")
        self.asked.append(("cancel", actor, move_id))
        return CancelView(cancelled=[move_id], still_open=[])

    def cancel_all(self, actor: str) -> CancelView:
        self.asked.append(("cancel", actor, ""))
        return CancelView(cancelled=["7-0"], still_open=["7-1"])

    def cancel_compaction(self, actor: str, compaction_id: str) -> CancelView:
        if compaction_id != "80-compaction-0":
            raise NothingSuch(f"compaction {compaction_id!r} is not open: GET /api/v1/compactions lists those that are")
        self.asked.append(("cancel", actor, compaction_id))
        return CancelView(cancelled=[compaction_id], still_open=[])
