"""Load or compute: the leading part of a prompt that gives the soonest first token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from advisor.entries import Measurement
from advisor.policies.instant_moves import InstantFold
from advisor.policies.loading import LoadAdvice, advise_load, namespace_of
from advisor.reader import ServiceReader
from advisor.service import AdvisorService
from advisor.settings import AdvisorSettings
from event_plane.schema import EventType, Namespace, RecordFlag

TENANT = Namespace(tenant="acme")
BYTES = 1_000_000
"""Of a block of 100 tokens."""


def shelf(fast: float = 1e9, slow: float = 1e8) -> InstantFold:
    """A chain 1 … 8 on the slow volume, 1 … 4 on the fast one too. Rates in bytes/s."""
    fold = InstantFold(
        [
            {"id": "slow", "speed_rank": 1, "capacity_blocks": 100, "read_bytes_per_s": slow},
            {"id": "fast", "speed_rank": 0, "capacity_blocks": 100, "read_bytes_per_s": fast},
        ],
        {},
    )
    fold.store("slow", list(range(1, 9)), TENANT, size=BYTES)
    fold.store("fast", [1, 2, 3, 4], TENANT, size=BYTES)
    return fold


def ask(hashes: list[int], prefill: float, *, fast: float = 1e9, slow: float = 1e8) -> LoadAdvice:
    fold = shelf(fast, slow)
    volumes = [volume.as_planned() for volume in fold.fold.volumes.values()]
    return advise_load(fold.fold.index, volumes, TENANT.namespace_id, 0, hashes, 100, prefill)


def loaded(advice: LoadAdvice) -> list[str]:
    return [block.volume for block in advice.blocks if block.load]


def test_all_that_is_stored_is_loaded_where_computing_is_slow() -> None:
    advice = ask(list(range(1, 11)), prefill=1_000.0)
    assert loaded(advice) == ["fast"] * 4 + ["slow"] * 4
    # The volumes are read at once: 4 ms and 40 ms; two blocks are computed, 100 ms each.
    assert advice.first_token_s == pytest.approx(0.240)
    assert advice.recompute_s == pytest.approx(1.0)
    assert advice.reason == "load 8 of 10 blocks, 8 are stored: first token in 240 ms instead of 1 s"
    assert advice.blocks[0] == (True, "fast", 0.001, "1 MB on fast, 1 ms to load, 100 ms to compute")
    assert [block.reason for block in advice.blocks[8:]] == ["on no volume", "behind a block that is on no volume"]


def test_slow_tail_is_computed_where_that_is_faster() -> None:
    advice = ask(list(range(1, 9)), prefill=20_000.0)  # 5 ms a block; 1 ms from fast, 10 ms from slow
    assert loaded(advice) == ["fast"] * 4
    assert advice.first_token_s == pytest.approx(0.004 + 0.020)


def test_nothing_is_loaded_where_every_volume_is_slower_than_computing() -> None:
    advice = ask(list(range(1, 9)), prefill=1e6)
    assert loaded(advice) == []
    assert advice.first_token_s == advice.recompute_s == pytest.approx(8e-4)
    assert advice.reason == "compute all 8 blocks: loading any of the 8 stored takes longer"


def test_unknown_rates_are_named_and_what_is_stored_is_loaded() -> None:
    no_prefill = ask([1, 2, 9], prefill=0.0)
    assert loaded(no_prefill) == ["fast", "fast"]
    assert "set policy.prefill_tokens_per_s" in no_prefill.reason
    no_rate = ask(list(range(1, 6)), prefill=1e6, slow=0.0)
    assert (len(loaded(no_rate)), no_rate.first_token_s) == (5, None)
    assert "declare read_bytes_per_s" in no_rate.reason


def test_blocks_that_are_no_chain_are_found_all_the_same() -> None:
    assert loaded(ask([1, 3, 8], prefill=1_000.0)) == ["fast", "fast", "slow"]


def test_prompt_that_is_not_stored_is_computed() -> None:
    advice = ask([77, 1], prefill=1_000.0)
    assert loaded(advice) == []
    assert advice.reason == "none of 2 blocks is on a volume, from the first on"


@pytest.mark.parametrize("prefill", [500.0, 15_000.0, 60_000.0, 140_000.0])
def test_no_other_leading_part_is_sooner(prefill: float) -> None:
    hashes = list(range(1, 11))
    advice = ask(hashes, prefill)
    seconds = []
    for part in range(9):
        loads = {"fast": min(part, 4) * BYTES / 1e9, "slow": max(0, part - 4) * BYTES / 1e8}
        seconds.append(max(loads.values()) + (len(hashes) - part) * 100 / prefill)
    assert advice.first_token_s == pytest.approx(min(seconds))


def test_service_answers_for_the_namespace_that_has_the_blocks_at_the_rate_measured(tmp_path: Path) -> None:
    fold = shelf()
    fold.store("slow", [1], Namespace(tenant="forge"), size=BYTES)
    fold.log(Measurement("fast", "read", BYTES, BYTES / 5e8))
    service = AdvisorService(AdvisorSettings(directory=tmp_path))
    service.fold = fold.fold
    reader = ServiceReader(service)
    answer = reader.load_advice([1, 2, 9], block_tokens=100, prefill_tokens_per_s=1_000.0)
    assert answer.namespace_id == f"{TENANT.namespace_id:016x}"
    assert [(block.load, block.volume) for block in answer.blocks] == [(True, "fast"), (True, "fast"), (False, "")]
    assert answer.first_token_s == pytest.approx(2 * BYTES / 5e8 + 0.1)
    other = reader.load_advice([1, 2], block_tokens=100, tenant="forge", prefill_tokens_per_s=1_000.0)
    assert (other.load_blocks, other.blocks[0].volume) == (1, "slow")
    unknown, others = (
        reader.load_advice([1, 2], block_tokens=100, tenant="forge", namespace_id=each.namespace_id)
        for each in (Namespace(tenant="nowhere"), TENANT)
    )
    assert others.model_copy(update={"namespace_id": unknown.namespace_id}) == unknown
    assert others.load_blocks == 0
    nobody = reader.load_advice([77], block_tokens=100, tenant="harbor")
    assert (nobody.namespace_id, nobody.load_blocks) == ("", 0)


def test_hashes_alone_are_those_of_the_namespace_with_the_most_on_volumes() -> None:
    fold = shelf()
    for tenant in ("forge", "harbor"):
        elsewhere = Namespace(tenant=tenant)
        fold.store("slow", [1], elsewhere, size=BYTES)
        fold.send(
            [fold.event(EventType.STORE, "slow", h, elsewhere, h - 1, flags=RecordFlag.COPY) for h in range(2, 12)]
        )
        fold.send([fold.event(EventType.REMOVE, "slow", h, elsewhere) for h in range(2, 12)])
        gpu = [replace(fold.event(EventType.STORE, "slow", h, elsewhere, h - 1), tier=1) for h in range(1, 12)]
        fold.send(gpu)
    volumes = [volume.as_planned() for volume in fold.fold.volumes.values()]
    asked = list(range(1, 12))
    known = list(fold.fold.namespaces)
    assert namespace_of(fold.fold.index, volumes, known, 0, asked) == TENANT.namespace_id
    assert namespace_of(fold.fold.index, volumes, known, 0, [99, 1]) == 0
    harbor = Namespace(tenant="harbor").namespace_id
    assert namespace_of(fold.fold.index, volumes, [harbor], 0, asked) == harbor
