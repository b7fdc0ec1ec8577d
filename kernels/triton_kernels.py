"""The Triton kernels. Addresses are numbers and strides are 64-bit throughout, so no pool is too large.

`kernels.triton_launch` works out the arguments. Triton's interpreter runs these on the CPU where TRITON_INTERPRET=1 was
set before this module was first imported.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels import fp8, nh64

_CHUNK_WORDS = tl.constexpr(nh64.CHUNK_WORDS)
_GOLDEN = tl.constexpr(nh64.GOLDEN)
_SHIFT_0, _SHIFT_1, _SHIFT_2 = (tl.constexpr(shift) for shift in nh64.MIX_SHIFTS)
_MULTIPLIER_0, _MULTIPLIER_1 = (tl.constexpr(multiplier) for multiplier in nh64.MIX_MULTIPLIERS)
_E4M3_MAX = tl.constexpr(fp8.E4M3_MAX)
_SCALE_MIN = tl.constexpr(fp8.SCALE_MIN)
_INFINITY = tl.constexpr(float("inf"))

_COPY_NUMBERS = [
    "source", "target", "source_blocks", "target_blocks", "blocks", "run", "size_a", "size_b", "size_c", "size_d",
    "source_block", "source_a", "source_b", "source_c", "source_d", "source_layer",
    "target_block", "target_a", "target_b", "target_c", "target_d", "target_layer",
]  # fmt: skip


@triton.jit(do_not_specialize=_COPY_NUMBERS)
def copy_tiles(
    source, target, source_ids, target_ids, source_blocks: tl.int64, target_blocks: tl.int64,
    blocks: tl.int32, run: tl.int64, size_a: tl.int32, size_b: tl.int32, size_c: tl.int32, size_d: tl.int32,
    source_block: tl.int64, source_a: tl.int64, source_b: tl.int64, source_c: tl.int64, source_d: tl.int64,
    source_layer: tl.int64,
    target_block: tl.int64, target_a: tl.int64, target_b: tl.int64, target_c: tl.int64, target_d: tl.int64,
    target_layer: tl.int64,
    WORD: tl.constexpr, VECTOR: tl.constexpr,
    RUN_TILE: tl.constexpr, A_TILE: tl.constexpr, B_TILE: tl.constexpr, BLOCK_TILE: tl.constexpr,
    SOURCE_TABLE: tl.constexpr, TARGET_TABLE: tl.constexpr,
    SOURCE_INDEXED: tl.constexpr, TARGET_INDEXED: tl.constexpr,
):  # fmt: skip
    """One tile of a copy: `RUN_TILE` words along the run, a patch of axes a and b, some blocks.

    Strides are in accesses of `VECTOR` words of type `WORD`, so that the compiler sees every run start at a whole
    access. `source` and `target` are addresses; with `_TABLE` tensors of addresses, one a layer. Ids out of range read
    zeros and write nothing.
    """
    tile = tl.program_id(0)
    run_tiles = tl.cdiv(run * VECTOR, RUN_TILE).to(tl.int32)
    tile_run = tile % run_tiles
    tile = tile // run_tiles
    tiles_a = tl.cdiv(size_a, A_TILE)
    tile_a = tile % tiles_a
    tile = tile // tiles_a
    tiles_b = tl.cdiv(size_b, B_TILE)
    tile_b = tile % tiles_b
    tile = tile // tiles_b
    c = (tile % size_c).to(tl.int64)
    tile = tile // size_c
    d = (tile % size_d).to(tl.int64)
    tile = tile // size_d
    block_tiles = tl.cdiv(blocks, BLOCK_TILE)
    tile_block = tile % block_tiles
    layer = (tile // block_tiles).to(tl.int64)

    row = tl.arange(0, BLOCK_TILE * B_TILE * A_TILE)
    a = tile_a * A_TILE + row % A_TILE
    b = tile_b * B_TILE + row // A_TILE % B_TILE
    block = tile_block * BLOCK_TILE + row // (A_TILE * B_TILE)
    reads = (a < size_a) & (b < size_b) & (block < blocks)
    writes = reads
    a, b = a.to(tl.int64), b.to(tl.int64)
    from_block, to_block = block.to(tl.int64), block.to(tl.int64)
    if SOURCE_INDEXED:
        from_block = tl.load(source_ids + block, mask=block < blocks, other=0)
        reads = reads & (from_block >= 0) & (from_block < source_blocks)
    if TARGET_INDEXED:
        to_block = tl.load(target_ids + block, mask=block < blocks, other=0)
        writes = writes & (to_block >= 0) & (to_block < target_blocks)
    source_at = from_block * source_block + a * source_a + b * source_b + c * source_c + d * source_d
    target_at = to_block * target_block + a * target_a + b * target_b + c * target_c + d * target_d
    if SOURCE_TABLE:
        source_base = tl.load(source + layer)
    else:
        source_base = source
        source_at += layer * source_layer
    if TARGET_TABLE:
        target_base = tl.load(target + layer)
    else:
        target_base = target
        target_at += layer * target_layer

    column = tile_run.to(tl.int64) * RUN_TILE + tl.arange(0, RUN_TILE)
    inside = column < run * VECTOR
    access: tl.constexpr = VECTOR * WORD.primitive_bitwidth // 8
    read_from = tl.multiple_of(source_base.to(tl.pointer_type(WORD)), access)
    write_to = tl.multiple_of(target_base.to(tl.pointer_type(WORD)), access)
    words = tl.load(
        read_from + (source_at * VECTOR)[:, None] + column[None, :], mask=reads[:, None] & inside[None, :], other=0
    )
    tl.store(
        write_to + (target_at * VECTOR)[:, None] + column[None, :], words, mask=writes[:, None] & inside[None, :]
    )


@triton.jit(do_not_specialize=["address", "stride_bytes", "length", "blocks"])
def add_chunks(
    address: tl.int64, stride_bytes: tl.int64, length: tl.int64, blocks: tl.int64, block_ids, keys, sums,
    CHUNKS: tl.constexpr, ALIGNED: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Add `CHUNKS` chunks of one block to its sum: NH-64 as `kernels.nh64` defines it.

    One warp takes a whole chunk, so no sum crosses warps; the keys stay in registers from one chunk to the next.
    `ALIGNED`: to how many bytes every block starts, 16, 8 or less. `TAIL`: the length is no multiple of 16.
    """
    place = tl.program_id(1)
    block = tl.load(block_ids + place)
    there = tl.where((block >= 0) & (block < blocks), length, 0)
    start = address + block * stride_bytes
    within = tl.arange(0, _CHUNK_WORDS)
    key = tl.load(keys + within).to(tl.uint64, bitcast=True)
    other = tl.load(keys + _CHUNK_WORDS + within).to(tl.uint64, bitcast=True)
    first_chunk = tl.program_id(0).to(tl.int64) * CHUNKS
    chunks = tl.minimum(tl.cdiv(length, _CHUNK_WORDS * 8) - first_chunk, CHUNKS).to(tl.int32)
    total = tl.zeros([1], tl.uint64)
    for step in range(chunks):
        chunk = first_chunk + step
        words = _words(start, chunk * _CHUNK_WORDS, within, there, ALIGNED, TAIL)
        low, high = words.to(tl.uint32), (words >> 32).to(tl.uint32)
        value = _mix(tl.sum(_products(low, high, other), axis=0) + (chunk + 1).to(tl.uint64) * _GOLDEN)
        total += _mix(tl.sum(_products(low, high, key), axis=0) ^ value)
    tl.atomic_add(sums + place + tl.arange(0, 1), total.to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def _products(low, high, key):
    """`(lo + k.lo) × (hi + k.hi)` for every word, each factor modulo 2^32."""
    key_low, key_high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    return (low + key_low).to(tl.uint64) * (high + key_high).to(tl.uint64)


@triton.jit
def _mix(word):
    word = (word ^ (word >> _SHIFT_0)) * _MULTIPLIER_0
    word = (word ^ (word >> _SHIFT_1)) * _MULTIPLIER_1
    return word ^ (word >> _SHIFT_2)


@triton.jit
def _words(start, first, within, length, ALIGNED: tl.constexpr, TAIL: tl.constexpr):
    """The 64-bit words `first + within` of a block that starts at the address `start`; zeros past its end."""
    left = tl.minimum(tl.maximum(length - first * 8, 0), _CHUNK_WORDS * 8).to(tl.int32)
    if ALIGNED < 8:
        return _assembled(start + first * 8, within, left, within >= 0)
    pointer = tl.multiple_of((start + first * 8).to(tl.pointer_type(tl.uint64)), ALIGNED)
    whole = left // 16 * 2
    words = tl.load(pointer + within, mask=within < whole, other=0)
    if TAIL:
        words = words | _assembled(start + first * 8, within, left, within >= whole)
    return words


@triton.jit
def _assembled(start, at, length, wanted):
    """Words put together from single bytes: for odd addresses, and for the last few bytes of a block."""
    pointer = start.to(tl.pointer_type(tl.uint8))
    words = tl.zeros_like(at).to(tl.uint64)
    for byte in tl.static_range(8):
        place = at * 8 + byte
        words = words | (tl.load(pointer + place, mask=wanted & (place < length), other=0).to(tl.uint64) << (8 * byte))
    return words


_GROUP_NUMBERS = ["layers", "outer", "heads", "tokens", "head_dim"] + [
    f"{side}_{axis}" for side in ("wide", "narrow") for axis in ("block", "layer", "outer", "head", "token")
]


@triton.jit
def _group_offset(group, layers, outer, heads, s_block, s_layer, s_outer, s_head):
    """Steps from the start of a tensor to a group; groups are numbered `[blocks, layers, outer, heads]`."""
    head = group % heads
    rest = group // heads
    side = rest % outer
    rest = rest // outer
    layer = rest % layers
    block = rest // layers
    return block.to(tl.int64) * s_block + layer * s_layer + side * s_outer + head * s_head


@triton.jit
def _in_group(token, element, s_token, UNIT: tl.constexpr):
    """Elements from the start of a group to those of its tokens."""
    return (token.to(tl.int64) * s_token * UNIT)[:, None] + element[None, :]


@triton.jit(do_not_specialize=_GROUP_NUMBERS)
def quantize_groups(
    wide, narrow, scales, layers: tl.int32, outer: tl.int32, heads: tl.int32, tokens: tl.int32, head_dim: tl.int32,
    wide_block: tl.int64, wide_layer: tl.int64, wide_outer: tl.int64, wide_head: tl.int64, wide_token: tl.int64,
    narrow_block: tl.int64, narrow_layer: tl.int64, narrow_outer: tl.int64, narrow_head: tl.int64,
    narrow_token: tl.int64,
    UNIT: tl.constexpr, TOKEN_TILE: tl.constexpr, DIM_TILE: tl.constexpr,
):  # fmt: skip
    """One group: its largest magnitude, its scale, its elements as e4m3. The second reading finds it in the cache.

    Strides and `head_dim` are in steps of `UNIT` elements, so that the compiler sees how wide it may read.
    """
    group = tl.program_id(0)
    source = wide + UNIT * _group_offset(group, layers, outer, heads, wide_block, wide_layer, wide_outer, wide_head)
    target = narrow + UNIT * _group_offset(
        group, layers, outer, heads, narrow_block, narrow_layer, narrow_outer, narrow_head
    )
    element = tl.arange(0, DIM_TILE)
    largest = tl.zeros([TOKEN_TILE, DIM_TILE], tl.float32)
    finite = tl.full([TOKEN_TILE, DIM_TILE], 1, tl.int32)
    for first in range(0, tokens, TOKEN_TILE):
        token = first + tl.arange(0, TOKEN_TILE)
        live = (token < tokens)[:, None] & (element < head_dim * UNIT)[None, :]
        x = tl.load(source + _in_group(token, element, wide_token, UNIT), mask=live, other=0.0)
        magnitude = tl.abs(x.to(tl.float32))
        finite = tl.where(magnitude < _INFINITY, finite, 0)
        largest = tl.maximum(largest, magnitude)
    scale = tl.maximum(tl.div_rn(tl.max(tl.max(largest, axis=1), axis=0), _E4M3_MAX), _SCALE_MIN)
    scale = tl.where(tl.min(tl.min(finite, axis=1), axis=0) == 1, scale, float("nan"))
    tl.store(scales + group, scale)
    reciprocal = tl.div_rn(1.0, scale)
    for first in range(0, tokens, TOKEN_TILE):
        token = first + tl.arange(0, TOKEN_TILE)
        live = (token < tokens)[:, None] & (element < head_dim * UNIT)[None, :]
        x = tl.load(source + _in_group(token, element, wide_token, UNIT), mask=live, other=0.0)
        scaled = x.to(tl.float32) * reciprocal
        scaled = tl.where(scaled > _E4M3_MAX, _E4M3_MAX, tl.where(scaled < -_E4M3_MAX, -_E4M3_MAX, scaled))
        tl.store(
            target + _in_group(token, element, narrow_token, UNIT),
            scaled.to(narrow.dtype.element_ty),
            mask=live,
        )


@triton.jit(do_not_specialize=_GROUP_NUMBERS)
def dequantize_groups(
    wide, narrow, scales, layers: tl.int32, outer: tl.int32, heads: tl.int32, tokens: tl.int32, head_dim: tl.int32,
    wide_block: tl.int64, wide_layer: tl.int64, wide_outer: tl.int64, wide_head: tl.int64, wide_token: tl.int64,
    narrow_block: tl.int64, narrow_layer: tl.int64, narrow_outer: tl.int64, narrow_head: tl.int64,
    narrow_token: tl.int64,
    UNIT: tl.constexpr, TOKEN_TILE: tl.constexpr, DIM_TILE: tl.constexpr,
):  # fmt: skip
    """One group back: its elements times its scale. Steps as in `quantize_groups`."""
    group = tl.program_id(0)
    source = narrow + UNIT * _group_offset(
        group, layers, outer, heads, narrow_block, narrow_layer, narrow_outer, narrow_head
    )
    target = wide + UNIT * _group_offset(group, layers, outer, heads, wide_block, wide_layer, wide_outer, wide_head)
    scale = tl.load(scales + group)
    element = tl.arange(0, DIM_TILE)
    for first in range(0, tokens, TOKEN_TILE):
        token = first + tl.arange(0, TOKEN_TILE)
        live = (token < tokens)[:, None] & (element < head_dim * UNIT)[None, :]
        x = tl.load(source + _in_group(token, element, narrow_token, UNIT), mask=live, other=0.0)
        tl.store(
            target + _in_group(token, element, wide_token, UNIT),
            (x.to(tl.float32) * scale).to(wide.dtype.element_ty),
            mask=live,
        )
