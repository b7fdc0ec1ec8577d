"""Spans reach a receiver of OpenTelemetry's protocol over HTTP."""

from __future__ import annotations

import gzip
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from advisor.service import AdvisorService
from advisor.settings import AdvisorSettings, TracesSettings
from advisor.tracing import TracingMissing, open_tracing


class Receiver:
    """Keeps every span that it is sent, by name: its attributes."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, dict[str, object]]] = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        for span in scope.spans:
                            values = ((each.key, each.value) for each in span.attributes)
                            facts = {key: getattr(value, value.WhichOneof("value")) for key, value in values}
                            spans.append((span.name, facts))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self.server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    opened = Receiver()
    yield opened
    opened.close()


def test_commits_and_folds_of_a_service_are_traced(receiver: Receiver, tmp_path: Path) -> None:
    traces = TracesSettings(enabled=True, endpoint=receiver.endpoint)
    settings = AdvisorSettings(directory=tmp_path / "advisor", tick_interval_s=0.05, traces=traces)
    with AdvisorService(settings) as service:
        while service.fold.position < 5:
            service.stopping.wait(0.05)
    names = {name for name, _ in receiver.spans}
    assert names == {"commit", "fold"}
    positions = [facts["kvadvisor.position"] for name, facts in receiver.spans if name == "commit"]
    assert positions[:3] == [2, 3, 4]


def test_without_the_extra_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(TracingMissing, match=r"pip install 'kvadvisor\[otel\]'"):
        open_tracing("", "0")
