"""An `AdvisorBlocks` over plain values: the blocks of a `SampleReader`, each with one made-up history."""

from __future__ import annotations

from sample_reader import NOW_US, SampleReader

from advisor.block_views import BlockDetail, BlockStep, HistoryPage
from advisor.views import BlockView

STEPS_A_LOOK = 4
"""However many are asked for: so far a look reaches."""


def _step(position: int, kind: str, text: str, **more: object) -> BlockStep:
    base = BlockStep(
        position=position, time_us=NOW_US - (2_000 - position) * 60_000_000, kind=kind, namespace_id="00000000000000f1",
        group=0, place="", tier=None, producer="", epoch="", hits=0, move="", text=text,
    )  # fmt: skip
    return base.model_copy(update=more)


def history_of(block: BlockView) -> list[BlockStep]:
    """Newest first: computed, used, put, promoted, used from there, cleared from G1."""
    engine = {"producer": "vllm · pod-3", "epoch": "a1"}
    gpu = {**engine, "place": "vllm · pod-3/gpu", "tier": 1}
    owner = {"producer": "agent · host-7", "epoch": "b2"}
    move = {"move": "1200-0"}
    steps = [
        _step(1_600, "cleared", "everything that its producer had placed in G1 was cleared", **engine),
        _step(1_500, "accessed", f"used {block.touches} times", place="nvme-a", tier=3, hits=block.touches, **owner),
        _step(1_240, "moved", "promote: keep", **move),
        _step(1_230, "moved", "promote: switch", **move),
        _step(1_221, "moved", "promote: verify", **move),
        _step(1_220, "stored", "copied there, 16.4 kB, when its move took verify", place="nvme-a", tier=3, **owner,
              **move),
        _step(1_210, "moved", "promote: begin", **move),
        _step(1_200, "planned", "promote lustre-01 → nvme-a planned: 3rd touch in 40 s; nvme-a has room", **move),
        _step(900, "stored", "copied there, 16.4 kB", place="lustre-01", tier=4, **owner),
        _step(700, "accessed", "used once", hits=1, **gpu),
        _step(600, "stored", "stored, 16.4 kB", **gpu),
    ]  # fmt: skip
    return [step.model_copy(update={"namespace_id": block.namespace_id if step.place else ""}) for step in steps]


class SampleBlocks:
    def __init__(self, reader: SampleReader | None = None) -> None:
        self.reader = SampleReader() if reader is None else reader

    def _of(self, sequence_hash: int, namespace_id: int | None, tenant: str | None) -> list[BlockView]:
        return [
            block
            for block in self.reader.block_views
            if int(block.hash, 16) == sequence_hash
            and namespace_id in (None, int(block.namespace_id, 16))
            and tenant in (None, block.tenant)
        ]

    def named(
        self, sequence_hash: int, *, namespace_id: int | None = None, tenant: str | None = None
    ) -> list[BlockDetail]:
        children: dict[str, list[str]] = {}
        for block in self.reader.block_views:
            children.setdefault(block.parent_hash, []).append(block.hash)
        return [
            BlockDetail(
                block=block, revision="main", adapter="", kv_dtype="bf16", hash_scheme="xxh3-blake2b",
                first_touch_us=NOW_US - 3_600_000_000, children=children.get(block.hash, []), open_move="",
            )
            for block in self._of(sequence_hash, namespace_id, tenant)
        ]  # fmt: skip

    async def history(
        self, sequence_hash: int, *, namespace_id: int | None = None, group: int | None = None,
        tenant: str | None = None, before: str | None = None, limit: int = 100,
    ) -> HistoryPage:
        if before is not None and not before.isdecimal():
            raise ValueError("it is no cursor of this list")
        found = self._of(sequence_hash, namespace_id, tenant)
        steps = [
            step
            for block in found
            for step in history_of(block)
            if before is None or (step.position or 0) < int(before)
        ]
        shown = steps[: min(limit, STEPS_A_LOOK)]
        is_complete = len(shown) == len(steps)
        hidden = {} if tenant is None else {"position": None, "move": ""}
        return HistoryPage(
            steps=[step.model_copy(update=hidden) for step in shown],
            next_before=None if is_complete else str(shown[-1].position),
            complete=is_complete,
            looked_back_us=shown[-1].time_us if shown else NOW_US - 86_400_000_000,
        )
