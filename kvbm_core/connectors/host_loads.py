"""Copies of host blocks into the engine's, in a thread of their own; each block is checked before it is copied."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import structlog
import torch

from kvbm_core.connectors.step_plan import Load, LoadMode
from kvbm_core.copies import copy_tensors

_log = structlog.get_logger()


class EndedLoad(NamedTuple):
    load: Load
    wrong: frozenset[int]
    """The engine's blocks that were not written, since the host's bytes were not what they were when they came."""
    failed: frozenset[int]
    """Those, and those of which the device did not take a copy."""


@dataclass(slots=True)
class _Batch:
    """Loads that are copied together: futures of the check and of each layer after it."""

    loads: tuple[Load, ...]
    good: list[tuple[int, int]] = field(default_factory=list)
    wrong: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    parts: list[concurrent.futures.Future[None]] = field(default_factory=list)


class HostLoads:
    """The worker's thread alone. `ASYNC`: each load ends by itself; `LAYERWISE`: a step's loads end with the step."""

    def __init__(
        self,
        host: Sequence[torch.Tensor],
        layers: Sequence[torch.Tensor],
        right: Callable[[Sequence[int]], list[bool]],
        mode: LoadMode,
    ) -> None:
        """`host` and `layers`: a tensor `[blocks, ...]` for each layer, of one shape a block. `right(places)`: which of
        the host's blocks may be copied."""
        self._host = host
        self._layers = layers
        self._right = right
        self._mode = mode
        self._copying = concurrent.futures.ThreadPoolExecutor(1, "kvbm-connector-load")
        self._batches: list[_Batch] = []

    def begin(self, loads: Sequence[Load]) -> None:
        """The host's blocks are held until the load has ended."""
        if not loads:
            return
        ready = recorded(self._layers[0])  # an earlier step may still read what was in these blocks
        for together in [tuple(loads)] if self._mode is LoadMode.LAYERWISE else [(load,) for load in loads]:
            batch = _Batch(together)
            batch.parts.append(self._copying.submit(self._check, batch, ready))
            batch.parts += [self._copying.submit(self._copy, batch, layer) for layer in range(len(self._layers))]
            self._batches.append(batch)

    def wait_layer(self, layer: int) -> None:
        """Until a layer of everything that this step waits for is there."""
        if self._mode is LoadMode.LAYERWISE:
            for batch in self._batches:
                batch.parts[layer + 1].result()

    def ended(self, wait_s: float = 0.0) -> list[EndedLoad]:
        """Loads that are over, each once; waits so long for the next, and for all of them where they are layerwise."""
        if self._batches:
            parts = [part for batch in self._batches for part in batch.parts]
            is_layerwise = self._mode is LoadMode.LAYERWISE
            concurrent.futures.wait(parts if is_layerwise else self._batches[0].parts, None if is_layerwise else wait_s)
        found: list[EndedLoad] = []
        while self._batches and all(part.done() for part in self._batches[0].parts):
            batch = self._batches.pop(0)
            for part in batch.parts:
                part.result()
            found += [
                EndedLoad(load, frozenset(batch.wrong & blocks), frozenset(batch.failed & blocks))
                for load, blocks in ((load, set(load.engine_blocks)) for load in batch.loads)
            ]
        return found

    def close(self) -> None:
        """What has not begun is left. Idempotent."""
        self._copying.shutdown(wait=True, cancel_futures=True)

    def _check(self, batch: _Batch, ready: Callable[[], None]) -> None:
        ready()
        pairs = [pair for load in batch.loads for pair in zip(load.host_blocks, load.engine_blocks, strict=True)]
        for pair, is_right in zip(pairs, self._right([host for host, _ in pairs]), strict=True):
            if is_right:
                batch.good.append(pair)
            else:
                batch.wrong.add(pair[1])
        batch.failed |= batch.wrong

    def _copy(self, batch: _Batch, layer: int) -> None:
        to = self._layers[layer]
        try:
            copy_tensors(self._host[layer], [host for host, _ in batch.good], to, [engine for _, engine in batch.good])
            recorded(to)()
        except RuntimeError as error:  # what torch raises when a device fails
            _log.warning(
                "blocks could not be copied to the engine", layer=layer, blocks=len(batch.good), reason=str(error)
            )
            batch.failed.update(engine for _, engine in batch.good)


def recorded(tensor: torch.Tensor) -> Callable[[], None]:
    """Waits for all that was queued on the tensor's device until now; at once where that is the CPU."""
    if tensor.device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensor.device))
    return event.synchronize
