"""docs/asyncapi.yaml is valid AsyncAPI 3.0 and says what the code does: its constants, fields and requests are read."""

from __future__ import annotations

import asyncio
import gzip
import json
import struct
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import nats
import numpy as np
import pytest
import yaml
import zmq

from event_plane import nats_requests, wire
from event_plane.batching import SNAPSHOT_CHUNK_RECORDS_MAX
from event_plane.connect import open_publisher
from event_plane.jetstream_stream import DUPLICATE_WINDOW_S, StreamOptions, stream_config, subject_of
from event_plane.publishing import RESEND_END, Acknowledgement, Ask, SnapshotAsk
from event_plane.schema import (
    EXTENSION_BYTES_MAX,
    RECORD_BYTES_MAX,
    RECORD_COUNT_MAX,
    RECORD_DTYPE,
    Batch,
    BatchKind,
    Namespace,
    SnapshotRange,
)
from event_plane.transport import NATS_PORT
from event_plane.zmq_transport import ACK_TAG, SNAPSHOT_TAG, TOPIC, ZmqPublisher
from tests.nats_server import nats_server

HERE = Path(__file__).resolve().parent
PRODUCER, EPOCH, SEQUENCE = 0x9252A8A0B7442DFB, 5, 0
VALUES = {"producer": PRODUCER, "epoch": EPOCH, "sequence": SEQUENCE, "end": RESEND_END}
PATIENCE_MS = 30_000


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((HERE.parents[1] / "docs" / "asyncapi.yaml").read_text(encoding="utf-8"))
    return read


def packed(frame: str | dict[str, Any]) -> bytes:
    """The bytes of a frame or body as the document describes it."""
    if isinstance(frame, str):
        return frame.encode()
    return struct.pack(frame["format"], *(VALUES[name] for name in frame["fields"]))


def message(document: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = document["components"]["messages"][name]
    return found


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        yield from ([node["$ref"]] if "$ref" in node else [])
        for each in node.values():
            yield from references(each)
    elif isinstance(node, list):
        for each in node:
            yield from references(each)


def test_document_is_valid_asyncapi(document: dict[str, Any]) -> None:
    schema = json.loads(gzip.decompress((HERE / "schemas" / "asyncapi-3.0.0.json.gz").read_bytes()))
    assert document["asyncapi"] == "3.0.0"
    jsonschema.Draft7Validator(schema).validate(document)


def test_every_reference_leads_somewhere_and_every_component_is_used(document: dict[str, Any]) -> None:
    used = set(references(document))
    for reference in used:
        found = document
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]
    named = {f"#/components/{kind}/{name}" for kind, each in document["components"].items() for name in each}
    # The extension lies inside a batch's bytes: nothing in AsyncAPI can refer to it there.
    assert named - used == {"#/components/schemas/extension"}


def test_batch_schema_has_the_codes_constants(document: dict[str, Any]) -> None:
    batch = document["components"]["schemas"]["batch"]
    assert batch["x-magic"].encode() == wire.MAGIC
    assert batch["x-version"] == wire.VERSION
    assert batch["x-record-bytes"] == RECORD_DTYPE.itemsize
    assert {name.replace(" ", "_").upper(): kind for name, kind in batch["x-kinds"].items()} == {
        kind.name: kind.value for kind in BatchKind
    }
    assert batch["x-limits"] == {
        "records": RECORD_COUNT_MAX,
        "record-bytes": RECORD_BYTES_MAX,
        "extension-bytes": EXTENSION_BYTES_MAX,
        "batch-bytes": wire.BATCH_BYTES_MAX,
        "snapshot-chunk-records": SNAPSHOT_CHUNK_RECORDS_MAX,
    }


