"""Whether a backend of NIXL's really moves a GPU's memory to a file and back. Run as a process: a plugin may abort.

`python -m storage_agent.gpu_direct_proof FOLDER` prints one JSON object on its last line: why each backend does not
serve, in the order of preference, or `""` for the one that does, which is the last.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from storage_agent.block_header import PAGE_BYTES
from storage_agent.errors import TransferError
from storage_agent.files import read_page
from storage_agent.nixl_memory import HOST_MEMORY, MemoryPlace, MemoryRegion
from storage_agent.nixl_spans import NixlSpans

if TYPE_CHECKING:
    import torch

BACKENDS = ("GDS_MT", "GDS")
DEADLINE_S = 10.0


def fault_of(backend: str, parameters: Mapping[str, str], device: torch.device, folder: Path) -> str:
    """Why `backend` does not move a page from `device` to a file in `folder` and back; '' where it does."""
    import torch  # here, for it takes seconds, and agents have no other use for it

    place = MemoryPlace("VRAM", device.index or 0) if device.type == "cuda" else HOST_MEMORY
    bytes_of_two = (torch.arange(2 * PAGE_BYTES, device=device) % 251).to(torch.uint8)
    page = bytes_of_two[-bytes_of_two.data_ptr() % PAGE_BYTES :][:PAGE_BYTES]  # O_DIRECT wants a page boundary
    expected = bytes(page.cpu().numpy())
    span = MemoryRegion(page.data_ptr(), PAGE_BYTES, place)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            fd = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDWR | _direct(file.fileno()))
            try:
                os.ftruncate(fd, PAGE_BYTES)
                spans = NixlSpans("proof", backend, parameters, [span], fd, PAGE_BYTES, deadline_s=DEADLINE_S)
                spans.write([span], [0])
                if read_page(fd, 0) != expected:
                    return "what it wrote is not what was in the memory"
                page.zero_()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                spans.read([span], [0])
                if bytes(page.cpu().numpy()) != expected:
                    return "what it read is not what is in the file"
                spans.close()
            finally:
                os.close(fd)
    except TransferError as error:
        return str(error)
    except OSError as error:
        return f"no file to try it on in {folder}: {error.strerror}"
    return ""


def _direct(fd: int) -> int:
    """O_DIRECT where the file system takes it."""
    try:
        os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_DIRECT))
    except OSError:
        return 0
    return os.O_DIRECT


def _main(folder: Path) -> None:
    import torch

    faults: dict[str, str] = {}
    if not torch.cuda.is_available():
        faults = dict.fromkeys(BACKENDS, "PyTorch finds no GPU")
    for backend in BACKENDS if not faults else ():
        faults[backend] = fault_of(backend, {}, torch.device("cuda", 0), folder)
        if not faults[backend]:
            break
    sys.stdout.write(msgspec.json.encode(faults).decode() + "\n")
    sys.stdout.flush()
    os._exit(0)  # a plugin that does not end well must not spoil what was found


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
