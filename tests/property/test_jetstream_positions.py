"""Where a producer's batches lie in a stream, for any lives and whatever lies between them."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from event_plane.jetstream_stream import Stored, first_of_life, first_unlogged

lives = st.lists(st.integers(1, 12), min_size=0, max_size=6)


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[Stored], int]:
    """One producer's batches, lives and positions rising with holes, and the position past the stream's last."""
    position, stored = draw(st.integers(1, 50)), []
    for number, length in enumerate(draw(lives)):
        for sequence in range(draw(st.integers(0, 3)), length):
            # Lives are numbered at random, as publishers do it: order says nothing.
            stored.append(Stored(position, number * 7919 % 97, sequence, b""))
            position += draw(st.integers(1, 9))
    return stored, position + draw(st.integers(0, 40))


class Reader:
    def __init__(self, stored: list[Stored]) -> None:
        self.stored = stored
        self.reads = 0

    async def __call__(self, position: int) -> Stored | None:
        self.reads += 1
        return next((one for one in self.stored if one.position >= position), None)


@given(streams(), st.data())
def test_reading_goes_on_with_the_batch_after_the_logs_last(
    stream: tuple[list[Stored], int], data: st.DataObject
) -> None:
    stored, end = stream
    known = stored or [Stored(0, 500, 3, b"")]
    last = data.draw(st.sampled_from([*known, Stored(0, 500, 3, b""), Stored(0, known[0].epoch, 99, b"")]))
    reader = Reader(stored)
    start = asyncio.run(first_unlogged(reader, last.epoch, last.sequence, end))
    if last.epoch not in {one.epoch for one in stored}:
        expected = stored
    else:
        of_life = [n for n, one in enumerate(stored) if one.epoch == last.epoch and one.sequence <= last.sequence]
        first = next(n for n, one in enumerate(stored) if one.epoch == last.epoch)
        expected = stored[of_life[-1] + 1 :] if of_life else stored[first:]
    assert [one for one in stored if one.position >= start] == expected
    assert start == (end if not expected else start) <= end
    assert reader.reads <= 3 + 10 * (2 + end.bit_length())


@given(streams(), st.integers(0, 14))
def test_resend_begins_with_the_first_that_is_wanted_of_the_latest_life(
    stream: tuple[list[Stored], int], sequence: int
) -> None:
    stored, end = stream
    if not stored:
        return
    epoch = stored[-1].epoch
    start = asyncio.run(first_of_life(Reader(stored), epoch, sequence, end))
    wanted = [one for one in stored if one.epoch == epoch and one.sequence >= sequence]
    assert [one for one in stored if one.position >= start] == wanted
