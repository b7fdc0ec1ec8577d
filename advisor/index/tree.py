"""Block rows and the prefix tree.

A root (no parent) holds its group's figures in the fields that only children need: placed blocks in `next_sibling`,
their bytes in `prev_sibling` (low 31 bits) and `root` (the rest). Every other row's `root` points at a row that was its
root once; that one outlives it, because it is its ancestor, and leads on to the present root. So a tree that is
attached to another keeps its pointers, and a parent closes a cycle exactly if its root is the block itself.
"""

from __future__ import annotations

from advisor.index.hash_table import delete_entry, insert_entry, tag_of
from advisor.index.heat import level_of, set_level
from advisor.index.jit import inlined, routine
from advisor.index.keep import keep_block
from advisor.index.layout import (
    BLOCK_FREE,
    BLOCK_MAX,
    BLOCK_ROWS,
    BLOCK_TOP,
    BLOCKS_FREE,
    DEPTH_UNKNOWN,
    FIRST_HIGH,
    FREE,
    GHOSTS,
    LAST_SHIFT,
    LIMBO,
    LOW_31,
    LOW_32,
    NONE,
    TOUCHED,
    TOUCHED_COUNT,
    Array,
    Row,
    Tables,
    int64,
)

LIMBO_MAX = 4096


@inlined
def blocks_spare(s: Array) -> int:
    return s[BLOCK_MAX] - s[BLOCK_TOP] + s[BLOCKS_FREE]


@inlined
def make_block(t: Tables, tag: int, lo: int, hi: int, realm: int) -> int:
    """A ghost row of that key, without parent. The caller has made sure that there is room and no such key."""
    s = t.state
    row = s[BLOCK_FREE]
    if row >= 0:
        keep_block(t, row)
        s[BLOCK_FREE] = int64(t.blocks[row].first_child)
        s[BLOCKS_FREE] -= 1
    else:
        row = s[BLOCK_TOP]
        s[BLOCK_TOP] += 1
    s[BLOCK_ROWS] += 1
    s[GHOSTS] += 1
    b = t.blocks[row]
    b.hash_lo = lo
    b.hash_hi = hi
    b.parent = NONE
    b.first_child = NONE
    b.next_sibling = 0
    b.prev_sibling = 0
    b.root = 0
    b.placed = NONE
    b.depth = DEPTH_UNKNOWN
    b.touches = 0
    b.realm = realm
    b.block_tokens = 0
    b.first_touch = 0
    b.last_touch = 0
    b.marks = 0
    t.realms[realm].rows += 1
    insert_entry(t, tag, row)
    return row


@inlined
def root_of(t: Tables, row: int) -> int:
    """The root of a block's tree; shortens the way there."""
    if t.blocks[row].parent < 0:
        return row
    root = int64(t.blocks[row].root)
    if t.blocks[root].parent >= 0:
        while t.blocks[root].parent >= 0:
            root = int64(t.blocks[root].root)
        keep_block(t, row)
        t.blocks[row].root = root
    return root


@inlined
def add_to_group(t: Tables, root: int, blocks: int, placed_bytes: int) -> None:
    keep_block(t, root)
    r = t.blocks[root]
    total = (int64(r.root) << 31) + int64(r.prev_sibling) + placed_bytes
    r.next_sibling = int64(r.next_sibling) + blocks
    r.prev_sibling = total & LOW_31
    r.root = total >> 31


@inlined
def attach(t: Tables, row: int, parent: int) -> None:
    """Make a root the child of a block of another tree; the two groups become one."""
    keep_block(t, row)
    keep_block(t, parent)
    b = t.blocks[row]
    root = root_of(t, parent)
    add_to_group(t, root, int64(b.next_sibling), (int64(b.root) << 31) + int64(b.prev_sibling))
    sibling = int64(t.blocks[parent].first_child)
    b.parent = parent
    b.root = root
    b.next_sibling = sibling
    b.prev_sibling = NONE
    if sibling >= 0:
        keep_block(t, sibling)
        t.blocks[sibling].prev_sibling = row
    t.blocks[parent].first_child = row


@inlined
def detach(t: Tables, row: int, parent: int) -> None:
    """Take a block that is about to be freed from its parent's children."""
    before = int64(t.blocks[row].prev_sibling)
    after = int64(t.blocks[row].next_sibling)
    if before >= 0:
        keep_block(t, before)
        t.blocks[before].next_sibling = after
    else:
        keep_block(t, parent)
        t.blocks[parent].first_child = after
    if after >= 0:
        keep_block(t, after)
        t.blocks[after].prev_sibling = before


@inlined
def push_free(t: Tables, row: int) -> None:
    s = t.state
    t.blocks[row].first_child = s[BLOCK_FREE]
    s[BLOCK_FREE] = row
    s[BLOCKS_FREE] += 1


@routine
def free_if_idle(t: Tables, row: int) -> None:
    """Free a block that is placed nowhere and has no children, then its parent if that is now the same."""
    s = t.state
    while row >= 0:
        b = t.blocks[row]
        if b.placed >= 0 or b.first_child >= 0:
            return
        keep_block(t, row)
        parent = int64(b.parent)
        realm = int64(b.realm)
        delete_entry(t, tag_of(s, b.hash_lo, b.hash_hi, realm), row)
        if parent >= 0:
            detach(t, row, parent)
        t.realms[realm].rows -= 1
        s[BLOCK_ROWS] -= 1
        s[GHOSTS] -= 1
        marks = int64(b.marks)
        b.marks = (marks & TOUCHED) | FREE
        b.parent = NONE
        if marks & TOUCHED:
            # Its place in the order of touches must not pass to another block: reused after the next drain.
            s[LIMBO] += 1
        else:
            push_free(t, row)
        row = parent
    if s[LIMBO] > LIMBO_MAX and 2 * s[LIMBO] > s[TOUCHED_COUNT]:
        leave_limbo(t)


@routine
def leave_limbo(t: Tables) -> None:
    """Forget touches of freed rows, and let those be used again."""
    s = t.state
    count = int64(0)
    for i in range(s[TOUCHED_COUNT]):
        row = int64(t.touched[i])
        marks = int64(t.blocks[row].marks)
        if marks & FREE:
            keep_block(t, row)
            t.blocks[row].marks = FREE
            push_free(t, row)
        else:
            t.touched[count] = row
            count += 1
    s[TOUCHED_COUNT] = count
    s[LIMBO] = 0


@inlined
def first_touch_ms(b: Row) -> int:
    return ((int64(b.marks) & FIRST_HIGH) << 32) | int64(b.first_touch)


@inlined
def last_touch_ms(b: Row) -> int:
    return (((int64(b.marks) >> LAST_SHIFT) & FIRST_HIGH) << 32) | int64(b.last_touch)


@inlined
def count_touch(t: Tables, row: int, hits: int, now_ms: int) -> None:
    """Add to the history of a placed block."""
    keep_block(t, row)
    b = t.blocks[row]
    before = int64(b.touches)
    marks = int64(b.marks)
    if before == 0:
        b.first_touch = now_ms & LOW_32
        marks = (marks & ~FIRST_HIGH) | (now_ms >> 32)
    touches = min(before + hits, LOW_32)
    b.touches = touches
    b.last_touch = now_ms & LOW_32
    b.marks = (marks & ~(FIRST_HIGH << LAST_SHIFT)) | ((now_ms >> 32) << LAST_SHIFT)
    set_level(t, row, level_of(before), level_of(touches))
