"""How far the model is: the rule by which transfers wait for an iteration or a layer. Pure."""

from __future__ import annotations

from typing import NamedTuple

from kvbm_core.errors import ProgressError

WHOLE_ITERATION = -1


class Gate(NamedTuple):
    """Passed once the model has finished `layer` of its `iteration`-th iteration, or all of it. 0: always passed."""

    iteration: int
    layer: int = WHOLE_ITERATION


NO_GATE = Gate(0)


class ModelProgress(NamedTuple):
    """Iterations are counted from 1. `layers_done`: the layers of the iteration under way that have finished."""

    layers: int
    iteration: int = 0
    is_running: bool = False
    layers_done: int = 0

    def passed(self, gate: Gate) -> bool:
        """Whether the model is past `gate`."""
        if gate.iteration != self.iteration or not self.is_running:
            return gate.iteration <= self.iteration
        return gate.layer != WHOLE_ITERATION and gate.layer < self.layers_done

    def gate(self) -> Gate:
        """Passed at the end of the iteration under way; `NO_GATE` between iterations."""
        return Gate(self.iteration) if self.is_running else NO_GATE

    def began(self) -> ModelProgress:
        """An iteration has begun. Raises `ProgressError` where one is under way."""
        if self.is_running:
            raise ProgressError(f"iteration {self.iteration} is under way: call end_iteration first")
        return ModelProgress(self.layers, self.iteration + 1, is_running=True)

    def layer_ended(self, layer: int) -> ModelProgress:
        """A layer of the iteration has finished. Raises `ProgressError` unless it is the next one."""
        if not self.is_running:
            raise ProgressError(f"layer {layer} is done but no iteration is under way: call begin_iteration first")
        if layer != self.layers_done or layer >= self.layers:
            raise ProgressError(
                f"layer {layer} is done, but {self.layers_done} of {self.layers} layers were: report them in order"
            )
        return self._replace(layers_done=layer + 1)

    def ended(self) -> ModelProgress:
        """The iteration is over, whatever layers were told of. Raises `ProgressError` where none is under way."""
        if not self.is_running:
            raise ProgressError("no iteration is under way: call begin_iteration first")
        return self._replace(is_running=False)
