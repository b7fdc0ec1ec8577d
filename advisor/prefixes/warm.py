"""Every kernel of a picture once, so that it is compiled, or read from numba's cache, before it is needed."""

from __future__ import annotations

from advisor.index import ArrayIndex, IndexSize
from advisor.prefixes.picture import Picture


def warm() -> None:
    """Takes some seconds where nothing is compiled yet."""
    picture = Picture.take(ArrayIndex(IndexSize.for_blocks(64)))
    picture.sum_of(picture.groups(), picture.allowed(None))
