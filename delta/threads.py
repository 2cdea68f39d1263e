"""One bounded, ordered map over threads: numpy and xxhash release the GIL, so scans and diffs scale with cores."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["in_order"]

A = TypeVar("A")
B = TypeVar("B")


def in_order(function: Callable[[A], B], items: Iterable[A], threads: int) -> Iterator[B]:
    """Yield `function(item)` in the order of the items.

    At most `threads` + 1 items are taken and not yet yielded, so a source may produce each on the way. When the
    consumer stops, or `function` raises, what has not begun is dropped and what runs is waited for.

    Args:
        function: safe to call from several threads.
        items: read in the caller's thread.
        threads: 1 or less calls `function` in the caller's thread.
    """
    if threads <= 1:
        yield from map(function, items)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="deltacast")
    pending: deque[Future[B]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
