"""Fingerprints. Right values: golden sums, and the plain-integer twin of tests/support."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from deltacast.delta.bits import numpy_words, words
from deltacast.delta.dtypes import DTYPES
from deltacast.delta.errors import InputError
from deltacast.delta.fingerprint import (
    Box,
    _torch_fingerprint,
    add,
    box_positions,
    change_sums,
    fingerprint,
    format_sum,
    keys,
    parse_sum,
    shard_fingerprint,
    words_fingerprint,
)
from fingerprint_twin import box_fingerprint, bytes_fingerprint, unit_bytes, unit_key
from tensor_bytes import WORDS, random_raw, tensor_of

_MASK = 2**64 - 1


def _ramp(num_bytes: int) -> bytes:
    return bytes((i * 7 + 3) % 251 for i in range(num_bytes))


@pytest.mark.parametrize(
    ("dtype", "shape", "raw", "expected"),
    [
        ("bfloat16", (1,), bytes.fromhex("803f"), 0x3157A14EF8D42D80),
        ("bfloat16", (2,), bytes.fromhex("00000080"), 0x036CAD6A081C8000),
        ("bfloat16", (2,), bytes(4), 0),
        ("bfloat16", (3,), bytes.fromhex("c17f817fffff"), 0x042986C1E96E66C7),
        ("float32", (), bytes.fromhex("0000c03f"), 0x6C34A05E4F0A31C0),
        ("bfloat16", (0, 4), b"", 0),
        ("float8_e4m3fn", (5,), bytes.fromhex("00807fff38"), 0x26D0DDB5021DD84C),
        ("int64", (2,), bytes.fromhex("ffffffffffffffff0000000000010000"), 0x159924B71BC92C86),
        ("bool", (3,), bytes.fromhex("010001"), 0xD2B0D0EFC90FD7FC),
        ("complex64", (2,), bytes.fromhex("0000803f000000c00000003f00000080"), 0x30C09D817CE4AA80),
        ("bfloat16", (40, 64), _ramp(5120), 0xFE21545982E65588),
        ("float32", (30, 50), _ramp(6000), 0x2831A0185BDD9992),
        ("float16", (2, 2), bytes.fromhex("0100020003000400"), 0x9DD9097F6D2EE530),
        ("float64", (3, 1), bytes.fromhex("9a9999999999b93f0000000000000080000000000000f07f"), 0x2BEF71ECC95C177F),
    ],
)
def test_golden_fingerprints_hold(dtype: str, shape: tuple[int, ...], raw: bytes, expected: int) -> None:
    """The published sums come out of the code and of the twin."""
    assert fingerprint(tensor_of(dtype, raw, shape)) == expected
    assert bytes_fingerprint(raw, WORDS[dtype][0]) == expected


@pytest.mark.parametrize(
    ("first", "word", "size", "expected"),
    [
        (0, "<u2", 2000, 0x8624D70A73F555B4),
        (1000, "<u2", 2000, 0xB2446CA214EEED84),
        (8589934597, "<u2", 4096, 0xB26643C9DCCFD22A),
        (1099511627776, "u1", 3000, 0x0C275E59C19919DA),
    ],
)
def test_golden_partial_sums_hold(first: int, word: str, size: int, expected: int) -> None:
    """Runs that begin anywhere, beyond 2^32 and 2^40 too, have the published sums."""
    assert words_fingerprint(np.frombuffer(_ramp(size), word), first) == expected


@pytest.mark.parametrize("numel", [0, 1, 511, 512, 1023, 1024, 1025, 2047, 2049, 3072])
@pytest.mark.parametrize("name", WORDS)
def test_fingerprints_are_the_twins_for_every_dtype_and_length(name: str, numel: int) -> None:
    """Around every row boundary, numpy's and torch's sum are the plain-integer sum."""
    raw = random_raw(np.random.default_rng(numel), name, numel)
    tensor = tensor_of(name, raw, (numel,))
    expected = bytes_fingerprint(raw, WORDS[name][0])
    assert fingerprint(tensor) == expected
    assert _torch_fingerprint(words(tensor)) == expected


@pytest.mark.parametrize("word", ["u1", "<u2", "<u4", "<u8"])
@pytest.mark.parametrize("first_unit", [0, 4, 1020, 1024, 2044, 2**32 - 4, 2**32 + 1020, 2**42, 2**61])
def test_runs_anywhere_are_the_twins(word: str, first_unit: int) -> None:
    """A run's sum depends on its global position as the twin's does."""
    width = np.dtype(word).itemsize
    raw = np.random.default_rng(first_unit % 97).bytes(3000 * min(width, 2))
    per_word = width // unit_bytes(width)
    assert words_fingerprint(np.frombuffer(raw, word), first_unit // per_word) == bytes_fingerprint(
        raw, width, first_unit
    )


@given(st.lists(st.integers(0, 2**62), min_size=1, max_size=40))
@settings(deadline=None)
def test_keys_are_the_twins(positions: list[int]) -> None:
    """Near and far positions, alone and mixed, have the twin's keys."""
    expected = [unit_key(position) for position in positions]
    assert keys(np.array(positions, np.int64)).tolist() == expected
    assert keys(np.array(positions, np.uint64)).tolist() == expected


