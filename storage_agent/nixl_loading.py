"""NIXL's bindings, loaded when first needed, and what every backend's use of them shares."""

from __future__ import annotations

import ctypes
import importlib
import itertools
import os
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, NamedTuple

from storage_agent.errors import TransferError


class Nixl(NamedTuple):
    """`module`: the bindings. `errors`: what their calls raise. `release`: empty where they were built from source."""

    module: ModuleType
    errors: tuple[type[Exception], ...]
    release: str


_INFINIBAND = "/sys/class/infiniband"
_RELEASE_MIN = (1, 5)
_loaded: Nixl | None = None
_agent_numbers = itertools.count()


def load_nixl() -> Nixl:
    """Without the package `nixl`, which imports torch. Raises `TransferError` where there are no bindings."""
    global _loaded
    if _loaded is None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")  # it prints to stdout otherwise
        # A dead S3 endpoint is given up after 2 seconds, not 26.
        os.environ.setdefault("AWS_RETRY_MODE", "standard")
        os.environ.setdefault("AWS_MAX_ATTEMPTS", "3")
        reasons = []
        for name in binding_names(_cuda_of_torch()):
            try:
                release = require_release(name)
                module = importlib.import_module(name)
            except ImportError as error:
                reasons.append(f"{name}: {error}")
                continue
            bindings = vars(module._api.nixlBind).values()
            errors = tuple(b for b in bindings if isinstance(b, type) and issubclass(b, Exception))
            _loaded = Nixl(module, errors, release)
            break
        else:
            raise TransferError(f"NIXL cannot be loaded ({'; '.join(reasons)}); install nixl 1.5.1 or later")
    return _loaded


def require_release(name: str) -> str:
    """The release that is installed.

    Raises `ImportError` for one that says of a short read, or of a write on a full disk, that it is done.
    One of no release, built from source, is taken: ''.
    """
    try:
        release = version(name.replace("_", "-"))
    except PackageNotFoundError:
        return ""
    if tuple(int(part) for part in re.findall(r"\d+", release)[:2]) < _RELEASE_MIN:
        raise ImportError(f"release {release} says of failed transfers that they are done")
    return release


def binding_names(cuda: str) -> list[str]:
    """Packages in the order they are tried. `cuda`: the process's release of it, whose library a plugin must share."""
    return sorted(("nixl_cu12", "nixl_cu13"), key=lambda name: not cuda.startswith(name.removeprefix("nixl_cu")))


def _cuda_of_torch() -> str:
    """Of PyTorch, where the process has loaded it: nobody else has a GPU's memory here."""
    torch = sys.modules.get("torch")
    return "" if torch is None else torch.version.cuda or ""


def make_agent(nixl: Nixl, name: str) -> Any:
    """An agent without backends. Strict synchronisation: any other crashes with several threads."""
    module = nixl.module
    settings = module.nixl_agent_config(
        enable_prog_thread=False, backends=[], sync_mode=module.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    )
    return module.nixl_agent(name, settings)


def make_ucx_agent(nixl: Nixl, name: str) -> Any:
    """An agent with the UCX backend, under a name that nobody else has. Raises `TransferError`."""
    if not os.path.isdir(_INFINIBAND) or not os.listdir(_INFINIBAND):
        os.environ.setdefault("UCX_MODULES", "^ib")  # the process crashes at its end otherwise
    try:
        # Not the pid alone: it is the same in many containers, and NIXL tells agents apart by name.
        agent = make_agent(nixl, f"{name}-{os.getpid()}-{next(_agent_numbers)}-{os.urandom(4).hex()}")
        agent.create_backend("UCX", {})
    except nixl.errors as error:
        raise TransferError(f"{name}: NIXL's UCX backend does not start: {error}") from error
    return agent


def keep_for_ever(*in_flight: Any) -> None:
    """Keep what may still be written to until the process ends, past the interpreter's own clean-up."""
    for kept in in_flight:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
