"""Patches, updates and the order of bits. Right values: written by hand, struct's floats, plain integers."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltacast.delta.bits import Words
from deltacast.delta.errors import InputError, PatchError
from deltacast.delta.patch import SparseWeightPatch, WeightUpdate, ordered, unordered
from deltacast.delta.table import ParameterTable, ParamMeta

_META = ParamMeta("w", "bfloat16", (4, 3))
_COMPLEX = ParamMeta("c", "complex64", (2, 2))


def _patch(indices: Any, values: Any = None, *, meta: ParamMeta = _META, **more: Any) -> SparseWeightPatch:
    if isinstance(indices, list):
        indices = np.array(indices, np.int64)
    if values is None:
        values = np.zeros(len(indices), meta.row.numpy_word)
    return SparseWeightPatch(meta, indices, values, 0, **more)


# --- what a patch may be -------------------------------------------------------------------------------------------


def test_a_patch_tells_what_it_is() -> None:
    """Name, full shape, number of changes, and whether it is dense."""
    sparse = _patch([0, 11])
    assert (sparse.name, sparse.full_shape, sparse.num_changed, sparse.is_dense) == ("w", (4, 3), 2, False)
    sparse.check_indices()
    dense = _patch(None, np.zeros(8, np.uint32), meta=_COMPLEX)
    assert (dense.num_changed, dense.is_dense, dense.num_box_words) == (8, True, 8)
    dense.check_indices()
    part = _patch(None, np.zeros(2, np.uint16), box=((1, 3), (2, 3)), part=1)
    assert part.num_box_words == 2


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (np.zeros(1, np.int16), "int16"),
        (np.zeros(1, np.float16), "float16"),
        (np.zeros(1, np.uint32), "uint32"),
        (np.zeros(1, ">u2"), ">u2"),
        (np.zeros((1, 1), np.uint16), "2-d"),
        (np.zeros(2, np.uint16)[::2], None),
        (np.zeros(4, np.uint16)[::2], "uint16"),
        ([0], "list"),
        (None, "NoneType"),
    ],
    ids=str,
)
def test_values_of_another_kind_are_refused_by_name(values: Any, found: str | None) -> None:
    """Only flat, contiguous, unsigned little-endian words of the parameter's width are values."""
    indices = np.arange(2 if getattr(values, "size", 1) == 2 else 1)
    if found is None:  # one element is contiguous whatever its stride
        SparseWeightPatch(_META, indices[:1], values, 0)
        return
    with pytest.raises(PatchError, match="values") as caught:
        SparseWeightPatch(_META, indices, values, 0)
    assert caught.value.parameter == "w"
    assert found in str(caught.value.found)


@pytest.mark.parametrize(
    "indices",
    [
        np.zeros(2, np.int32),
        np.zeros(2, np.uint64),
        np.zeros(2, np.float64),
        np.zeros(2, np.bool_),
        np.zeros(2, ">i8"),
        np.zeros((2, 1), np.int64),
        np.zeros((1, 2), np.int64),
        np.zeros(3, np.int64),
        np.zeros((), np.int64),
        [0, 1],
    ],
    ids=lambda value: f"{getattr(value, 'dtype', 'list')}{getattr(value, 'shape', '')}",
)
def test_indices_of_another_kind_are_refused_by_name(indices: Any) -> None:
    """int32 cannot address 2^31 words, 2-D pairs are no flat positions, and lengths must agree."""
    with pytest.raises(PatchError, match="indices") as caught:
        SparseWeightPatch(_META, indices, np.zeros(2, np.uint16), 0)
    assert caught.value.parameter == "w"


@pytest.mark.parametrize(
    ("indices", "found"),
    [
        ([-1, 0], -1),
        ([0, 12], 12),
        ([-(2**63)], -(2**63)),
        ([2**31], 2**31),
        ([2**63 - 1], 2**63 - 1),
        ([3, 3], 3),
        ([4, 3], 3),
        ([0, 5, 5, 7], 5),
        ([0, 7, 2, 9], 2),
        ([11, 0], 0),
        ([0, 2**40, 3], 2**40),
    ],
    ids=str,
)
def test_positions_outside_or_out_of_order_are_refused_by_name(indices: list[int], found: int) -> None:
    """Negative, at or beyond numel, equal, descending: the first offender is named."""
    with pytest.raises(PatchError, match=r"outside|ascending") as caught:
        _patch(indices).check_indices()
    assert caught.value.parameter == "w"
    assert found in (caught.value.found, *indices)


def test_positions_are_words_so_a_complex_parameter_has_two_for_each_element() -> None:
    """The last position of a complex tensor is 2 * numel - 1."""
    _patch([0, 7], meta=_COMPLEX).check_indices()
    with pytest.raises(PatchError):
        _patch([8], meta=_COMPLEX).check_indices()


@pytest.mark.parametrize(
    "more",
    [
        {"base_values": np.zeros(1, np.uint16)},
        {"base_values": np.zeros(2, np.uint32)},
        {"base_values": np.zeros((1, 2), np.uint16)},
        {"base_values": [0, 0]},
        {"form": "xor"},
        {"form": ""},
    ],
    ids=str,
)
def test_base_values_and_forms_that_do_not_fit_are_refused(more: dict[str, Any]) -> None:
    """Other lengths, dtypes and forms never pass for the absolute form."""
    with pytest.raises(PatchError) as caught:
        _patch([0, 1], **more)
    assert caught.value.parameter == "w"


