"""Errors of the block manager: each says what was wrong, with which value, and what to do."""

from __future__ import annotations


class KvbmError(Exception):
    """Base of everything this room raises. `exit_status` is what a command line ends with."""

    exit_status = 2


class ConfigError(KvbmError, ValueError):
    """A configuration that cannot work; names the number to change."""


class BlockStateError(KvbmError):
    """A step that the block's state does not allow. Nothing changed: its guard still holds the block."""


class PoolExhaustedError(KvbmError):
    """More blocks were asked for than are reset or inactive. Nothing was taken and nothing evicted."""


class TensorAllocationError(KvbmError):
    """The memory for a pool could not be had."""
