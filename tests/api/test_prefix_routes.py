"""Routes of the prefix tree, over the index of a real service."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from direct import Direct
from sample_prefixes import SamplePrefixes
from sample_reader import SampleReader

from advisor.access.doorkeeper import Doorkeeper
from advisor.access.identity import Identity, Scope
from advisor.errors import PictureBeingMade
from advisor.policies.instant_moves import InstantFold
from advisor.prefix_desk import ANSWER_NODES_MAX, PATH_STEPS_MAX, ServicePrefixes
from advisor.prefix_keeper import WAIT_S, PictureKeeper
from advisor.prefix_views import AdvisorPrefixes
from advisor.service import AdvisorService
from advisor.settings import AdvisorSettings
from event_plane.schema import Namespace

ACME, FORGE = Namespace(tenant="acme", model="m"), Namespace(tenant="forge")
TREE = "/api/v1/prefixes/tree"


def h(number: int) -> str:
    return f"{number:032x}"


def at(namespace: Namespace, number: int) -> str:
    return f"namespace_id={namespace.namespace_id:016x}&hash={h(number)}"


@pytest.fixture(scope="module")
def fold() -> InstantFold:
    """Of acme 1 … 4, whose last block 10 … 14 and 20, 21 follow, and 31 … 50 with 100 children of 50; of forge 1, 2."""
    fold = InstantFold(
        [
            {"id": "slow", "tier": 4, "speed_rank": 1, "capacity_blocks": 4_000, "read_bytes_per_s": 1e8},
            {"id": "fast", "tier": 3, "speed_rank": 0, "capacity_blocks": 4_000, "read_bytes_per_s": 1e9},
        ],
        {},
    )
    fold.store("slow", [1, 2, 3, 4, 10, 11, 12, 13, 14], ACME, size=100)
    fold.store("slow", [1, 2, 3, 4, 20, 21], ACME, size=1_000)
    fold.store("fast", [1, 2], ACME, size=100)
    fold.use([1, 2, 10], ACME)
    chain = list(range(31, 51))
    for leaf in range(100):
        fold.store("slow", [*chain, 1_000 + leaf], ACME, size=10)
    fold.store("slow", [1, 2], FORGE, size=50_000)
    return fold


@pytest.fixture(scope="module")
def prefixes(fold: InstantFold, tmp_path_factory: pytest.TempPathFactory) -> ServicePrefixes:
    service = AdvisorService(AdvisorSettings(directory=tmp_path_factory.mktemp("service")))
    service.fold = fold.fold
    desk = ServicePrefixes(service)
    # The kernels may have to be compiled, which takes longer than a route waits.
    for _ in range(300):
        if Direct(SampleReader(), prefixes=desk).get("/api/v1/prefixes").status_code == 200:
            break
    return desk


@pytest.fixture(scope="module")
def client(prefixes: ServicePrefixes) -> Direct:
    return Direct(SampleReader(), prefixes=prefixes)


def seen_by(prefixes: AdvisorPrefixes, tenant: str) -> Direct:
    return Direct(SampleReader(), prefixes=prefixes, doorkeeper=Doorkeeper(anonymous=Identity("t", Scope.READ, tenant)))


def answer(client: Direct, path: str) -> Any:
    answered = client.get(path)
    assert answered.status_code == 200, answered.text
    return answered.json()


@pytest.mark.parametrize(
    ("by", "firsts"), [("bytes", [1, 1, 31]), ("blocks", [31, 1, 1]), ("heat", [1, 31, 1])]
)
def test_groups_are_ranked_by_what_was_asked_for(client: Direct, by: str, firsts: list[int]) -> None:
    page = answer(client, f"/api/v1/prefixes?by={by}")
    assert [group["first_hash"] for group in page["groups"]] == [h(each) for each in firsts]
    assert page["next_cursor"] is None


def test_a_group_has_the_figures_of_its_whole_subtree_each_block_in_its_fastest_tier(client: Direct) -> None:
    acme = answer(client, "/api/v1/prefixes?tenant=acme&by=bytes")["groups"][0]
    assert (acme["tenant"], acme["model"], acme["depth"], acme["children"]) == ("acme", "m", 0, 2)
    assert (acme["first_hash"], acme["last_hash"], acme["chain_blocks"]) == (h(1), h(4), 4)
    figures = acme["figures"]
    assert (figures["blocks"], figures["block_bytes"], figures["uses"]) == (11, 4_700, 3)
    assert figures["tiers"] == [
        {"tier": 3, "blocks": 2, "block_bytes": 200}, {"tier": 4, "blocks": 9, "block_bytes": 4_500},
    ]


def test_pages_of_groups_give_each_once(client: Direct) -> None:
    first = answer(client, "/api/v1/prefixes?limit=2")
    second = answer(client, f"/api/v1/prefixes?limit=2&after={first['next_cursor']}")
    keys = [(group["namespace_id"], group["first_hash"]) for group in first["groups"] + second["groups"]]
    assert (len(keys), len(set(keys)), second["next_cursor"]) == (3, 3, None)


def test_the_tree_is_walked_from_all_groups_down_to_a_leaf_and_back_up(client: Direct) -> None:
    top = answer(client, f"{TREE}?tenant=acme&depth=1&width=2")
    assert (top["path"], top["others"], top["figures"]["blocks"]) == ([], None, 131)
    assert [[child["first_hash"] for child in node["nodes"]] for node in top["nodes"]] == [
        [h(20), h(10)], [node["first_hash"] for node in top["nodes"][1]["nodes"]],
    ]
    assert [node["others"] and node["others"]["nodes"] for node in top["nodes"]] == [None, 98]
    assert top["nodes"][1]["others"]["figures"]["block_bytes"] == 980
    leaf = answer(client, f"{TREE}?{at(ACME, 12)}")
    assert [step["first_hash"] for step in leaf["path"]] == [h(1)]
    assert (leaf["nodes"][0]["first_hash"], leaf["nodes"][0]["last_hash"]) == (h(10), h(14))
    assert (leaf["nodes"][0]["nodes"], leaf["nodes"][0]["children"]) == ([], 0)
    all_of_it = answer(client, f"{TREE}?width=1&depth=0")
    assert (all_of_it["others"]["nodes"], all_of_it["others"]["figures"]["blocks"]) == (2, 131)


def test_one_that_sees_a_tenant_alone_gets_that_tenants_groups_and_no_others(prefixes: ServicePrefixes) -> None:
    forge = seen_by(prefixes, "forge")
    for asked in ("", "?tenant=acme"):
        groups = answer(forge, f"/api/v1/prefixes{asked}")["groups"]
        assert [(group["tenant"], group["figures"]["blocks"]) for group in groups] == [("forge", 2)]
        tree = answer(forge, f"{TREE}{asked}")
        assert (tree["figures"]["blocks"], tree["figures"]["block_bytes"], len(tree["nodes"])) == (2, 100_000, 1)
    assert answer(forge, f"{TREE}?{at(FORGE, 2)}")["nodes"][0]["first_hash"] == h(1)


def test_a_block_of_another_tenant_is_refused_in_the_words_for_one_that_there_is_not(
    prefixes: ServicePrefixes,
) -> None:
    forge, unknown = seen_by(prefixes, "forge"), Namespace(tenant="nobody")
    theirs = forge.get(f"{TREE}?{at(ACME, 10)}")
    for other in (at(ACME, 77), at(unknown, 10), at(FORGE, 10)):
        none = forge.get(f"{TREE}?{other}")
        assert (theirs.status_code, none.status_code) == (404, 404)

        def words(text: str) -> str:
            return " ".join(word for word in text.split() if not any(digit in word for digit in "0123456789"))

        assert words(theirs.text) == words(none.text)
        assert theirs.headers.keys() == none.headers.keys()


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/api/v1/prefixes?by=size", 422, "'bytes', 'blocks' or 'heat'"),
        ("/api/v1/prefixes?after=x", 400, "after was 'x'"),
        (f"{TREE}?hash={1:032x}", 422, "give its namespace_id"),
        (f"{TREE}?depth=9", 422, "depth was '9'"),
        (f"{TREE}?width=65", 422, "width was '65'"),
        (f"{TREE}?hash=12", 422, "hash was '12'"),
        (f"{TREE}?namespace_id={1:016x}&hash={1:032x}", 404, "GET /api/v1/prefixes lists what there is"),
    ],
)
def test_bad_values_are_named_with_the_remedy(client: Direct, path: str, status: int, said: str) -> None:
    refused = client.get(path)
    assert refused.status_code == status
    assert said in refused.json()["detail"]


def test_before_the_first_picture_the_answer_is_to_ask_again() -> None:
    prefixes = SamplePrefixes()
    prefixes.is_being_made = True
    client = Direct(SampleReader(), prefixes=prefixes)
    for path in ("/api/v1/prefixes", TREE):
        refused = client.get(path)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "4")
        assert refused.json()["detail"] == "the first picture of prefixes is being taken: ask again in 4 s"
    blind = seen_by(prefixes, "acme").get("/api/v1/prefixes")
    assert (blind.status_code, blind.headers["retry-after"]) == (503, "5")


def test_how_long_a_first_picture_takes_is_told_by_the_blocks_there_are() -> None:
    taking, no_memory = threading.Event(), threading.Event()

    def take() -> int:
        assert taking.wait(60)
        if no_memory.is_set():
            raise MemoryError
        return 1

    keeper = PictureKeeper(take, takes_s=lambda: 7.0, wait_s=0.0)
    with pytest.raises(PictureBeingMade, match="the first picture of prefixes is being taken") as refused:
        keeper.newest()
    assert 0 < refused.value.wait_s <= 7
    no_memory.set()
    taking.set()
    patient = PictureKeeper(take, wait_s=60.0)
    with pytest.raises(PictureBeingMade, match="not enough memory") as refused:
        patient.newest()
    assert 5 < refused.value.wait_s <= 10


def test_an_answer_is_bounded_and_a_long_way_up_is_cut_in_its_middle(tmp_path: Path) -> None:
    fold = InstantFold([{"id": "a", "tier": 4, "speed_rank": 0, "capacity_blocks": 90_000, "read_bytes_per_s": 1}], {})
    for number in range(1, 61):  # a conversation that was forked after each turn
        fold.store("a", [*range(1, number + 1), 10_000 + number], ACME)
    for number in range(100, 170):
        for leaf in range(40):
            fold.store("a", [number, 1_000 * number + leaf], FORGE)
    service = AdvisorService(AdvisorSettings(directory=tmp_path))
    service.fold = fold.fold
    prefixes = ServicePrefixes(service)
    client = Direct(SampleReader(), prefixes=prefixes)
    path = answer(client, f"{TREE}?{at(ACME, 60)}&depth=0")
    assert (len(path["path"]), path["path_left_out"]) == (PATH_STEPS_MAX, 59 - PATH_STEPS_MAX)
    assert path["path"][0]["first_hash"] == h(1)
    wide = answer(client, f"{TREE}?tenant=forge&depth=8&width=64")
    nodes = len(wide["nodes"]) + sum(len(node["nodes"]) for node in wide["nodes"])
    assert ANSWER_NODES_MAX - 64 < nodes <= ANSWER_NODES_MAX
    assert wide["nodes"][-1]["nodes"] == []
    assert (wide["nodes"][-1]["children"], wide["others"]["nodes"], wide["figures"]["blocks"]) == (40, 6, 70 * 41)


def test_a_picture_is_shared_and_made_anew_when_it_is_old_and_let_go_when_nobody_asks() -> None:
    made: list[int] = []

    def take() -> int:
        made.append(len(made))
        return made[-1]

    keeper = PictureKeeper(take, fresh_s=1e9, wait_s=60.0, idle_s=0.01)
    assert keeper.newest() == 0
    patient = PictureKeeper(take, fresh_s=1e9, wait_s=60.0)
    assert [patient.newest() for _ in range(5)] == [1] * 5
    # A rest of no time: each question has the next one taken and is answered with what there is.
    eager = PictureKeeper(take, fresh_s=0.0, wait_s=60.0)
    answers = [eager.newest()]
    while answers[-1] == answers[0]:
        answers.append(eager.newest())
    assert answers == sorted(answers)
    assert WAIT_S < 0.5
    while keeper.newest() == 0:
        pass


def test_the_page_of_one_that_sees_a_tenant_alone_names_no_other_and_has_no_filter(prefixes: ServicePrefixes) -> None:
    forge = seen_by(prefixes, "forge")
    page = forge.get("/prefixes?tenant=acme").text
    assert "Groups of forge" in page
    assert h(31) not in page
    assert 'name="tenant"' not in page
    assert "This prefix is not there" in forge.get(f"/prefixes?{at(ACME, 10)}").text
    everybody = Direct(SampleReader(), prefixes=prefixes)
    assert "This prefix is not there" not in everybody.get(f"/prefixes?{at(ACME, 10)}").text


def test_without_the_part_there_is_no_page_and_no_route() -> None:
    client = Direct(SampleReader(), prefixes=None)
    assert [client.get(path).status_code for path in ("/prefixes", "/api/v1/prefixes", TREE)] == [404] * 3
    assert 'href="/prefixes"' not in client.get("/").text
