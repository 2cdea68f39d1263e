"""How tables are cut into groups and chunks. Right values: written by hand from docs/format.md, "Plan"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltacast.delta.chunks import ChunkPlan, Span, even_chunk_bytes
from deltacast.delta.errors import InputError
from deltacast.delta.table import ParameterTable, ParamMeta

CHUNK_BYTES = 1 << 19
"""Four blocks of 2-byte words, two of 4-byte words, eight of single bytes."""


def table_of(*metas: tuple[str, Sequence[int]]) -> ParameterTable:
    """A table of dtypes and shapes, named in their order."""
    return ParameterTable([ParamMeta(chr(97 + i), dtype, tuple(shape)) for i, (dtype, shape) in enumerate(metas)])


MIXED = table_of(
    ("bfloat16", [1000, 300]),
    ("float32", [2 * 65536 + 1]),
    ("float16", [0, 9]),
    ("uint8", []),
    ("bfloat16", [4, 65536]),
)
"""5, 3, 0, 1 and 4 blocks."""


def test_spans_follow_the_order_and_what_is_left_comes_last() -> None:
    """A span goes as soon as its group has blocks enough, with so many parameters there; groups take turns."""
    plan = ChunkPlan(MIXED, range(5), CHUNK_BYTES)
    assert (plan.word_bytes, plan.members) == ((2, 4, 1), ((0, 2, 4), (1,), (3,)))
    assert plan.spans == (
        Span(0, 0, 4, num_params=1),
        Span(1, 0, 2, num_params=2),
        Span(0, 4, 4, num_params=5),
        Span(0, 8, 1, num_params=5),
        Span(1, 2, 1, num_params=5),
        Span(2, 0, 1, num_params=5),
    )
    assert [plan.num_chunks(group) for group in range(3)] == [3, 2, 1]
    assert [plan.max_blocks(group) for group in range(3)] == [4, 2, 1]


def test_another_order_is_another_plan() -> None:
    """Groups are numbered by their first parameter, blocks by the order."""
    plan = ChunkPlan(MIXED, (4, 3, 2, 1, 0), CHUNK_BYTES)
    assert (plan.word_bytes, plan.members) == ((2, 1, 4), ((4, 2, 0), (3,), (1,)))
    assert plan.spans == (
        Span(0, 0, 4, num_params=1),
        Span(2, 0, 2, num_params=4),
        Span(0, 4, 4, num_params=5),
        Span(0, 8, 1, num_params=5),
        Span(1, 0, 1, num_params=5),
        Span(2, 2, 1, num_params=5),
    )


def test_one_parameter_of_more_than_2_to_the_31_elements_is_many_spans() -> None:
    """6 GiB in chunks of one."""
    plan = ChunkPlan(table_of(("bfloat16", [3 << 30])), [0], 1 << 30)
    assert plan.spans == tuple(Span(0, 8192 * number, 8192, num_params=1) for number in range(6))


def test_a_table_of_nothing_has_no_span() -> None:
    """Empty parameters have no blocks, but a group."""
    plan = ChunkPlan(table_of(("bfloat16", [0]), ("bfloat16", [3, 0])), [1, 0], CHUNK_BYTES)
    assert (plan.spans, plan.members, plan.max_blocks(0), plan.capacities(1.0)) == ((), ((1, 0),), 0, (0,))


def test_capacities_are_a_share_of_the_words_but_at_least_a_million() -> None:
    """And 16 more for each chunk, whose changes are rounded up."""
    assert ChunkPlan(MIXED, range(5), CHUNK_BYTES).capacities(0.01) == (562_144 + 48, 131_073 + 32, 1 + 16)
    large = ChunkPlan(table_of(("bfloat16", [1 << 22])), [0], CHUNK_BYTES)
    assert large.capacities(0.5) == ((1 << 21) + 16 * 16,)
    assert large.capacities(1e-9) == ((1 << 20) + 16 * 16,)


@pytest.mark.parametrize("order", [[], [0, 1, 2, 3], [0, 1, 2, 3, 3], [0, 1, 2, 3, 5], [-1, 0, 1, 2, 3]])
def test_an_order_that_does_not_name_each_parameter_once_is_refused(order: list[int]) -> None:
    """Too few, twice, or not there."""
    with pytest.raises(InputError, match="each of 5 once"):
        ChunkPlan(MIXED, order, CHUNK_BYTES)


@pytest.mark.parametrize("chunk_bytes", [-1, 0, CHUNK_BYTES - 1])
def test_chunks_smaller_than_a_block_are_refused(chunk_bytes: int) -> None:
    """Of the widest words, whatever the table has."""
    with pytest.raises(InputError, match="at least 524288 bytes"):
        ChunkPlan(MIXED, range(5), chunk_bytes)


@given(
    st.lists(st.tuples(st.sampled_from(["int8", "bfloat16", "float64"]), st.integers(0, 12)), min_size=1, max_size=9),
    st.randoms(use_true_random=False),
)
def test_every_block_is_in_one_span_whose_parameters_are_there(blocks: list[tuple[str, int]], random: Random) -> None:
    """Counted block by block: each once, in order, none bigger than a chunk, none before its parameters."""
    table = table_of(*((dtype, [count * 65536]) for dtype, count in blocks))
    order = list(range(len(blocks)))
    random.shuffle(order)
    plan = ChunkPlan(table, order, CHUNK_BYTES)
    owners = {group: [p for p in order if p in places for _ in range(blocks[p][1])]
              for group, places in enumerate(plan.members)}  # fmt: skip
    covered: Counter[int] = Counter()
    for span in plan.spans:
        assert span.first_block == covered[span.group]
        covered[span.group] += span.num_blocks
        assert 1 <= span.num_blocks * 65536 * plan.word_bytes[span.group] <= CHUNK_BYTES
        assert set(owners[span.group][span.first_block : covered[span.group]]) <= set(order[: span.num_params])
    assert [covered[group] for group in owners] == [len(places) for places in owners.values()]


@pytest.mark.parametrize(
    ("shapes", "chunk_bytes", "even"),
    [
        (("bfloat16", [65536 * 9]), 65536 * 2 * 8, 65536 * 2 * 5),  # 9 blocks: not 8 and 1, but 5 and 4
        (("bfloat16", [65536 * 8]), 65536 * 2 * 8, 65536 * 2 * 8),
        (("bfloat16", [65536 * 9]), 1 << 40, 1 << 40),
        (("int64", [65536 * 2]), 65536 * 8, 65536 * 8),
        (("uint8", [65536 * 9]), 65536 * 8, 65536 * 8),  # no smaller than a block of 8-byte words
    ],
)
def test_even_chunks_are_as_many_as_before_and_alike(
    shapes: tuple[str, list[int]], chunk_bytes: int, even: int
) -> None:
    """No small last chunk."""
    assert even_chunk_bytes(table_of(shapes), chunk_bytes) == even
