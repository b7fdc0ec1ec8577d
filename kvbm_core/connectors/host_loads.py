"""Copies of host blocks into the engine's, in a thread of their own; another checks the blocks meanwhile.

A block that is wrong is copied too, and told when its load ends: the engine computes it again, and nobody but its
request has it until then.
"""

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
    """The engine's blocks that got bytes which are not what they were when they came to the host."""
    failed: frozenset[int]
    """Those, and those of which the device did not take a copy."""


@dataclass(slots=True)
class _Batch:
    """Loads that are copied together: pairs of a host's and an engine's block."""

    loads: tuple[Load, ...]
    pairs: list[tuple[int, int]]
    wrong: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)
    """The engine's blocks of which the device did not take a copy."""
    layers: list[concurrent.futures.Future[None]] = field(default_factory=list)
    beside: list[concurrent.futures.Future[None]] = field(default_factory=list)

    @property
    def parts(self) -> list[concurrent.futures.Future[None]]:
        return [*self.beside, *self.layers]


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
        the host's blocks are what they should be."""
        self._host = host
        self._layers = layers
        self._right = right
        self._mode = mode
        self._copying = concurrent.futures.ThreadPoolExecutor(1, "kvbm-connector-load")
        self._checking = concurrent.futures.ThreadPoolExecutor(1, "kvbm-connector-load-check")
        self._batches: list[_Batch] = []

    def begin(self, loads: Sequence[Load]) -> None:
        """The host's blocks are held until the load has ended."""
        if not loads:
            return
        ready = recorded(self._layers[0])  # an earlier step may still read what was in these blocks
        for together in [tuple(loads)] if self._mode is LoadMode.LAYERWISE else [(load,) for load in loads]:
            pairs = [pair for load in together for pair in zip(load.host_blocks, load.engine_blocks, strict=True)]
            batch = _Batch(together, pairs)
            batch.beside = [self._checking.submit(self._check, batch), self._copying.submit(ready)]
            batch.layers = [self._copying.submit(self._copy, batch, layer) for layer in range(len(self._layers))]
            self._batches.append(batch)

    def wait_layer(self, layer: int) -> None:
        """Until a layer of everything that this step waits for is there."""
        if self._mode is LoadMode.LAYERWISE:
            for batch in self._batches:
                batch.layers[layer].result()

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
            for load in batch.loads:
                wrong = batch.wrong.intersection(load.engine_blocks)
                refused = batch.refused.intersection(load.engine_blocks)
                found.append(EndedLoad(load, frozenset(wrong), frozenset(wrong | refused)))
        return found

    def close(self) -> None:
        """What has not begun is left. Idempotent."""
        for threads in (self._copying, self._checking):
            threads.shutdown(wait=True, cancel_futures=True)

    def _check(self, batch: _Batch) -> None:
        right = self._right([host for host, _ in batch.pairs])
        batch.wrong.update(engine for (_, engine), is_right in zip(batch.pairs, right, strict=True) if not is_right)

    def _copy(self, batch: _Batch, layer: int) -> None:
        host, engine = [pair[0] for pair in batch.pairs], [pair[1] for pair in batch.pairs]
        try:
            copy_tensors(self._host[layer], host, self._layers[layer], engine)
            recorded(self._layers[layer])()
        except RuntimeError as error:  # what torch raises when a device fails
            _log.warning("blocks could not be copied to the engine", layer=layer, blocks=len(host), reason=str(error))
            batch.refused.update(engine)


def recorded(tensor: torch.Tensor) -> Callable[[], None]:
    """Waits for all that was queued on the tensor's device until now; at once where that is the CPU."""
    if tensor.device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensor.device))
    return event.synchronize