def test_extension_schema_has_the_codes_fields_and_defaults(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert {name: each["default"] for name, each in schemas["namespace"]["properties"].items()} == msgspec.to_builtins(
        Namespace()
    )
    assert {name: each["default"] for name, each in schemas["snapshot"]["properties"].items()} == msgspec.to_builtins(
        SnapshotRange()
    )
    assert schemas["extension"]["properties"]["locations"]["maxItems"] == wire.LOCATIONS_MAX


def test_extension_that_the_encoder_writes_keeps_the_schema(document: dict[str, Any]) -> None:
    full = Batch(
        1, 2, 3, np.zeros(1, RECORD_DTYPE),
        namespaces=(Namespace(tenant="acme"),), locations=("gpu",), extra=({"note": 1},), snapshot=SnapshotRange(4, 5),
    )  # fmt: skip
    extension = msgspec.msgpack.decode(wire.encode(full)[wire.HEADER.size + RECORD_DTYPE.itemsize :])
    schema = {"$ref": "#/components/schemas/extension", "components": document["components"]}
    jsonschema.Draft7Validator(schema).validate(extension)
    assert set(extension) == set(document["components"]["schemas"]["extension"]["properties"])


def test_requests_as_documented_are_what_a_publisher_over_zeromq_understands(document: dict[str, Any]) -> None:
    asked: list[bool] = []
    any_port = "zmq+tcp://127.0.0.1:0"
    opened = ZmqPublisher(
        any_port, any_port, producer=PRODUCER, epoch=EPOCH, on_snapshot=lambda: asked.append(True)
    )
    with (
        closing(opened) as publisher,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as dealer,
    ):
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        dealer.connect(publisher.resend_url.endpoint)
        publisher.publish_lost("one batch to ask for")
        publisher.flush()
        for name in ("zeromqAcknowledgement", "zeromqSnapshot", "zeromqResend"):
            dealer.send_multipart([packed(frame) for frame in message(document, name)["x-frames"]])
        for name in ("zeromqResentBatch", "zeromqResendEnd"):
            *head, payload = dealer.recv_multipart()
            *documented, last = message(document, name)["x-frames"]
            assert head == [packed(frame) for frame in documented]
            assert (last, wire.is_batch(payload)) in {("batch", True), ("", False)}
        deadline = time.monotonic() + PATIENCE_MS / 1000
        while not asked:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        stat = publisher.stat()
    assert (stat.acknowledged_sequence, stat.resends, stat.requests_refused) == (SEQUENCE, 1, 0)


def test_frames_of_a_batch_over_zeromq_are_the_codes(document: dict[str, Any]) -> None:
    assert document["channels"]["zeromqBatches"]["address"].encode() == TOPIC
    assert [frame for frame in message(document, "zeromqBatch")["x-frames"] if isinstance(frame, str)] == [
        TOPIC.decode(), "batch",
    ]  # fmt: skip
    tags = [message(document, name)["x-frames"][1].encode() for name in ("zeromqAcknowledgement", "zeromqSnapshot")]
    assert tags == [ACK_TAG, SNAPSHOT_TAG]


def test_subjects_on_nats_are_the_codes(document: dict[str, Any]) -> None:
    producer = f"{PRODUCER:016x}"
    address = {name: channel["address"] for name, channel in document["channels"].items() if channel["address"]}
    assert nats_requests.batch_subject("kv.events", PRODUCER) == address["natsBatches"].format(
        subject="kv.events", producer=producer
    )
    for named, spoken in ((PRODUCER, producer), (None, "all")):
        assert nats_requests.request_subject("kv.events", named) == address["natsRequests"].format(
            subject="kv.events", producer=spoken
        )
    assert nats_requests.batch_subject(subject_of("s"), PRODUCER) == address["jetstreamBatches"].format(
        stream="s", producer=producer
    )
    assert document["components"]["parameters"]["producer"]["examples"] == [producer]
    assert document["servers"]["nats"]["host"].endswith(f":{NATS_PORT}")


def test_headers_on_nats_are_the_codes(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for sequence in (0, RESEND_END):
        headers = nats_requests.batch_headers(PRODUCER, EPOCH, sequence)
        jsonschema.Draft7Validator(schemas["batchHeaders"]).validate(headers)
        assert set(headers) == set(schemas["batchHeaders"]["required"])
    assert str(RESEND_END) in schemas["batchHeaders"]["properties"]["Kv-Sequence"]["description"]
    ((name, request),) = schemas["requestHeaders"]["properties"].items()
    assert (name, request["enum"]) == (nats_requests.REQUEST_HEADER, list(nats_requests.RequestKind))


def test_requests_as_documented_are_what_a_publisher_on_nats_understands(document: dict[str, Any]) -> None:
    peer = "_INBOX.1"
    read = {
        name: nats_requests.read_request(
            message(document, name)["x-request"], packed(message(document, name)["x-body"]), peer
        )
        for name in ("natsResend", "natsAck", "natsSnapshot")
    }
    assert read == {
        "natsResend": Ask(peer.encode(), SEQUENCE),
        "natsAck": Acknowledgement(peer.encode(), PRODUCER, EPOCH, SEQUENCE),
        "natsSnapshot": SnapshotAsk(peer.encode(), PRODUCER, EPOCH),
    }
    assert message(document, "natsWho")["x-request"] == nats_requests.RequestKind.WHO
    assert nats_requests.read_who_reply(packed(message(document, "natsEpoch")["x-body"])) == EPOCH


def test_batch_in_a_real_stream_has_the_subject_and_headers_described(document: dict[str, Any], tmp_path: Path) -> None:
    async def stored() -> tuple[str, dict[str, str], bytes]:
        client = await nats.connect(server.url(""))
        message = await client.jetstream().get_msg("events", seq=1)
        await client.close()
        assert message.subject is not None
        return message.subject, dict(message.headers or {}), message.data or b""

    with (
        nats_server(tmp_path, jetstream=True) as server,
        closing(open_publisher(server.url("events", "jetstream"), producer=PRODUCER, epoch=EPOCH)) as publisher,
    ):
        publisher.publish_lost("one batch to look at")
        publisher.flush()
        publisher.close()
        subject, headers, payload = asyncio.run(stored())
    described = message(document, "jetstreamBatch")["headers"] | {"components": document["components"]}
    jsonschema.Draft7Validator(described).validate(headers)
    address = document["channels"]["jetstreamBatches"]["address"]
    assert subject == address.format(stream="events", producer=f"{PRODUCER:016x}")
    schemas = document["components"]["schemas"]
    assert set(headers) == {*schemas["batchHeaders"]["required"], *schemas["deduplication"]["required"]}
    assert wire.decode(payload).sequence == SEQUENCE


def test_duplicate_window_of_the_stream_is_as_said(document: dict[str, Any]) -> None:
    said = document["components"]["schemas"]["deduplication"]["properties"]["Nats-Msg-Id"]["description"]
    assert "within two minutes" in said
    assert stream_config("s", StreamOptions()).duplicate_window == DUPLICATE_WINDOW_S == 120
