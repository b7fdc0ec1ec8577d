"""The machine that a scenario's time is reckoned for. Pure: virtual seconds out of tokens and bytes."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Source(StrEnum):
    """Where a block of a prompt was."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"


class LoadRate(msgspec.Struct, frozen=True):
    """One way toward the device: seconds of each call, and bytes/s of what it carries."""

    call_s: float
    bytes_s: float

    def seconds(self, moved_bytes: int) -> float:
        return self.call_s + moved_bytes / self.bytes_s


class MachineModel(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that prefills one prompt after another, beside the answers of those before.

    An 8-billion-parameter model (32 layers, 8 key-value heads of 128, 2 bytes) on a GPU with PCIe 4, one NVMe and a
    remote store over 25 Gbit/s. `block_bytes` are the model's, of `page_tokens` tokens; those that a scenario really
    moves are smaller.
    """

    prefill_tokens_per_s: float = 10_000.0
    answer_tokens_per_s: float = 50.0
    """Of each answer, however many are under way."""
    page_tokens: int = 64
    block_bytes: int = 8 * 1024 * 1024
    host: LoadRate = LoadRate(call_s=0.000_05, bytes_s=25e9)
    disk: LoadRate = LoadRate(call_s=0.000_2, bytes_s=5e9)
    remote: LoadRate = LoadRate(call_s=0.01, bytes_s=3e9)

    def prefill_s(self, tokens: int) -> float:
        """To compute so many tokens of a prompt. The last one is always computed, whatever was found."""
        return max(tokens, 1) / self.prefill_tokens_per_s

    def answer_s(self, tokens: int) -> float:
        """From an answer's first token to its last."""
        return tokens / self.answer_tokens_per_s

    def load_s(self, source: Source, blocks: int) -> float:
        """To bring blocks to the device by one call, which costs its time also where it brings none."""
        moved_bytes = blocks * self.block_bytes
        match source:
            case Source.DEVICE:
                return 0.0
            case Source.HOST:
                return self.host.seconds(moved_bytes)
            case Source.DISK:
                return self.disk.seconds(moved_bytes) + self.host.seconds(moved_bytes)
            case Source.REMOTE:
                return self.remote.seconds(moved_bytes) + self.host.seconds(moved_bytes)
