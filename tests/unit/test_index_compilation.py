"""The kernels run as plain Python too, and no state of numba's cache folder stops them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from advisor.index import jit, order_kernels

ROOT = Path(__file__).resolve().parents[2]

LIST_CHILDREN = """
from advisor.index.array_index import ArrayIndex
from advisor.index.layout import IndexSize
from advisor.index import jit, order_kernels
index = ArrayIndex(IndexSize.for_blocks(10))
index.tables.blocks[0].first_child = -1
assert index.children(0) == ([], 0)
stats = getattr(order_kernels.children_of, "stats", None)
print(sum(stats.cache_misses.values()) if stats and stats.cache_path else "in memory", jit.has_compiled())
"""


def run(script: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=170,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(jit.INTERPRETED, reason="nothing is compiled with NUMBA_DISABLE_JIT=1")
def test_kernels_are_compiled_once_and_then_read_from_the_cache_folder(tmp_path: Path) -> None:
    assert run(LIST_CHILDREN, NUMBA_CACHE_DIR=str(tmp_path)) == "1 True"
    assert run(LIST_CHILDREN, NUMBA_CACHE_DIR=str(tmp_path)) == "0 False"


@pytest.mark.skipif(jit.INTERPRETED, reason="nothing is compiled with NUMBA_DISABLE_JIT=1")
def test_without_a_cache_folder_kernels_are_compiled_in_memory() -> None:
    only = {"NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator", "NUMBA_CACHE_DIR": "/proc/none"}
    assert run(LIST_CHILDREN, **only) == "in memory True"


@pytest.mark.skipif(jit.INTERPRETED, reason="nothing is compiled with NUMBA_DISABLE_JIT=1")
def test_cache_folder_that_fills_up_stops_nothing(tmp_path: Path) -> None:
    script = """
import errno, numba.core.caching as caching
def full(*_): raise OSError(errno.ENOSPC, "No space left on device")
caching.IndexDataCacheFile.save = full
"""
    assert run(script + LIST_CHILDREN, NUMBA_CACHE_DIR=str(tmp_path)) == "1 True"


def test_kernels_run_as_plain_python() -> None:
    if jit.INTERPRETED:
        assert not hasattr(order_kernels.children_of, "py_func")
        return
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/property/test_index_machine.py"],
        cwd=ROOT,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout


def test_a_kernel_is_compiled_again_when_a_helper_in_another_file_of_its_room_changed(tmp_path: Path) -> None:
    for room, text in (("one", "1"), ("two", "2")):
        (tmp_path / room).mkdir()
        (tmp_path / room / "kernel.py").write_text("def kernel(): pass")
        (tmp_path / room / "helper.py").write_text(text)

    def stamp(room: str) -> str:
        code = compile("def kernel(): pass", str(tmp_path / room / "kernel.py"), "exec")
        names: dict[str, Any] = {}
        exec(code, names)
        return jit.stamp_of(names["kernel"])

    assert stamp("one") != stamp("two")
