"""Promotion: blocks used lately come to the fastest volume that takes them, parents before children."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from advisor.index import BlockRow, IndexFault
from advisor.moves import MoveKind
from advisor.policies.admission import ARMS, KEEPS_USED_TWICE, THRESHOLDS, ByWorth, Ghost, Guarded, Learner
from advisor.policies.budgets import expected_hits, loss, saved_s
from advisor.policies.plan import Proposal, Volume
from advisor.policies.policy import Candidate, Policy, Scene, Verdict, verdict_of
from advisor.policies.relief import Leavers
from advisor.policies.rows import NO_ROWS, Rows
from advisor.policies.rules.noting import placed_columns
from advisor.policies.rules.score import HALF_LIFE_S, RANK_PERIOD_S
from advisor.policies.rules.worth import BATCH_SHARE, MARGIN, protected
from advisor.policies.sight import NOWHERE, Sight, mean_bytes
from advisor.tiers.duelling import BY_WORTH, RANKED
from advisor.wording import bytes_text, duration_text

CANDIDATES_MIN = 256
CANDIDATES_A_MOVE = 4
"""Blocks that one plan looks at: so many for each promotion it may make, at least 256; the best."""

Array = npt.NDArray[Any]


class _Asking(NamedTuple):
    candidate: Candidate
    verdict: Verdict
    source: Volume
    slot: int


def promote(sight: Sight, policy: Policy, touched: Array, slots: Array, first_us: int) -> None:
    """Propose the best of what was used, `touched` (rows, with the slots that the book noted them in), the first of it
    at `first_us`, and of what waits. Blocks that stay out are refused with the reason.
    """
    state = sight.state
    if policy.period_s > 0:
        state.wait(touched)
        if state.due_us == 0 and first_us:
            state.due_us = first_us + int(policy.period_s * 1e6)
    slots = state.book.still_of(touched, slots)
    if isinstance(policy, Learner):
        _as_the_leader_would(sight, touched, slots)
        return
    if policy.period_s == 0:
        _admit(sight, policy, touched, slots, Rows(touched))
    elif _is_due(sight, policy.period_s) or (policy.hurries and not sight.purse.is_tight()):
        _admit(sight, policy, *_waiting(sight), Rows(touched))
    state.learning.end_turns()


def _as_the_leader_would(sight: Sight, touched: Array, slots: Array) -> None:
    """What was just used comes, or a batch of its time; each as the arm that leads then has it."""
    learning = sight.state.learning
    if learning.leader == BY_WORTH:
        worthy = sight.state.book.worths(slots) >= learning.least
        _admit(sight, ARMS[BY_WORTH], touched[worthy], slots[worthy], Rows(touched), learning.least)
    elif learning.leader != RANKED:
        _admit(sight, ARMS[learning.leader], touched, slots, Rows(touched))
    learning.end_turns()
    if _is_due(sight, RANK_PERIOD_S):
        learning.rank(sight.now_us)
        waiting = _waiting(sight)
        if learning.leader == RANKED:
            _admit(sight, ARMS[RANKED], *waiting, NO_ROWS)
    fast = sight.ordered[0]
    if learning.sweep_if_due(sight.now_us, fast.slots_high, sight.state.promoted) and learning.leader == BY_WORTH:
        learning.price_seen(_swap(sight, ARMS[BY_WORTH]))


def _waiting(sight: Sight) -> tuple[Array, Array]:
    """Rows that waited and are not free now, with the slots of their notes."""
    rows = np.array(list(sight.state.waiting), np.int32)
    sight.state.waiting.clear()
    rows = rows[rows < len(sight.index.tables.blocks)]
    return rows, sight.state.book.of(sight.index, rows)


def _is_due(sight: Sight, period_s: float) -> bool:
    """Whether the batch's time has come; if so the next one's is set."""
    state = sight.state
    if state.due_us == 0 or sight.now_us < state.due_us:
        return False
    periods = (sight.now_us - state.due_us) // int(period_s * 1e6) + 1
    state.due_us += int(periods * period_s * 1e6)
    return True


def _swap(sight: Sight, policy: Policy) -> float:
    """Propose the best of all absent blocks, as long as each is worth more than one that leaves, and a batch's share of
    the budget pays for it.

    Returns the price of a move from now on: the worth of the best that could not be paid for, at least the margin.
    """
    fast = sight.ordered[0]
    payable = BATCH_SHARE * sight.purse.blocks_left(fast, mean_bytes(sight.index, sight.ordered))
    rows = sight.state.book.worthy_absent(sight.index, fast.place, MARGIN)
    slots = sight.state.book.of(sight.index, rows)
    leavers: dict[str, Leavers] = {}
    promoted = 0
    for row, slot in _best(sight, policy, rows, slots):
        each = _ask(sight, policy, row, slot, MARGIN, [])
        if each is None:
            continue
        if payable - promoted < 1.0:
            if _follows_parent(sight, each):
                return each.candidate.worth
            continue
        if promoted == sight.limits.promote_moves_max:
            break
        why = _come(sight, policy, each, MARGIN, leavers, NO_ROWS)
        if not why:
            promoted += 1
            continue
        sight.plan.refuse(each.candidate.block, each.candidate.target, why)
        if each.candidate.target in leavers and leavers[each.candidate.target].keeps:
            break  # what comes next is worth less
    return MARGIN


def _admit(
    sight: Sight, policy: Policy, rows: Array, slots: Array, pinned: Rows, least: float = MARGIN
) -> None:
    """Propose the best of `rows` that the policy admits. `pinned` do not make way.

    Of another's policy all are asked before one comes, since its verdicts say which is the best.
    """
    out: list[int] = []
    rest = iter(_best(sight, policy, rows, slots))
    found = (_ask(sight, policy, row, slot, least, out) for row, slot in rest)
    asking: Iterable[_Asking] = (each for each in found if each is not None)
    is_arm = policy in ARMS
    if not is_arm:
        asking = sorted(asking, key=lambda e: (-e.verdict.value, e.candidate.block.depth, e.candidate.block.key))
    leavers: dict[str, Leavers] = {}
    promoted = 0
    for each in asking:
        why = f"this plan's {sight.limits.promote_moves_max} promotions are spent"
        if promoted < sight.limits.promote_moves_max:
            why = _come(sight, policy, each, least, leavers, pinned)
        if not why:
            promoted += 1
            continue
        sight.plan.refuse(each.candidate.block, each.candidate.target, why)
        out.append(each.slot)
        if is_arm and promoted == sight.limits.promote_moves_max:
            out += [slot for _, slot in rest]
            break
    sight.state.book.keep_out(out)


def _best(sight: Sight, policy: Policy, rows: Array, slots: Array) -> list[tuple[int, int]]:
    """Of `rows` with their notes, those not on the fastest volume: the best first, ancestors before descendants."""
    tables = sight.index.tables
    uses, sizes = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
    placed_columns(tables.blocks, tables.placements, rows, sight.ordered[0].place, uses, sizes)
    rows, slots = rows[uses < 0], slots[uses < 0]
    values = _values(sight, policy, rows, slots)
    count = max(CANDIDATES_MIN, CANDIDATES_A_MOVE * sight.limits.promote_moves_max)
    if len(rows) > count:
        best = np.sort(np.argpartition(-values, count - 1)[:count])
        rows, slots, values = rows[best], slots[best], values[best]
    order = np.lexsort((tables.blocks["depth"][rows], -values))
    return list(zip(rows[order].tolist(), slots[order].tolist(), strict=True))


def _values(sight: Sight, policy: Policy, rows: Array, slots: Array) -> Array:
    """By which candidates come: an arm's are those of its verdicts."""
    if isinstance(policy, ByWorth):
        return sight.state.book.worths(slots)
    if isinstance(policy, (Guarded, Ghost)):
        return sight.index.tables.blocks["touches"][rows].astype(np.float64)
    return sight.state.book.scores(sight.index, rows, slots)


