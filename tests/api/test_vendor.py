"""Vendored files are those that were reviewed, carry their licences, and are pinned where pages load them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from importlib.resources import files
from pathlib import Path

import pytest
from direct import Direct
from sample_reader import SampleReader

VENDOR = Path(str(files("advisor.web"))) / "static" / "vendor"
INTEGRITY: dict[str, dict[str, str]] = json.loads((VENDOR / "integrity.json").read_text("utf-8"))


def sha384(content: bytes) -> str:
    return f"sha384-{base64.b64encode(hashlib.sha384(content).digest()).decode()}"


def test_every_vendored_script_and_style_has_a_recorded_hash() -> None:
    found = {path.relative_to(VENDOR).as_posix() for path in VENDOR.rglob("*") if path.suffix in {".js", ".css"}}
    assert found == set(INTEGRITY)


@pytest.mark.parametrize("name", sorted(INTEGRITY))
def test_vendored_file_is_unchanged_and_licensed(name: str) -> None:
    assert INTEGRITY[name]["integrity"] == sha384((VENDOR / name).read_bytes())
    assert INTEGRITY[name]["license"] in {"0BSD", "MIT", "Apache-2.0"}
    assert (VENDOR / name).parent.joinpath("LICENSE").stat().st_size > 100


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_page_pins_each_vendored_file_it_loads(path: str) -> None:
    client = Direct(SampleReader())
    page = client.get(path).text
    loaded = re.findall(r'(?:src|href)="(/static/vendor/[^"]+)" integrity="([^"]+)"', page)
    assert len(loaded) == page.count("/static/vendor/") > 0
    for url, integrity in loaded:
        assert integrity == sha384(client.get(url).content)
