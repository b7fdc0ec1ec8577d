"""Deletions that people order: what is to go, how far each volume is, and who stays refused afterwards. Pure.

A deletion sweeps each volume for itself, in waves of bounded size: a wave's copies are freed by moves, then the agent
is asked for every key of it again, and only an answer of `miss` to all of them ends the wave. So a volume that is away
keeps its own sweep waiting and no other's. See docs/deletions.md.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from advisor.entries import DeletionStep, OutcomeBatch
from advisor.errors import ActionRefused
from advisor.index import Key
from advisor.moves import Move, MoveState
from advisor.state_diagram import state_diagram

OPEN_MAX = 64
"""Open deletions. More are refused until one is done."""
FINISHED_KEPT_MAX = 256
REFUSED_MAX = 1_024
"""Tenants refused at once: as many as an agent keeps."""

TENANT_BYTES_MAX = 256
"""Of a tenant's name: what an agent takes."""


class DeletionState(StrEnum):
    REQUESTED = "requested"
    DELETING = "deleting"
    """Copies are being freed."""
    PROVING = "proving"
    """All known copies are gone; agents are asked for every key again."""
    WAITING = "waiting"
    """Only volumes are left that cannot be asked for now; each says why."""
    DONE = "done"
    FAILED = "failed"
    """Given up by a person: volumes that were not proven may hold copies."""


class DeletionTrigger(StrEnum):
    BEGIN = "begin"
    PROVE = "prove"
    WAIT = "wait"
    FINISH = "finish"
    ABANDON = "abandon"


TRANSITIONS: dict[DeletionState, dict[DeletionTrigger, DeletionState]] = {
    DeletionState.REQUESTED: {
        DeletionTrigger.BEGIN: DeletionState.DELETING,
        DeletionTrigger.PROVE: DeletionState.PROVING,
        DeletionTrigger.WAIT: DeletionState.WAITING,
        DeletionTrigger.ABANDON: DeletionState.FAILED,
    },
    DeletionState.DELETING: {
        DeletionTrigger.PROVE: DeletionState.PROVING,
        DeletionTrigger.WAIT: DeletionState.WAITING,
        DeletionTrigger.ABANDON: DeletionState.FAILED,
    },
    DeletionState.PROVING: {
        DeletionTrigger.BEGIN: DeletionState.DELETING,
        DeletionTrigger.WAIT: DeletionState.WAITING,
        DeletionTrigger.FINISH: DeletionState.DONE,
        DeletionTrigger.ABANDON: DeletionState.FAILED,
    },
    DeletionState.WAITING: {
        DeletionTrigger.BEGIN: DeletionState.DELETING,
        DeletionTrigger.PROVE: DeletionState.PROVING,
        DeletionTrigger.ABANDON: DeletionState.FAILED,
    },
}
"""States without an entry are final. Nothing is done that was not proven."""


class IllegalDeletion(ActionRefused):
    """An order or step that cannot be: says why. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What is to go: a tenant, a namespace, or in that the block `prefix` and all that follows it, in every group.

    Raises `IllegalDeletion` unless it is exactly one of them. 0 and the empty name are none. An id has 64 bits, a hash
    128, a name at most `TENANT_BYTES_MAX` bytes.
    """

    tenant: str = ""
    namespace_id: int = 0
    prefix: int = 0

    def __post_init__(self) -> None:
        if bool(self.tenant) == bool(self.namespace_id):
            raise IllegalDeletion("give a tenant or a namespace_id, one of them: what is to be deleted?")
        if self.prefix and not self.namespace_id:
            raise IllegalDeletion("a prefix is a block of one namespace: give its namespace_id with it")
        if not (0 <= self.namespace_id < 1 << 64 and 0 <= self.prefix < 1 << 128):
            raise IllegalDeletion(f"{self.namespace_id:x} has 64 bits at most, and prefix {self.prefix:x} 128")
        if len(self.tenant.encode()) > TENANT_BYTES_MAX:
            raise IllegalDeletion(
                f"tenant {self.tenant[:40]}… has more than {TENANT_BYTES_MAX} bytes, and agents cannot refuse it: "
                f"delete its namespaces one by one"
            )

    def __str__(self) -> str:
        if self.tenant:
            return f"tenant {self.tenant}"
        whole = f"namespace {self.namespace_id:016x}"
        return f"prefix {self.prefix:032x} of {whole}" if self.prefix else whole


