"""The launches as they are made for an H100 or H200, up to the machine code, which needs no GPU."""

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

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class NoGpu:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


made, launch = [], JITFunction.run


def compile_only(kernel, *arguments, grid, warmup, **options):
    made.append(launch(kernel, *arguments, grid=grid, warmup=True, **options).asm["ptx"])


driver.set_active(NoGpu())
JITFunction.run = compile_only

from kernels import KvLayout, triton_launch

pool = torch.zeros(64, 4, 2, 16, 8, 128, dtype=torch.bfloat16)
ids = torch.tensor([3, 1, 2])
view = pool.permute(KvLayout.NHD.order(KvLayout.UNIVERSAL))
values = torch.empty(pool.shape, dtype=torch.float8_e4m3fn)
scales = torch.empty(64, 4, 2, 8)
grouped = pool.permute(KvLayout.NHD.order(KvLayout.HND)), values.permute(KvLayout.NHD.order(KvLayout.HND))
calls = {
    "gather": lambda: triton_launch.copy([pool], [torch.empty_like(pool[:3])], ids, None),
    "permute": lambda: triton_launch.copy([view], [torch.empty(view.shape, dtype=torch.bfloat16)], None, None),
    "checksum": lambda: triton_launch.checksum(pool, ids),
    "quantize": lambda: triton_launch.quantize(*grouped, scales),
    "dequantize": lambda: triton_launch.dequantize(grouped[1], scales, grouped[0]),
}
compiled = {}
for name, call in calls.items():
    # The second call finds the compiled kernel, and checks that what it was compiled with is unchanged.
    call()
    call()
    assert len(made) == 2 and made[0] == made[1]
    compiled[name] = made[0]
    made.clear()
print(json.dumps(compiled))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """PTX of each launch. Another process: here the interpreter may have taken the kernels' names already."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    script = tmp_path_factory.mktemp("compile") / "script.py"
    script.write_text(COMPILE)
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    ptx: dict[str, str] = json.loads(done.stdout)
    return ptx


@pytest.mark.parametrize("operation", ["gather", "permute"])
def test_a_copy_moves_16_bytes_at_a_time_four_times_a_thread(operation: str, compiled: dict[str, str]) -> None:
    assert compiled[operation].count("ld.global.v4.b32") == 4
    assert compiled[operation].count("st.global.v4.b32") == 4


def test_a_checksum_reads_16_bytes_at_a_time_and_no_warp_waits_for_another(compiled: dict[str, str]) -> None:
    assert compiled["checksum"].count("ld.global.v2.b64") >= 8
    assert "mad.wide.u32" in compiled["checksum"]
    assert "bar.sync" not in compiled["checksum"]


@pytest.mark.parametrize("operation", ["quantize", "dequantize"])
def test_fp8_is_read_and_written_16_bytes_at_a_time(operation: str, compiled: dict[str, str]) -> None:
    assert "ld.global.v4.b32" in compiled[operation]
    assert "st.global.v4.b32" in compiled[operation]


def test_quantising_rounds_in_hardware(compiled: dict[str, str]) -> None:
    assert "cvt.rn.satfinite.e4m3x2.f32" in compiled["quantize"]
