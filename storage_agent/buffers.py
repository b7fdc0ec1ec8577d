"""Callers' buffers that blocks are read into."""

from __future__ import annotations

from storage_agent.direct_memory import DirectSpan


def fill_buffer(buffer: object, payload: memoryview) -> str:
    """Copy `payload` to the start of `buffer`, or say why that cannot be; nothing is written then."""
    if not isinstance(buffer, (memoryview, DirectSpan)):
        return f"the buffer is of type {type(buffer).__name__}; give a memoryview of it"
    if buffer.nbytes < payload.nbytes:
        return f"the buffer has {buffer.nbytes} bytes, the block {payload.nbytes}"
    if isinstance(buffer, DirectSpan):
        try:
            buffer.fill(payload)
        except RuntimeError as error:  # of CUDA's: it is over with that GPU, and not with the volume
            return f"the device does not take the bytes: {error}"
        return ""
    if buffer.readonly or not buffer.c_contiguous:
        return "the buffer is not writable and contiguous"
    flat = buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")
    flat[: payload.nbytes] = payload
    return ""


def require_one_each(keys: int, buffers: int) -> None:
    """Raises `ValueError` unless there are as many buffers as keys."""
    if keys != buffers:
        raise ValueError(f"{keys} keys, {buffers} buffers: give one buffer a key")
