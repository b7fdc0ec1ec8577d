"""The demo's engine, in this process: what it serves is right, and it says so when it is not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import msgspec
import pytest
import torch

from advisor.demo_config import (
    EngineReport,
    EngineSettings,
    EngineSettingsError,
    demo_agent_toml,
    demo_engine_toml,
    load_engine_settings,
)
from advisor.demo_engine import DemoEngine, core_config, open_engine, run
from advisor.demo_workload import Request, Workload, trace_requests
from kvbm_core.config import KvbmConfig
from kvbm_core.pattern import expected_bytes
from kvbm_core.sequence import TokenBlockSequence
from kvbm_core.torch_threads import one_torch_thread
from storage_agent.config import load_settings


class Room:
    """An engine opened from the files that the demo writes."""

    def __init__(self, folder: Path, closing: ExitStack) -> None:
        file = folder / "engine.toml"
        file.write_text(demo_engine_toml(core_events_url="zmq+tcp://127.0.0.1:0"))
        (folder / "agent.toml").write_text(
            demo_agent_toml(agent_events_url="zmq+tcp://127.0.0.1:0", command_url="tcp://127.0.0.1:*")
        )
        self.settings: EngineSettings = load_engine_settings(file)
        self.config: KvbmConfig = core_config(self.settings, file)
        self.agent = load_settings(folder / self.settings.agent_file)
        self.engine: DemoEngine = open_engine(self.settings, self.config, self.agent, closing)

    def workload(self, count: int) -> Iterator[Request]:
        return islice(Workload(self.settings.workload.tenants, seed=5).requests(), count)


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    # As in the engine's process: teams of threads wait for each other wherever something else runs too.
    with one_torch_thread(), ExitStack() as closing:
        yield Room(tmp_path, closing)


def test_blocks_come_back_right_from_every_tier_and_every_block_is_accounted_for(room: Room) -> None:
    prompt_blocks = 0
    for request in room.workload(140):
        prompt_blocks += len(request.prompt) // room.config.page_tokens
        room.engine.serve(request)
    report = room.engine.report(1.0, done=False)
    assert report.requests == 140
    assert report.wrong_blocks == 0
    assert report.blocks_device > 0
    assert report.blocks_host > 0
    assert set(report.blocks_volume) == {"fast", "slow"}
    found = report.blocks_device + report.blocks_host + sum(report.blocks_volume.values())
    assert found + report.blocks_recomputed == prompt_blocks
    assert report.puts["fast"] <= 1_024
    assert sum(report.puts.values()) == report.blocks_computed > report.blocks_recomputed
    assert report.gets_failed == {}
    assert report.puts_refused == {}
    assert report.device_blocks_used <= 256


def test_a_block_with_other_bytes_is_counted_as_wrong(room: Room) -> None:
    request = next(room.workload(1))
    room.engine.serve(request)
    room.engine._manager.device_tensor[:] = 1.0
    room.engine.serve(request)
    report = room.engine.report(1.0, done=False)
    assert report.wrong_blocks == report.blocks_device == len(request.prompt) // 16


def test_a_prompt_larger_than_the_device_is_cut_and_counted(room: Room) -> None:
    (request,) = trace_requests([range(300)], page_tokens=16)
    room.engine.serve(request)
    report = room.engine.report(1.0, done=False)
    assert report.requests_cut == 1
    assert report.blocks_recomputed == 256


def test_a_run_reports_totals_on_lines_of_their_own_and_says_when_its_trace_has_ended(
    room: Room, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = threading.Event()

    def until_the_end() -> Iterator[Request]:
        yield from trace_requests([[0, 1, 2], [0, 1, 3], [0, 1, 2]], room.config.page_tokens)
        stop.set()

    run(room.engine, until_the_end(), 1_000.0, stop, 0.0)
    lines = capsys.readouterr().out.splitlines()
    first, last = (msgspec.json.decode(line, type=EngineReport) for line in (lines[0], lines[-1]))
    assert first.requests == 0
    assert last.done
    assert last.requests == 3
    assert last.tokens_prompt == 9 * 16
    assert (last.blocks_recomputed, last.blocks_device) == (4, 5)


def test_a_run_that_is_told_to_stop_reports_once_more(room: Room, capsys: pytest.CaptureFixture[str]) -> None:
    stop = threading.Event()
    stop.set()
    run(room.engine, room.workload(5), 20.0, stop, 0.0)
    (line,) = capsys.readouterr().out.splitlines()
    assert msgspec.json.decode(line, type=EngineReport).requests == 0


def test_no_two_blocks_are_expected_to_hold_the_same_words() -> None:
    config = KvbmConfig(
        layers=1, heads=1, head_dim=3, page_tokens=3, device_blocks=1, host_blocks=1, hash_secret="secret of the tests"
    )
    blocks = [
        block for tenant in ("acme", "forge") for block in TokenBlockSequence(config, tenant, range(3 * 200)).blocks
    ]
    expected = expected_bytes(blocks, config.block_bytes)
    assert expected.shape == (400, 36)
    assert torch.equal(expected, expected_bytes(blocks, config.block_bytes))
    assert len({bytes(row[:8].numpy()) for row in expected}) == 400


@pytest.mark.parametrize(
    ("was", "becomes", "text"),
    [
        ("requests_per_s = 20.0", "requests_per_second = 20.0", "unknown field `requests_per_second`"),
        ("requests_per_s = 20.0", "requests_per_s = 0.0", "requests_per_s = 0.0 is out of range"),
        ("requests_per_s = 20.0", "tenants = []", "workload.tenants is empty"),
        ("layers = 4", "layers = 0", r"\[core\] layers = 0 is out of range"),
        ("[core]", "[core", "engine.toml: "),
    ],
)
def test_a_bad_setting_names_the_file_and_the_key(tmp_path: Path, was: str, becomes: str, text: str) -> None:
    file = tmp_path / "engine.toml"
    file.write_text(demo_engine_toml(core_events_url="zmq+tcp://127.0.0.1:0").replace(was, becomes))
    with pytest.raises(EngineSettingsError, match=text) as caught:
        core_config(load_engine_settings(file), file)
    assert "engine.toml" in str(caught.value)
    assert "\n" not in str(caught.value)
