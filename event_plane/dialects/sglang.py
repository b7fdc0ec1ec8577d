"""SGLang's KV events, 0.4.7 to 0.5.23: vLLM's frames with fields of its own.

Hashes are signed, token ids are pairs with speculative decoding, one event may carry many pages. A node split removes
and stores again what stays, so its records are a set: counting them would leave stale blocks.
"""

from __future__ import annotations

from typing import Final

from event_plane.dialects.block_events import BlockEventDialect, Flavour
from event_plane.schema import Namespace, Tier

FLAVOUR: Final = Flavour(
    name="sglang",
    title="SGLang",
    flags=0,
    tiers={
        "GPU": Tier.G1,
        "CPU_PINNED": Tier.G2,
        "CPU": Tier.G2,
        "DISK": Tier.G3,
        "EXTERNAL": Tier.G4,
    },
    stored=(
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "cache_salt", "session_id",
        "lora_name",
    ),
    removed=("block_hashes", "medium"),
    extra=("lora_id", "lora_name", "cache_salt"),
)  # fmt: skip


class SglangDialect(BlockEventDialect):
    """See `Dialect`."""

    def __init__(self, *, namespace: Namespace, hash_root_shared: bool = False) -> None:
        """`namespace` as configured; `hash_root_shared`: its epochs share one namespace (`columns.NamespaceRule`)."""
        super().__init__(FLAVOUR, namespace=namespace, hash_root_shared=hash_root_shared)
