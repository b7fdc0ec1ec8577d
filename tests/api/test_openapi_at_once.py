"""OpenAPI that several ask for at once, before it was made."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from sample_parts import sample_parts

from advisor.api.app import create_app


def test_all_who_ask_at_once_get_the_whole_of_it() -> None:
    app = create_app(sample_parts())
    with ThreadPoolExecutor(4) as asking:
        answers = list(asking.map(lambda _: app.openapi(), range(4)))
    assert all(answer is answers[0] for answer in answers)
    assert "securitySchemes" in answers[0]["components"]
