"""`POST /api/v1/advice/load`: what is asked reaches the reader, and what is wrong is named."""

from __future__ import annotations

from typing import Any

import pytest
from direct import Direct
from sample_reader import SampleReader

ROUTE = "/api/v1/advice/load"


def test_question_reaches_the_reader_and_its_answer_the_engine() -> None:
    reader = SampleReader()
    question = {
        "hashes": ["0a", "ff" * 16, "3"], "block_tokens": 16, "namespace_id": "00000000000000aa", "tenant": "acme",
        "group": 2, "prefill_tokens_per_s": 8_000,
    }  # fmt: skip
    answer = Direct(reader).request("POST", ROUTE, json=question)
    assert answer.status_code == 200
    assert reader.asked_to_load == ([10, (1 << 128) - 1, 3], 16, 0xAA, "acme", 2, 8_000.0)
    assert [(block["load"], block["volume"]) for block in answer.json()["blocks"]] == [
        (True, "nvme-a"), (True, "nvme-a"), (False, ""),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hashes": []}, "hashes was []: list should have at least 1 item"),
        ({"hashes": ["xyz"]}, "0 was 'xyz': string should match pattern"),
        ({"block_tokens": 0}, "block_tokens was 0: it must be greater than or equal to 1"),
        ({"prefill_tokens_per_s": 0}, "prefill_tokens_per_s was 0: it must be greater than 0"),
        ({"tokens": [1, 2]}, "tokens is not a parameter of this route"),
    ],
)
def test_bad_question_is_a_problem_that_names_the_value(change: dict[str, Any], words: str) -> None:
    answer = Direct(SampleReader()).request("POST", ROUTE, json={"hashes": ["1"], "block_tokens": 16, **change})
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert words in answer.json()["detail"]
