"""vLLM's KV events, 0.9 to 0.33: arrays and maps, integer and byte hashes. Traps: reference on foreign streams.

The engine may hold several copies of one block, so its records ask for the counting rule.
"""

from __future__ import annotations

from typing import Final

from event_plane.dialects.block_events import CLEARED, REMOVED, STORED, BlockEventDialect, Flavour
from event_plane.schema import Namespace, RecordFlag, Tier

HASH_SCHEME: Final = "vllm"

# Order of the fields while events are arrays; each release appended to it.
FIELDS: Final[dict[str, tuple[str, ...]]] = {
    STORED: (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
        "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership", "session_id",
        "lookahead_token_ids",
    ),
    REMOVED: ("block_hashes", "medium", "group_idx", "locality", "ownership"),
    CLEARED: (),
}  # fmt: skip

TIERS: Final[dict[str, Tier]] = {
    "GPU": Tier.G1,
    "CPU": Tier.G2,
    "STORAGE": Tier.G3,
    "FS": Tier.G3,
    "DISK": Tier.G3,
    "OBJ": Tier.G4,
    "EXTERNAL": Tier.G4,
}

FLAVOUR: Final = Flavour(
    name=HASH_SCHEME,
    title="vLLM",
    flags=RecordFlag.COUNTED,
    tiers=TIERS,
    stored=FIELDS[STORED],
    removed=FIELDS[REMOVED],
    extra=("lora_id", "lora_name", "extra_keys"),
)


class VllmDialect(BlockEventDialect):
    """See `Dialect`."""

    def __init__(self, *, namespace: Namespace, hash_root_shared: bool = False) -> None:
        """`namespace` as configured; `hash_root_shared`: its epochs share one namespace (`columns.NamespaceRule`)."""
        super().__init__(FLAVOUR, namespace=namespace, hash_root_shared=hash_root_shared)
