"""Objects in a bucket: S3 and what speaks like it, Google Cloud Storage, Azure. Needs the extra `objects` (obstore).

Credentials and region come from the environment, under the names that each service's own tools use (`AWS_*`,
`GOOGLE_*`, `AZURE_STORAGE_*`) or from the machine's role; `~/.aws` is not read. An S3-compatible service is named by
`AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL` or `AWS_ENDPOINT`.

What a large write left behind when its process was killed is an unfinished multipart upload. No listing shows it, but
it is paid for: give the bucket a lifecycle rule that ends such uploads after a day.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING, Final

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import AzureStore, GCSStore, S3Store

from deltacast.delta.errors import InputError, MissingObjectError, ObjectExistsError, StoreError
from deltacast.store.backends.upload import gather_parts, upload_parts
from deltacast.store.objects import Buffer, ObjectBackend, ObjectInfo, check_listing, check_object_name, is_object_name

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

__all__ = ["RemoteBackend"]

_URL: Final = re.compile(r"(s3|gs|az)://([A-Za-z0-9][A-Za-z0-9._-]{1,254})((?:/[A-Za-z0-9_=+-][A-Za-z0-9._=+-]*)*)/?")
_ENDPOINTS: Final = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": (),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_CLOCK: Final = ".clock"  # no object can have this name, and no listing shows it
_CLOCK_LIFE_S: Final = 60.0
_SMALLEST_PART_BYTES: Final = 5 << 20  # S3 accepts none smaller but the last, and 10,000 at most
_CREATE_WAITS_S: Final = (0.2, 0.4)
_NO_BUCKET: Final = "Make the bucket first; deltacast makes none."


class RemoteBackend(ObjectBackend):
    """A bucket, or what lies below a prefix in one.

    Args:
        url: `s3://bucket/prefix`, `gs://bucket/prefix` or `az://container/prefix`.
        part_bytes: the parts in which large objects travel, at least 5 MiB; S3 takes 10,000 of one object. A write
            keeps `num_connections + 3` of them in memory.
        num_connections: parts of one write that travel at a time.
        timeout_s: how long one request may take, with its data.
        connect_timeout_s: how long a connection may take to open.
        max_retries: how often a request that failed for a passing reason is sent again.
        retry_timeout_s: how long that may go on.

    Raises:
        InputError: not such a URL (it is not repeated, it may hold a secret), or parts that are too small.
        StoreError: the environment says nothing that the service's client can use.
    """

    def __init__(
        self,
        url: str,
        *,
        part_bytes: int = 16 << 20,
        num_connections: int = 4,
        timeout_s: float = 60.0,
        connect_timeout_s: float = 5.0,
        max_retries: int = 5,
        retry_timeout_s: float = 120.0,
    ) -> None:
        match = _URL.fullmatch(url)
        if match is None:
            raise InputError(
                "not a URL of a bucket",
                expected="s3://bucket/prefix, gs://bucket/prefix or az://container/prefix, without credentials",
                hint="Credentials belong in the environment.",
            )
        if part_bytes < _SMALLEST_PART_BYTES:
            raise InputError("part_bytes is too small", expected=f">= {_SMALLEST_PART_BYTES}", found=part_bytes)
        scheme, bucket, prefix = match[1], match[2], match[3].removeprefix("/")
        self._url = f"{scheme}://{bucket}/{prefix}".rstrip("/")
        self._part_bytes = part_bytes
        self._num_connections = num_connections
        self._clock: tuple[float, float] | None = None  # the service's time, and time.monotonic() then
        client: ClientConfig = {
            "timeout": timedelta(seconds=timeout_s),
            "connect_timeout": timedelta(seconds=connect_timeout_s),
        }
        endpoint = next(filter(None, map(os.environ.get, _ENDPOINTS[scheme])), "")
        if endpoint.startswith("http://"):
            client["allow_http"] = True
        retry: RetryConfig = {"max_retries": max_retries, "retry_timeout": timedelta(seconds=retry_timeout_s)}
        with self._explained("open", "a store"):
            self._store = _connect(scheme, bucket, prefix or None, client, retry)

    @property
    def url(self) -> str:
        """The URL that it was opened with."""
        return self._url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._url!r})"

    def check_create(self) -> None:
        """Make sure that this service refuses to create what exists; some that speak S3 silently write over it.

        Raises:
            StoreError: it does not, so that two writers could commit one version; or it cannot be reached.
        """
        self._overwrite(_CLOCK, b"")
        with self._explained("create", _CLOCK), suppress(ObjectExistsError):
            self._create_once(_CLOCK, b"")
            raise StoreError(
                f"the service behind {self._url} writes over an object that it was asked to create",
                expected="an error for If-None-Match: * where there is an object",
                found="success",
                hint="Two writers could commit the same version there: use a service that has conditional writes.",
            )

    def create(self, name: str, data: Buffer) -> None:
        """Write a small object if there is none of that name; see `ObjectBackend.create`.

        Tried again where it failed for a passing reason: the answer to a write that succeeded may have been lost.
        """
        check_object_name(name)
        with self._explained("create", name):
            for wait_s in _CREATE_WAITS_S:
                with suppress(GenericError):
                    self._create_once(name, data)
                    return
                time.sleep(wait_s)
            self._create_once(name, data)

    def write(self, name: str, pieces: Iterable[Buffer]) -> int:
        """Write an object whose name says what it holds; see `ObjectBackend.write`.

        Up to `part_bytes` go in one request, more in a multipart upload that is ended if `pieces` raises. Asks for the
        object's size first.
        """
        there, num_bytes = self._size(check_object_name(name)), 0

        def counted() -> Iterator[bytearray]:
            nonlocal num_bytes
            for part in gather_parts(pieces, self._part_bytes):
                num_bytes += len(part)
                yield part
            if there not in (None, num_bytes):
                raise StoreError(
                    f"{name} in {self._url} is not what its name says",
                    expected=f"{num_bytes} bytes",
                    found=f"{there} bytes",
                    hint="It is damaged, or another object has its name: `deltacast store fsck` says what needs it.",
                )

        parts = counted()
        first, second = next(parts), next(parts, None)
        if second is None:
            self._overwrite(name, first)
        else:
            upload_parts(lambda stream: self._send(name, stream), chain((first, second), parts))
        return num_bytes

    def replace(self, name: str, data: Buffer) -> None:
        """Write a small object over whatever is there; see `ObjectBackend.replace`."""
        self._overwrite(check_object_name(name), bytes(data))

    def read(self, name: str) -> bytes:
        """Return a whole object; see `ObjectBackend.read`. One request, more if it is larger than `part_bytes`."""
        with self._explained("read", check_object_name(name)):
            found = obstore.get(self._store, name)
            num_bytes = found.meta["size"]
            if num_bytes <= self._part_bytes:
                return bytes(found.bytes())
        whole = bytearray(num_bytes)
        self.read_into(name, 0, memoryview(whole))
        return bytes(whole)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` with an object's bytes from `start` on; see `ObjectBackend.read_into`."""
        left, at = out.cast("B"), start
        if not left:
            self.stat(name)
        while left:
            wanted = min(left.nbytes, self._part_bytes)
            with self._explained("read", check_object_name(name)):
                got = memoryview(obstore.get_range(self._store, name, start=at, length=wanted))
            if got.nbytes < wanted:
                raise StoreError(
                    f"{name} in {self._url} is too short",
                    expected=f"{start + out.nbytes} bytes",
                    found=f"{at + got.nbytes} bytes",
                )
            left[:wanted] = got
            left, at = left[wanted:], at + wanted

    def stat(self, name: str) -> ObjectInfo:
        """Say an object's size and age; see `ObjectBackend.stat`."""
        with self._explained("read", check_object_name(name)):
            return _info(obstore.head(self._store, name))

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects below a folder; see `ObjectBackend.list`. One request for every 1000 of them."""
        check_listing(prefix, after)
        return self._listed(prefix, after)

    def delete(self, name: str) -> None:
        """Remove an object; that there is none is no error."""
        with suppress(MissingObjectError), self._explained("delete", check_object_name(name)):
            obstore.delete(self._store, name)

    def sweep(self, older_than_s: float) -> int:  # noqa: ARG002 - the bucket's lifecycle rule goes by age
        """Return 0: unfinished uploads cannot be seen from here. A lifecycle rule of the bucket removes them."""
        return 0

    def now_s(self) -> float:
        """Return the service's time, at most a second and the time of two requests behind it, never ahead.

        Writes an object that no listing shows and asks when that was: two requests, once a minute.
        """
        if self._clock is None or time.monotonic() - self._clock[1] > _CLOCK_LIFE_S:
            self._overwrite(_CLOCK, b"")
            with self._explained("read", _CLOCK):
                service_s = _info(obstore.head(self._store, _CLOCK)).modified_s
            self._clock = service_s, time.monotonic()
        service_s, then = self._clock
        return service_s + time.monotonic() - then

    def _size(self, name: str) -> int | None:
        with suppress(MissingObjectError):
            return self.stat(name).num_bytes
        return None

    def _create_once(self, name: str, data: Buffer) -> None:
        try:
            obstore.put(self._store, name, bytes(data), mode="create", use_multipart=False)
        except (AlreadyExistsError, PreconditionError):
            raise ObjectExistsError(f"there is an object {name} already in {self._url}") from None

    def _overwrite(self, name: str, data: Buffer) -> None:
        with self._explained("write", name):
            obstore.put(self._store, name, data, mode="overwrite", use_multipart=False)

    def _send(self, name: str, parts: Iterator[bytearray]) -> None:
        with self._explained("write", name):
            obstore.put(self._store, name, parts, chunk_size=self._part_bytes, max_concurrency=self._num_connections)

    def _listed(self, prefix: str, after: str) -> Iterator[ObjectInfo]:
        stream = iter(obstore.list(self._store, prefix or None, offset=after or None, chunk_size=1000))
        while True:
            with self._explained("list", prefix):
                chunk = next(stream, None)
            if chunk is None:
                return
            yield from (_info(meta) for meta in chunk if is_object_name(meta["path"]))

    @contextmanager
    def _explained(self, action: str, name: str) -> Iterator[None]:
        """Turn what obstore raises into our errors.

        Without the cause: its text may quote a signed URL, which a log must not hold.
        """
        try:
            yield
        except StoreError:
            raise
        except FileNotFoundError as err:
            if action in ("read", "delete") and "NoSuchBucket" not in str(err):
                raise MissingObjectError(f"there is no object {name} in {self._url}") from None
            raise StoreError(f"cannot {action} {name} in {self._url}: {_reason(err)}", hint=_NO_BUCKET) from None
        except BaseError as err:
            raise StoreError(f"cannot {action} {name} in {self._url}: {_reason(err)}", hint=_hint(err)) from None


def _connect(scheme: str, bucket: str, prefix: str | None, client: ClientConfig, retry: RetryConfig) -> ObjectStore:
    if scheme == "s3":
        return S3Store(bucket, prefix=prefix, client_options=client, retry_config=retry)
    if scheme == "gs":
        return GCSStore(bucket, prefix=prefix, client_options=client, retry_config=retry)
    return AzureStore(bucket, prefix=prefix, client_options=client, retry_config=retry)


def _info(meta: ObjectMeta) -> ObjectInfo:
    return ObjectInfo(meta["path"], meta["size"], meta["last_modified"].timestamp())


def _reason(err: Exception) -> str:
    """The first line of what obstore says, without queries (they may be signed), and the service's code for it."""
    text = str(err)
    line = re.sub(r"\?\S*", "?...", text.partition("\n")[0].partition(": <?xml")[0])
    code = re.search(r"<Code>(\w+)</Code>", text)
    return f"{line[:400]} {code[1]}" if code else line[:400]


def _hint(err: Exception) -> str:
    if isinstance(err, PermissionDeniedError | UnauthenticatedError):
        return "Check the credentials in the environment, and what they may do in this bucket."
    if "NoSuchBucket" in str(err):
        return _NO_BUCKET
    if "status code: 416" in str(err):
        return "The object ends before the bytes that were asked for."
    return "Check the network, the endpoint and the region, then try again."
