"""Block table, prefix tree and recency order, in plain Python.

This is the skeleton's index: exact, small and slow (about 1 µs an operation, 1 KB a block). Its answers are the
contract of the array index of ARCHITECTURE.md section 6.

A *ghost* is a block that is placed nowhere but has children: an unknown parent, or one removed before its children. It
is not counted, stops a match, and is freed when childless.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from advisor.index.errors import IndexFault
from advisor.index.keys import Key, PlaceKey
from event_plane.schema import DEPTH_UNKNOWN


class Order(Protocol):
    """An eviction order over one place's blocks, told of each change by the index."""

    def stored(self, block: Block) -> None: ...
    def touched(self, block: Block, hits: int) -> None: ...
    def removed(self, block: Block) -> None: ...
    def coldest(self) -> Iterator[Block]:
        """Blocks, first the one to evict first."""


class Placement:
    """A block in one place. `references` counts physical copies where the counting rule applies, else it is 1."""

    __slots__ = ("block_bytes", "references")

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.references = 1


class Block:
    """One block. History (`touches`, times) lasts while it is placed anywhere and survives moves."""

    __slots__ = (
        "block_tokens",
        "children",
        "depth",
        "first_touch_us",
        "key",
        "last_touch_us",
        "parent",
        "placements",
        "touches",
    )

    def __init__(self, key: Key) -> None:
        self.key = key
        self.parent: Block | None = None
        self.children: dict[Block, None] = {}
        self.placements: dict[Place, Placement] = {}
        self.depth = DEPTH_UNKNOWN
        self.block_tokens = 0
        self.touches = 0
        self.first_touch_us = 0
        self.last_touch_us = 0

    @property
    def is_ghost(self) -> bool:
        return not self.placements

    def volume_placements(self) -> Iterator[tuple[Place, Placement]]:
        return ((place, placement) for place, placement in self.placements.items() if place.volume)


class Place:
    """A location with its blocks in exact recency order, least recently touched first."""

    __slots__ = ("block_bytes", "blocks", "key", "order", "reads", "volume")

    def __init__(self, key: PlaceKey) -> None:
        self.key = key
        self.volume = False
        self.blocks: OrderedDict[Block, Placement] = OrderedDict()
        self.block_bytes = 0
        self.reads = 0
        """Accesses that named this place."""
        self.order: Order | None = None
        """None: recency itself."""

    def coldest(self) -> Iterator[Block]:
        """Blocks in eviction order. Do not change the index while it runs."""
        return iter(self.blocks) if self.order is None else self.order.coldest()


