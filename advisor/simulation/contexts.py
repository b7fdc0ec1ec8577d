"""What a prompt says so far, cut into blocks. A block has a number of its own for each path that leads to it."""

from __future__ import annotations

from event_plane.recording import TRACE_BLOCK_TOKENS

_Piece = tuple[int, int, int]
"""Text, first token of it, tokens."""


class BlockNumbers:
    """Numbers blocks from 0 in the order in which they are first met."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, tuple[_Piece, ...]], int] = {}

    def of(self, parent: int, pieces: tuple[_Piece, ...]) -> int:
        return self._known.setdefault((parent, pieces), len(self._known))


class Context:
    """Grows by texts, each named by a number: equal numbers are equal tokens."""

    def __init__(self, numbers: BlockNumbers) -> None:
        self.tokens = 0
        self._numbers = numbers
        self._whole: list[int] = []
        self._rest: list[_Piece] = []

    def append(self, text: int, tokens: int) -> None:
        begun = 0
        while begun < tokens:
            room = TRACE_BLOCK_TOKENS - self.tokens % TRACE_BLOCK_TOKENS
            piece = min(room, tokens - begun)
            self._rest.append((text, begun, piece))
            begun += piece
            self.tokens += piece
            if piece == room:
                self._whole.append(self._last())
                self._rest = []

    def block_ids(self) -> list[int]:
        """Root first; the last block may be a partial one."""
        return [*self._whole, self._last()] if self._rest else list(self._whole)

    def _last(self) -> int:
        return self._numbers.of(self._whole[-1] if self._whole else -1, tuple(self._rest))