@pytest.mark.parametrize(
    ("size", "more"),
    [
        (11, {}),
        (13, {}),
        (0, {}),
        (12, {"form": "delta"}),
        (12, {"box": ((0, 2), (0, 3))}),
        (5, {"box": ((0, 2), (0, 3))}),
    ],
    ids=str,
)
def test_a_dense_patch_holds_every_word_absolute(size: int, more: dict[str, Any]) -> None:
    """Short, long or relative dense patches are refused."""
    with pytest.raises(PatchError, match="dense"):
        _patch(None, np.zeros(size, np.uint16), **more)


# --- what an update may be -----------------------------------------------------------------------------------------


def _update(*patches: SparseWeightPatch, **fields: Any) -> WeightUpdate:
    given_fields: dict[str, Any] = {
        "run_id": "r",
        "epoch": 0,
        "base_version": 1,
        "target_version": 2,
        "base_digest": "b",
        "target_digest": "t",
        "table_digest": "x",
    }
    return WeightUpdate(**{**given_fields, "patches": patches, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"target_version": 0},
        {"target_version": -1, "base_version": None, "base_digest": None},
        {"base_version": -3, "target_version": -2},
        {"base_version": -1, "target_version": 0},
        {"epoch": -1},
        {"base_digest": None},
        {"base_version": None},
        {"target_version": 1},
    ],
    ids=str,
)
def test_versions_that_make_no_sense_are_refused(fields: dict[str, Any]) -> None:
    """Backwards, negative, a base without its digest, and one version for two states."""
    with pytest.raises(InputError):
        _update(**fields)


def test_a_repair_keeps_version_and_digest() -> None:
    """An update to its own version is legal only if the state's digest stays."""
    assert not _update(target_version=1, target_digest="b").is_seed
    assert _update(base_version=None, base_digest=None).is_seed
    assert _update(target_version=9).num_changed == 0


def test_a_parameter_part_has_one_patch() -> None:
    """The same (name, part) twice is refused, two parts are not."""
    _update(_patch([0]), _patch([1], part=1))
    with pytest.raises(InputError, match="two patches"):
        _update(_patch([0]), _patch([1]))


def test_a_seed_must_send_every_word_of_every_parameter() -> None:
    """A parameter that is missing, sparse or sent in part is named; disjoint parts that fill it are enough."""
    table = ParameterTable([_META, ParamMeta("e", "int8", (0,))])
    empty = SparseWeightPatch(ParamMeta("e", "int8", (0,)), None, np.zeros(0, np.uint8), 0)
    top = _patch(None, np.zeros(6, np.uint16), box=((0, 2), (0, 3)))
    bottom = _patch(None, np.zeros(6, np.uint16), box=((2, 4), (0, 3)), part=1)
    seed = {"base_version": None, "base_digest": None}
    _update(_patch(None, np.zeros(12, np.uint16)), empty, **seed).check_covers(table)
    _update(top, bottom, empty, **seed).check_covers(table)
    every_word = _patch(list(range(12)))
    for patches, parameter in (
        ((empty,), "w"),
        ((top, empty), "w"),
        ((every_word, empty), "w"),
        ((top, bottom), "e"),
    ):
        with pytest.raises(InputError, match="whole") as caught:
            _update(*patches, **seed).check_covers(table)
        assert caught.value.parameter == parameter
    _update(top).check_covers(table)


# --- the order of bits ---------------------------------------------------------------------------------------------


def _naive_ordered(word: int, bits: int) -> int:
    sign, magnitude = divmod(word, 1 << (bits - 1))
    return word if not sign else (1 << (bits - 1)) + ((1 << (bits - 1)) - 1 - magnitude)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_every_narrow_word_is_ordered_as_the_plain_integers_say(dtype: type[np.unsignedinteger[Any]]) -> None:
    """All 8- and 16-bit words: sign kept, magnitude of negatives flipped, and its own inverse."""
    bits = np.dtype(dtype).itemsize * 8
    array = np.arange(1 << bits, dtype=np.uint64).astype(dtype)
    result = ordered(array, signed_magnitude=True)
    assert result.tolist() == [_naive_ordered(word, bits) for word in array.tolist()]
    assert np.array_equal(unordered(result, signed_magnitude=True), array)
    assert np.array_equal(ordered(array, signed_magnitude=False), array)


@given(st.lists(st.floats(allow_nan=False), min_size=2, max_size=20))
@settings(deadline=None)
def test_order_of_words_is_the_order_of_doubles(values: list[float]) -> None:
    """As signed integers, ordered words sort as the floats do, and neighbours differ by one."""
    array: Words = np.frombuffer(struct.pack(f"<{len(values)}d", *values), "<u8")
    as_int = ordered(array, signed_magnitude=True).view("<i8")
    by_bits = [values[i] for i in np.argsort(as_int, kind="stable")]
    assert by_bits == sorted(values)
    stepped = np.nextafter(np.array([value for value in values if value != 0 and abs(value) < 1e300]), np.inf)
    before = np.nextafter(stepped, -np.inf)
    step = ordered(stepped.view("<u8"), signed_magnitude=True) - ordered(before.view("<u8"), signed_magnitude=True)
    assert set(step.tolist()) <= {1, 2}  # 2 where the step crosses from -0.0 to the first positive


@pytest.mark.parametrize("word", [0, 1, 0x7F800000, 0x7FC00001, 0x80000000, 0x80000001, 0xFF800000, 0xFFFFFFFF])
def test_special_words_survive_the_order(word: int) -> None:
    """Both zeros, NaNs, infinities and the lowest subnormals map back to themselves, read-only input included."""
    array = np.frombuffer(struct.pack("<I", word), "<u4")
    once = ordered(array, signed_magnitude=True)
    assert once.tolist() == [_naive_ordered(word, 32)]
    assert unordered(once, signed_magnitude=True).tolist() == [word]
    assert array.tolist() == [word]
