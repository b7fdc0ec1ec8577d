"""Views of the policies in force and of the comparison with shadows, made from the folded state."""

from __future__ import annotations

from collections.abc import Sequence

from advisor.fold import Fold
from advisor.policies.eviction import EVICTIONS
from advisor.policies.limits import Limits
from advisor.policies.registry import known_names, policy_named
from advisor.settings import PolicySettings, ShadowSettings
from advisor.shadow import Shadow
from advisor.shadow_comparison import LIVE
from advisor.shadow_tally import Counts, Tally, found_each
from advisor.views import ComparedPolicy, ComparisonView, PoliciesView, PolicyFigures


def policies_view(fold: Fold) -> PoliciesView:
    """The caller holds the fold's lock, here and below."""
    return PoliciesView(
        policy_version=fold.policy_version,
        policy=PolicySettings.model_validate(fold.settings.get("policy", {})),
        eviction=_eviction(fold.limits),
        admissions=known_names(),
        evictions=list(EVICTIONS),
        changed_here=sorted(fold.changed_settings),
        file_policy=PolicySettings.model_validate(fold.file_settings.get("policy", {})),
        shadow=[ShadowSettings.model_validate(each) for each in fold.settings.get("shadow", ())],
        shadows=[] if fold.comparison is None else [shadow.name for shadow in fold.comparison.shadows],
    )


def comparison_view(fold: Fold) -> ComparisonView:
    comparison = fold.comparison
    if comparison is None:
        return ComparisonView(began_us=0, note="", fastest="", times_us=[], policies=[])
    fastest = next(iter(fold.volumes_by_speed()), None)
    live_blocks = 0 if fastest is None else fold.index.place_figures(fastest.place).blocks
    live = _policy(LIVE, fold.limits, comparison.live, fold.now_us, fast_blocks=live_blocks)
    return ComparisonView(
        began_us=comparison.began_us,
        note=comparison.note,
        fastest="" if fastest is None else fastest.volume_id,
        times_us=[mark.at_us for mark in comparison.live.marks[1:]],
        policies=[live, *(_shadow(shadow, fold.now_us) for shadow in comparison.shadows)],
    )


def _shadow(shadow: Shadow, now_us: int) -> ComparedPolicy:
    fast_blocks = shadow.index.place_figures(shadow.volumes[0].place).blocks if shadow.volumes else 0
    return _policy(
        shadow.name, shadow.limits, shadow.tally, now_us, fast_blocks=fast_blocks, known_blocks=len(shadow.index),
        left_out=shadow.left_out, memory_bytes=shadow.memory_bytes(),
    )  # fmt: skip


def _policy(
    name: str, limits: Limits, tally: Tally, now_us: int, *, fast_blocks: int, known_blocks: int = 0, left_out: int = 0,
    memory_bytes: int = 0,
) -> ComparedPolicy:  # fmt: skip
    return ComparedPolicy(
        name=name,
        admission=limits.admission,
        eviction=_eviction(limits),
        since_start=_figures(tally.counts),
        last_hour=_figures(tally.last_hour(now_us)),
        found_each=_rounded(found_each(tally.marks)),
        fast_blocks=fast_blocks,
        known_blocks=known_blocks,
        left_out=left_out,
        memory_bytes=memory_bytes,
    )


def _eviction(limits: Limits) -> str:
    return policy_named(limits.admission).eviction if limits.eviction == "auto" else limits.eviction


def _figures(counts: Counts) -> PolicyFigures:
    return PolicyFigures(
        uses=counts.uses,
        used_bytes=counts.used_bytes,
        found=counts.found,
        found_bytes=counts.found_bytes,
        found_share=_share(counts.found, counts.uses),
        saved_s=counts.saved_s if counts.timed else None,
        moves=counts.moves,
        moved_bytes=counts.moved_bytes,
        promoted=counts.came,
        promoted_used=counts.hit,
        precision=_share(counts.hit, counts.came),
        bounced=counts.bounced,
        ping_pong=_share(counts.bounced, counts.came),
    )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _rounded(shares: Sequence[float | None]) -> list[float | None]:
    return [None if share is None else round(share, 4) for share in shares]
