"""The interfaces of engines that we implement, as their releases have them: recorded, and compared with our classes.

    python -m tests.engine_interfaces PACKAGE RELEASE FOLDER

reads the sources of one package under FOLDER (an unpacked wheel, or a checkout) and records them in the table.
"""

from __future__ import annotations

import ast
import inspect
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

TABLE = Path(__file__).with_name("engine_interfaces.json")

SOURCES = {
    "sglang": {
        "sglang/srt/mem_cache/hicache_storage.py": [
            "HiCacheStorage", "HiCacheStorageConfig", "PoolHitPolicy", "PoolTransfer", "PoolTransferResult",
        ],
        "sglang/srt/observability/metrics_collector.py": ["StorageMetrics"],
        "sglang/srt/disaggregation/kv_events.py": ["BlockStored", "BlockRemoved", "StorageMedium"],
    },
    "tensorrt_llm": {
        "tensorrt_llm/_torch/pyexecutor/kv_cache_connector.py": [
            "KvCacheConnectorScheduler", "KvCacheConnectorWorker", "RequestData", "SchedulerOutput",
        ]
    },
    "vllm": {
        "vllm/v1/kv_offload/tiering/base.py": ["SecondaryTierManager", "TransferJob", "JobResult"],
        "vllm/distributed/kv_events.py": ["BlockStored", "BlockRemoved"],
    },
}  # fmt: skip
"""Package → file → classes."""

Parameter = tuple[str, bool]
"""Name, with `*` or `**` before it; whether it may be left out."""


class Method(msgspec.Struct, frozen=True):
    parameters: list[Parameter]
    """Without `self`; keyword-only ones after `*`."""
    abstract: bool = False


class Interface(msgspec.Struct, frozen=True):
    methods: dict[str, Method]
    fields: list[str] = []
    """Of a dataclass or struct."""
    values: list[str] = []
    """Texts of an enumeration."""


class Release(msgspec.Struct, frozen=True):
    release: str
    classes: dict[str, Interface]


def recorded() -> dict[str, Release]:
    return msgspec.json.decode(TABLE.read_bytes(), type=dict[str, Release])


def installed(package: str) -> dict[str, Interface] | None:
    """What the package in this environment has; None where there is none. Imports nothing of it."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return None
    return read_sources(package, Path(spec.origin).parent.parent)


def read_sources(package: str, folder: Path) -> dict[str, Interface]:
    found: dict[str, Interface] = {}
    for path, names in SOURCES[package].items():
        for node in ast.parse((folder / path).read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name in names:
                found[node.name] = interface_of(node)
    return found


def of_class(kind: type) -> dict[str, Method]:
    """The methods of one of our classes, its bases' too."""
    return {
        name: Method([*_signature(inspect.signature(method))])
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") or name == "__init__"
    }


def interface_of(node: ast.ClassDef) -> Interface:
    """Public methods and `__init__`; no properties."""
    methods = {}
    fields = []
    values = []
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and (not part.name.startswith("_") or part.name == "__init__"):
            marks = {mark.id for mark in part.decorator_list if isinstance(mark, ast.Name)}
            if not marks & {"property", "classmethod", "staticmethod"}:
                methods[part.name] = Method(_arguments(part.args), "abstractmethod" in marks)
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            fields.append(part.target.id)
        elif isinstance(part, ast.Assign) and isinstance(part.value, ast.Constant):
            values.append(str(part.value.value))
    return Interface(methods, fields, values)


def _arguments(arguments: ast.arguments) -> list[Parameter]:
    plain = [*arguments.posonlyargs, *arguments.args]
    first_default = len(plain) - len(arguments.defaults)
    found = [(each.arg, number >= first_default) for number, each in enumerate(plain)][1:]
    if arguments.vararg is not None:
        found.append((f"*{arguments.vararg.arg}", True))
    elif arguments.kwonlyargs:
        found.append(("*", True))
    found += [
        (each.arg, default is not None)
        for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg is not None:
        found.append((f"**{arguments.kwarg.arg}", True))
    return found


def _signature(signature: inspect.Signature) -> list[Parameter]:
    found: list[Parameter] = []
    starred = False
    for each in [*signature.parameters.values()][1:]:
        may_be_left_out = each.default is not inspect.Parameter.empty
        if each.kind is inspect.Parameter.VAR_POSITIONAL:
            found.append((f"*{each.name}", True))
            starred = True
        elif each.kind is inspect.Parameter.VAR_KEYWORD:
            found.append((f"**{each.name}", True))
        else:
            if each.kind is inspect.Parameter.KEYWORD_ONLY and not starred:
                found.append(("*", True))
                starred = True
            found.append((each.name, may_be_left_out))
    return found


def record(package: str, release: str, folder: Path) -> None:
    table: dict[str, Any] = msgspec.json.decode(TABLE.read_bytes()) if TABLE.exists() else {}
    table[package] = msgspec.to_builtins(Release(release, read_sources(package, folder)))
    TABLE.write_bytes(msgspec.json.format(msgspec.json.encode(table, order="sorted"), indent=1) + b"\n")


if __name__ == "__main__":
    record(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