@dataclass(slots=True)
class Sweep:
    """One volume's part. Figures are of copies there."""

    volume: str
    wave: int = 0
    """How many waves were begun."""
    keys: list[Key] = field(default_factory=list)
    """The wave's, leaves first."""
    pending: OrderedDict[Key, None] = field(default_factory=OrderedDict)
    """Of them, those that no move has freed yet, the next to look at first."""
    cursor: tuple[int, int] | None = None
    """Depth and low half of the hash of the last key swept; see `advisor.deletion_planning`."""
    is_asking: bool = False
    """The agent is to be asked for every key of the wave."""
    answer: OutcomeBatch | None = None
    """It answered `miss` to all; counts once its events up to here are folded."""
    is_clear: bool = False
    blocks: int = 0
    block_bytes: int = 0
    asked: int = 0
    """Keys that the agent answered `miss` to."""
    found: int = 0
    """Copies that the agent still had when it was asked, and freed."""
    reason: str = ""
    """Why it waits; empty where it does not."""
    note: str = ""
    """What went wrong last with a move or a question."""

    def next_wave(self, keys: list[Key], cursor: tuple[int, int] | None) -> None:
        self.wave += 1
        self.keys, self.cursor = keys, cursor
        self.pending = OrderedDict.fromkeys(keys)
        self.is_asking, self.answer, self.is_clear = False, None, False

    def ask(self) -> None:
        self.is_asking, self.answer = True, None

    def begin_anew(self) -> None:
        """Whatever was swept may be there again."""
        self.keys, self.cursor, self.note = [], None, ""
        self.pending.clear()
        self.is_asking, self.answer, self.is_clear = False, None, False


@dataclass(slots=True)
class Deletion:
    """One order. `is_again`: not a person's, but of blocks of a refused tenant that came back."""

    deletion_id: str
    scope: Scope
    actor: str
    requested_us: int
    changed_us: int
    state: DeletionState = DeletionState.REQUESTED
    is_again: bool = False
    note: str = ""
    sweeps: dict[str, Sweep] = field(default_factory=dict)
    """By volume: those that were registered at any time since it began."""
    engine_blocks: int = 0
    """When it ended: blocks that lie elsewhere, and on no volume. Their engines' own, and not touched."""
    left_blocks: int = 0
    """When it ended: copies on volumes that were stored while it ran. Of a tenant there are none."""

    @property
    def is_open(self) -> bool:
        return self.state in TRANSITIONS

    @property
    def blocks(self) -> int:
        return sum(sweep.blocks for sweep in self.sweeps.values())

    @property
    def block_bytes(self) -> int:
        return sum(sweep.block_bytes for sweep in self.sweeps.values())

    def step(self, trigger: DeletionTrigger, now_us: int) -> None:
        """Raises `IllegalDeletion`."""
        allowed = TRANSITIONS.get(self.state, {})
        if trigger not in allowed:
            raise IllegalDeletion(
                f"deletion {self.deletion_id} is {self.state} and cannot take {trigger}; "
                f"it may take {', '.join(allowed) or 'nothing'}"
            )
        self.state, self.changed_us = allowed[trigger], now_us


@dataclass(slots=True)
class RefusedTenant:
    """A tenant that was deleted and not enabled again."""

    tenant: str
    since_us: int
    actor: str
    returned_blocks: int = 0
    """Copies that came to a volume all the same, and were deleted again."""


