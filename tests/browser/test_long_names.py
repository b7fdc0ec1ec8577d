"""Names of publishers, tenants and models, which are as long as whoever gave them likes, break no page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect
from sample_blocks import SampleBlocks
from sample_prefixes import SamplePrefixes
from sample_reader import SampleReader, block_hash
from served import Served, serving
from watched import PHONE, assert_fits, opened

from advisor.web.formats import NAME_CHARACTERS_ON_HOVER, NAME_CHARACTERS_SHOWN

pytestmark = pytest.mark.browser

LONG = "n" * 20_000
CUT = f"{LONG[:NAME_CHARACTERS_SHOWN]}…"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    reader, prefixes = SampleReader(), SamplePrefixes()
    named = {"tenant": LONG, "model": LONG}
    reader.block_views = [
        each.model_copy(update=named | {
            "placements": [placed.model_copy(update={"place": f"{LONG}/gpu"}) for placed in each.placements]
        })
        for each in reader.block_views[:3]
    ]  # fmt: skip
    partial = {"name": LONG, "state": "partial", "note": "batches are missing"}
    reader.producer_views = [each.model_copy(update=partial) for each in reader.producer_views[:3]]
    moves, refusals = reader.moves_view.moves, reader.moves_view.refusals
    reader.moves_view.moves[:] = [each.model_copy(update={"tenant": LONG}) for each in moves]
    reader.moves_view.refusals[:] = [
        each.model_copy(update={"tenant": LONG, "reason": f"{LONG} holds its 8 blocks on nvme-a"}) for each in refusals
    ]
    prefixes.group_views = [each.model_copy(update=named) for each in prefixes.group_views]
    with serving(reader, blocks=SampleBlocks(reader), prefixes=prefixes) as served:
        yield served


def test_every_page_fits_names_of_20_000_characters(chromium: Browser, served: Served) -> None:
    tree = f"prefixes?namespace_id=00000000000000f1&group=0&hash={block_hash(1_000)}"
    paths = ["", "prefixes", tree, "blocks", f"blocks/{block_hash(1)}", "moves", "producers"]
    for size in ({"width": 1_280, "height": 900}, PHONE):
        watched = opened(chromium, served.url, viewport=size)
        for path in paths:
            watched.page.goto(f"{served.url}{path}")
            expect(watched.page.locator("#main"), path).to_contain_text(CUT)
            assert_fits(watched.page)
        watched.page.context.close()


def test_a_name_that_is_cut_is_whole_on_hover_up_to_a_bound(chromium: Browser, served: Served) -> None:
    watched = opened(chromium, f"{served.url}blocks/{block_hash(1)}")
    tenant = watched.page.locator("h2 .called").first
    expect(tenant).to_have_text(CUT)
    expect(tenant).to_have_attribute("title", f"{LONG[:NAME_CHARACTERS_ON_HOVER]}…")
    watched.page.context.close()
