"""The index: blocks, their prefix tree, and where they are placed. Pure data structure; the fold is its only writer."""

from advisor.index.array_index import INDEX_FULL, ORDERS, ArrayIndex
from advisor.index.errors import IndexDamaged, IndexFault, IndexFull
from advisor.index.keys import Key, PlaceKey
from advisor.index.layout import IndexSize
from advisor.index.views import BlockRow, PlacedIn

__all__ = [
    "INDEX_FULL",
    "ORDERS",
    "ArrayIndex",
    "BlockRow",
    "IndexDamaged",
    "IndexFault",
    "IndexFull",
    "IndexSize",
    "Key",
    "PlaceKey",
    "PlacedIn",
]
