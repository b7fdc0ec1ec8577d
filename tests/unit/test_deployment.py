"""The deployment's files agree with their schemas, with each other and with the code."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from advisor.demo_config import load_engine_settings
from advisor.settings import load_settings
from storage_agent.config import load_settings as load_agent_settings

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
KUBERNETES = ROOT / "deploy" / "kubernetes"


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return loaded


def test_compose_file_follows_the_compose_specification() -> None:
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*check, ROOT / "docker-compose.yml"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_file_has_every_service_and_starts_only_those_in_use() -> None:
    services = compose()["services"]
    in_use = {name for name, service in services.items() if "profiles" not in service}
    assert in_use == {"engine", "advisor", "prometheus", "grafana"}
    assert set(services) - in_use == {"nats", "postgres", "seaweedfs"}


def test_files_that_compose_mounts_exist() -> None:
    mounted = [
        volume.split(":")[0]
        for service in compose()["services"].values()
        for volume in service.get("volumes", [])
        if volume.startswith("./")
    ]
    assert len(mounted) >= 4
    assert [path for path in mounted if not (ROOT / path).exists()] == []


def test_nothing_is_reachable_from_outside_the_host() -> None:
    for name, service in compose()["services"].items():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), name
    assert load_settings(ROOT / "deploy" / "advisor.toml", {}).api.host == "127.0.0.1"


def test_spread_advisor_uses_the_servers_of_its_profile() -> None:
    settings = load_settings(ROOT / "deploy" / "advisor-spread.toml", {})
    services = compose()["services"]
    spread = {name for name, service in services.items() if service.get("profiles") == ["spread"]}
    assert spread == {"nats", "postgres"}
    nats, postgres = (services[name]["ports"][0].split(":")[1] for name in ("nats", "postgres"))
    assert {source.url.rsplit("/", 1)[0] for source in settings.sources} == {f"jetstream://127.0.0.1:{nats}"}
    database = services["postgres"]["environment"]["POSTGRES_DB"]
    assert settings.log.url.endswith(f"@127.0.0.1:{postgres}/{database}")


def test_nats_server_acknowledges_after_its_sync() -> None:
    lines = [line.strip() for line in (ROOT / "deploy" / "nats.conf").read_text().splitlines()]
    assert "sync_interval: always" in lines


def test_advisor_listens_to_the_engine_and_commands_its_agent() -> None:
    engine = load_engine_settings(ROOT / "deploy" / "engine.toml")
    agent = load_agent_settings(ROOT / "deploy" / engine.agent_file)
    advisor = load_settings(ROOT / "deploy" / "advisor.toml", {})
    assert {source.url for source in advisor.sources} == {engine.events_url, agent.event_url}
    assert [(each.name, each.command_url) for each in advisor.agents] == [(agent.name, agent.command_url)]
    (state,) = {volume for volume in compose()["services"]["engine"]["volumes"] if volume.startswith("state:")}
    assert [str(root) for root in agent.allowed_roots] == [state.split(":")[1]]


def test_prometheus_scrapes_the_port_that_the_advisor_listens_on() -> None:
    settings = load_settings(ROOT / "deploy" / "advisor.toml", {})
    scraped = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    assert scraped[0]["static_configs"][0]["targets"] == [f"{settings.api.host}:{settings.api.port}"]


def test_dashboards_draw_from_the_data_source_that_is_provisioned() -> None:
    provisioning = ROOT / "deploy" / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "kvadvisor.yml").read_text())["providers"]
    targets = [volume.split(":")[1] for volume in compose()["services"]["grafana"]["volumes"]]
    assert provider["options"]["path"] in targets
    (dashboard,) = (ROOT / "deploy" / "grafana" / "dashboards").glob("*.json")
    panels = json.loads(dashboard.read_text())["panels"]
    assert {panel["datasource"]["uid"] for panel in panels} == {source["uid"]}
    assert len({panel["id"] for panel in panels}) == len(panels)


@pytest.mark.parametrize("script", [".ci/run", ".ci/test-wheel"])
def test_scripts_are_valid_and_executable(script: str) -> None:
    path = ROOT / script
    assert path.stat().st_mode & 0o111
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0


def test_image_holds_every_package_of_the_wheel() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    copied = [line.split() for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("COPY ")]
    assert {words[1] for words in copied if len(words) == 3} >= set(wheel["packages"])


def alerts() -> dict[str, dict[str, Any]]:
    (group,) = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def test_every_alert_has_its_section_and_its_test() -> None:
    headings = re.findall(r"^### (\w+)$", (ROOT / "docs" / "operations.md").read_text("utf-8"), re.MULTILINE)
    assert headings == list(alerts())
    tested = (PROMETHEUS / "alerts_test.yml").read_text()
    for name, rule in alerts().items():
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{name.lower()}"
        assert name in tested


def test_alert_rules_fire_when_they_should() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool here: apt-get install prometheus")
    for arguments in (["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run([promtool, *arguments], cwd=PROMETHEUS, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("unit", ["kvadvisor.service", "kvadvisor-agent@.service"])
def test_systemd_units_start_what_there_is(unit: str) -> None:
    path = ROOT / "deploy" / "systemd" / unit
    (start,) = re.findall(r"^ExecStart=/opt/kvadvisor/bin/kvadvisor (.*)$", path.read_text(), re.MULTILINE)
    commands = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["kvadvisor.commands"]
    assert start.split()[2] in commands
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze here")
    done = subprocess.run([analyze, "verify", path], capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if unit.split(".")[0].rstrip("@") in line]
    assert [line for line in said if "is not executable: No such file" not in line] == []


@pytest.mark.parametrize("folder", ["base", "overlays/spread"])
def test_manifests_name_files_that_are_there_and_settings_that_load(folder: str) -> None:
    where = KUBERNETES / folder
    kustomization = yaml.safe_load((where / "kustomization.yaml").read_text())
    named = [*kustomization["resources"], *(patch["path"] for patch in kustomization.get("patches", []))]
    named += [name for made in kustomization["configMapGenerator"] for name in made["files"]]
    assert [name for name in named if not (where / name).exists()] == []
    advisor = load_settings(where / "advisor.toml", {})
    agent = load_agent_settings(where / "agent.toml")
    assert advisor.api.login == "required"
    assert agent.event_url in {source.url for source in advisor.sources}
    commanded = {each.command_url for each in advisor.agents}
    assert {agent.command_url.replace("NODE_NAME", "node-1")} == commanded


def test_probes_and_ports_of_the_pod_are_those_of_the_service() -> None:
    pod = yaml.safe_load((KUBERNETES / "base" / "statefulset.yaml").read_text())["spec"]["template"]["spec"]
    containers = {container["name"]: container for container in pod["containers"]}
    advisor = containers["advisor"]
    assert advisor["ports"][0]["containerPort"] == load_settings(KUBERNETES / "base" / "advisor.toml", {}).api.port
    probes = [advisor[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")]
    assert probes == ["/healthz", "/healthz", "/readyz"]
    for container in containers.values():
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted <= {volume["name"] for volume in pod["volumes"]} | {"state", "volumes"}
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
