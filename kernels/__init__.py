"""Copies of KV blocks between paged pools, staging and layouts; their checksum and their fp8 form. Knows no other room.

Triton on a GPU, numpy and torch on the CPU, one dispatch for each operation: see `kernels.dispatch`.
"""

from kernels.checksum import checksum_blocks
from kernels.layouts import KvLayout
from kernels.paged import copy_blocks, gather_blocks, scatter_blocks
from kernels.quantize import QuantizedBlocks, dequantize_blocks, quantize_blocks
from kernels.relayout import permute_blocks, reshard_blocks

__all__ = [
    "KvLayout",
    "QuantizedBlocks",
    "checksum_blocks",
    "copy_blocks",
    "dequantize_blocks",
    "gather_blocks",
    "permute_blocks",
    "quantize_blocks",
    "reshard_blocks",
    "scatter_blocks",
]
