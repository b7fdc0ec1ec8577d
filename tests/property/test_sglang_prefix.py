"""Which prefixes SGLang can restore: against what its interface says of each pool, looked at page by page."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvbm_core.connectors.sglang_prefix import ALL_PAGES, POLICIES, TRAILING_PAGES, PoolAsked, pages_found

POOL = st.builds(
    PoolAsked,
    st.sampled_from(["mamba", "swa", "indexer"]),
    st.sampled_from(POLICIES),
    st.integers(0, 4),
    st.lists(st.booleans(), min_size=8, max_size=8),
)


def restores(pool: PoolAsked, pages: int) -> bool:
    if pool.policy == ALL_PAGES:
        return all(pool.there[:pages])
    return all(pool.there[max(0, pages - max(1, pool.trailing)) : pages])


@given(st.integers(0, 8), st.lists(POOL, max_size=3, unique_by=lambda pool: pool.name))
def test_a_prefix_is_restorable_where_each_pool_has_what_it_needs(kv_pages: int, pools: list[PoolAsked]) -> None:
    found = pages_found(kv_pages, pools)
    wanted = [pages for pages in range(1, kv_pages + 1) if all(restores(pool, pages) for pool in pools)]
    assert found.restorable_prefix_pages == wanted
    assert found.kv_hit_pages == max(wanted, default=0)
    longest = {pool.name: max((n for n in range(1, kv_pages + 1) if restores(pool, n)), default=0) for pool in pools}
    longest["kv"] = kv_pages
    assert found.extra_pool_hit_pages == {name: pages for name, pages in longest.items() if pages}


def test_a_state_is_needed_at_the_end_alone() -> None:
    found = pages_found(3, [PoolAsked("mamba", TRAILING_PAGES, 1, [False, True, False])])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (2, [2])