def _ask(sight: Sight, policy: Policy, row: int, slot: int, least: float, out: list[int]) -> _Asking | None:
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
        verdict = verdict_of(policy, candidate, _scene(sight, target, least))
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


def _scene(sight: Sight, target: Volume, least: float) -> Scene:
    leader = sight.state.learning.leader
    return Scene(
        now_s=sight.now_s,
        turn=sight.state.book.turn,
        fast_blocks=target.slots_high,
        is_full=sight.occupied[target.volume_id] >= target.slots_high,
        is_tight=sight.purse.is_tight(),
        leading_touches=THRESHOLDS.get(leader, 2),
        leader=leader,
        least=least,
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
        worth=float(book.notes["worth"][slot]) if slot >= 0 else 0.0,
    )


def _come(
    sight: Sight,
    policy: Policy,
    asking: _Asking,
    least: float,
    leavers: dict[str, Leavers],
    pinned: Rows,
) -> str:
    """Propose the block's promotion; why not, where a law is against it."""
    candidate, source = asking.candidate, asking.source
    block, size = candidate.block, candidate.block_bytes
    target = next(v for v in sight.ordered if v.volume_id == candidate.target)
    if not _follows_parent(sight, asking):
        return f"its parent is not on {target.volume_id}, so a read would stop before it"
    # Asked again: those that came before it in this plan changed the scene.
    verdict = verdict_of(policy, candidate, _scene(sight, target, least))
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


