"""Spans for OpenTelemetry, where the extra `otel` is installed and `[traces]` in the settings says so; else nothing.

Spans of the service: `commit` (entries, position), `fold` (entries, position), `command` (agent, phase, moves) and
`request` (method, route). No hash, key or tenant is an attribute of any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, Protocol

from advisor.errors import AdvisorError

Value = str | int | float | bool


class Open(Protocol):
    """A span that is under way."""

    def set(self, name: str, value: Value) -> None: ...


class Span(Protocol):
    """Opens a span of a name, with what is known at its begin."""

    def __call__(self, name: str, /, **attributes: Value) -> AbstractContextManager[Open]: ...


class _Nothing:
    def set(self, name: str, value: Value) -> None: ...


_NOTHING: Final = _Nothing()


def no_span(_name: str, /, **_attributes: Value) -> AbstractContextManager[Open]:
    """Where nothing is traced."""
    return nullcontext(_NOTHING)


class TracingMissing(AdvisorError):
    """Traces are asked for, and what makes them is not installed."""


def open_tracing(endpoint: str, version: str) -> tuple[Span, Callable[[], None]]:
    """A `Span` whose spans go to `endpoint` (OTLP over HTTP; empty: where `OTEL_EXPORTER_OTLP_ENDPOINT` says, else
    http://localhost:4318), in batches from a thread of its own, and what ends it. An endpoint that is away costs spans
    alone. Raises `TracingMissing`.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import Span as TelemetrySpan
    except ImportError as error:
        raise TracingMissing(
            f"traces.enabled is set and OpenTelemetry is not installed ({error}): pip install 'kvadvisor[otel]'"
        ) from error
    resource = Resource.create({"service.name": "kvadvisor", "service.version": version})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint or None)))
    tracer = provider.get_tracer("kvadvisor", version)

    class Traced:
        def __init__(self, span: TelemetrySpan) -> None:
            self._span = span

        def set(self, name: str, value: Value) -> None:
            self._span.set_attribute(f"kvadvisor.{name}", value)

    @contextmanager
    def span(name: str, /, **attributes: Value) -> Iterator[Open]:
        with tracer.start_as_current_span(name) as opened:
            traced = Traced(opened)
            for key, value in attributes.items():
                traced.set(key, value)
            yield traced

    return span, provider.shutdown
