"""Whole containers: what goes in comes out, by bits, for every dtype, form and encoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import made_updates as made
import naive_container
from deltacast.delta.codec import decode_update, encode, encode_update, read_header, read_update, write_update
from deltacast.delta.dtypes import DTYPES
from deltacast.delta.errors import ChecksumError, InputError, PatchError
from deltacast.delta.patch import SparseWeightPatch, WeightUpdate
from deltacast.delta.table import ParamMeta


def some_patch(
    name: str, dtype: str, shape: tuple[int, ...], num: int, form: str, *, seed: int = 0
) -> SparseWeightPatch:  # fmt: skip
    rng = np.random.default_rng(seed)
    meta = ParamMeta(name, dtype, shape)
    old = made.random_words(rng, meta)
    at = np.sort(rng.choice(meta.num_words, min(num, meta.num_words), replace=False)).astype(np.int64)
    return made.patch_of(meta, old, made.step(rng, old, at), form=form)


def assert_naive_reads(raw: bytes, update: WeightUpdate) -> None:
    """Assert that the slow reader in tests/support finds in the bytes what was sent."""
    _, entries = naive_container.read(raw)
    for patch, entry in zip(update.patches, entries, strict=True):
        assert entry.indices == (None if patch.indices is None else patch.indices.tolist()), patch.name
        sent = patch.values
        if entry.header["values"] == "delta" and patch.form == "absolute":
            bits, signed = 8 * sent.itemsize, patch.meta.row.signed_magnitude
            order = [[naive_container.order(w, bits, signed_magnitude=signed) for w in words]
                     for words in (sent.tolist(), np.asarray(patch.base_values).tolist())]  # fmt: skip
            assert entry.values == [(a - b) % (1 << bits) for a, b in zip(*order, strict=True)], patch.name
        else:
            assert entry.values == sent.tolist(), patch.name


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_form_and_encoding(dtype: str) -> None:
    """A container comes back bit by bit, and a reader that shares no code with ours reads it alike."""
    patches = [some_patch(f"{form}.{num}", dtype, (7, 0 if num == 0 else 29), num, form, seed=num)
               for form in ("based", "absolute", "delta", "dense") for num in (0, 1, 12, 90, 203)]  # fmt: skip
    update = made.update_of(patches)
    raw = encode_update(update)
    made.assert_same(update, decode_update(raw))
    assert_naive_reads(raw, update)
    assert {entry.encoding for entry in read_header(raw).entries} == {"sparse", "bitmap", "dense"}


@st.composite
def updates(draw: st.DrawFn) -> WeightUpdate:
    patches = []
    for number in range(draw(st.integers(0, 6))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        dtype = draw(st.sampled_from(list(DTYPES)))
        share = draw(st.sampled_from([0.0, 0.02, 0.1, 0.2, 0.6, 1.0]))
        size = ParamMeta("x", dtype, shape).num_words
        form = draw(st.sampled_from(["based", "absolute", "delta", "dense"]))
        patches.append(some_patch(f"p{number}é", dtype, shape, int(share * size), form, seed=draw(st.integers(0, 99))))
    return made.update_of(patches, removed=("gone",), aliases={"head": "p0é"} if patches else {})


@given(updates(), st.sampled_from([None, b"key"]), st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_round_trip(update: WeightUpdate, key: bytes | None, threads: int) -> None:
    """Any mix of dtypes, shapes (0-d and empty too), forms and densities."""
    raw = encode_update(update, signing_key=key, threads=threads)
    made.assert_same(update, decode_update(raw, signing_key=key, threads=threads))
    assert_naive_reads(raw, update)


@given(updates())
@settings(deadline=None, max_examples=20)
def test_delta_patches_encode_again(update: WeightUpdate) -> None:
    """What a decoder returns can be encoded again and says the same."""
    once = decode_update(encode_update(update))
    made.assert_same(once, decode_update(encode_update(once)))


@pytest.mark.parametrize("dtype", ["bfloat16", "complex64", "uint8"])
@pytest.mark.parametrize("form", ["based", "absolute", "delta", "dense"])
def test_large_entries_split_over_groups(monkeypatch: pytest.MonkeyPatch, dtype: str, form: str) -> None:
    """Entries larger than a group are cut by position, and read back as one; threads change nothing."""
    monkeypatch.setattr(encode, "GROUP_WEIGHT", 64)
    patches = [some_patch("a", dtype, (40, 25), 150, form), some_patch("b", dtype, (3,), 1, form),
               some_patch("c", dtype, (40, 25), 700, form), some_patch("d", dtype, (900,), 64, form)]  # fmt: skip
    update = made.update_of(patches)
    raw = encode_update(update)
    assert len(read_header(raw).groups) > 8
    assert encode_update(update, threads=3) == raw
    made.assert_same(update, decode_update(raw, threads=3))
    assert_naive_reads(raw, update)


def test_wide_gaps() -> None:
    """Positions far apart, beyond 2^31, cost 8 bytes each and arrive."""
    meta = ParamMeta("w", "bfloat16", (1 << 20, 1 << 20))
    at = np.array([0, 65535, 65536, 131072, 1 << 33, (1 << 40) - 1], np.int64)  # gaps 0, 65534, 0, 65535 ...
    values = np.arange(1, 7, dtype="<u2")
    update = made.update_of([SparseWeightPatch(meta, at, values, 1, form="delta")])
    raw = encode_update(update)
    made.assert_same(update, decode_update(raw))
    assert read_header(raw).groups[0].streams["wide"][2] == 8 * 3
    assert_naive_reads(raw, update)


def test_an_empty_update_is_legal() -> None:
    """It advances the version and sends nothing."""
    update = made.update_of([])
    raw = encode_update(update)
    made.assert_same(update, decode_update(raw))
    assert read_header(raw).groups == ()


def test_a_seed() -> None:
    """Without a base there are dense entries only."""
    dense = some_patch("a", "float32", (5, 5), 0, "dense")
    update = made.update_of([dense], base_version=None, base_digest=None)
    made.assert_same(update, decode_update(encode_update(update)))
    sparse = some_patch("b", "float32", (5, 5), 3, "based")
    with pytest.raises(PatchError, match="must be dense"):
        encode_update(made.update_of([dense, sparse], base_version=None, base_digest=None))


def test_changed_dtype_and_shape() -> None:
    """A parameter that was something else in the base travels dense and says what it was."""
    meta, was = ParamMeta("w", "bfloat16", (2, 3)), ParamMeta("w", "float32", (6,))
    patch = SparseWeightPatch(meta, None, np.arange(6, dtype="<u2"), 77, base_meta=was)
    update = made.update_of([patch])
    made.assert_same(update, decode_update(encode_update(update)))


@pytest.mark.parametrize("form", ["based", "absolute", "delta", "dense"])
def test_parts_with_boxes(form: str) -> None:
    """Column shards of one parameter: indices are global in memory, and come back global."""
    rng = np.random.default_rng(5)
    meta = ParamMeta("w", "bfloat16", (6, 10))
    old = made.random_words(rng, meta)
    grid = np.arange(60).reshape(6, 10)
    patches = []
    for part, columns in enumerate([(0, 3), (3, 10)]):
        box = ((1, 6), columns)
        inside = grid[1:6, columns[0] : columns[1]].reshape(-1)
        if form == "dense":
            values = old[inside].copy()
            patches.append(SparseWeightPatch(meta, None, values, 5, part=part, box=box))
            continue
        at = np.sort(rng.choice(inside, 6, replace=False)).astype(np.int64)
        patches.append(made.patch_of(meta, old, made.step(rng, old, at), form=form, part=part, box=box, indices=at))
    update = made.update_of(patches)
    made.assert_same(update, decode_update(encode_update(update)))


def test_values_forms() -> None:
    """`auto` prefers differences unless they are large; `absolute` and `delta` insist or refuse."""
    based = some_patch("a", "bfloat16", (50, 50), 100, "based")
    absolute = some_patch("b", "bfloat16", (50, 50), 100, "absolute")
    delta = some_patch("c", "bfloat16", (50, 50), 100, "delta")
    rng = np.random.default_rng(0)
    meta = ParamMeta("noise", "bfloat16", (2500,))
    old = made.random_words(rng, meta)
    noise = made.patch_of(meta, old, made.random_words(rng, meta))

    def forms(*patches: SparseWeightPatch, **options: Any) -> list[str]:
        update = made.update_of(patches)
        raw = encode_update(update, **options)
        assert_naive_reads(raw, update)
        return [entry.values for entry in read_header(raw).entries]

    assert forms(based, absolute, delta, noise) == ["delta", "absolute", "delta", "absolute"]
    assert forms(based, noise, values="delta") == ["delta", "delta"]
    assert forms(based, absolute, values="absolute") == ["absolute", "absolute"]
    with pytest.raises(InputError, match="parameter 'b'"):
        forms(based, absolute, values="delta")
    with pytest.raises(InputError, match="parameter 'c'"):
        forms(based, delta, values="absolute")
    with pytest.raises(InputError, match="unknown value form"):
        forms(based, values="sometimes")


def test_a_value_that_did_not_change() -> None:
    """Differences cannot say "no change": `auto` sends the word, `delta` and delta patches are refused."""
    meta = ParamMeta("w", "bfloat16", (100,))
    at, words = np.array([3, 9], np.int64), np.array([7, 8], "<u2")
    idle = SparseWeightPatch(meta, at, words, 1, base_values=np.array([7, 2], "<u2"))
    assert read_header(encode_update(made.update_of([idle]))).entries[0].values == "absolute"
    with pytest.raises(PatchError, match="did not change"):
        encode_update(made.update_of([idle]), values="delta")
    with pytest.raises(PatchError, match="did not change"):
        encode_update(made.update_of([SparseWeightPatch(meta, at, np.array([7, 0], "<u2"), 1, form="delta")]))


@pytest.mark.parametrize("at", [[-1, 3], [3, 3], [5, 4], [0, 100]])
@pytest.mark.parametrize("size", [100, 8])
def test_patches_that_break_the_policy_are_not_written(at: list[int], size: int) -> None:
    """Order and range are checked on the way out too, for sparse and for bitmap entries."""
    meta = ParamMeta("w", "int16", (size,))
    patch = SparseWeightPatch(meta, np.array(at, np.int64), np.array([1, 2], "<u2"), 1)
    with pytest.raises(PatchError, match="parameter 'w'"):
        encode_update(made.update_of([patch]))


def test_overlapping_parts_are_not_written() -> None:
    """Boxes of one parameter are disjoint."""
    meta = ParamMeta("w", "int16", (4, 4))
    halves = [SparseWeightPatch(meta, None, np.zeros(8, "<u2"), 1, part=i, box=((i, i + 2), (0, 4))) for i in (0, 1)]
    with pytest.raises(PatchError, match="overlap"):
        encode_update(made.update_of(halves))


def test_signature() -> None:
    """With a key, only a container signed with it is read; without one, the signature is not looked at."""
    update = made.update_of([some_patch("a", "bfloat16", (50, 50), 100, "based")])
    signed, plain = encode_update(update, signing_key=b"one"), encode_update(update)
    made.assert_same(update, decode_update(signed, signing_key=b"one"))
    made.assert_same(update, decode_update(signed))
    assert read_header(signed, signing_key=b"one").signed
    assert not read_header(plain).signed
    for raw, key in ((signed, b"two"), (plain, b"one")):
        with pytest.raises(ChecksumError, match="sign"):
            decode_update(raw, signing_key=key)
        with pytest.raises(ChecksumError, match="sign"):
            read_header(raw, signing_key=key)


def test_header_for_inspection() -> None:
    """`read_header` shows entries and the bytes of each stream without touching the payload."""
    update = made.update_of([some_patch("a", "bfloat16", (50, 50), 100, "based")])
    raw = encode_update(update)
    header = read_header(raw)
    entry = header.entries[0]
    assert (entry.meta.name, entry.encoding, entry.values, entry.num_changed) == ("a", "sparse", "delta", 100)
    assert header.envelope.target_version == 4
    assert header.file_bytes == len(raw)
    assert sum(header.stream_bytes.values()) == sum(group.num_bytes for group in header.groups)
    assert set(header.stream_bytes) == {"gap_low", "gap_quads", "nibbles16", "exceptions16"}


def test_files(tmp_path: Path) -> None:
    """A written file reads back and leaves nothing else in the folder."""
    update = made.update_of([some_patch("a", "bfloat16", (50, 50), 100, "based")])
    path = tmp_path / "u.dcu"
    size = write_update(update, path)
    assert size == path.stat().st_size
    write_update(update, path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["u.dcu"]
    made.assert_same(update, read_update(path))


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    """The old file stays, and no temporary file does."""
    path = tmp_path / "u.dcu"
    (path / "inside").mkdir(parents=True)  # a folder that is not empty cannot be replaced
    with pytest.raises(OSError, match=r"u\.dcu"):
        write_update(made.update_of([]), path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["u.dcu"]