def _follows_parent(sight: Sight, asking: _Asking) -> bool:
    """Its parent, if it has one, is where it is to come, or on a faster volume."""
    block, target = asking.candidate.block, asking.candidate.target
    if block.parent < 0:
        return True
    rank = sight.rank(sight.index.block(block.parent))
    return rank < len(sight.ordered) and rank <= next(r for r, v in enumerate(sight.ordered) if v.volume_id == target)


def _make_way(sight: Sight, policy: Policy, asking: _Asking, target: Volume, leavers: Leavers) -> str:
    """Send the block that leaves first down, if it is worth less."""
    victim = leavers.peek()
    if victim is None or victim.row == asking.candidate.block.parent:
        return f"{target.volume_id} has no room below its high watermark, and nothing there may leave"
    if not policy.replaces_better:
        why = _keeps(sight, policy, asking.candidate, victim)
        leavers.keeps = bool(why)
        if why:
            return why.format(target.volume_id)
    if sight.purse.moves < 2:
        return "the budget of open moves or bytes is spent"
    leavers.next()
    better = f"a block with its {_times(asking.candidate.block.touches)} comes to {target.volume_id}"
    if not leavers.send_down(victim, better):
        return f"{target.volume_id} has no room below its high watermark"
    return sight.purse.refusal(target, asking.candidate.block_bytes, promotion=True)


def _keeps(sight: Sight, policy: Policy, entering: Candidate, victim: BlockRow) -> str:
    """Why the block that leaves first stays, with the volume for `{}`; empty where it goes."""
    book = sight.state.book
    slot = book.slot(sight.index, victim.row)
    if isinstance(policy, (ByWorth, Guarded)):
        return policy.keeps(entering, victim.touches, float(book.notes["worth"][slot]) if slot >= 0 else 0.0)
    score = float(book.notes["score"][slot]) if slot >= 0 else victim.last_touch_us / 1e6 / HALF_LIFE_S
    if entering.score <= score:
        return "{} is full of blocks that are used more"
    heats = sight.heat(entering.score), sight.heat(score)
    return KEEPS_USED_TWICE if protected(entering.block.touches, heats[0], victim.touches, heats[1]) else ""


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
