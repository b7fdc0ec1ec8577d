"""A Parquet recording gives back what was written, to the byte; damage is one error that names the file."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from event_plane.errors import RecordingError
from event_plane.parquet import ParquetRecorder, read_parquet
from event_plane.parquet_rows import RecordedBatch
from event_plane.schema import Batch
from event_plane.wire import encode
from tests.examples import examples
from tests.property.test_wire_property import BATCHES

RECORDED = st.builds(
    RecordedBatch,
    batch=BATCHES,
    source=st.text(max_size=8),
    position=st.integers(1, 2**63 - 1),
    received_us=st.integers(0, 2**62),
)


def record(path: Path, recorded: list[RecordedBatch], group_rows: int) -> None:
    with ParquetRecorder(path, group_rows=group_rows) as recorder:
        for each in recorded:
            recorder.write(each.batch, each.source, received_us=each.received_us, position=each.position)


def facts(each: RecordedBatch) -> tuple[bytes, str, int, int]:
    return encode(each.batch), each.source, each.position, each.received_us


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(RECORDED, max_size=6), st.integers(1, 5))
def test_batches_survive_the_round_trip_to_the_byte(recorded: list[RecordedBatch], group_rows: int) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "stream.parquet"
        record(path, recorded, group_rows)
        assert [facts(each) for each in read_parquet(path)] == [facts(each) for each in recorded]


@settings(max_examples=examples(80), deadline=None)
@given(st.lists(BATCHES, min_size=1, max_size=4), st.data())
def test_damage_gives_the_batches_before_it_or_one_error_that_names_the_file(
    batches: list[Batch], data: st.DataObject
) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "stream.parquet"
        record(path, [RecordedBatch(batch) for batch in batches], 2)
        whole = path.read_bytes()
        damaged = bytearray(whole)
        for at in data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=3)):
            damaged[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(damaged[: data.draw(st.integers(len(whole) // 2, len(whole)))])
        read: list[bytes] = []
        try:
            read.extend(encode(each.batch) for each in read_parquet(path))
        except RecordingError as error:
            assert str(path) in str(error)  # noqa: PT017
            assert "\n" not in str(error)  # noqa: PT017
        assert read == [encode(batch) for batch in batches][: len(read)]
