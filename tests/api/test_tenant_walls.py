"""Whoever sees one tenant alone learns nothing of others: neither hashes nor names, counts, cursors or timing."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import httpx
import pytest
from as_tenant import entering
from direct import Direct
from sample_blocks import SampleBlocks
from sample_deletions import view as deletion
from sample_reader import SampleReader, block_hash

from advisor.access.identity import Identity, Scope
from advisor.api import even_timing
from advisor.api.cursors import BEGIN_AGAIN, Cursors
from advisor.api.even_timing import QUANTUM_S, wait_s
from advisor.deletions import Scope as Deleted

OWN, OTHER = "agents", "support-bot"
OTHER_NAMESPACE = "00000000000000f2"
OTHER_BLOCKS = 1_237
OTHER_HASH, UNKNOWN_HASH = block_hash(50_000), block_hash(90_000)
OTHERS_NAMES = {OTHER, OTHER_NAMESPACE, "misc", "rag-legal", "chat", "d-1"}
OTHERS_COUNTS = {str(OTHER_BLOCKS), str(OTHER_BLOCKS + 250), "8412345", "18204551"}
"""Of the other tenant, and of all together."""
OPEN = {"/healthz"}
PAGES: dict[str, tuple[str, ...]] = {
    "/": (), "/live": (), "/openapi.json": (), "/docs": (), "/volumes": (), "/moves": (), "/producers": (),
    "/replay": (), "/settings": (), "/plan": (),
    "/blocks": ("tenant", "hash_prefix", "namespace_id"), "/blocks/{hash}": ("namespace_id",),
    "/prefixes": ("tenant", "namespace_id", "hash"),
}  # fmt: skip
"""With the parameters that name somebody's."""


def full_reader() -> SampleReader:
    """Blocks of two tenants, each in its namespace, one after the other."""
    reader = SampleReader()
    own = [block for block in reader.block_views if block.tenant == OWN]
    others = [
        own[0].model_copy(
            update={"hash": block_hash(50_000 + n), "tenant": OTHER, "namespace_id": OTHER_NAMESPACE, "touches": 9}
        )
        for n in range(OTHER_BLOCKS)
    ]
    # The tenant's own are on both sides of the others'.
    reader.block_views = [*own[:60], *others, *own[60:]]
    return reader


@pytest.fixture(scope="module")
def reader() -> SampleReader:
    return full_reader()


@pytest.fixture(scope="module")
def inside(reader: SampleReader) -> Direct:
    """An admin, but of one tenant."""
    return Direct(reader, raises=False, blocks=SampleBlocks(reader), **entering(Scope.ADMIN, OWN, name="acme-ops"))


@pytest.fixture(scope="module")
def outside(reader: SampleReader) -> Direct:
    return Direct(reader, blocks=SampleBlocks(reader))


def told(answer: httpx.Response) -> str:
    """All of an answer but what was asked."""
    headers = {name: value for name, value in answer.headers.items() if name not in ("content-length", "etag")}
    return f"{answer.status_code} {json.dumps(headers)} {answer.text}"


def assert_nothing_of_others(answer: httpx.Response, reader: SampleReader, echoed: set[str]) -> None:
    text = told(answer)
    for value in echoed:
        text = text.replace(value, "")
    hashes = {block.hash for block in reader.block_views if block.tenant != OWN}
    assert not hashes & set(re.findall(r"[0-9a-f]{32}", text)), answer.url
    for name in OTHERS_NAMES:
        assert not re.search(rf"\b{name}\b", text), (answer.url, name)
    assert not OTHERS_COUNTS & set(re.findall(r"[0-9]+", text)), answer.url
    assert "x-total-count" not in answer.headers


VALUES = {"tenant": OTHER, "deletion_id": "d-1", "hash": OTHER_HASH, "namespace_id": OTHER_NAMESPACE,
          "hash_prefix": OTHER_HASH, "volume_id": "nvme-a", "volume": "nvme-a"}  # fmt: skip