def test_keys_around_the_end_of_the_key_table_are_the_twins() -> None:
    """The table of row keys ends at 2^22 rows; nothing changes there."""
    positions = [(1 << 32) + step for step in (-1025, -1024, -1, 0, 1, 1024)]
    for last in range(1, len(positions) + 1):
        assert keys(np.array(positions[:last])).tolist() == [unit_key(position) for position in positions[:last]]
    assert keys(np.empty(0, np.int64)).size == 0


@pytest.mark.parametrize("word", ["u1", "<u2", "<u4", "<u8"])
def test_a_run_in_any_two_pieces_adds_up(word: str) -> None:
    """Cuts at, before and after row boundaries give partial sums of the same total."""
    array = np.frombuffer(np.random.default_rng(5).bytes(5000 * np.dtype(word).itemsize), word)
    total = words_fingerprint(array, 77)
    for cut in (0, 1, 434, 435, 947, 948, 1024, 4999, 5000):
        assert add(words_fingerprint(array[:cut], 77), words_fingerprint(array[cut:], 77 + cut)) == total


@pytest.mark.parametrize("name", ["bfloat16", "float32", "float64", "uint8", "complex64", "complex128"])
def test_the_torch_sum_does_not_depend_on_its_chunk(name: str) -> None:
    """The device's arithmetic wraps and chunks like numpy's."""
    tensor = tensor_of(name, random_raw(np.random.default_rng(6), name, 5000), (5000,))
    for chunk in (1024, 2048, 1 << 22):
        assert _torch_fingerprint(words(tensor), chunk=chunk) == fingerprint(tensor)


# --- increments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORDS)
def test_sums_over_changes_move_a_fingerprint_to_the_rescanned_one(name: str) -> None:
    """The sum before - old_sum + new_sum is the fingerprint of the new bits; each sum is the twin's."""
    rng = np.random.default_rng(7)
    row = DTYPES[name]
    old = np.frombuffer(random_raw(rng, name, 3000), row.numpy_word)
    positions = np.sort(rng.choice(old.size, 500, replace=False))
    new = old.copy()
    new[positions] = np.frombuffer(random_raw(rng, name, 3000), row.numpy_word)[:500]
    old_sum, new_sum = change_sums(positions, old[positions], new[positions])
    width, per_word = row.word_bytes, row.units_per_word
    for words_there, found in ((old, old_sum), (new, new_sum)):
        one_by_one = (
            bytes_fingerprint(words_there[at : at + 1].tobytes(), width, int(at) * per_word) for at in positions
        )
        assert found == sum(one_by_one) & _MASK
    before, after = bytes_fingerprint(old.tobytes(), width), bytes_fingerprint(new.tobytes(), width)
    assert add(before, new_sum - old_sum) == after


def test_sums_over_changes_do_not_depend_on_their_order_or_chunks() -> None:
    """More changes than a chunk holds, in any order, have one sum: integers commute."""
    rng = np.random.default_rng(8)
    positions = np.sort(rng.choice(1 << 30, 150_000, replace=False)).astype(np.int64)
    old, new = rng.integers(0, 2**16, (2, positions.size), np.uint16)
    expected = change_sums(positions, old, new)
    order = rng.permutation(positions.size)
    assert change_sums(positions[order], old[order], new[order]) == expected
    pieces = [change_sums(positions[part], old[part], new[part]) for part in np.array_split(np.arange(150_000), 7)]
    assert tuple(sum(piece) & _MASK for piece in zip(*pieces, strict=True)) == expected
    assert change_sums(positions[:0], old[:0], new[:0]) == (0, 0)


# --- shards --------------------------------------------------------------------------------------------------------

