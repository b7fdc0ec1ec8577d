"""The demo's engine as a process: it ends in order, with its parent, or with one clear sentence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from advisor.demo_config import EngineReport, demo_agent_toml, demo_engine_toml
from storage_agent.client import AgentClient
from storage_agent.config import load_settings, scan_volumes

_PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([*sys.argv[1:], "--parent", str(os.getpid())], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def _arguments(folder: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "advisor.demo_engine", "--config", str(folder / "engine.toml"), "--seed", "3", *more]


def _write_settings(folder: Path, command_url: str) -> None:
    (folder / "engine.toml").write_text(demo_engine_toml(core_events_url="zmq+tcp://127.0.0.1:0"))
    agent = demo_agent_toml(agent_events_url="zmq+tcp://127.0.0.1:0", command_url=command_url)
    (folder / "agent.toml").write_text(agent)


def _start(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        _arguments(folder, "--parent", str(os.getpid()), *more), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def _first_report_with_requests(process: subprocess.Popen[bytes]) -> EngineReport:
    assert process.stdout is not None
    for line in process.stdout:
        report = msgspec.json.decode(line, type=EngineReport)
        if report.requests:
            return report
    raise AssertionError("the engine ended before it served anything")


@pytest.mark.crash
def test_the_engine_serves_commands_ignores_ctrl_c_and_stops_in_order(tmp_path: Path) -> None:
    _write_settings(tmp_path, f"ipc://{tmp_path}/commands")
    process = _start(tmp_path)
    assert _first_report_with_requests(process).wrong_blocks == 0
    client = AgentClient(f"ipc://{tmp_path}/commands", timeout_s=10)
    volumes = {stat.descriptor.id: stat for stat in client.stat().volumes}
    client.close()
    assert set(volumes) == {"fast", "slow"}
    assert volumes["slow"].blocks > 0
    process.send_signal(signal.SIGINT)
    assert _first_report_with_requests(process).requests > 0
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=150)
    assert err == b""
    assert process.returncode == 0
    last = msgspec.json.decode(out.splitlines()[-1], type=EngineReport)
    assert last.wrong_blocks == 0
    live = {
        descriptor.id: sum(report.state == "live" for report in reports)
        for descriptor, reports in scan_volumes(load_settings(tmp_path / "agent.toml"))
    }
    assert live == last.puts


@pytest.mark.crash
def test_the_engine_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    _write_settings(tmp_path, f"ipc://{tmp_path}/commands")
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, *_arguments(tmp_path)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    engine_pid = int(parent.stdout.readline())
    assert _is_running(engine_pid)
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 60
    while _is_running(engine_pid):
        assert time.monotonic() < deadline, f"engine {engine_pid} outlives its parent"
        time.sleep(0.02)


@pytest.mark.crash
def test_a_volume_outside_the_allowed_roots_ends_the_engine_with_one_sentence(tmp_path: Path) -> None:
    _write_settings(tmp_path, f"ipc://{tmp_path}/commands")
    file = tmp_path / "agent.toml"
    file.write_text(file.read_text().replace('path = "slow.slab"', 'path = "/slow.slab"'))
    assert _ends_with(tmp_path, "'/slow.slab'") == 2


@pytest.mark.crash
def test_a_port_in_use_and_a_bad_trace_line_end_the_engine_with_one_sentence(tmp_path: Path, free_port: int) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]}\n{"timestamp\n')
    _write_settings(tmp_path, f"tcp://127.0.0.1:{free_port}")
    assert _ends_with(tmp_path, "trace.jsonl, line 2", "--trace", str(trace)) == 2
    with zmq.Context() as context, context.socket(zmq.REP) as holder:
        holder.bind(f"tcp://127.0.0.1:{free_port}")
        assert _ends_with(tmp_path, str(free_port)) == 2


def _ends_with(folder: Path, sentence: str, *more: str) -> int:
    with _start(folder, *more) as process:
        try:
            _, err = process.communicate(timeout=150)
        finally:
            process.kill()
    lines = err.decode().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("kvadvisor demo engine: ")
    assert sentence in lines[0]
    return process.returncode


def _is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
