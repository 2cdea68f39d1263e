"""The ordered map over threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from deltacast.delta.threads import in_order


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_come_in_the_order_of_the_items(threads: int) -> None:
    """Even where a later item is done first."""
    first_may_end = threading.Event()

    def function(item: int) -> int:
        if threads > 1 and item == 0:
            assert first_may_end.wait(10)
        if item == 1:
            first_may_end.set()
        return item * item

    assert list(in_order(function, range(20), threads)) == [i * i for i in range(20)]


def test_items_are_not_taken_far_ahead() -> None:
    """A source that makes each item on the way holds a few at most."""
    taken: list[int] = []

    def items() -> Iterator[int]:
        for i in range(100):
            taken.append(i)
            yield i

    results = in_order(lambda i: i, items(), 3)
    assert next(results) == 0
    assert len(taken) == 4
    results.close()  # type: ignore[attr-defined]
    assert len(taken) == 4


def test_an_error_surfaces_and_what_has_not_begun_is_dropped() -> None:
    """The caller sees the exception itself."""

    def function(item: int) -> int:
        if item == 2:
            raise KeyError(item)
        return item

    results = in_order(function, range(100), 2)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(KeyError):
        next(results)
