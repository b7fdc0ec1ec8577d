"""What docs/integrations and docs/agent.md tell to copy is taken by our own readers."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from advisor.settings import AdvisorSettings, load_settings
from kvbm_core.connectors.agent_place import AgentPlace, read_place
from kvbm_core.connectors.sglang_pages import SETTINGS_KEY
from kvbm_core.connectors.trtllm_blocks import SETTINGS, TrtllmLeader
from kvbm_core.connectors.vllm_settings import read_settings
from storage_agent.config import load_settings as load_agent_settings

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = {page.stem: page.read_text(encoding="utf-8") for page in (DOCS / "integrations").glob("*.md")}
AGENT = (DOCS / "agent.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for spoken, block in fenced if spoken == language]


def option(page: str, name: str) -> list[dict[str, Any]]:
    """The JSON that each command of the page gives to this option."""
    given = [re.findall(rf"{re.escape(name)} '(.*?)'", command, re.DOTALL) for command in blocks(PAGES[page], "")]
    return [json.loads(text) for texts in given for text in texts]


def advisor_settings(text: str, folder: Path) -> AdvisorSettings:
    file = folder / "advisor.toml"
    file.write_text(text)
    return load_settings(file, {})


@pytest.mark.parametrize(
    ("page", "dialect"), [("vllm", "vllm"), ("sglang", "sglang"), ("tensorrt-llm", "trtllm"), ("dynamo", "dynamo")]
)
def test_the_advisors_settings_of_each_page_are_taken(page: str, dialect: str, tmp_path: Path) -> None:
    (text,) = blocks(PAGES[page], "toml")
    (source,) = advisor_settings(text, tmp_path).sources
    assert source.dialect == dialect


@pytest.mark.parametrize("page", ["vllm", "sglang"])
def test_an_engines_stream_is_read_where_it_is_published(page: str, tmp_path: Path) -> None:
    (told,) = option(page, "--kv-events-config")
    (text,) = blocks(PAGES[page], "toml")
    (source,) = advisor_settings(text, tmp_path).sources
    ports = [url.rpartition(":")[2] for url in (source.url, source.resend_url)]
    assert ports == [told[key].rpartition(":")[2] for key in ("endpoint", "replay_endpoint")]
    assert told["publisher"] == "zmq"


def test_the_agents_settings_are_those_that_the_pages_name(tmp_path: Path) -> None:
    agent_text, advisor_text = blocks(AGENT, "toml")[:2]
    file = tmp_path / "agent.toml"
    file.write_text(agent_text)
    agent = load_agent_settings(file)
    advisor = advisor_settings(advisor_text, tmp_path)
    assert [(each.name, each.command_url) for each in advisor.agents] == [(agent.name, agent.command_url)]
    assert [each.url for each in advisor.sources] == [agent.event_url]
    (volume,) = agent.volumes
    (hicache,) = option("sglang", "--hicache-storage-backend-extra-config")
    place = read_place(hicache[SETTINGS_KEY], "sglang.md")
    assert (place.agent_url, place.volume) == (agent.command_url, volume.id)


def test_the_class_that_sglang_is_told_to_load_is_there() -> None:
    (hicache,) = option("sglang", "--hicache-storage-backend-extra-config")
    module = DOCS.parent / (hicache["module_path"].replace(".", "/") + ".py")
    assert hicache["class_name"] in {each.name for each in ast.parse(module.read_text()).body if _is_class(each)}


def test_vllms_two_ways_are_taken() -> None:
    connector, tiers = option("vllm", "--kv-transfer-config")
    settings = read_settings(connector["kv_connector_extra_config"])
    assert settings.agent_url == "tcp://127.0.0.1:5600"
    assert settings.disk is not None
    assert settings.disk.volumes == ("fast",)
    (tier,) = tiers["kv_connector_extra_config"]["secondary_tiers"]
    place = read_place({key: value for key, value in tier.items() if key not in ("type", "module_path")}, "vllm.md")
    assert place == AgentPlace("tcp://127.0.0.1:5600", "fast")


def test_what_tensorrt_llm_is_told_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    *_, code = blocks(PAGES["tensorrt-llm"], "python")
    (settings,) = re.findall(rf"{SETTINGS}='(.*?)'", code)
    monkeypatch.setenv(SETTINGS, settings)
    module = DOCS.parent / "kvbm_core/connectors/trtllm.py"
    classes = {each.name for each in ast.parse(module.read_text()).body if _is_class(each)}
    named = {
        keyword.arg: ast.literal_eval(keyword.value)
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if (keyword.arg or "").startswith("connector_")
    }
    assert {named["connector_scheduler_class"], named["connector_worker_class"]} == classes
    args = type("Args", (), {"kv_cache_config": type("Cache", (), {"tokens_per_block": 32})})
    TrtllmLeader(args).shutdown()


def _is_class(node: ast.stmt) -> bool:
    return isinstance(node, ast.ClassDef)
