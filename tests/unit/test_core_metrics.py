"""The core's metrics, its desk, and `kvadvisor explain`: what they say is so, and every metric is documented."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from advisor.cli import main
from kvbm_core import metric_names
from kvbm_core.core_desk import CoreDesk
from kvbm_core.errors import ConfigError
from kvbm_core.explain import BlockExplanation
from kvbm_core.metrics import CoreCollector
from tests.core_room import DISK, CoreRoom, release

PAGE = (Path(__file__).parents[2] / "docs" / "kvbm.md").read_text(encoding="utf-8")


@pytest.fixture
def room() -> Iterator[CoreRoom]:
    with closing(CoreRoom(disk=DISK)) as opened:
        yield opened


def samples(text: str) -> dict[str, float]:
    """Each sample's value by its name and labels."""
    shown = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            shown[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return shown


def scraped(room: CoreRoom) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(CoreCollector(room.manager))
    return samples(generate_latest(registry).decode())


def test_every_metric_of_the_core_is_documented() -> None:
    rows = re.findall(r"^\| `(kvbm_\w+)` \| (\w+) \|([^|]*)\|", PAGE, re.MULTILINE)
    documented = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert documented == {name.exposed: (name.kind, set(name.labels)) for name in metric_names.ALL}


def test_every_metric_is_exposed_and_no_other(room: CoreRoom) -> None:
    exposed = {family.name for family in CoreCollector(room.manager).collect()}
    assert exposed == {name.name for name in metric_names.ALL}


def test_metrics_say_what_the_accounts_say(room: CoreRoom) -> None:
    wanted = room.sequence(4)
    room.compute_and_release(wanted)
    room.push_out_of_device()
    release(room.manager.onboard([*wanted, *room.sequence(1, 7_000)]).blocks)
    shown = scraped(room)
    block_bytes = room.config.block_bytes
    assert shown["kvbm_pool_blocks{pool=device,state=inactive}"] == 8
    assert shown["kvbm_pool_blocks{pool=host,state=reset}"] == 12
    assert shown["kvbm_pool_capacity_bytes{pool=host}"] == 16 * block_bytes
    assert shown["kvbm_pool_evictions_total{pool=device}"] == 8
    assert shown["kvbm_pool_evictions_unmatched_total{pool=device}"] == 8
    assert shown["kvbm_pool_registrations_total{pool=host}"] == 4
    assert shown["kvbm_tokens_requested_total"] == 20
    assert shown["kvbm_tokens_matched_total"] == 16
    assert shown["kvbm_requested_bytes_total"] == 5 * block_bytes
    assert shown["kvbm_requested_blocks_total{found=G2}"] == 4
    assert shown["kvbm_requested_blocks_total{found=absent}"] == 1
    assert shown["kvbm_loaded_blocks_total{source=G2}"] == 4
    assert shown["kvbm_path_blocks_total{path=device_to_host}"] == 4
    assert shown["kvbm_path_bytes_total{path=host_to_device}"] == 4 * block_bytes
    assert shown["kvbm_path_seconds_count{path=host_to_disk}"] == 1
    assert shown["kvbm_path_seconds_bucket{le=+Inf,path=host_to_disk}"] == 1
    assert 0 < shown["kvbm_path_seconds_sum{path=host_to_disk}"] < 60
    assert shown["kvbm_queue_blocks{path=disk_to_device,state=in_doubt}"] == 0
    assert shown["kvbm_offload_waiting_blocks"] == 0
    assert shown["kvbm_put_blocks_total{volume=disk}"] == 4
    assert shown["kvbm_events_lost_total"] == 0


def test_the_desk_answers_prometheus_and_explains_blocks(room: CoreRoom) -> None:
    wanted = room.sequence(2)
    room.compute_and_release(wanted)
    with CoreDesk(room.manager) as desk:
        with urllib.request.urlopen(f"{desk.url}/metrics") as answer:
            assert samples(answer.read().decode())["kvbm_put_blocks_total{volume=disk}"] == 2
        name = f"{wanted[0].key.sequence_hash:032x}"
        for asked in (name, name[:12], name.upper()):
            with urllib.request.urlopen(f"{desk.url}/blocks/{asked}") as answer:
                (block,) = msgspec.json.decode(answer.read(), type=list[BlockExplanation])
            assert block == room.manager.explain(wanted[0].key)
        assert [(copy.tier, copy.location, copy.state, copy.owner) for copy in block.copies] == [
            ("G1", "device:0", "inactive", "core"),
            ("G2", "host", "inactive", "core"),
            ("G3", "disk", "seen", "storage agent"),
        ]
        for path, status in (("/blocks/xyz", 400), ("/blocks/", 400), ("/blocks/" + "0" * 33, 400), ("/else", 404)):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(desk.url + path)
            assert refused.value.code == status
            refused.value.close()


@pytest.mark.parametrize("url", ["http://0.0.0.0:0", "https://127.0.0.1:0", "http://127.0.0.1", "127.0.0.1:80"])
def test_a_desk_listens_on_this_machine_alone(room: CoreRoom, url: str) -> None:
    with pytest.raises(ConfigError, match=r"give http://127\.0\.0\.1:PORT"):
        CoreDesk(room.manager, url)


def test_a_desk_whose_port_is_taken_says_so(room: CoreRoom) -> None:
    with CoreDesk(room.manager) as desk, pytest.raises(ConfigError, match="give another port"):
        CoreDesk(room.manager, desk.url)


def kvadvisor(*arguments: str) -> object:
    """The status that a command line ends with."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


def test_explain_asks_cores_and_prints_what_they_say(room: CoreRoom, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = room.sequence(1)
    room.compute_and_release([block])
    name = f"{block.key.sequence_hash:032x}"
    with CoreDesk(room.manager) as desk:
        assert kvadvisor("explain", name[:8], "--advisor", "", "--core", desk.url, "--json") == 0
        (found,) = json.loads(capsys.readouterr().out)
        assert found["source"] == f"core at {desk.url}"
        assert found["block"]["sequence_hash"] == name
        assert kvadvisor("explain", name, "--core", desk.url) == 0
        shown = capsys.readouterr().out
        assert "storage agent" in shown
        assert "waits: nothing" in shown
        assert kvadvisor("explain", "0" * 32, "--core", desk.url) == 2
        assert "nobody asked knows a block" in capsys.readouterr().err
    assert kvadvisor("explain", name, "--core", desk.url) == 2
    assert "cannot be asked" in capsys.readouterr().err
