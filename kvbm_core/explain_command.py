"""`kvadvisor explain HASH`: where a block is, who owns each copy, and what waits for it."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from typing import Annotated, TypeVar
from urllib.parse import quote

import msgspec
import typer
from rich.table import Table

from event_plane.console import table_console
from kvbm_core.errors import ExplainError
from kvbm_core.explain import BlockExplanation, CopyExplanation

AnswerT = TypeVar("AnswerT")
_ADVISOR = "http://127.0.0.1:8470"
_OPEN = frozenset({"planned", "copying", "verified", "switched"})
"""States of a move that is under way (docs/moves.md)."""
_TIMEOUT_S = 10.0
_ANSWER_BYTES_MAX = 64 * 1024 * 1024


class _Placement(msgspec.Struct, frozen=True):
    """Of the advisor's answer, what is used here. `place` is a volume, or a producer's name and location."""

    place: str
    tier: int


class _Block(msgspec.Struct, frozen=True):
    hash: str
    namespace_id: str
    group: int
    placements: list[_Placement]


class _BlockPage(msgspec.Struct, frozen=True):
    blocks: list[_Block]


class _Volume(msgspec.Struct, frozen=True):
    id: str
    agent: str


class _Move(msgspec.Struct, frozen=True):
    kind: str
    state: str
    hash: str
    source: str
    target: str


class _Moves(msgspec.Struct, frozen=True):
    moves: list[_Move]


class Sighting(msgspec.Struct, frozen=True):
    """A block as one of those asked sees it. `source`: who says so."""

    source: str
    block: BlockExplanation


def explain(
    sequence_hash: Annotated[str, typer.Argument(metavar="HASH", help="The block's hash, or its first hex digits.")],
    advisor: Annotated[
        str | None,
        typer.Option(help=f"The advisor's URL. Without a --core it is {_ADVISOR}; else only the cores are asked."),
    ] = None,
    core: Annotated[list[str] | None, typer.Option(help="A core's desk (`CoreDesk`); may be given again.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say where a block is, who owns each copy, and what waits for it.

    The advisor knows every copy that was announced, and the moves under way; a core knows what its own queues and
    policies make of the block.
    """
    found: list[Sighting] = []
    if advisor is None and not core:
        advisor = _ADVISOR
    if advisor:
        found += _of_advisor(advisor.rstrip("/"), sequence_hash)
    for url in core or []:
        answer = _ask(f"{url.rstrip('/')}/blocks/{quote(sequence_hash)}", list[BlockExplanation])
        found += [Sighting(f"core at {url}", block) for block in answer]
    if as_json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    else:
        _show(found)
    if not found:
        raise ExplainError(f"nobody asked knows a block {sequence_hash}: check the hash, or name more --core")


def _of_advisor(url: str, sequence_hash: str) -> list[Sighting]:
    page = _ask(f"{url}/api/v1/blocks?limit=100&hash_prefix={quote(sequence_hash)}", _BlockPage)
    agents = {volume.id: volume.agent for volume in _ask(f"{url}/api/v1/volumes?limit=1000", list[_Volume])}
    moves = _ask(f"{url}/api/v1/moves?limit=1000", _Moves).moves
    return [Sighting(f"advisor at {url}", _explained(block, agents, moves)) for block in page.blocks]


def _explained(block: _Block, agents: dict[str, str], moves: list[_Move]) -> BlockExplanation:
    copies = [
        CopyExplanation(
            tier=f"G{placement.tier}",
            location=placement.place,
            state="announced",
            owner=f"agent {agents[placement.place]}" if placement.place in agents else placement.place.split("/")[0],
        )
        for placement in block.placements
    ]
    waits = [
        f"{move.kind} from {move.source}{' to ' + move.target if move.target else ''}: {move.state}"
        for move in moves
        if move.hash == block.hash and move.state in _OPEN
    ]
    return BlockExplanation(block.hash, block.namespace_id, block.group, copies, waits)


def _ask(url: str, kind: type[AnswerT]) -> AnswerT:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            return msgspec.json.decode(answer.read(_ANSWER_BYTES_MAX), type=kind)
    except urllib.error.HTTPError as refused:
        with refused:
            detail = refused.read(1_000).decode(errors="replace").strip()
        raise ExplainError(f"{url} refuses with {refused.code}: {detail}") from refused
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise ExplainError(f"{url} cannot be asked ({error}): start it, or correct --advisor or --core") from error


def _show(found: list[Sighting]) -> None:
    console = table_console()
    for sighting in found:
        block = sighting.block
        title = f"{block.sequence_hash} of namespace {block.namespace_id}, group {block.group}, says {sighting.source}"
        table = Table(title=title, title_justify="left")
        for column in ("tier", "where", "state", "owner", "guards", "next"):
            table.add_column(column)
        for copy in block.copies:
            table.add_row(copy.tier, copy.location, copy.state, copy.owner, str(copy.guards or ""), copy.next)
        console.print(table)
        console.print(f"waits: {'; '.join(block.waits) or 'nothing'}")