class BlockIndex:
    """All blocks and places. Single writer; readers hold the writer's lock."""

    def __init__(self) -> None:
        self.blocks: dict[Key, Block] = {}
        self.places: dict[PlaceKey, Place] = {}
        self.ghosts = 0

    # -- places

    def place(self, key: PlaceKey) -> Place:
        """The place of that key, made when first named."""
        place = self.places.get(key)
        if place is None:
            place = self.places[key] = Place(key)
        return place

    def set_order(self, place: Place, order: Order | None) -> None:
        """Evict from `place` in `order` from now on; blocks already there enter it in recency order."""
        place.order = order
        if order is not None:
            for block in place.blocks:
                order.stored(block)

    # -- changes

    def store(
        self, key: Key, place: Place, parent_key: Key | None, depth: int, block_bytes: int, block_tokens: int
    ) -> tuple[Block, bool]:
        """Place a block; returns it and whether it was not there before. Touches nothing.

        Raises `ValueError` where `parent_key` would close a cycle; then nothing has changed.
        """
        block = self.blocks.get(key)
        if block is None:
            if parent_key is not None and parent_key == key:
                raise ValueError("a block names itself as its parent")
            block = self.blocks[key] = Block(key)
            self.ghosts += 1
        if parent_key is not None and block.parent is None:
            self._attach(block, parent_key)
        if block.depth == DEPTH_UNKNOWN:
            if depth != DEPTH_UNKNOWN:
                block.depth = depth
            elif block.parent is not None and block.parent.depth != DEPTH_UNKNOWN:
                block.depth = block.parent.depth + 1
        if block_tokens:
            block.block_tokens = block_tokens
        placement = block.placements.get(place)
        if placement is not None:
            if block_bytes and block_bytes != placement.block_bytes:
                place.block_bytes += block_bytes - placement.block_bytes
                placement.block_bytes = block_bytes
            return block, False
        if not block.placements:
            self.ghosts -= 1
        placement = Placement(block_bytes)
        block.placements[place] = placement
        place.blocks[block] = placement
        place.block_bytes += block_bytes
        if place.order is not None:
            place.order.stored(block)
        return block, True

    def touch(self, block: Block, place: Place, hits: int, now_us: int, *, entered: bool = False) -> None:
        """Count `hits` uses of a block at `place`, which it has just `entered` or where it was before.

        A use in G1 or G2 also refreshes the volumes that hold the block: heat belongs to the block.
        """
        if not block.touches:
            block.first_touch_us = now_us
        block.touches += hits
        block.last_touch_us = now_us
        if not entered and place in block.placements:
            self._refresh(block, place, hits)
        if place.key.tier <= 2 and len(block.placements) > 1:
            for other in block.placements:
                if other.volume:
                    self._refresh(block, other, hits)

    @staticmethod
    def _refresh(block: Block, place: Place, hits: int) -> None:
        place.blocks.move_to_end(block)
        if place.order is not None:
            place.order.touched(block, hits)

    def remove(self, block: Block, place: Place) -> None:
        """Take a block out of a place it is in. Its history ends with its last placement."""
        placement = block.placements.pop(place)
        del place.blocks[block]
        place.block_bytes -= placement.block_bytes
        if place.order is not None:
            place.order.removed(block)
        if not block.placements:
            block.touches = block.first_touch_us = block.last_touch_us = 0
            self.ghosts += 1
            self._free_if_idle(block)

    def clear(self, places: Sequence[Place], only: Callable[[Key], bool] | None = None) -> int:
        """Remove every block, or those whose key satisfies `only`, from `places`; returns how many placements went."""
        count = 0
        for place in places:
            # Newest first, so that most children go before their parents.
            for block in reversed(list(place.blocks)):
                if only is None or only(block.key):
                    self.remove(block, place)
                    count += 1
        return count

    def _attach(self, block: Block, parent_key: Key) -> None:
        parent = self.blocks.get(parent_key)
        if parent is None:
            parent = self.blocks[parent_key] = Block(parent_key)
            self.ghosts += 1
        elif block.children:
            ancestor: Block | None = parent
            while ancestor is not None:
                if ancestor is block:
                    raise ValueError("a block's parent is its own descendant")
                ancestor = ancestor.parent
        block.parent = parent
        parent.children[block] = None

    def _free_if_idle(self, block: Block) -> None:
        current: Block | None = block
        while current is not None and not current.placements and not current.children:
            parent = current.parent
            del self.blocks[current.key]
            self.ghosts -= 1
            if parent is not None:
                del parent.children[current]
            current.parent = None
            current = parent

    # -- questions

    def __len__(self) -> int:
        """Blocks that are placed somewhere."""
        return len(self.blocks) - self.ghosts

    def get(self, key: Key) -> Block | None:
        """The block, or None where it is placed nowhere."""
        block = self.blocks.get(key)
        return None if block is None or not block.placements else block

    def match(self, namespace_id: int, group: int, hashes: Sequence[int], place: Place | None = None) -> int:
        """How many leading `hashes` are present in a row, at `place` or (None) anywhere."""
        count = 0
        for sequence_hash in hashes:
            block = self.blocks.get(Key(namespace_id, group, sequence_hash))
            if block is None or not block.placements or (place is not None and place not in block.placements):
                break
            count += 1
        return count

    def leaves_first(self, place: Place) -> Iterator[Block]:
        """Blocks of a place, coldest leaf first; a block comes after all its children in that place.

        Takes time and memory in proportion to the place.
        """
        rank = {block: i for i, block in enumerate(place.coldest())}
        waiting = {block: sum(child in rank for child in block.children) for block in rank}
        heap = [(rank[block], block.key) for block, children in waiting.items() if not children]
        heapq.heapify(heap)
        while heap:
            _, key = heapq.heappop(heap)
            block = self.blocks[key]
            yield block
            parent = block.parent
            if parent is not None and parent in waiting:
                waiting[parent] -= 1
                if not waiting[parent]:
                    heapq.heappush(heap, (rank[parent], parent.key))

    def check(self) -> None:
        """Verify every invariant; raises `IndexFault` naming the first that does not hold."""
        ghosts = 0
        for key, block in self.blocks.items():
            if block.key != key:
                raise IndexFault(f"block {block.key} stands under key {key}")
            if not block.placements:
                ghosts += 1
                if not block.children:
                    raise IndexFault(f"ghost {key} has no children and was not freed")
                if block.touches:
                    raise IndexFault(f"ghost {key} kept {block.touches} touches")
            if block.parent is not None and block not in block.parent.children:
                raise IndexFault(f"block {key} is no child of its parent")
            for child in block.children:
                if child.parent is not block or self.blocks.get(child.key) is not child:
                    raise IndexFault(f"child {child.key} of {key} names another parent or is gone")
            for place, placement in block.placements.items():
                if place.blocks.get(block) is not placement:
                    raise IndexFault(f"block {key} is not in the order of {place.key}")
                if placement.references < 1:
                    raise IndexFault(f"block {key} has {placement.references} references in {place.key}")
        if ghosts != self.ghosts:
            raise IndexFault(f"{ghosts} ghosts, counted {self.ghosts}")
        for place in self.places.values():
            total = sum(placement.block_bytes for placement in place.blocks.values())
            if total != place.block_bytes:
                raise IndexFault(f"{place.key} holds {total} bytes, counted {place.block_bytes}")
            for block in place.blocks:
                if place not in block.placements:
                    raise IndexFault(f"{place.key} orders {block.key}, which is not placed there")
