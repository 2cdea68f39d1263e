"""One large object on its way to a bucket: pieces gathered into parts, parts handed to the thread that sends them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Final

from deltacast.store.objects import Buffer

__all__ = ["gather_parts", "upload_parts"]

_WAITING_PARTS: Final = 2  # one that is sent next and one that is being made


class _CallerFailedError(Exception):
    """Ends an upload whose parts will not come."""


def gather_parts(pieces: Iterable[Buffer], part_bytes: int) -> Iterator[bytearray]:
    """Yield the pieces' bytes in parts of `part_bytes`, the last one shorter; one empty part if there are none.

    Each part has memory of its own: obstore keeps what it is given until it is sent, and by then a caller may have
    filled the same buffer with its next piece.
    """
    part = bytearray()
    for piece in pieces:
        left = memoryview(piece).cast("B")
        while left:
            if len(part) == part_bytes:
                yield part
                part = bytearray()
            taken = left[: part_bytes - len(part)]
            part += taken
            left = left[len(taken) :]
    yield part


def upload_parts(put: Callable[[Iterator[bytearray]], object], parts: Iterable[bytearray]) -> None:
    """Send parts in a thread of its own while this one makes them; blocks until all are sent.

    The parts must be made here: obstore takes them inside its own event loop, where making them from another object of
    a bucket, which is a call of obstore too, would panic.

    Args:
        put: sends what it is given; it ends the upload if the iterator raises.
        parts: at most three of them are in memory beside those that `put` holds.

    Raises:
        Exception: whatever `put` or `parts` raised; the upload has been ended.
    """
    room = threading.Semaphore(_WAITING_PARTS)
    queue: SimpleQueue[bytearray | _CallerFailedError | None] = SimpleQueue()

    def taken() -> Iterator[bytearray]:
        while (part := queue.get()) is not None:
            if isinstance(part, _CallerFailedError):
                raise part
            room.release()
            yield part

    with ThreadPoolExecutor(1, "deltacast-upload") as sender:
        sent = sender.submit(put, taken())
        sent.add_done_callback(
            lambda _: room.release()
        )  # nobody will take the part that this thread waits to hand over
        try:
            for part in parts:
                room.acquire()
                if sent.done():
                    break
                queue.put(part)
            queue.put(None)
        except BaseException:
            queue.put(_CallerFailedError())
            raise
        sent.result()
