"""The demo's requests: seeded, shared where they should be, and shaped like chats, agents and scans."""

from __future__ import annotations

from itertools import islice, pairwise

import numpy as np

from advisor.demo_workload import DEFAULT_TENANTS, Request, TenantSettings, Workload, trace_requests


def _first(count: int, seed: int = 7, tenants: tuple[TenantSettings, ...] = DEFAULT_TENANTS) -> list[Request]:
    return list(islice(Workload(tenants, seed).requests(), count))


def test_one_seed_gives_one_workload_and_another_a_different_one() -> None:
    once, again, other = _first(200), _first(200), _first(200, seed=8)
    assert [r.tenant for r in once] == [r.tenant for r in again]
    assert all(
        np.array_equal(a.prompt, b.prompt) and np.array_equal(a.answer, b.answer)
        for a, b in zip(once, again, strict=True)
    )
    assert any(not np.array_equal(a.prompt, b.prompt) for a, b in zip(once, other, strict=True))


def test_every_tenant_is_served_and_its_prompts_share_its_system_prompt() -> None:
    by_tenant: dict[str, list[Request]] = {}
    for request in _first(600):
        by_tenant.setdefault(request.tenant, []).append(request)
    assert set(by_tenant) == {tenant.name for tenant in DEFAULT_TENANTS}
    for tenant in DEFAULT_TENANTS:
        prompts = [request.prompt[: tenant.system_tokens] for request in by_tenant[tenant.name]]
        assert all(np.array_equal(prompt, prompts[0]) for prompt in prompts)


def test_a_session_grows_by_its_question_and_its_answer() -> None:
    chat = TenantSettings(
        name="acme", kind="chat", sessions=1, system_tokens=32, document_tokens=16, turns_max=50, think_s=1.0
    )
    requests = _first(60, tenants=(chat,))
    grown = 0
    for before, after in pairwise(requests):
        said = np.concatenate([before.prompt, before.answer])
        if len(after.prompt) > len(said):
            assert np.array_equal(after.prompt[: len(said)], said)
            grown += 1
    assert grown >= 40


def test_popular_documents_come_back_far_more_often_than_rare_ones() -> None:
    chat = TenantSettings(name="acme", kind="chat", sessions=10, system_tokens=16, documents=50, document_tokens=32)
    documents = [request.prompt[16:48].tobytes() for request in _first(1_000, tenants=(chat,))]
    counts = sorted((documents.count(document) for document in set(documents)), reverse=True)
    assert sum(counts[:5]) > 400
    assert len(counts) > 35


def test_a_scan_never_comes_back() -> None:
    scans = TenantSettings(name="ledger", kind="scan", sessions=2, system_tokens=0, document_tokens=64)
    documents = {request.prompt[:64].tobytes() for request in _first(100, tenants=(scans,))}
    assert len(documents) == 100


def test_a_trace_block_becomes_one_block_that_only_it_has() -> None:
    one, two = trace_requests([[0, 1, 2], [0, 9]], page_tokens=16)
    assert len(one.prompt) == 48
    assert np.array_equal(one.prompt[:16], two.prompt[:16])
    assert not set(one.prompt[16:].tolist()) & set(two.prompt[16:].tolist())
    assert len(one.answer) == 0
