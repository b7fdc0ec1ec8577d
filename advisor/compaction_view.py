"""Compactions and how volumes' blocks lie, as the API shows them."""

from __future__ import annotations

from advisor.compactions import Compaction, VolumeLayout
from advisor.fold import Fold
from advisor.policies.compaction import spread_of
from advisor.views import CompactionsView, CompactionView, LayoutView, VolumeLayoutView
from storage_agent.port import Fragmentation


def compactions_view(fold: Fold, limit: int) -> CompactionsView:
    """The newest `limit`, open ones first. The caller holds the fold's lock."""
    newest = [*fold.compactions.open.values(), *reversed(fold.compactions.finished)]
    return CompactionsView(
        compactions=[_compaction_view(each) for each in newest[:limit]],
        volumes=[volume_layout(name, layout) for name, layout in sorted(fold.compactions.layouts.items())],
    )


def volume_layout(name: str, layout: VolumeLayout) -> VolumeLayoutView:
    return VolumeLayoutView(
        volume=name, as_of_us=layout.told_us, layout=_layout_view(layout.figures), note=layout.note
    )


def _layout_view(figures: Fragmentation) -> LayoutView:
    return LayoutView(
        held_bytes=figures.held_bytes,
        live_bytes=figures.live_bytes,
        reclaimable_bytes=figures.reclaimable_bytes,
        objects=figures.objects,
        objects_least=figures.objects_least,
        chains=figures.chains,
        chain_blocks=figures.chain_blocks,
        extents=figures.extents,
        extents_least=figures.extents_least,
        spread=spread_of(figures),
    )


def _compaction_view(compaction: Compaction) -> CompactionView:
    return CompactionView(
        id=compaction.compaction_id,
        volume=compaction.volume,
        kind=str(compaction.kind),
        state=str(compaction.state),
        reason=compaction.reason,
        note=compaction.note,
        planned_us=compaction.planned_us,
        changed_us=compaction.changed_us,
        blocks=compaction.blocks,
        commands=compaction.commands,
        commands_done=compaction.commands_done,
        moved_blocks=compaction.moved_blocks,
        moved_bytes=compaction.moved_bytes,
        freed_bytes=compaction.freed_bytes,
        extents_before=compaction.extents_before,
        extents_after=compaction.extents_after,
        seconds=compaction.seconds,
        before=_layout_view(compaction.before),
        after=None if compaction.after is None else _layout_view(compaction.after),
    )
