"""Promotion: blocks used lately come to the fastest volume that takes them, parents before children."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from advisor.index import BlockRow, IndexFault
from advisor.moves import MoveKind
from advisor.policies.budgets import expected_hits, loss, saved_s
from advisor.policies.plan import Proposal, Volume
from advisor.policies.policy import Candidate, Policy, Scene, Verdict, verdict_of
from advisor.policies.relief import Leavers
from advisor.policies.rules.noting import placed_columns
from advisor.policies.rules.score import HALF_LIFE_S
from advisor.policies.rules.worth import protected
from advisor.policies.sight import NOWHERE, Sight
from advisor.wording import bytes_text, duration_text

CANDIDATES_MAX = 512
"""Blocks that one plan looks at, those of the best scores."""


class _Asking(NamedTuple):
    candidate: Candidate
    verdict: Verdict
    source: Volume
    slot: int


def promote(sight: Sight, policy: Policy, pinned: set[int]) -> None:
    """Where a batch is due, or none is waited for, propose the best of those that wait."""
    state = sight.state
    hurries = policy.hurries and not sight.purse.is_tight()
    if policy.period_s > 0 and not _is_due(sight, policy.period_s) and not hurries:
        return
    rows = np.array(list(state.waiting), np.int32)
    state.waiting.clear()
    out: list[int] = []
    asking = [each for row, slot in _best(sight, rows) if (each := _ask(sight, policy, row, slot, out)) is not None]
    asking.sort(key=lambda each: (-each.verdict.value, each.candidate.block.depth, each.candidate.block.key))
    leavers: dict[str, Leavers] = {}
    promoted = 0
    for each in asking:
        why = f"this plan's {sight.limits.promote_moves_max} promotions are spent"
        if promoted < sight.limits.promote_moves_max:
            why = _come(sight, policy, each, leavers, frozenset(pinned))
        if why:
            sight.plan.refuse(each.candidate.block, each.candidate.target, why)
            out.append(each.slot)
        else:
            promoted += 1
    sight.state.book.keep_out(out)


def _is_due(sight: Sight, period_s: float) -> bool:
    """Whether the batch's time has come; if so the next one's is set."""
    state = sight.state
    if state.due_us == 0:
        if state.waiting:
            state.due_us = sight.now_us + int(period_s * 1e6)
        return False
    if sight.now_us < state.due_us:
        return False
    periods = (sight.now_us - state.due_us) // int(period_s * 1e6) + 1
    state.due_us += int(periods * period_s * 1e6)
    return True


def _best(sight: Sight, rows: np.ndarray) -> list[tuple[int, int]]:
    """Rows that are not on the fastest volume, with their notes: best scores first, ancestors before descendants."""
    tables, top = sight.index.tables, len(sight.index.tables.blocks)
    rows = rows[rows < top]
    uses, sizes = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
    placed_columns(tables.blocks, tables.placements, rows, sight.ordered[0].place, uses, sizes)
    rows = rows[uses < 0]
    slots = sight.state.book.of(sight.index, rows)
    scores = sight.state.book.scores(sight.index, rows, slots)
    order = np.lexsort((tables.blocks["depth"][rows], -scores))[:CANDIDATES_MAX]
    return list(zip(rows[order].tolist(), slots[order].tolist(), strict=True))


def _ask(sight: Sight, policy: Policy, row: int, slot: int, out: list[int]) -> _Asking | None:
    """What the policy says of a block; None where it is on no volume or moves already, or stays out."""
    try:
        block = sight.index.block(row)
    except IndexFault:
        return None  # it went while it waited
    rank = sight.rank(block)
    if not 0 < rank < NOWHERE or row in sight.plan.rows or sight.moves.of(block.key) is not None:
        return None
    source = sight.ordered[rank]
    placed = block.placed_in(source.place)
    assert placed is not None
    target, why = _target(sight, block, rank, placed.block_bytes)
    candidate = _candidate(sight, block, source, target, placed.block_bytes, slot)
    why = sight.kept_out(block) or why
    if not why:
        verdict = verdict_of(policy, candidate, _scene(sight, target))
        if verdict.admitted:
            return _Asking(candidate, verdict, source, slot)
        why = verdict.reason
    sight.plan.refuse(block, target.volume_id, why)
    out.append(slot)
    return None


def _target(sight: Sight, block: BlockRow, rank: int, size: int) -> tuple[Volume, str]:
    """The fastest volume that may hold the block; where none may, the fastest and why not."""
    why = ""
    tenant = sight.tenant(block)
    for volume in sight.ordered[:rank]:
        barred = sight.barred(volume, tenant, size)
        if not barred:
            return volume, ""
        why = why or barred
    return sight.ordered[0], why


def _scene(sight: Sight, target: Volume) -> Scene:
    return Scene(
        now_s=sight.now_s,
        turn=sight.state.book.turn,
        fast_blocks=target.slots_high,
        is_full=sight.occupied[target.volume_id] >= target.slots_high,
        is_tight=sight.purse.is_tight(),
        leading_touches=sight.state.duel.threshold,
    )


def _candidate(sight: Sight, block: BlockRow, source: Volume, target: Volume, size: int, slot: int) -> Candidate:
    book = sight.state.book
    score = float(book.notes["score"][slot]) if slot >= 0 else block.last_touch_us / 1e6 / HALF_LIFE_S
    return Candidate(
        block=block,
        tenant=sight.tenant(block),
        source=source.volume_id,
        target=target.volume_id,
        block_bytes=size,
        saved_s=saved_s(size, source, target),
        score=score,
        expected_hits=expected_hits(score, sight.now_s, HALF_LIFE_S),
        gap_s=float(book.notes["gap_s"][slot]) if slot >= 0 else 0.0,
        out_turn=int(book.notes["out_turn"][slot]) if slot >= 0 else 0,
    )


def _come(
    sight: Sight, policy: Policy, asking: _Asking, leavers: dict[str, Leavers], pinned: frozenset[int]
) -> str:
    """Propose the block's promotion; why not, where a law is against it."""
    candidate, source = asking.candidate, asking.source
    block, size = candidate.block, candidate.block_bytes
    target = next(v for v in sight.ordered if v.volume_id == candidate.target)
    if block.parent >= 0 and sight.rank(sight.index.block(block.parent)) > sight.ordered.index(target):
        return f"its parent is not on {target.volume_id}, so a read would stop before it"
    # Asked again: those that came before it in this plan changed the scene.
    verdict = verdict_of(policy, candidate, _scene(sight, target))
    why = (
        ("" if verdict.admitted else verdict.reason)
        or sight.barred(target, candidate.tenant, size)
        or sight.purse.refusal(target, size, promotion=True)
        or loss(size, candidate.expected_hits, source, target, sight.limits)
        or _bounce(sight, asking)
    )
    if why:
        return why
    if sight.occupied[target.volume_id] >= target.slots_high:
        if target.volume_id not in leavers:
            leavers[target.volume_id] = Leavers(sight, target, pinned)
        why = _make_way(sight, policy, asking, target, leavers[target.volume_id])
        if why:
            return why
    reason = _reason(asking, size)
    proposal = Proposal(MoveKind.PROMOTE, block, source.volume_id, target.volume_id, size, reason)
    sight.propose(proposal, source, target)
    return ""


