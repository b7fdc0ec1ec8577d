"""How the kernels are compiled: the only file that knows numba's options, its cache and its intrinsics.

With `NUMBA_DISABLE_JIT=1` everything here is the identity and the kernels run as plain Python.

Two options are private to numba: `_nrt=False` (no reference counting; kernels allocate nothing) took a batch from 84 to
38 ns a record when measured, and the cache's source stamp, which otherwise covers a kernel's own file and not the
helpers that it calls from others. Where a release of numba lacks either, the kernels work without.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core import types

F = TypeVar("F", bound=Callable[..., Any])

_CACHES: list[Any] = []
"""numba's cache of each kernel that has one."""
_KERNELS: list[Any] = []

INTERPRETED = bool(numba.config.DISABLE_JIT)  # type: ignore[attr-defined]


_HERE = Path(__file__).parent
_OTHER_ROOMS = ("caches", "tiers", "policies/rules")
"""Whose kernels call each other's helpers, and the index's."""


@cache
def _sources_digest(*folders: Path) -> str:
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def stamp_of(function: Callable[..., Any]) -> str:
    """Of all files that what `function` compiles to can come from: the index's own kernels call nothing outside."""
    room = Path(function.__code__.co_filename).parent
    if room == _HERE:
        return _sources_digest(_HERE)
    return _sources_digest(*sorted({_HERE, room, *(_HERE.parent / other for other in _OTHER_ROOMS)}))


def _compiled(function: F, **options: Any) -> Any:
    njit: Any = numba.njit
    try:
        return njit(nogil=True, _nrt=False, **options)(function)
    except KeyError:
        return njit(nogil=True, **options)(function)


def cache_folder() -> Path | None:
    """Where compiled kernels are kept: beside the sources, else in numba's folder of the user; None: nowhere."""
    return Path(_CACHES[0].cache_path) if _CACHES else None


def has_compiled() -> bool:
    """Whether a kernel was not found in the cache, in this process so far."""
    return any(sum(made.stats.cache_misses.values()) for made in _KERNELS)


def inlined(function: F) -> F:
    """A small helper, merged into its callers by LLVM."""
    if INTERPRETED:
        return function
    made: F = _compiled(function, forceinline=True, no_cpython_wrapper=True)
    return made


def rule(function: F) -> F:
    """A small function of numbers that Python calls as well as kernels, which merge it into themselves."""
    if INTERPRETED:
        return function
    made: F = _compiled(function, forceinline=True)
    return made


def routine(function: F) -> F:
    """A helper that stays a call of its own: what is rare or long."""
    if INTERPRETED:
        return function
    made: F = _compiled(function, no_cpython_wrapper=True)
    return made


def kernel(function: F) -> F:
    """What Python calls: releases the GIL, compiled at the first call, kept in numba's cache folder.

    Where no cache folder can be written, it is compiled in memory at each start.
    """
    if INTERPRETED:
        return function
    made = _compiled(function)
    _KERNELS.append(made)
    try:
        made.enable_caching()
    except RuntimeError:
        return _typed(function, made)
    kept = getattr(made, "_cache", None)
    if kept is not None and hasattr(kept, "_cache_file"):
        _CACHES.append(kept)
        kept._cache_file._source_stamp = stamp_of(function)
        kept.save_overload = _saving_if_possible(kept.save_overload)
    return _typed(function, made)


def _typed(function: F, made: Any) -> F:
    typed: F = made
    return typed


def _saving_if_possible(save: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def save_overload(signature: Any, result: Any) -> None:
        try:
            save(signature, result)
        except OSError:
            # A full or read-only disk costs the next start its compile time, and this one nothing.
            return

    return save_overload


if INTERPRETED:

    def prefetch(array: Any, index: Any) -> None:
        """Nothing to fetch ahead in plain Python."""

else:
    from llvmlite import ir
    from numba.core import cgutils
    from numba.extending import intrinsic

    @intrinsic
    def prefetch(_typing: Any, array: Any, index: Any) -> Any:
        """Ask for the cache line where `array[index]` starts. Any index is allowed; nothing is read."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            view = context.make_array(signature.args[0])(context, builder, arguments[0])
            address = builder.bitcast(builder.gep(view.data, [arguments[1]]), ir.IntType(8).as_pointer())
            word = ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [address.type, word, word, word])
            ask: Any = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")  # type: ignore[no-untyped-call]
            builder.call(ask, [address, word(1), word(3), word(1)])  # for writing, keep close, data
            return context.get_dummy_value()

        return types.void(array, types.intp), generate