class DeletionTable:
    """Open deletions by id, the last finished ones, and the tenants that are refused."""

    def __init__(self) -> None:
        self.open: OrderedDict[str, Deletion] = OrderedDict()
        """The oldest first."""
        self.finished: deque[Deletion] = deque(maxlen=FINISHED_KEPT_MAX)
        self.refused: dict[str, RefusedTenant] = {}
        self.suspects: set[str] = set()
        """Refused tenants that the owner of a volume named lately."""
        self.deleted_blocks = 0
        self.deleted_bytes = 0

    def get(self, deletion_id: str) -> Deletion | None:
        if (deletion := self.open.get(deletion_id)) is not None:
            return deletion
        return next((each for each in self.finished if each.deletion_id == deletion_id), None)

    def open_of(self, scope: Scope) -> Deletion | None:
        """The open deletion of exactly this."""
        return next((each for each in self.open.values() if each.scope == scope), None)

    # -- orders

    def require_room(self, scope: Scope) -> None:
        """Raises `IllegalDeletion` where a deletion of this cannot be taken now."""
        if (same := self.open_of(scope)) is not None:
            raise IllegalDeletion(f"deletion {same.deletion_id} of {scope} is open already")
        if len(self.open) >= OPEN_MAX:
            raise IllegalDeletion(f"{OPEN_MAX} deletions are open: wait until one is done, or abandon one")
        if scope.tenant and scope.tenant not in self.refused and len(self.refused) >= REFUSED_MAX:
            raise IllegalDeletion(f"{REFUSED_MAX} tenants are refused: enable one that will not come back")

    def order(self, deletion_id: str, scope: Scope, actor: str, now_us: int, *, is_again: bool = False) -> Deletion:
        """Open a deletion; its tenant is refused from now on. Raises `IllegalDeletion`."""
        if not deletion_id or self.get(deletion_id) is not None:
            raise IllegalDeletion(f"a deletion has an id of its own, {deletion_id!r} is empty or taken")
        self.require_room(scope)
        deletion = Deletion(deletion_id, scope, actor, now_us, now_us, is_again=is_again)
        self.open[deletion_id] = deletion
        if scope.tenant:
            self.refused.setdefault(scope.tenant, RefusedTenant(scope.tenant, now_us, actor))
        return deletion

    def enable(self, tenant: str) -> None:
        """Refuse a tenant no longer. Raises `IllegalDeletion`."""
        if tenant not in self.refused:
            raise IllegalDeletion(f"tenant {tenant!r} is not refused: there is nothing to enable")
        self.require_enabling(tenant)
        del self.refused[tenant]
        self.suspects.discard(tenant)

    def require_enabling(self, tenant: str) -> None:
        """Raises `IllegalDeletion` where a tenant cannot be enabled for it is being deleted."""
        if (deletion := self.open_of(Scope(tenant=tenant))) is not None:
            raise IllegalDeletion(
                f"deletion {deletion.deletion_id} of tenant {tenant} is {deletion.state}: wait for its end, or "
                f"abandon it"
            )

    def abandon(self, deletion_id: str, actor: str, now_us: int) -> None:
        """Give up; what was not proven may be there still. Raises `IllegalDeletion`."""
        deletion = self.open.get(deletion_id)
        if deletion is None:
            raise IllegalDeletion(f"deletion {deletion_id!r} is not open: there is nothing to abandon")
        unproven = [sweep.volume for sweep in deletion.sweeps.values() if not sweep.is_clear]
        self.end(deletion, DeletionTrigger.ABANDON, now_us)
        where = f"not proven gone from {', '.join(sorted(unproven))}" if unproven else "not begun"
        deletion.note = f"given up by {actor}: {where}"

    def end(self, deletion: Deletion, trigger: DeletionTrigger, now_us: int) -> None:
        deletion.step(trigger, now_us)
        del self.open[deletion.deletion_id]
        for sweep in deletion.sweeps.values():
            sweep.keys, sweep.cursor = [], None
            sweep.pending.clear()
            sweep.is_asking = False
        self.finished.append(deletion)

    # -- what happens meanwhile

    def moved(self, move: Move) -> None:
        """A move of a deletion took a step."""
        deletion = self.get(move.deletion)
        sweep = deletion.sweeps.get(move.source) if deletion is not None else None
        if deletion is None or sweep is None:
            return
        if move.state is MoveState.FREED:
            sweep.pending.pop(move.key, None)
            sweep.note = ""
            self.count(deletion, sweep, 1, move.block_bytes)
        elif move.state is MoveState.ABORTED:
            sweep.note = move.note

    def answered(self, step: DeletionStep) -> None:
        """An agent was asked, or cannot be. Raises `IllegalDeletion` for another wave than the one that is open."""
        deletion = self.open.get(step.deletion)
        sweep = deletion.sweeps.get(step.volume) if deletion is not None else None
        if deletion is None or sweep is None or sweep.is_clear or sweep.wave != step.wave:
            raise IllegalDeletion(f"deletion {step.deletion!r} has no wave {step.wave} open on {step.volume!r}")
        if step.reason:
            sweep.note = step.reason
            return
        if not sweep.is_asking or sweep.answer is not None:
            raise IllegalDeletion(f"deletion {step.deletion!r} does not ask {step.volume!r} now")
        sweep.note = ""
        if step.missing == step.asked == len(sweep.keys) and step.outcome is not None:
            sweep.asked += step.asked
            sweep.answer = step.outcome
        else:
            sweep.found += step.asked - step.missing
            self.count(deletion, sweep, step.asked - step.missing, step.found_bytes)

    def count(self, deletion: Deletion, sweep: Sweep, blocks: int, block_bytes: int) -> None:
        """Copies of a volume are gone."""
        sweep.blocks += blocks
        sweep.block_bytes += block_bytes
        self.deleted_blocks += blocks
        self.deleted_bytes += block_bytes
        if deletion.is_again and (refused := self.refused.get(deletion.scope.tenant)) is not None:
            refused.returned_blocks += blocks

    def suspect(self, tenants: Iterable[str]) -> None:
        """A volume's owner named these tenants."""
        self.suspects.update(tenant for tenant in tenants if tenant in self.refused)

    def lose(self, volume: str) -> None:
        """A volume went away: what was swept may be there again when it is back."""
        for deletion in self.open.values():
            if (sweep := deletion.sweeps.get(volume)) is not None:
                sweep.begin_anew()


def diagram() -> str:
    """For the documentation."""
    return state_diagram(DeletionState.REQUESTED, TRANSITIONS)