def _make_way(sight: Sight, policy: Policy, asking: _Asking, target: Volume, leavers: Leavers) -> str:
    """Send the block that leaves first down, if it is worth less."""
    victim = leavers.peek()
    if victim is None or victim.row == asking.candidate.block.parent:
        return f"{target.volume_id} has no room below its high watermark, and nothing there may leave"
    if not policy.replaces_better:
        slot = sight.state.book.slot(sight.index, victim.row)
        score = float(sight.state.book.notes["score"][slot]) if slot >= 0 else victim.last_touch_us / 1e6 / HALF_LIFE_S
        if asking.candidate.score <= score:
            return f"{target.volume_id} is full of blocks that are used more"
        touches, heats = asking.candidate.block.touches, (sight.heat(asking.candidate.score), sight.heat(score))
        if protected(touches, heats[0], victim.touches, heats[1]):
            return f"{target.volume_id} keeps blocks used twice from those used once"
    if sight.purse.moves < 2:
        return "the budget of open moves or bytes is spent"
    leavers.next()
    better = f"a block with its {_times(asking.candidate.block.touches)} comes to {target.volume_id}"
    if not leavers.send_down(victim, better):
        return f"{target.volume_id} has no room below its high watermark"
    return sight.purse.refusal(target, asking.candidate.block_bytes, promotion=True)


def _bounce(sight: Sight, asking: _Asking) -> str:
    """Why a block that was dropped lately stays out; empty where it may come."""
    limits = sight.limits
    if asking.slot < 0 or limits.hysteresis_s <= 0:
        return ""
    note = sight.state.book.notes[asking.slot]
    since_s = sight.now_s - float(note.dropped_s)
    if note.dropped_s <= 0 or since_s >= limits.hysteresis_s:
        return ""
    if sight.heat(asking.candidate.score) >= limits.hysteresis_gain * float(note.dropped_heat):
        return ""
    return f"dropped {duration_text(since_s)} ago, and not used {limits.hysteresis_gain:g} times as much as then"


def _reason(asking: _Asking, size: int) -> str:
    reason = asking.verdict.reason
    gain_s = asking.candidate.saved_s
    if gain_s is not None and gain_s > 0 and math.isfinite(gain_s):
        reason += f", est. {duration_text(gain_s)} saved a hit"
    return f"{reason}, {bytes_text(size)}"


def _times(touches: int) -> str:
    return f"{touches} touch" if touches == 1 else f"{touches} touches"