def parameters(*names: str) -> dict[str, Any]:
    return {"parameters": [{"name": name, "in": "query"} for name in names]}


def test_no_route_tells_of_others(
    inside: Direct, outside: Direct, reader: SampleReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(even_timing, "wait_s", lambda _: 0.0)  # hundreds of requests
    document = outside.get("/openapi.json").json()
    routes = [(method.upper(), path, about) for path, methods in document["paths"].items()
              for method, about in methods.items()]  # fmt: skip
    answered = set()
    for method, path, about in [*routes, *(("GET", page, parameters(*names)) for page, names in PAGES.items())]:
        if path in OPEN:
            continue
        filled = re.sub(r"\{(\w+)\}", lambda part: VALUES.get(part[1], "x"), path)
        named = {p["name"]: VALUES[p["name"]] for p in about.get("parameters", [])
                 if p["in"] == "query" and p["name"] in VALUES}  # fmt: skip
        alone = [{name: value} for name, value in named.items()] if len(named) > 1 else []
        for query in [{}, named, *alone] if named else [{}]:
            question = {"hashes": [OTHER_HASH], "block_tokens": 16, "namespace_id": OTHER_NAMESPACE, "tenant": OTHER}
            answer = inside.request(method, filled, params=query, json=question if method != "GET" else None)
            assert answer.status_code < 500, (method, path, answer.text)
            # An answer names the block or tenant that was asked about; a page and a refusal every value that was sent.
            is_page = path in PAGES
            echoed = {v for v in VALUES.values() if is_page or answer.status_code >= 400 or v in filled}
            assert_nothing_of_others(answer, reader, echoed | ({OTHER_HASH} if "advice" in path else set()))
            if answer.status_code == 200:
                answered.add(path)
            if answer.status_code == 403:
                break
    assert reader.asked_to_load[3] == OWN
    assert answered >= {
        "/api/v1/blocks", "/api/v1/advice/load", "/api/v1/deletions", "/api/v1/identity", "/api/v1/prefixes",
        "/api/v1/tenants/{tenant}/usage", "/blocks", "/blocks/{hash}", "/prefixes",
    }  # fmt: skip


def test_own_blocks_are_seen_whole(inside: Direct, reader: SampleReader) -> None:
    found: list[str] = []
    after: dict[str, str] = {}
    while True:
        page = inside.get("/api/v1/blocks", params={"limit": "50", **after}).json()
        found += [block["hash"] for block in page["blocks"]]
        if page["next_cursor"] is None:
            break
        after = {"after": page["next_cursor"]}
    assert found == [block.hash for block in reader.block_views if block.tenant == OWN]
    own = found[3]
    assert inside.get(f"/api/v1/blocks/{own}").json()[0]["block"]["hash"] == own
    assert inside.get(f"/api/v1/blocks/{own}/history").json()["steps"]
    assert inside.get(f"/api/v1/tenants/{OWN}/usage").json()["blocks"] == 125
    assert [each["id"] for each in inside.get("/api/v1/deletions").json()["deletions"]] == ["d-2"]


@pytest.mark.parametrize(
    ("path", "others", "unknown"),
    [
        ("/api/v1/blocks/{}", OTHER_HASH, UNKNOWN_HASH),
        ("/api/v1/blocks/{}/history", OTHER_HASH, UNKNOWN_HASH),
        ("/api/v1/blocks?hash_prefix={}", OTHER_HASH, UNKNOWN_HASH),
        ("/api/v1/blocks?tenant={}", OTHER, "nobody-here"),
        ("/api/v1/blocks?namespace_id={}", OTHER_NAMESPACE, "00000000000000f9"),
        ("/api/v1/tenants/{}/usage", OTHER, "nobody-here"),
        ("/api/v1/deletions/{}", "d-1", "d-9"),
        ("/api/v1/deletions?after={}", "d-1", "d-9"),
        (f"/api/v1/prefixes/tree?namespace_id={OTHER_NAMESPACE}&hash={{}}", block_hash(2_000), UNKNOWN_HASH),
    ],
)
def test_what_is_of_others_is_as_what_is_not_there(inside: Direct, path: str, others: str, unknown: str) -> None:
    answers = [inside.get(path.format(asked)) for asked in (others, unknown)]
    told_of = [told(answer).replace(asked, "…") for answer, asked in zip(answers, (others, unknown), strict=True)]
    assert told_of[0] == told_of[1]


def test_cursor_is_no_row_number_and_is_of_one_identity_and_process(inside: Direct, reader: SampleReader) -> None:
    cursors = [inside.get("/api/v1/blocks", params={"limit": limit}).json()["next_cursor"] for limit in (1, 2)]
    assert len({len(cursor) for cursor in cursors}) == 1
    assert not any(cursor.isdecimal() for cursor in cursors)
    restarted = Direct(reader, alone=True, **entering(Scope.ADMIN, OWN, name="acme-ops"))
    refusals = [restarted.get("/api/v1/blocks", params={"after": after}) for after in (cursors[0], "made-up", "60")]
    for refusal in refusals:
        assert refusal.status_code == 400
        assert BEGIN_AGAIN in refusal.json()["detail"]


def test_cursor_opens_for_whom_and_what_it_was_sealed() -> None:
    cursors = Cursors()
    ann = Identity("ann", Scope.READ, OWN)
    sealed = cursors.sealed(ann, "blocks", "77")
    assert cursors.opened(ann, "blocks", sealed) == "77"
    for who, route in (
        (Identity("bob", Scope.READ, OWN), "blocks"), (Identity("ann", Scope.READ, OTHER), "blocks"), (ann, "moves")
    ):  # fmt: skip
        with pytest.raises(ValueError, match="begin at the first page"):
            cursors.opened(who, route, sealed)
    everybody = Identity("ann", Scope.READ)
    assert cursors.opened(everybody, "blocks", cursors.sealed(everybody, "blocks", "77")) == "77"
    assert cursors.sealed(ann, "blocks", None) is None


@pytest.mark.parametrize("path", [f"/api/v1/blocks/{OTHER_HASH}", "/api/v1/summary", "/nothing", "/api/v1/blocks"])
def test_answers_go_out_at_even_times(inside: Direct, path: str) -> None:
    began_s = time.monotonic()
    inside.get(path)
    assert time.monotonic() - began_s >= QUANTUM_S


def test_files_of_the_pages_are_not_held(inside: Direct, monkeypatch: pytest.MonkeyPatch) -> None:
    def held(_: float) -> float:
        raise AssertionError("it was held")

    monkeypatch.setattr(even_timing, "wait_s", held)
    assert inside.get("/static/app.css").status_code == 200
    with pytest.raises(AssertionError, match="it was held"):
        Direct(SampleReader(), **entering(Scope.READ, OWN)).get("/api/v1/identity")


@pytest.mark.parametrize(("taken_s", "then_s"), [(0.0, 0.05), (0.01, 0.05), (0.049, 0.05), (0.06, 0.1), (0.99, 1.0)])
def test_answer_waits_for_the_next_multiple(taken_s: float, then_s: float) -> None:
    assert taken_s + wait_s(taken_s, 0.05) == pytest.approx(then_s)


def test_sample_has_what_could_be_told(outside: Direct, reader: SampleReader) -> None:
    """The walls above would stand for nothing if nothing were behind them."""
    assert deletion("d-1", Deleted(tenant="chat")).tenant == "chat"
    seen: dict[str, Any] = {
        path: outside.get(path).text
        for path in ("/api/v1/deletions", "/api/v1/prefixes", "/api/v1/moves", "/api/v1/summary")
    }
    seen["blocks"] = outside.get("/api/v1/blocks", params={"limit": 200}).text
    everything = "".join(seen.values())
    for name in (*OTHERS_NAMES, "8412345", OTHER_HASH):
        assert name in everything
