"""Your own workflow, started by what is stored and planned: `python examples/hook.py zmq+tcp://127.0.0.1:5557 state`.

In a package, name the class under the entry point `kvadvisor.hooks` and that name in the setting `hooks`; `kvadvisor
serve` calls it then.
"""

import contextlib
import sys
from pathlib import Path

from advisor.hooks import BlockEvents, Hook, PlanMade
from advisor.service import AdvisorService
from advisor.settings import AdvisorSettings, SourceSettings


class Workflow(Hook):
    """Called on a thread of its own: it may take its time, and what it is too slow for is counted."""

    def on_store(self, events: BlockEvents) -> None:
        for event in events:
            print("stored", f"{event.sequence_hash:032x}", event.location, event.block_bytes, flush=True)

    def on_plan(self, plan: PlanMade) -> None:
        for move in plan.moves:
            print("planned", move.kind, move.source, move.target, move.reason, flush=True)


settings = AdvisorSettings(directory=Path(sys.argv[2]), sources=(SourceSettings(name="engine", url=sys.argv[1]),))
with contextlib.suppress(KeyboardInterrupt), AdvisorService(settings, hooks={"workflow": Workflow()}) as service:
    service.wait()
