"""Blocks in the order that a reader of prompts wants them: each chain together, parents before children. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from storage_agent.block_header import BlockHeader


def chain_order(headers: Sequence[BlockHeader]) -> list[BlockHeader]:
    """`headers`, each once: a block, then its first child with all below it, then the next child.

    A block whose parent is not among them begins a chain. Chains and children come in order of generation. A loop of
    parents, which only a hostile producer makes, is broken anywhere.
    """
    by_age = sorted(headers, key=lambda header: header.generation)
    holder = {_identity(header, header.key.sequence_hash): header for header in by_age}
    children: dict[object, list[BlockHeader]] = {}
    roots: list[BlockHeader] = []
    for header in by_age:
        parent = _identity(header, header.parent_hash)
        if header.parent_hash and parent in holder and holder[parent] is not header:
            children.setdefault(parent, []).append(header)
        else:
            roots.append(header)
    ordered: list[BlockHeader] = []
    seen: set[int] = set()
    for start in [*roots, *by_age]:  # the second time round only loops are left
        stack = [start]
        while stack:
            header = stack.pop()
            if id(header) in seen:
                continue
            seen.add(id(header))
            ordered.append(header)
            stack += reversed(children.get(_identity(header, header.key.sequence_hash), []))
    return ordered


def _identity(header: BlockHeader, sequence_hash: int) -> tuple[int, int, int]:
    return header.key.namespace_id, header.key.group, sequence_hash
