"""The index: blocks, their prefix tree, and where they are placed. Pure data structure; the fold is its only writer."""

from advisor.index.block_index import Block, BlockIndex, Place
from advisor.index.keys import Key, PlaceKey

__all__ = ["Block", "BlockIndex", "Key", "Place", "PlaceKey"]
