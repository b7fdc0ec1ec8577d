"""Writes the OpenAPI document of an app with all its parts, for `make client`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sample_parts import sample_parts

from advisor.api.app import create_app


def write_document(path: Path) -> None:
    document = create_app(sample_parts()).openapi()
    for methods in document["paths"].values():
        for about in methods.values():
            # With it, the generator makes functions that take no client without a token.
            del about["security"]
    path.write_text(json.dumps(document), "utf-8")


if __name__ == "__main__":
    write_document(Path(sys.argv[1]))
