"""Where two checkpoints differ, against differences put there by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltacast.delta.checkpoint import CheckpointSource
from deltacast.delta.checkpoint_compare import Comparison, ElementDifference, compare_checkpoints
from golden_checkpoint import GOLDEN, GOLDEN_STATE_DIGEST, Raw, write_raw


def _compare(
    tmp_path: Path, a: dict[str, Raw], b: dict[str, Raw], *, num_first: int = 3, threads: int = 1
) -> Comparison:
    first, second = write_raw(tmp_path / "a.safetensors", a), write_raw(tmp_path / "b.safetensors", b)
    with CheckpointSource(first) as source_a, CheckpointSource(second) as source_b:
        return compare_checkpoints(source_a, source_b, num_first=num_first, threads=threads)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_same_bits_in_another_order_are_identical(tmp_path: Path, threads: int) -> None:
    """Identical NaN payloads are equal, and both digests are the golden one."""
    found = _compare(tmp_path, GOLDEN, dict(reversed(GOLDEN.items())), threads=threads)
    assert found.identical
    assert found.a.state_digest == found.b.state_digest == GOLDEN_STATE_DIGEST


def test_a_sign_of_zero_and_a_nan_payload_are_differences(tmp_path: Path) -> None:
    """Floats are never compared as floats."""
    a: dict[str, Raw] = {"w": ("F32", [2, 3], bytes.fromhex("00000000 0000c07f 0000803f 00000000 00000000 00000000"))}
    b: dict[str, Raw] = {"w": ("F32", [2, 3], bytes.fromhex("00000080 0100c07f 0000803f 00000000 00000000 00000080"))}
    [difference] = _compare(tmp_path, a, b, num_first=2).differences
    assert (difference.kind, difference.num_differing) == ("bits", 3)
    assert difference.first == (
        ElementDifference(0, (0, 0), "00000000", "80000000"),
        ElementDifference(1, (0, 1), "7fc00000", "7fc00001"),
    )


def test_only_dtype_shape_and_presence_are_named_as_such(tmp_path: Path) -> None:
    """In the order of the table."""
    same: dict[str, Raw] = {"same": ("U8", [2], b"ab")}
    a = same | {"shape": ("U8", [4], b"abcd"), "gone": ("U8", [1], b"a"), "dtype": ("U8", [2], b"ab")}
    b = same | {"shape": ("U8", [2, 2], b"abcd"), "new": ("U8", [1], b"a"), "dtype": ("I8", [2], b"ab")}
    found = _compare(tmp_path, a, b)
    assert [(d.name, d.kind, d.num_differing) for d in found.differences] == [
        ("dtype", "dtype", None), ("gone", "only in A", None), ("new", "only in B", None), ("shape", "shape", None),
    ]  # fmt: skip
    assert found.a.state_digest != found.b.state_digest


def test_a_scalar_and_a_complex_element_have_their_own_index(tmp_path: Path) -> None:
    """A complex number counts once, though both of its parts changed."""
    a: dict[str, Raw] = {"s": ("BF16", [], b"\1\2"), "c": ("C64", [2], bytes(16))}
    b: dict[str, Raw] = {"s": ("BF16", [], b"\1\3"), "c": ("C64", [2], bytes(8) + b"\1" * 8)}
    complex_, scalar = _compare(tmp_path, a, b).differences
    assert (complex_.num_differing, complex_.first) == (1, (ElementDifference(1, (1,), "0" * 16, "01" * 8),))
    assert scalar.first == (ElementDifference(0, (), "0201", "0301"),)


def test_differences_are_counted_over_chunks(tmp_path: Path) -> None:
    """First and last element of a tensor of more than one chunk."""
    size = (1 << 18) + 5
    changed = bytearray(size)
    changed[0] = changed[-1] = 1
    [difference] = _compare(
        tmp_path, {"w": ("U8", [size], bytes(size))}, {"w": ("U8", [size], bytes(changed))}
    ).differences
    assert difference.num_differing == 2
    assert [one.position for one in difference.first] == [0, size - 1]
