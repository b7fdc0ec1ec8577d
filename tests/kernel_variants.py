"""A plugin with the fixture `device`: kernel tests run with the CPU's kernels, the reference, and Triton.

Triton runs on the GPU where there is one, else in its interpreter on the CPU. Test modules name the plugin themselves
and need no conftest, so that they run from a bare checkout on a machine with a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from kernels import dispatch, reference

TORCH_OF_TRITON = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
}
BITS_OF_SIZE = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@pytest.fixture(params=["cpu", "reference", "triton"])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where the tensors of a test lie; its kernels are those of the variant."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "cpu":
            yield torch.device("cpu")
        elif request.param == "reference":
            patch.setattr(dispatch, "implementation_for", lambda device, *, fp8=False: reference)
            yield torch.device("cuda" if torch.cuda.is_available() else "cpu")
        elif torch.cuda.is_available():
            pytest.importorskip("triton")
            yield torch.device("cuda", torch.cuda.current_device())
        else:
            launch = _interpreted(patch)
            patch.setattr(dispatch, "implementation_for", lambda device, *, fp8=False: launch)
            yield torch.device("cpu")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Triton's implementation itself, for what the public operations refuse before it."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, and tests/device looks at this on it")
    return _interpreted(monkeypatch)


def _interpreted(patch: pytest.MonkeyPatch) -> ModuleType:
    """`kernels.triton_launch` for tensors on the CPU. Works only if nothing imported Triton before to compile."""
    patch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton")
    from triton.runtime import interpreter

    from kernels import triton_launch

    # Of release 3.7, it loses the carry when it rounds, and truncates to bfloat16, which no GPU does.
    patch.setattr(interpreter, "_convert_float", convert_as_torch)
    return triton_launch


def convert_as_torch(bits: np.ndarray[Any, Any], source: Any, target: Any, rounding: Any) -> np.ndarray[Any, Any]:
    """What the interpreter's `_convert_float` should do: to nearest, ties to even."""
    wide = torch.from_numpy(np.ascontiguousarray(bits).view(np.uint8)).view(TORCH_OF_TRITON[str(source)])
    converted = wide.to(TORCH_OF_TRITON[str(target)])
    return converted.view(torch.uint8).numpy().view(BITS_OF_SIZE[converted.element_size()]).reshape(bits.shape)
