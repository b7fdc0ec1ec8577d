"""What every answer tells browsers, so that a page of ours does nothing that is not ours."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders

CONTENT_POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)
"""Of what may be in a page, unless its route has set another: the report of a replay alone does."""
SAFETY_HEADERS = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Not no-referrer: with that a browser sends `Origin: null` with our own forms, which tells nothing.
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}
TRANSPORT_SECURITY = "max-age=31536000"
"""A year. Not for subdomains, nor to be preloaded: the host's other services are not ours to decide about."""


def add_safety_headers(headers: MutableHeaders, *, secure: bool = False) -> None:
    """`secure`: browsers came over TLS, and are to come so from now on."""
    for name, value in SAFETY_HEADERS.items():
        headers[name] = value
    headers.setdefault("Content-Security-Policy", CONTENT_POLICY)
    if secure:
        headers["Strict-Transport-Security"] = TRANSPORT_SECURITY
    # A figure kept by a cache is a wrong figure; files are asked for again with their ETag.
    headers.setdefault("Cache-Control", "no-cache")
