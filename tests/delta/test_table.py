"""The parameter table. Right values: digests by stock xxhash over bytes that the twin lays out, and fixed hex."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltacast.delta.errors import DTypeError, InputError, TableError
from deltacast.delta.table import ParameterTable, ParamMeta, check_name
from fingerprint_twin import digests
from tensor_bytes import WORDS

_ROWS: list[tuple[str, str, tuple[int, ...], int]] = [
    ("one", "bfloat16", (1,), 0x3157A14EF8D42D80),
    ("neg_zero", "bfloat16", (2,), 0x036CAD6A081C8000),
    ("pos_zero", "bfloat16", (2,), 0),
    ("nan_payload", "bfloat16", (3,), 0x042986C1E96E66C7),
    ("scalar", "float32", (), 0x6C34A05E4F0A31C0),
    ("empty", "bfloat16", (0, 4), 0),
    ("fp8", "float8_e4m3fn", (5,), 0x26D0DDB5021DD84C),
    ("int64", "int64", (2,), 0x159924B71BC92C86),
    ("bool", "bool", (3,), 0xD2B0D0EFC90FD7FC),
    ("complex", "complex64", (2,), 0x30C09D817CE4AA80),
    ("model.layers.0.w", "bfloat16", (40, 64), 0xFE21545982E65588),
    ("model.layers.0.w_t", "bfloat16", (64, 40), 0xFE21545982E65588),
    ("router", "float32", (30, 50), 0x2831A0185BDD9992),
    ("modèle.ß", "float16", (2, 2), 0x9DD9097F6D2EE530),
    ("f64", "float64", (3, 1), 0x2BEF71ECC95C177F),
]
_TABLE_DIGEST = "xxh3_128:eefc1b67857bf122c80752eda65274f9"
_STATE_DIGEST = "xxh3_128:d69024f5c5f547be9f4407bc6567e015"


def _table(rows: list[tuple[str, str, tuple[int, ...], int]], aliases: dict[str, str] | None = None) -> ParameterTable:
    return ParameterTable([ParamMeta(name, dtype, shape) for name, dtype, shape, _ in rows], aliases)


def _state_digest(rows: list[tuple[str, str, tuple[int, ...], int]]) -> str:
    sums = {name: value for name, _, _, value in rows}
    table = _table(rows)
    return table.state_digest(np.array([sums[meta.name] for meta in table], np.uint64))


def test_golden_digests_hold() -> None:
    """The published table and state digests come out, whatever order the rows came in."""
    for rows in (_ROWS, _ROWS[::-1]):
        assert _table(rows).digest == _TABLE_DIGEST
        assert _state_digest(rows) == _STATE_DIGEST


def test_an_entry_is_the_bytes_that_are_written_down() -> None:
    """Length, name, dtype, NUL, number of dims, dims: byte by byte."""
    assert ParamMeta("ß", "int8", (2, 258)).table_entry().hex() == (
        "02000000c39f" + b"int8".hex() + "000200000002000000000000000201000000000000"
    )
    assert ParamMeta("s", "bool", ()).table_entry().hex() == "01000000" + b"sbool".hex() + "0000000000"


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        ("rename", ("w", "bfloat16", (2, 3), 5)),
        ("reshape", ("v", "bfloat16", (3, 2), 5)),
        ("flatten", ("v", "bfloat16", (6,), 5)),
        ("unit dim", ("v", "bfloat16", (2, 3, 1), 5)),
        ("dtype of the same width", ("v", "float16", (2, 3), 5)),
    ],
)
def test_what_a_parameter_is_shows_in_both_digests(change: str, changed: tuple[str, str, tuple[int, ...], int]) -> None:
    """Equal bits under another name, shape or dtype are another state."""
    rows: list[tuple[str, str, tuple[int, ...], int]] = [("u", "int8", (4,), 9), ("v", "bfloat16", (2, 3), 5)]
    assert _table([rows[0], changed]).digest != _table(rows).digest, change
    assert _state_digest([rows[0], changed]) != _state_digest(rows), change


def test_swapped_contents_show_in_the_state_digest() -> None:
    """Two parameters that exchange their bits are another state of the same table."""
    rows: list[tuple[str, str, tuple[int, ...], int]] = [("a", "int8", (4,), 1), ("b", "int8", (4,), 2)]
    swapped = [(name, dtype, shape, 3 - value) for name, dtype, shape, value in rows]
    assert _table(rows).digest == _table(swapped).digest
    assert _state_digest(rows) != _state_digest(swapped)


def test_aliases_are_recorded_and_not_hashed() -> None:
    """A table with aliases has the digest of one without, equals it, and resolves them."""
    tied = _table(_ROWS, {"lm_head": "one"})
    assert tied.digest == _TABLE_DIGEST
    assert tied == _table(_ROWS)
    assert tied["lm_head"] is tied["one"]
    assert "lm_head" not in tied


def test_entries_are_in_the_order_of_utf8_bytes() -> None:
    """Not of UTF-16 or of a locale: U+FF5E sorts before U+1F600, upper case before lower."""
    names = ["\U0001f600", "\uff5e", "b", "B", "a.10", "a.9", "ß"]
    table = ParameterTable([ParamMeta(name, "int8", ()) for name in names])
    assert [meta.name for meta in table] == ["B", "a.10", "a.9", "b", "ß", "\uff5e", "\U0001f600"]


_NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12)
_METAS = st.tuples(_NAMES, st.sampled_from(sorted(WORDS)), st.lists(st.integers(0, 9), max_size=4).map(tuple))


@given(
    st.lists(st.tuples(_METAS, st.integers(0, 2**64 - 1)), max_size=6, unique_by=lambda row: row[0][0]),
    st.randoms(use_true_random=False),
)
@settings(max_examples=150, deadline=None)
def test_digests_are_the_twins(pairs: list[Any], order: Any) -> None:
    """Any table gives the digests that stock xxhash gives for the bytes that the twin lays out, in any order."""
    rows = [(name, dtype, shape, value) for (name, dtype, shape), value in pairs]
    expected = digests(rows)
    order.shuffle(rows)
    assert (_table(rows).digest, _state_digest(rows)) == expected


def test_entries_that_run_into_each_other_have_different_digests() -> None:
    """Moving a character between names, or a dim between shapes, cannot give the same bytes."""
    one = [("ab", "int8", (1,), 0), ("c", "int8", (1,), 0)]
    other = [("a", "int8", (1,), 0), ("bc", "int8", (1,), 0)]
    assert _table(list(one)).digest != _table(list(other)).digest


@pytest.mark.parametrize(
    "name",
    ["", "a\0b", "\ud800", "x" * 65536, "é" * 32768, None, 3, b"bytes", ("a",)],
    ids=lambda name: ascii(name)[:12],
)
def test_names_that_cannot_be_compared_by_bytes_are_refused(name: Any) -> None:
    """Empty, NUL, lone surrogates, too long, not a str."""
    with pytest.raises(InputError, match="parameter name"):
        check_name(name)
    with pytest.raises(InputError, match="parameter name"):
        ParamMeta(name, "int8", ())


@pytest.mark.parametrize(
    "shape", [(-1,), (1.0,), (True,), [1], ("2",), (2**60, 2), (2**62,), (1,) * 65, None, (0, 2**61)], ids=str
)
def test_absurd_shapes_are_refused_by_name(shape: Any) -> None:
    """Negative, fractional, too large, too many dims, not a tuple."""
    with pytest.raises(InputError) as caught:
        ParamMeta("w", "int8", shape)
    assert caught.value.parameter == "w"


def test_bad_dtypes_duplicates_and_aliases_are_refused_by_name() -> None:
    """Whatever is wrong with a table, the error names it."""
    a, b = ParamMeta("a", "int8", (1,)), ParamMeta("b", "int8", (1,))
    with pytest.raises(DTypeError):
        ParamMeta("a", "floaty", ())
    with pytest.raises(TableError, match="twice") as caught:
        ParameterTable([a, b, ParamMeta("a", "int8", (2,))])
    assert caught.value.parameter == "a"
    for aliases in ({"b": "a"}, {"c": "d"}, {"c": "a", "d": "c"}):
        with pytest.raises(TableError, match="alias"):
            ParameterTable([a, b], aliases)
    with pytest.raises(InputError, match="name"):
        ParameterTable([a, b], {"": "a"})
    with pytest.raises(TableError, match="no such parameter") as caught:
        ParameterTable([a, b]).index("c")
    assert caught.value.parameter == "c"
    with pytest.raises(TableError, match="number of fingerprints"):
        ParameterTable([a, b]).state_digest(np.zeros(3, np.uint64))


@pytest.mark.parametrize(
    ("other", "parameter", "expected", "found"),
    [
        ([("a", "int8", (1,), 0)], "b", "int8[2]", "no such parameter"),
        ([("a", "int8", (1,), 0), ("b", "int8", (2,), 0), ("c", "bool", (), 0)], "c", "no such parameter", "bool[]"),
        ([("a", "int8", (1,), 0), ("b", "uint8", (2,), 0)], "b", "int8[2]", "uint8[2]"),
    ],
)
def test_a_disagreement_names_the_first_parameter(
    other: list[tuple[str, str, tuple[int, ...], int]], parameter: str, expected: str, found: str
) -> None:
    """Missing, extra and different parameters are named, with what was expected and found."""
    mine = _table([("a", "int8", (1,), 0), ("b", "int8", (2,), 0)])
    mine.require_equal(_table([("b", "int8", (2,), 0), ("a", "int8", (1,), 0)]), who="rank 1")
    with pytest.raises(TableError, match="rank 1") as caught:
        mine.require_equal(_table(other), who="rank 1")
    assert (caught.value.parameter, caught.value.expected, caught.value.found) == (parameter, expected, found)


def test_sizes_count_elements_words_and_bytes() -> None:
    """A complex element is two words; a table's bytes are the sum."""
    meta = ParamMeta("c", "complex64", (3, 2))
    assert (meta.numel, meta.num_words, meta.nbytes) == (6, 12, 48)
    scalar = ParamMeta("s", "bfloat16", ())
    assert (scalar.numel, scalar.num_words, scalar.nbytes) == (1, 1, 2)
    assert ParameterTable([meta, scalar, ParamMeta("e", "int64", (0, 5))]).nbytes == 50
