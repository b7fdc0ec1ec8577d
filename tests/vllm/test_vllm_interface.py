"""The connector is what vLLM's base class asks for, by name and by argument."""

from __future__ import annotations

import inspect
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what importing vLLM warns of is vLLM's
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

    from kvbm_core.connectors import vllm as ours

from kvbm_core.connectors.vllm_support import VERSIONS

METHODS = [name for name in vars(ours.KvAdvisorConnector) if not name.startswith("_") and name != "role"]


def test_nothing_that_vllm_asks_for_is_missing() -> None:
    assert not inspect.isabstract(ours.KvAdvisorConnector)
    assert not inspect.isabstract(ours.Counts)
    assert vllm.__version__.startswith(VERSIONS)


@pytest.mark.parametrize("name", METHODS)
def test_methods_take_what_vllm_gives(name: str) -> None:
    base = inspect.signature(getattr(KVConnectorBase_V1, name))
    assert list(inspect.signature(getattr(ours.KvAdvisorConnector, name)).parameters) == list(base.parameters)


def test_counts_of_two_steps_add_up_and_survive_the_way_to_the_logger() -> None:
    first = ours.Counts(data={"saved_blocks": 2})
    assert isinstance(first, KVConnectorStats)
    sent = ours.KvAdvisorConnector.build_kv_connector_stats(ours.Counts(data={"saved_blocks": 1, "a": 1}).to_dict())
    assert sent is not None

    assert first.aggregate(sent).reduce() == {"saved_blocks": 3, "a": 1}
    assert ours.Counts(data={"saved_blocks": 0}).is_empty()


def test_offloading_settings_that_took_the_connectors_place_are_told_why() -> None:
    with pytest.raises(ours.EngineSupportError, match="one owner"):
        ours.OffloadingConnector  # noqa: B018
    with pytest.raises(AttributeError, match="has no Nothing"):
        ours.Nothing  # noqa: B018
