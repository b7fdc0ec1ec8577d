"""Pages write the same kind of thing the same way: numbers with their words, hashes, times."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from advisor.web import formats

TEMPLATES = {
    path.name: path.read_text("utf-8")
    for folder in (".", "fragments")
    for path in files("advisor.web").joinpath("templates").joinpath(folder).iterdir()
    if path.name.endswith(".html")
}
OWN_WAYS = {
    "a plural beside a number, of one too": re.compile(
        r"\|(?:exact|count) (?:\}\}|~ \") ?(?:blocks|uses|moves|bytes|batches|events|tokens|gaps|requests|copies)\b"
    ),
    "a hash cut by itself": re.compile(r"hash\[|hash\|truncate"),
    "a time": re.compile(r"timestamp\)\[|\|moment(?! ~|\) %)|/ 1e6\)\|seconds \}\} ago"),
}


@pytest.mark.parametrize("way", OWN_WAYS)
def test_no_template_has_its_own_way_to_write(way: str) -> None:
    found = {
        name: hits for name, text in TEMPLATES.items() if name != "parts.html" and (hits := OWN_WAYS[way].findall(text))
    }
    assert len(TEMPLATES) > 20
    assert not found


@pytest.mark.parametrize(
    ("plural", "singular"),
    [
        ("uses", "use"), ("blocks", "block"), ("copies", "copy"), ("batches", "batch"), ("branches", "branch"),
        ("closed epochs", "closed epoch"), ("refused", "refused"), ("corrupt", "corrupt"),
    ],
)  # fmt: skip
def test_one_is_in_the_singular(plural: str, singular: str) -> None:
    assert formats.counted(1, plural) == f"1 {singular}"
    assert formats.counted(0, plural) == f"0 {plural}"
    assert formats.counted(1_204_000, plural) == f"1.20 M {plural}"
    assert formats.exactly(1, plural) == f"1 {singular}"
    assert formats.exactly(1_204, plural) == f"1\u202f204 {plural}"
