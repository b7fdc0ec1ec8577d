"""What Triton's compiler makes of the kernels for a GPU of the H100's and H200's kind, which needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# Not imported here: in this process it may have to be imported for its interpreter.
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: install the test extra")

COMPILE = """
import json
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import triton_kernels

def instructions(kernel, pointers, constants, num_warps):
    signature = {}
    for parameter in kernel.params:
        name = parameter.name
        signature[name] = "constexpr" if name in constants else pointers.get(name) or parameter.annotation_type or "i64"
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, fixed, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    return made.asm["ptx"]

copy = {"WORD": tl.int32, "VECTOR": 4, "RUN_TILE": 4096, "A_TILE": 1, "B_TILE": 1, "BLOCK_TILE": 1,
        "SOURCE_TABLE": False, "TARGET_TABLE": False, "SOURCE_INDEXED": True, "TARGET_INDEXED": False,
        "target_ids": None}
group = {"UNIT": 16, "TOKEN_TILE": 16, "DIM_TILE": 128}
print(json.dumps({
    "gather": instructions(triton_kernels.copy_tiles, {"source_ids": "*i64"}, copy, 8),
    "checksum": instructions(triton_kernels.add_chunks, {"block_ids": "*i64", "keys": "*i64", "sums": "*i64"},
                             {"CHUNKS": 8, "ALIGNED": 16, "TAIL": False}, 1),
    "quantize": instructions(triton_kernels.quantize_groups, {"wide": "*bf16", "narrow": "*fp8e4nv", "scales": "*fp32"},
                             group, 4),
}))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """PTX of each kernel. Another process: here the interpreter may have taken the kernels' names already."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    script = tmp_path_factory.mktemp("compile") / "script.py"
    script.write_text(COMPILE)
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    ptx: dict[str, str] = json.loads(done.stdout)
    return ptx


def test_a_gather_moves_16_bytes_at_a_time_four_times_a_thread(compiled: dict[str, str]) -> None:
    assert compiled["gather"].count("ld.global.v4.b32") == 4
    assert compiled["gather"].count("st.global.v4.b32") == 4


def test_a_checksum_reads_16_bytes_at_a_time_and_no_warp_waits_for_another(compiled: dict[str, str]) -> None:
    assert compiled["checksum"].count("ld.global.v2.b64") >= 8
    assert "mad.wide.u32" in compiled["checksum"]
    assert "bar.sync" not in compiled["checksum"]


def test_quantising_reads_and_writes_16_bytes_and_rounds_in_hardware(compiled: dict[str, str]) -> None:
    assert "ld.global.v4.b32" in compiled["quantize"]
    assert "st.global.v4.b32" in compiled["quantize"]
    assert "cvt.rn.satfinite.e4m3x2.f32" in compiled["quantize"]
