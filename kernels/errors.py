"""Errors of the kernels: each says what was wrong, with which value, and what to do."""

from __future__ import annotations


class KernelError(Exception):
    """Base of everything this room raises. `exit_status` is what a command line ends with."""

    exit_status = 2


class BlockIndexError(KernelError):
    """A block index outside its pool, or the same one twice where blocks are written."""


class ShapeError(KernelError):
    """Tensors that do not fit each other, or the operation, in shape, dtype or device."""