_CUTS: dict[str, tuple[tuple[int, ...], list[Box]]] = {
    "rows": ((8, 6), [((0, 4), (0, 6)), ((4, 8), (0, 6))]),
    "columns": ((8, 6), [((0, 8), (0, 2)), ((0, 8), (2, 4)), ((0, 8), (4, 6))]),
    "uneven rows": ((5, 7), [((0, 3), (0, 7)), ((3, 5), (0, 7))]),
    "uneven rows with an empty rank": ((2, 3), [((0, 1), (0, 3)), ((1, 2), (0, 3)), ((2, 2), (0, 3))]),
    "experts": ((4, 3, 5), [((0, 2), (0, 3), (0, 5)), ((2, 4), (0, 3), (0, 5))]),
    "experts and rows": ((2, 4, 3), [((e, e + 1), (r, r + 2), (0, 3)) for e in range(2) for r in (0, 2)]),
    "innermost of three": ((3, 2, 6), [((0, 3), (0, 2), (0, 1)), ((0, 3), (0, 2), (1, 6))]),
    "middle of three": ((3, 5, 2), [((0, 3), (0, 3), (0, 2)), ((0, 3), (3, 5), (0, 2))]),
    "fused qkv blocks": ((12, 4), [((q, q + 2), (0, 4)) for q in (0, 8, 4, 2, 10, 6)]),
    "tiles": ((4, 4), [((r, r + 2), (c, c + 2)) for r in (0, 2) for c in (0, 2)]),
    "whole": ((3, 4), [((0, 3), (0, 4))]),
    "scalar": ((), [()]),
}


def _slice(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(lo, hi) for lo, hi in box)]


@pytest.mark.parametrize("dtype", ["bfloat16", "uint8", "float32", "float64", "complex64"])
@pytest.mark.parametrize("cut", _CUTS)
def test_shards_add_up_to_the_full_fingerprint(cut: str, dtype: str) -> None:
    """Any cut that covers each element once sums to the whole; each part is the twin's sum of its elements."""
    shape, boxes = _CUTS[cut]
    raw = random_raw(np.random.default_rng(9), dtype, int(np.prod(shape)))
    tensor = tensor_of(dtype, raw, shape)
    parts = [shard_fingerprint(_slice(tensor, box), shape, box) for box in boxes]
    assert parts == [box_fingerprint(raw, *WORDS[dtype], shape, box) for box in boxes]
    total = sum(parts) & _MASK
    assert total == fingerprint(tensor) == bytes_fingerprint(raw, WORDS[dtype][0])
    if len(boxes) > 1:
        assert (total + parts[0]) & _MASK != fingerprint(tensor), "a shard counted twice"
        assert sum(parts[1:]) & _MASK != fingerprint(tensor), "a shard left out"


