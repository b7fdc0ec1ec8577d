"""Errors of the storage agent: each says what was wrong, with which value, and what to do."""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.MsgspecError, RecursionError)
"""What msgspec raises on bytes that are not what they should be; the second where values are nested too deep."""


class StorageAgentError(Exception):
    """Base of everything this room raises. `exit_status` is what a command line ends with."""

    exit_status = 2


class VolumeError(StorageAgentError):
    """A volume that cannot be registered, opened or closed as asked."""


class FieldFault(msgspec.Struct, frozen=True):
    """What is wrong with one field of a descriptor, and what to do."""

    field: str
    """A dotted path in it: `options.inner`; empty: the whole."""
    value: str
    """As Python shows it, cut; empty where it was left out, or may be a secret."""
    remedy: str


class DescriptorError(VolumeError):
    """A descriptor that no agent of these settings can take, whatever else is there."""

    def __init__(self, reason: str, fault: FieldFault) -> None:
        super().__init__(reason)
        self.fault = fault


class NotTheOwner(VolumeError):
    """Asked of a client of the agent: what only the agent that owns the volume does."""


class BlockFormatError(StorageAgentError):
    """A page of a volume that is not what it should be, or facts that no page can hold."""


class ShardError(StorageAgentError):
    """A layout or a split into shards that does not add up, or a slice that cannot be cut from what is stored."""


class CorruptBlock(StorageAgentError):
    """A block whose bytes on the volume are not those that were put. Its copy is freed; the block is a miss."""


class SlotStateError(StorageAgentError):
    """A slot was asked for a step that `slot_table.TRANSITIONS` does not allow. Nothing was changed."""


class TransferError(StorageAgentError):
    """A NIXL transfer that did not end well.

    `in_doubt`: bytes may still be written later (a deadline passed), so the places it named must not be used again
    until the file is opened anew. False: nothing of it is under way any more.
    """

    def __init__(self, message: str, *, in_doubt: bool = False) -> None:
        super().__init__(message)
        self.in_doubt = in_doubt


class ConfigError(StorageAgentError):
    """Agent settings that cannot be read; names the file and the key."""


class ServiceError(StorageAgentError):
    """The command socket cannot be opened as asked."""


class AgentUnreachable(StorageAgentError):
    """The agent did not answer in time. A command may still have run: ask again with the same command id."""


class CommandRefused(StorageAgentError):
    """The agent answered that it will not run the command, and why."""


class LeaseError(StorageAgentError):
    """A step on a lease that it does not allow: another client has the shard, or the lease has run out."""


class TermError(CommandRefused):
    """A term that is none, or the file of the newest one cannot be read."""


class RefusalError(CommandRefused):
    """Tenants that cannot be refused as asked, or the file of those that are cannot be read."""


class StaleTerm(CommandRefused):
    """The command is of an older term than one that was carried out: another advisor has taken over."""
