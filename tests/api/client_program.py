"""What a vendor's program does with the generated client; test_client.py type-checks and runs it.

`python client_program.py URL` prints what it saw as JSON.
"""

from __future__ import annotations

import json
import sys

from kvadvisor_client import Client
from kvadvisor_client.api.actions import post_pause
from kvadvisor_client.api.advisor import get_summary
from kvadvisor_client.api.blocks import get_blocks
from kvadvisor_client.models import BlockPage, PauseOrder, PauseView, Problem, Summary
from kvadvisor_client.types import UNSET, Unset


def all_hashes(client: Client) -> list[str]:
    hashes: list[str] = []
    after: str | Unset | None = UNSET
    while True:
        page = get_blocks.sync(client=client, limit=100, after=after)
        assert isinstance(page, BlockPage)
        hashes += [block.hash_ for block in page.blocks]
        if page.next_cursor is None:
            return hashes
        after = page.next_cursor


def main() -> None:
    client = Client(base_url=sys.argv[1])
    summary = get_summary.sync(client=client)
    assert isinstance(summary, Summary)
    paused = [
        post_pause.sync_detailed(client=client, body=PauseOrder(volume="nvme-a"), idempotency_key="night-1")
        for _ in range(2)
    ]
    views = [answer.parsed for answer in paused]
    problem = post_pause.sync(client=client, body=PauseOrder(volume="nowhere"))
    assert isinstance(problem, Problem)
    seen = {
        "blocks": summary.blocks,
        "hashes": all_hashes(client),
        "paused": [view.volumes for view in views if isinstance(view, PauseView)],
        "replayed": [answer.headers.get("idempotency-replayed") for answer in paused],
        "problem": [problem.status, problem.detail],
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