def test_a_large_column_shard_crosses_rows_of_keys() -> None:
    """A wide matrix in uneven columns still sums to the golden value of the whole."""
    tensor = tensor_of("bfloat16", _ramp(5120), (40, 64))
    parts = [shard_fingerprint(tensor[:, lo:hi], (40, 64), ((0, 40), (lo, hi))) for lo, hi in ((0, 30), (30, 64))]
    assert sum(parts) & _MASK == 0xFE21545982E65588


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_runs_of_any_box_are_the_elements_of_the_box(data: st.DataObject) -> None:
    """Runs are disjoint, ascending, as long as possible in sum, and name the same elements as numpy's slicing."""
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=4)))
    box = tuple(tuple(sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in shape)
    factor = data.draw(st.sampled_from([1, 2]))
    grid = np.arange(int(np.prod(shape)) * factor).reshape(*shape, factor)
    expected = grid[tuple(slice(lo, hi) for lo, hi in box)].ravel().tolist()
    runs = list(box_positions(shape, box, factor))  # type: ignore[arg-type]
    assert [there + i for _, there, count in runs for i in range(count)] == expected
    assert [here for here, _, _ in runs] == np.cumsum([0, *(count for _, _, count in runs)])[:-1].tolist()


@pytest.mark.parametrize(
    "box",
    [((0, 3), (0, 7)), ((0, 3),), ((-1, 2), (0, 6)), ((2, 1), (0, 6)), ((0, 1), (0, 1), (0, 1)), ((5, 6), (0, 6))],
)
def test_a_box_outside_the_parameter_is_refused_by_name(box: Box) -> None:
    """Too far, too few or too many dims, negative, inverted: InputError with the parameter's name."""
    shard = torch.zeros(tuple(max(hi - lo, 0) for lo, hi in box), dtype=torch.bfloat16)
    with pytest.raises(InputError) as caught:
        shard_fingerprint(shard, (5, 6), box, name="q_proj")
    assert caught.value.parameter == "q_proj"


def test_a_shard_of_another_shape_than_its_box_is_refused_by_name() -> None:
    """A transposed or padded shard does not pass for its box."""
    for shape in ((6, 2), (2, 5), (12,), (2, 6, 1)):
        with pytest.raises(InputError, match="fill its box") as caught:
            shard_fingerprint(torch.zeros(shape), (4, 6), ((0, 2), (0, 6)), name="k_proj")
        assert caught.value.parameter == "k_proj"


# --- what it must not miss -----------------------------------------------------------------------------------------

Corruption = Callable[[NDArray[np.uint16], np.random.Generator], NDArray[np.uint16]]


def _swap_elements(m: NDArray[np.uint16], rng: np.random.Generator) -> NDArray[np.uint16]:
    flat = m.ravel()
    i, j = rng.choice(flat.size, 2, replace=False)
    flat[[i, j]] = flat[[j, i]]
    return m


def _swap_rows(m: NDArray[np.uint16], rng: np.random.Generator) -> NDArray[np.uint16]:
    i, j = rng.choice(len(m), 2, replace=False)
    m[[i, j]] = m[[j, i]]
    return m


def _swap_columns(m: NDArray[np.uint16], rng: np.random.Generator) -> NDArray[np.uint16]:
    return _swap_rows(m.T, rng).T


def _shift(m: NDArray[np.uint16], rng: np.random.Generator) -> NDArray[np.uint16]:
    return np.roll(m.ravel(), int(rng.integers(1, m.size))).reshape(m.shape)


def _transpose(m: NDArray[np.uint16], rng: np.random.Generator) -> NDArray[np.uint16]:
    return np.ascontiguousarray(m.T).reshape(m.shape)


def _duplicate_block(m: NDArray[np.uint16], rng: np.random.Generator) -> NDArray[np.uint16]:
    size = int(rng.integers(1, len(m) // 2))
    at = int(rng.integers(size, len(m) - size + 1))
    m[at : at + size] = m[:size]
    return m


def _zero_block(m: NDArray[np.uint16], rng: np.random.Generator) -> NDArray[np.uint16]:
    (r, s), (c, d) = (sorted(rng.choice(n + 1, 2, replace=False)) for n in m.shape)
    m[r:s, c:d] = 0
    return m


def _flip_signs(m: NDArray[np.uint16], rng: np.random.Generator) -> NDArray[np.uint16]:
    (r, s), (c, d) = (sorted(rng.choice(n + 1, 2, replace=False)) for n in m.shape)
    m[r:s, c:d] ^= 0x8000
    return m


def _flip_sign_corners(m: NDArray[np.uint16], rng: np.random.Generator) -> NDArray[np.uint16]:
    rows, columns = rng.choice(len(m), 2, replace=False), rng.choice(m.shape[1], 2, replace=False)
    m[np.ix_(rows, columns)] ^= 0x8000
    return m


@pytest.mark.parametrize("width", [64, 1024, 1000])
@pytest.mark.parametrize(
    "corrupt",
    [
        *(_swap_elements, _swap_rows, _swap_columns, _shift, _transpose),
        *(_duplicate_block, _zero_block, _flip_signs, _flip_sign_corners),
    ],
)
def test_structured_corruptions_change_the_fingerprint(corrupt: Corruption, width: int) -> None:
    """What a wrong copy, stride or rank does to weights never leaves the sum alone, in 60 seeded trials each."""
    rng = np.random.default_rng(width)
    for trial in range(60):
        weights = rng.standard_normal((48, width)).astype(np.float32).view(np.uint32) >> 16
        before = weights.astype(np.uint16)
        after = np.ascontiguousarray(corrupt(before.copy(), rng))
        if np.array_equal(before, after):
            continue
        assert words_fingerprint(before.ravel()) != words_fingerprint(after.ravel()), trial


@pytest.mark.parametrize("name", WORDS)
def test_every_single_bit_shows(name: str) -> None:
    """Flipping any one bit of a small tensor changes its fingerprint: keys are odd."""
    raw = random_raw(np.random.default_rng(10), name, 3)
    before = words_fingerprint(np.frombuffer(raw, DTYPES[name].numpy_word))
    for bit in range(8 * len(raw)):
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        assert words_fingerprint(np.frombuffer(bytes(changed), DTYPES[name].numpy_word)) != before


def test_layouts_do_not_matter_and_order_does() -> None:
    """A transposed view has the fingerprint of its row-major copy, not of its memory."""
    tensor = tensor_of("bfloat16", _ramp(5120), (40, 64))
    assert fingerprint(tensor.t()) == fingerprint(tensor.t().contiguous())
    assert fingerprint(tensor.t()) != fingerprint(tensor)
    assert numpy_words(tensor.t()).tobytes() == np.frombuffer(_ramp(5120), "<u2").reshape(40, 64).T.tobytes()


# --- sums in text --------------------------------------------------------------------------------------------------


@given(st.integers(0, _MASK))
def test_sums_survive_their_text(value: int) -> None:
    """16 hex digits, and back."""
    assert len(format_sum(value)) == 16
    assert parse_sum(format_sum(value)) == value == int(format_sum(value), 16)


@pytest.mark.parametrize("text", ["", "0" * 15, "0" * 17, "F" * 16, "0x" + "0" * 14, " " * 16, "+" + "0" * 15, 5, None])
def test_other_texts_are_no_sums(text: object) -> None:
    """Short, long, upper case, signs, prefixes, other digits, numbers."""
    for bad in (text, "\u0660" * 16):
        with pytest.raises(InputError):
            parse_sum(bad)
