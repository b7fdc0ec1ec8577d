"""The index: blocks, their prefix tree, and where they are placed. Pure data structure; the fold is its only writer."""

from advisor.index.block_index import Block, BlockIndex, Key, Place, PlaceKey

__all__ = ["Block", "BlockIndex", "Key", "Place", "PlaceKey"]
