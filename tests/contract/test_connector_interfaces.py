"""Our connectors have every method of the engines' released interfaces, with its parameters."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from event_plane.dialects import sglang, vllm
from event_plane.dialects.block_events import Flavour
from kvbm_core.connectors.sglang_pages import PagesOnVolumes, PoolTransfer, StorageFacts
from kvbm_core.connectors.sglang_prefix import POLICIES, PagesFound
from kvbm_core.connectors.sglang_stats import StorageStats
from kvbm_core.connectors.trtllm_blocks import TrtllmLeader, TrtllmWorker
from kvbm_core.connectors.trtllm_plan import StepOfRequest
from tests.engine_interfaces import Method, installed, interface_of, of_class, recorded

TIER = Path(__file__).parents[2] / "kvbm_core/connectors/vllm_tier.py"

BLOCK_GROUPS = "block_groups"
"""Of SGLang's policies the one that nothing in that release asks for, and that its own backends refuse."""
OURS = [
    ("sglang", "HiCacheStorage", PagesOnVolumes),
    ("tensorrt_llm", "KvCacheConnectorScheduler", TrtllmLeader),
    ("tensorrt_llm", "KvCacheConnectorWorker", TrtllmWorker),
]


@pytest.mark.parametrize(("package", "name", "ours"), OURS)
def test_every_method_of_the_released_interface_is_there_with_its_parameters(
    package: str, name: str, ours: type
) -> None:
    wanted = recorded()[package].classes[name].methods
    found = of_class(ours)
    assert {method: found[method].parameters for method in wanted if method != "__init__"} == {
        method: signature.parameters for method, signature in wanted.items() if method != "__init__"
    }


def test_the_tier_of_vllm_has_every_abstract_method_and_none_with_other_parameters() -> None:
    (ours,) = [
        interface_of(node).methods
        for node in ast.parse(TIER.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "KvAdvisorTier"
    ]
    theirs = recorded()["vllm"].classes["SecondaryTierManager"].methods
    assert {name for name, method in theirs.items() if method.abstract} <= set(ours)
    shared = set(ours) & set(theirs) - {"__init__"}
    assert {name: ours[name].parameters for name in shared} == {name: theirs[name].parameters for name in shared}


def test_steps_of_tensorrt_llm_have_the_fields_that_are_used() -> None:
    assert set(StepOfRequest.__annotations__) <= set(recorded()["tensorrt_llm"].classes["RequestData"].fields)


@pytest.mark.parametrize(("package", "flavour"), [("sglang", sglang.FLAVOUR), ("vllm", vllm.FLAVOUR)])
def test_events_have_the_fields_that_our_dialect_reads_in_their_order(package: str, flavour: Flavour) -> None:
    classes = recorded()[package].classes
    for name, ours in (("BlockStored", flavour.stored), ("BlockRemoved", flavour.removed)):
        theirs = classes[name].fields
        assert list(ours[: len(theirs)]) == theirs  # a later release may add to the end


def test_every_medium_of_sglang_has_a_tier() -> None:
    media = recorded()["sglang"].classes["StorageMedium"].values
    assert media
    assert {medium.upper() for medium in media} <= set(sglang.FLAVOUR.tiers)


def test_what_hicache_is_configured_by_has_the_fields_that_are_used() -> None:
    classes = recorded()["sglang"].classes
    assert set(StorageFacts.__annotations__) <= set(classes["HiCacheStorageConfig"].fields)
    assert set(PoolTransfer.__annotations__) <= set(classes["PoolTransfer"].fields)


def test_what_hicache_is_answered_has_its_fields_and_its_policies() -> None:
    classes = recorded()["sglang"].classes
    assert list(PagesFound.__annotations__) == classes["PoolTransferResult"].fields
    assert list(StorageStats._fields) == classes["StorageMetrics"].fields
    assert {*POLICIES, BLOCK_GROUPS} == set(classes["PoolHitPolicy"].values)


@pytest.mark.parametrize("package", sorted(recorded()))
def test_an_installed_package_has_the_interface_that_was_recorded(package: str) -> None:
    found = installed(package)
    if found is None:
        pytest.skip(f"{package} is not installed here: the recorded table stands for it")
    assert found == recorded()[package].classes


def test_a_parameter_that_changed_is_seen() -> None:
    source = (
        "class HiCacheStorage(ABC):\n"
        "    @abstractmethod\n"
        "    def get(self, key: str, *, target=None, **more): ...\n"
        "    def _own(self): ...\n"
    )
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    read = interface_of(node).methods
    assert read == {"get": Method([("key", False), ("*", True), ("target", True), ("**more", True)], True)}
    assert read["get"].parameters != of_class(PagesOnVolumes)["get"].parameters
