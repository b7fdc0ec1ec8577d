"""What NIXL does not do with a bucket: list, delete, look, and put under a condition. By obstore."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError, PreconditionError
from obstore.store import S3Store

from storage_agent.endpoints import Endpoint
from storage_agent.errors import TransferError, VolumeError

CONNECT_S = 2.0
REQUEST_S = 10.0
_RETRIES_MAX = 2
_REGION = "us-east-1"
"""What servers other than AWS expect where none is configured."""
NIXL_THREADS = 8
_REASON_CHARACTERS_MAX = 200
_MISSING = (FileNotFoundError, NotFoundError)


class Listed(NamedTuple):
    name: str
    size_bytes: int


class Bucket:
    """One bucket of a configured endpoint. Thread-safe.

    Every call raises `TransferError`, which says what the server said, where it does not do as asked.
    """

    def __init__(self, volume: str, endpoint: Endpoint, name: str) -> None:
        """Connects to nothing. Raises `VolumeError`: no URL, or a file of keys that cannot be read."""
        scheme = urlsplit(endpoint.url).scheme
        if scheme not in ("http", "https"):
            raise VolumeError(f"volume {volume!r}: endpoint {endpoint.url!r} is no http or https URL; correct it")
        self.place = f"{endpoint.url.rstrip('/')}/{name}"
        self._what = f"volume {volume!r}: {self.place}"
        region = endpoint.region or _REGION
        self.nixl_parameters = {
            "bucket": name,
            "endpoint_override": endpoint.url,
            "scheme": scheme,
            "region": region,
            "use_virtual_addressing": "false",
            "req_checksum": "required",
            "num_threads": str(NIXL_THREADS),
        }
        keys: dict[str, str] = {}
        if endpoint.access_key_file is not None and endpoint.secret_key_file is not None:
            access_key, secret_key = (
                _secret(volume, file) for file in (endpoint.access_key_file, endpoint.secret_key_file)
            )
            keys = {"access_key_id": access_key, "secret_access_key": secret_key}
            self.nixl_parameters |= {"access_key": access_key, "secret_key": secret_key}
        elif endpoint.access_key_file is not None or endpoint.secret_key_file is not None:
            raise VolumeError(f"volume {volume!r}: give both access_key_file and secret_key_file of {endpoint.url}")
        self._store = S3Store(
            name,
            config={  # type: ignore[arg-type]  # its keys are a Literal, the two of `keys` are among them
                "endpoint": endpoint.url,
                "region": region,
                "virtual_hosted_style_request": "false",
                **keys,
            },
            client_options={
                "allow_http": scheme == "http",
                "connect_timeout": timedelta(seconds=CONNECT_S),
                "timeout": timedelta(seconds=REQUEST_S),
            },
            retry_config={
                "max_retries": _RETRIES_MAX,
                "retry_timeout": timedelta(seconds=REQUEST_S),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=100),
                    "max_backoff": timedelta(seconds=1),
                    "base": 2,
                },
            },
        )

    def size_bytes(self, name: str) -> int | None:
        """Of an object; None where there is none."""
        try:
            return int(obstore.head(self._store, name)["size"])
        except _MISSING:
            return None
        except BaseError as error:
            raise self._failed(f"look at {name}", error) from error

    def get(self, name: str) -> tuple[bytes, str] | None:
        """A whole object and its tag; None where there is none."""
        try:
            found = obstore.get(self._store, name)
            return bytes(found.bytes()), found.meta["e_tag"] or ""
        except _MISSING:
            return None
        except BaseError as error:
            raise self._failed(f"read {name}", error) from error

    def get_range(self, name: str, start: int, end: int) -> bytes | None:
        """Bytes from `start` to before `end`, fewer where the object is shorter; None where there is none."""
        try:
            return bytes(obstore.get_range(self._store, name, start=start, end=end))
        except _MISSING:
            return None
        except BaseError as error:
            raise self._failed(f"read {name}", error) from error

    def put(self, name: str, content: bytes) -> None:
        try:
            obstore.put(self._store, name, content, use_multipart=False)
        except BaseError as error:
            raise self._failed(f"put {name}", error) from error

    def put_if(self, name: str, content: bytes, tag: str | None) -> str | None:
        """Put only where the object there has `tag`, or where there is none for None. The new tag; None if not put."""
        try:
            if tag is None:
                put = obstore.put(self._store, name, content, mode="create", use_multipart=False)
            else:
                put = obstore.put(self._store, name, content, mode={"e_tag": tag}, use_multipart=False)
            return put["e_tag"] or ""
        except (AlreadyExistsError, PreconditionError, *_MISSING):
            return None
        except BaseError as error:
            raise self._failed(f"put {name}", error) from error

    def delete(self, names: Sequence[str]) -> None:
        """One that is not there is no fault."""
        if not names:
            return
        try:
            obstore.delete(self._store, list(names))
        except _MISSING:
            pass
        except BaseError as error:
            raise self._failed(f"delete {len(names)} objects", error) from error

    def list(self, folder: str) -> Iterator[Listed]:
        """Everything below `folder/`."""
        try:
            for part in obstore.list(self._store, prefix=folder):
                yield from (Listed(found["path"], int(found["size"])) for found in part)
        except _MISSING:
            return
        except BaseError as error:
            raise self._failed(f"list {folder}", error) from error

    def _failed(self, tried: str, error: BaseError) -> TransferError:
        # "… Error performing PUT URL in 0.3s, after 2 retries, … - status code: 500 …": what it says is at the end.
        said = " ".join(str(error).split("\n\nDebug source")[0].split())
        reason = said.split(" - ", 1)[-1][:_REASON_CHARACTERS_MAX]
        return TransferError(f"{self._what} does not {tried}: {type(error).__name__}: {reason}")


def _secret(volume: str, file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise VolumeError(f"volume {volume!r}: {file} cannot be read: {error}; name the file of the key") from error
