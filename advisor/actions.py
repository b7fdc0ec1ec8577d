"""What a person may have the running service do: cancel, pause and resume."""

from __future__ import annotations

from advisor.entries import OperatorEntry
from advisor.errors import ActionRefused, NothingSuch
from advisor.moves import CANCELLED_IN
from advisor.service import AdvisorService
from advisor.views import CancelView, PauseView


class ServiceActions:
    """`advisor.views.AdvisorActions` over a running service. An action is a log entry; it returns when that is applied.
    """

    def __init__(self, service: AdvisorService) -> None:
        self._service = service

    def pause(self, actor: str, volume: str = "") -> PauseView:
        """See `AdvisorActions.pause`."""
        return self._set_pause(OperatorEntry(actor, "pause", volume))

    def resume(self, actor: str, volume: str = "") -> PauseView:
        """See `AdvisorActions.resume`."""
        return self._set_pause(OperatorEntry(actor, "resume", volume))

    def _set_pause(self, entry: OperatorEntry) -> PauseView:
        service = self._service
        with service.lock:
            known = {*service.fold.volumes, *service.fold.paused}
        if entry.volume and entry.volume not in known:
            names = ", ".join(sorted(known - {""})) or "none: there is none yet"
            raise NothingSuch(f"volume {entry.volume!r} is not registered: name one of {names}")
        service.submit(entry).result()
        with service.lock:
            paused = service.fold.paused
            return PauseView(paused="" in paused, volumes=sorted(paused - {""}))

    def cancel(self, actor: str, move_id: str) -> CancelView:
        """See `AdvisorActions.cancel`."""
        with self._service.lock:
            move = self._service.fold.moves.open.get(move_id)
            if move is None:
                raise NothingSuch(f"move {move_id!r} is not open: GET /api/v1/moves lists those that are")
            if move.state not in CANCELLED_IN:
                raise ActionRefused(f"move {move_id} is {move.state}: past its switch it cannot be cancelled any more")
        return self._cancel(OperatorEntry(actor, "cancel", move=move_id), [move_id])

    def cancel_all(self, actor: str) -> CancelView:
        """See `AdvisorActions.cancel_all`."""
        with self._service.lock:
            open_ids = list(self._service.fold.moves.open)
        return self._cancel(OperatorEntry(actor, "cancel"), open_ids)

    def cancel_compaction(self, actor: str, compaction_id: str) -> CancelView:
        """See `AdvisorActions.cancel_compaction`."""
        service = self._service
        with service.lock:
            open_ids = [each.compaction_id for each in service.fold.compactions.open.values()]
        if compaction_id not in open_ids:
            raise NothingSuch(f"compaction {compaction_id!r} is not open: GET /api/v1/compactions lists those that are")
        service.submit(OperatorEntry(actor, "cancel", move=compaction_id)).result()
        with service.lock:
            cancelled = service.fold.compactions.was_aborted(compaction_id)
        return CancelView(cancelled=[compaction_id] if cancelled else [], still_open=[])

    def _cancel(self, entry: OperatorEntry, asked: list[str]) -> CancelView:
        self._service.submit(entry).result()
        with self._service.lock:
            moves = self._service.fold.moves
            cancelled = [move_id for move_id in asked if moves.was_aborted(move_id)]
            return CancelView(cancelled=cancelled, still_open=[each for each in asked if each in moves.open])
