"""The dtype table. Right values: a list written by hand, torch's own item sizes, stock safetensors' codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors import torch as stock_safetensors

from deltacast.delta.dtypes import DTYPES, dtype_named, dtype_of, dtype_of_safetensors
from deltacast.delta.errors import DTypeError
from tensor_bytes import SIGN_AND_MAGNITUDE, WORDS

_REFUSED = (
    *("quint8", "qint8", "qint32", "quint4x2", "quint2x4"),
    *("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"),
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)),
)


def test_the_table_holds_every_dtype_that_is_promised_and_no_other() -> None:
    """The names are the hand-written ones."""
    assert set(DTYPES) == set(WORDS)


@pytest.mark.parametrize("name", WORDS)
def test_a_row_says_how_torch_stores_the_dtype(name: str) -> None:
    """Words, units and item size agree with torch and with the hand-written list."""
    row, (word_bytes, per_element) = DTYPES[name], WORDS[name]
    assert row.torch_dtype is getattr(torch, name)
    assert (row.word_bytes, row.words_per_element) == (word_bytes, per_element)
    assert row.itemsize == row.torch_dtype.itemsize
    assert (row.unit_bytes, row.units_per_word) == ((1, 1) if word_bytes == 1 else (2, word_bytes // 2))
    assert row.numpy_word.str == {1: "|u1", 2: "<u2", 4: "<u4", 8: "<u8"}[word_bytes]
    assert row.torch_word.itemsize == word_bytes
    assert row.torch_part.itemsize == word_bytes
    assert row.signed_magnitude is (name in SIGN_AND_MAGNITUDE)


@pytest.mark.parametrize("name", WORDS)
def test_names_and_torch_dtypes_find_their_row(name: str) -> None:
    """Both look-ups give the same row."""
    assert dtype_named(name) is dtype_of(getattr(torch, name)) is DTYPES[name]


@pytest.mark.parametrize("name", _REFUSED)
def test_dtypes_without_plain_memory_are_refused_by_name(name: str) -> None:
    """Quantised, bits and shell dtypes are named in the error, whichever way they come."""
    with pytest.raises(DTypeError, match=rf"torch\.{name} "):
        dtype_of(getattr(torch, name))
    with pytest.raises(DTypeError, match=repr(name)):
        dtype_named(name)


@pytest.mark.parametrize(
    "name", ["float", "half", "load", "__name__", "torch.bfloat16", "BFLOAT16", "", 7, None, ["int8"]]
)
def test_names_from_outside_are_looked_up_not_evaluated(name: Any) -> None:
    """Attributes of torch that are no dtype names of the table, and things that are no names, are refused."""
    with pytest.raises(DTypeError):
        dtype_named(name)


@pytest.mark.parametrize(("code", "torch_dtype"), sorted(stock_safetensors._TYPES.items()))
def test_codes_mean_what_stock_safetensors_means(code: str, torch_dtype: torch.dtype) -> None:
    """Every code that the safetensors package reads maps to the same torch dtype."""
    assert dtype_of_safetensors(code).torch_dtype is torch_dtype


@pytest.mark.parametrize("code", ["F6", "bf16", "", 3, None, ["BF16"], {}])
def test_unknown_safetensors_codes_are_refused(code: Any) -> None:
    """A code that is not in the table, or no code at all, is a named error."""
    with pytest.raises(DTypeError, match="safetensors"):
        dtype_of_safetensors(code)
