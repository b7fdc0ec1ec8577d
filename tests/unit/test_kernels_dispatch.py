"""Which implementation works on which device, and that docs/kernels.md names every operation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kernels
from kernels import cpu, dispatch, reference

GPU = torch.device("cuda", 0)


def test_the_cpu_has_kernels_of_its_own_and_other_devices_plain_torch() -> None:
    assert dispatch.implementation_for(torch.device("cpu")) is cpu
    assert dispatch.implementation_for(torch.device("meta")) is reference


def test_a_gpu_has_triton_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = cpu  # stands for kernels.triton_launch, which is not imported where its interpreter may be wanted
    monkeypatch.setattr(dispatch, "_triton", lambda: launch)
    assert dispatch.implementation_for(GPU) is launch
    monkeypatch.setattr(dispatch, "_triton", lambda: None)
    assert dispatch.implementation_for(GPU) is reference


@pytest.mark.parametrize(("capability", "wanted"), [((8, 0), reference), ((8, 9), cpu), ((9, 0), cpu)])
def test_a_gpu_that_cannot_convert_to_fp8_leaves_that_to_torch(
    capability: tuple[int, int], wanted: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_triton", lambda: cpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert dispatch.implementation_for(GPU, fp8=True) is wanted
    assert dispatch.implementation_for(GPU) is cpu


def test_the_page_names_every_operation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
    operations = [name for name in kernels.__all__ if name.endswith("_blocks")]
    assert operations
    assert [name for name in operations if f"`{name}(" not in page] == []
