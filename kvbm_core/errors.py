"""Errors of the block manager: each says what was wrong, with which value, and what to do."""

from __future__ import annotations


class KvbmError(Exception):
    """Base of everything this room raises. `exit_status` is what a command line ends with."""

    exit_status = 2


class ConfigError(KvbmError, ValueError):
    """A configuration that cannot work; names the number to change."""


class BlockStateError(KvbmError):
    """A step that the block's state does not allow. Nothing changed: its guard still holds the block."""


class WrongIdentityError(KvbmError, ValueError):
    """A block was to be committed under an identity that is not that of its tokens. Its guard still holds it."""


class PoolExhaustedError(KvbmError):
    """More blocks were asked for than are reset or inactive. Nothing was taken and nothing evicted."""


class TensorAllocationError(KvbmError):
    """The memory for a pool could not be had."""


class TransferStateError(KvbmError):
    """A step that a transfer's state does not allow. Nothing changed."""


class TransferQueueFullError(KvbmError):
    """As many transfers wait on a path as its queue takes. Nothing was queued."""


class ProgressError(KvbmError):
    """The engine told of an iteration or a layer out of order. Nothing changed."""


class ExplainError(KvbmError):
    """Nobody who was asked knows the block, or none could be asked."""


class EngineSupportError(KvbmError):
    """An engine, or something it is configured with, that a connector does not serve; says who owns what, and what to
    change."""


class LookupStateError(KvbmError):
    """A step that the state of a request's lookup does not allow. Nothing changed."""


class ManagerClosedError(KvbmError):
    """The block manager was closed, or is that of the process this one was forked from: it moves nothing here."""

    def __init__(self) -> None:
        super().__init__("the block manager is closed, or was opened before this process was forked: open another one")


class BudgetError(KvbmError):
    """This machine cannot hold what the configuration asks for; names each number to change, and to what."""


class LayoutError(KvbmError):
    """A block, layer or layout that is not there, or layouts of which one cannot be read into the other."""


class LayoutFormatError(LayoutError):
    """Bytes that are no serialised layout, or one that cannot be true."""


class StorageClosedError(KvbmError):
    """Memory that was given back is asked for."""


class RemoteMemoryError(KvbmError):
    """Blocks in another worker's memory that cannot be read or written. Nothing of them may be used."""


class RemotePeerError(RemoteMemoryError):
    """The worker is gone, or does not answer in time."""


class RemoteWriteInDoubtError(RemotePeerError):
    """It was lost while it was written to: any of it may arrive still, so the owner keeps the block's memory."""


class RemoteBlockGoneError(RemoteMemoryError):
    """The owner took the block back, or it was never offered."""


class RemoteBlockDamagedError(RemoteMemoryError):
    """The bytes are not those that were offered or announced."""


class RemoteSealsExhaustedError(RemoteMemoryError):
    """More blocks are offered to peers at once than the registration has seals for. Nothing was offered."""


class ScenarioError(KvbmError):
    """A scenario that is not there, or whose figures cannot be written."""


class BenchError(KvbmError):
    """A measurement that did not move what it should have."""
