"""An array that moves blocks by itself, obeying published plans:

`python examples/array_mover.py tcp://127.0.0.1:5600 zmq+tcp://127.0.0.1:5557`

beside an advisor with `[[agents]]` `name = "array"`, `mover = "published"`, `command_url` the first URL, and
`[[sources]]` the second. It knows the advisor by its messages alone (docs/moves.md); a dictionary stands for its disks.
"""

import contextlib
import json
import sys
import time
from typing import Any

import zmq

from event_plane.connect import open_publisher
from event_plane.schema import EventRecord, EventType, Namespace, RecordFlag, producer_id

plans_url, events_url = sys.argv[1:]
space = Namespace(tenant="acme", model="my-model")
held = {"array-fast": set[int](), "array-slow": set(range(1, 9))}
volumes = [
    {"id": name, "kind": "array", "speed_rank": rank, "capacity_blocks": 64, "block_bytes_max": 1 << 20}
    for rank, name in enumerate(held)
]
publisher = open_publisher(events_url, producer=producer_id("array"))
me = f"{publisher.producer:016x}"
answered: dict[str, dict[str, Any]] = {}
newest_term = 0


def event(kind: EventType, volume: str, block: int, flags: int = 0) -> EventRecord:
    hits = int(kind is EventType.ACCESS)
    return EventRecord(kind, 3, block, space, volume, block_size=4096, block_tokens=16, flags=flags, hits=hits)


def snapshot() -> None:
    """All that is held: at the start, and when a subscriber asks for it."""
    publisher.publish_snapshot([event(EventType.STORE, v, b, RecordFlag.COPY) for v in held for b in held[v]])


def move_one(phase: str, source: str, target: str, block: int) -> str:
    if phase == "free":
        if block not in held[source]:
            return "miss"
        held[source].remove(block)
        publisher.publish([event(EventType.REMOVE, source, block)])
        return "deleted"
    if block in held[target]:
        return "present"  # after reading and verifying it
    if block not in held[source]:
        return "miss"
    held[target].add(block)  # here the bytes go, are made durable and verified
    publisher.publish([event(EventType.STORE, target, block, RecordFlag.COPY)])
    return "copied"


def carry_out(command: dict[str, Any]) -> dict[str, Any]:
    """One command, once: asked again, it is answered as before. What is late, or of an old term, is not done."""
    global newest_term
    command_id = command["command_id"]
    if command_id in answered:
        return answered[command_id]
    newest_term = max(newest_term, command["term"])
    if command["term"] < newest_term or command["deadline_us"] < time.time_ns() // 1000:
        return {"type": "refusal", "command_id": command_id, "reason": "it is too late for that"}
    way = command["phase"], command["source"], command["target"]
    results = [{"result": move_one(*way, int(block["hash"], 16))} for block in command["blocks"]]
    print(command["kind"], command["phase"], *(result["result"] for result in results), flush=True)
    events = {"producer": me, "epoch": f"{publisher.epoch:016x}", "sequence": publisher.flush()}
    answered[command_id] = {"type": "outcome", "command_id": command_id, "results": results, "events": events}
    return answered[command_id]


snapshot()
publisher.serve_snapshots(snapshot)
with contextlib.suppress(KeyboardInterrupt), contextlib.closing(publisher), zmq.Context() as context:
    plans = context.socket(zmq.DEALER)
    plans.linger = 0
    plans.connect(plans_url)
    said_s = 0.0
    while True:
        if time.monotonic() - said_s > 0.4:
            said_s = time.monotonic()
            plans.send(json.dumps({"type": "volumes", "producer": me, "volumes": volumes}).encode())
            # Somebody reads blocks 1 to 4, each where it is fastest.
            read = [event(EventType.ACCESS, next(v for v in held if b in held[v]), b) for b in range(1, 5)]
            publisher.publish(read, flush=True)
        if plans.poll(200):
            plans.send(json.dumps(carry_out(json.loads(plans.recv()))).encode())
