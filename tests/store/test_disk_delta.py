"""Version folders of SGLang and slime, one at a time; what is written is read by a naive twin, and the other way."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard

from deltacast.delta.bits import Words
from deltacast.delta.errors import ChecksumError, FormatError, InputError, TableError
from deltacast.delta.table import ParamMeta
from deltacast.store.disk_delta import (
    Change,
    DeltaEncoding,
    DeltaIndex,
    read_delta,
    read_index,
    version_folder,
    write_delta,
)
from golden_checkpoint import GOLDEN, NEXT, Raw, write_raw
from naive_disk_delta import pulled
from tensor_bytes import WORDS, element_bytes, random_raw

CODES = {"float32": "F32", "bfloat16": "BF16", "float64": "F64", "uint8": "U8", "complex64": "C64", "bool": "BOOL"}
Tensors = Mapping[str, tuple[str, bytes]]
"""Name -> torch dtype name and bytes; every tensor is flat."""


def words_of(dtype: str, raw: bytes) -> Words:
    return np.frombuffer(raw, f"<u{WORDS[dtype][0]}")


def changes(old: Tensors, new: Tensors) -> list[Change]:
    """Every tensor that differs, its positions found word by word."""
    found = []
    for name, (dtype, raw) in new.items():
        before, after = words_of(dtype, old[name][1]), words_of(dtype, raw)
        positions = np.array([i for i in range(len(after)) if before[i] != after[i]], np.int64)
        if positions.size:
            meta = ParamMeta(name, dtype, (len(after) // WORDS[dtype][1],))
            found.append(Change(meta, positions, before[positions], after[positions], after))
    return found


def states(rng: np.random.Generator, dtype: str, numel: int, num_changed: int) -> tuple[Tensors, Tensors]:
    """Two states: `a` differs in some words, `same` in none, `b` in every word."""
    size = WORDS[dtype][0]
    raw = random_raw(rng, dtype, numel)
    changed = bytearray(raw)
    for place in rng.choice(len(raw) // size, num_changed, replace=False):
        changed[place * size] ^= 1
    flipped = bytes(byte ^ 1 for byte in raw)
    return (
        {"a": (dtype, raw), "same": (dtype, raw), "b": (dtype, raw)},
        {"a": (dtype, bytes(changed)), "same": (dtype, raw), "b": (dtype, flipped)},
    )


def full(folder: Path, tensors: Tensors) -> Path:
    folder.mkdir(parents=True)
    raw = {name: (CODES[dtype], [len(data) // element_bytes(dtype)], data) for name, (dtype, data) in tensors.items()}
    return write_raw(folder / "model.safetensors", raw).parent


def held(tensors: Tensors) -> Callable[[str], Words]:
    def words(name: str) -> Words:
        if name not in tensors:
            raise TableError("no such parameter", parameter=name)
        return words_of(*tensors[name])

    return words


def read(root: Path, version: int, old: Tensors, threads: int = 1) -> dict[str, bytes]:
    folder = version_folder(root, version)
    index = read_index(folder)
    assert index is not None
    return {name: words.tobytes() for name, words in read_delta(folder, index, held(old), threads=threads)}


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("checksum", ["xxh3-128", "adler32"])
@pytest.mark.parametrize("dtype", CODES)
def test_a_naive_reader_gets_the_weights(tmp_path: Path, dtype: str, encoding: DeltaEncoding, checksum: str) -> None:
    """Bit for bit, from the full version and what is written on top of it; and so does our own reader."""
    old, new = states(np.random.default_rng(1), dtype, 3000, 40)
    full(version_folder(tmp_path, 1), old)
    size = write_delta(tmp_path, DeltaIndex(2, 1, encoding, checksum), changes(old, new), threads=2)
    assert pulled(tmp_path, 2) == {name: raw for name, (_, raw) in new.items()}
    assert read(tmp_path, 2, old, threads=2) == {"a": new["a"][1], "b": new["b"][1]}
    assert size == sum(path.stat().st_size for path in version_folder(tmp_path, 2).iterdir())


def test_the_index_is_what_the_engines_expect(tmp_path: Path) -> None:
    """Keys, spelling and file names, as docs/disk_delta.md lists them."""
    old, new = states(np.random.default_rng(1), "uint8", 10, 1)
    write_delta(tmp_path, DeltaIndex(12, 11, state_digest="xxh3_128:00"), changes(old, new))
    folder = tmp_path / "weight_v000012"
    shard = "model-00000-of-00001.safetensors"
    assert sorted(path.name for path in folder.iterdir()) == [shard, "model.safetensors.index.json"]
    assert json.loads((folder / "model.safetensors.index.json").read_text()) == {
        "metadata": {
            "version": "000012", "base_version": "000011", "delta_encoding": "xor", "compression_format": "zstd",
            "checksum_format": "xxh3-128", "deltacast_state_digest": "xxh3_128:00",
        },
        "weight_map": {"a": shard, "b": shard},
    }  # fmt: skip
    raw = (folder / shard).read_bytes()
    header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    assert header["__metadata__"] == {name: xxhash.xxh3_128(new[name][1]).hexdigest() for name in ("a", "b")}
    assert [header[name]["dtype"] for name in ("a", "b")] == ["U8", "U8"]


def test_a_version_that_changes_nothing_is_an_index_alone(tmp_path: Path) -> None:
    """It still makes a version: readers move their marker."""
    full(version_folder(tmp_path, 1), {"a": ("uint8", b"xyz")})
    write_delta(tmp_path, DeltaIndex(2, 1), [])
    assert [path.name for path in version_folder(tmp_path, 2).iterdir()] == ["model.safetensors.index.json"]
    assert pulled(tmp_path, 2) == {"a": b"xyz"}
    assert read(tmp_path, 2, {}) == {}


def test_full_versions_have_no_delta_index(tmp_path: Path) -> None:
    """Ordinary checkpoints, of one file or with an index."""
    assert read_index(full(tmp_path / "single", {"a": ("uint8", b"xyz")})) is None
    folder = full(tmp_path / "sharded", {"a": ("uint8", b"xyz")})
    for content in ({"weight_map": {"a": "model.safetensors"}}, {"metadata": {"total_size": 3.0}, "weight_map": {}}):
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))
        assert read_index(folder) is None


def test_a_folder_that_is_there_stays(tmp_path: Path) -> None:
    """Versions are never written twice, and a failure leaves nothing behind."""
    old, new = states(np.random.default_rng(1), "uint8", 10, 1)
    write_delta(tmp_path, DeltaIndex(2, 1), changes(old, new))
    with pytest.raises(InputError, match="there already"):
        write_delta(tmp_path, DeltaIndex(2, 1), [])
    reserved = [Change(ParamMeta("__metadata__", "uint8", (1,)), *(np.zeros(1, t) for t in "lBBB"))]
    with pytest.raises(InputError, match="reserved"):
        write_delta(tmp_path, DeltaIndex(3, 2), reserved)
    assert [path.name for path in tmp_path.iterdir()] == ["weight_v000002"]


def test_overwrite_refuses_what_32_bits_cannot_address(tmp_path: Path) -> None:
    """By name, before anything is written."""
    one = np.zeros(1, np.uint8)
    huge = Change(ParamMeta("huge", "uint8", (1 << 32,)), np.zeros(1, np.int64), one, one, one)
    with pytest.raises(InputError, match="huge") as caught:
        write_delta(tmp_path, DeltaIndex(2, 1, "overwrite"), [huge])
    assert caught.value.hint == "Use xor."
    assert list(tmp_path.iterdir()) == []


# What a foreign writer may have written: folders made by hand.

OLD: Tensors = {"w": ("uint8", bytes(range(100)))}
NEW = bytes(b ^ (3 if i % 10 == 0 else 0) for i, b in enumerate(range(100)))
XOR = bytes(a ^ b for a, b in zip(OLD["w"][1], NEW, strict=True))


def compressed(raw: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(level=1, **options).compress(raw)


def by_hand(
    root: Path,
    payload: bytes,
    *,
    checksum: str = xxhash.xxh3_128(NEW).hexdigest(),
    metadata: Mapping[str, Any] | None = None,
    weight_map: Mapping[str, Any] | None = None,
) -> Path:
    """A delta folder of version 2 with one tensor `w`, any piece of it replaced."""
    folder = version_folder(root, 2)
    folder.mkdir()
    said = {
        "version": "000002", "base_version": "000001", "delta_encoding": "xor", "compression_format": "zstd",
        "checksum_format": "xxh3-128",
    } | dict(metadata or {})  # fmt: skip
    names = {"w": "model-00000-of-00001.safetensors"} if weight_map is None else weight_map
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": said, "weight_map": names}))
    tensor: Raw = ("U8", [len(payload)], payload)
    write_raw(folder / "model-00000-of-00001.safetensors", {"w": tensor}, {"w": checksum})
    return folder


@pytest.mark.parametrize("options", [{}, {"write_content_size": False}, {"write_checksum": True}])
def test_a_folder_made_by_hand_is_read(tmp_path: Path, options: dict[str, bool]) -> None:
    """Also frames that do not state their size."""
    by_hand(tmp_path, compressed(XOR, **options))
    assert read(tmp_path, 2, OLD) == {"w": NEW}


def test_adler32_is_written_with_eight_digits(tmp_path: Path) -> None:
    """Leading zeros included."""
    checksum = f"{zlib.adler32(NEW):08x}"
    assert len(checksum) == 8
    by_hand(tmp_path, compressed(XOR), checksum=checksum, metadata={"checksum_format": "adler32"})
    assert read(tmp_path, 2, OLD) == {"w": NEW}


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"delta_encoding": "sum"}, "unknown delta_encoding"),
        ({"compression_format": "lz4"}, "unknown compression_format"),
        ({"checksum_format": "blake3"}, "unknown checksum_format"),
        ({"version": 2}, "bad version"),
        ({"version": "-2"}, "bad version"),
        ({"version": "٢"}, "bad version"),
        ({"base_version": "9" * 19}, "bad base_version"),
        ({"base_version": None}, "bad base_version"),
        ({"deltacast_state_digest": 7}, "bad deltacast_state_digest"),
    ],
)
def test_an_index_that_says_something_else_is_refused(tmp_path: Path, metadata: dict[str, Any], words: str) -> None:
    """By the key that is wrong."""
    with pytest.raises(FormatError, match=words):
        read_index(by_hand(tmp_path, compressed(XOR), metadata=metadata))


@pytest.mark.parametrize("index", ["", "[]", '{"metadata": 1}', '{"metadata": {}, "metadata": {}}', "{" * 9999])
def test_an_index_that_is_no_index_is_refused(tmp_path: Path, index: str) -> None:
    """As damage, not as a full version."""
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(FormatError, match="index"):
        read_index(tmp_path)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "..", "", "a\0b", 7, None])
def test_a_file_name_that_leads_out_is_refused(tmp_path: Path, file: Any) -> None:
    """Whatever is there."""
    write_raw(tmp_path / "secret.safetensors", {"w": ("U8", [1], b"x")})
    by_hand(tmp_path, compressed(XOR), weight_map={"w": file})
    with pytest.raises(FormatError, match="not a plain file name"):
        read(tmp_path, 2, OLD)


def test_index_and_files_must_name_the_same_tensors(tmp_path: Path) -> None:
    """No tensor is left out, none slips in; a file that is missing is said."""
    shard = "model-00000-of-00001.safetensors"
    folder = by_hand(tmp_path, compressed(XOR), weight_map={"w": shard, "v": shard})
    with pytest.raises(FormatError, match="disagree"):
        read(tmp_path, 2, OLD)
    (folder / shard).unlink()
    with pytest.raises(FileNotFoundError):
        read(tmp_path, 2, OLD)


def test_a_tensor_that_the_base_does_not_have_is_named(tmp_path: Path) -> None:
    """There is nothing to apply the delta to."""
    by_hand(tmp_path, compressed(XOR))
    with pytest.raises(TableError) as caught:
        read(tmp_path, 2, {})
    assert caught.value.parameter == "w"


@pytest.mark.parametrize("checksum", ["", "0" * 32, xxhash.xxh3_128(OLD["w"][1]).hexdigest()])
def test_another_checksum_is_refused(tmp_path: Path, checksum: str) -> None:
    """The delta is damaged, or was made for other bits."""
    by_hand(tmp_path, compressed(XOR), checksum=checksum)
    with pytest.raises(ChecksumError) as caught:
        read(tmp_path, 2, OLD)
    assert (caught.value.parameter, caught.value.version) == ("w", 2)


def test_another_base_is_refused(tmp_path: Path) -> None:
    """XOR onto other bits makes other bits, which the checksum shows."""
    by_hand(tmp_path, compressed(XOR))
    with pytest.raises(ChecksumError):
        read(tmp_path, 2, {"w": ("uint8", bytes(100))})


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"no frame",
        compressed(XOR)[:-1],
        compressed(XOR) + b"\0",
        compressed(XOR) * 2,
        compressed(XOR[:-1]),
        compressed(XOR + b"\0"),
        compressed(XOR + b"\0", write_content_size=False),
        compressed(bytes(1 << 24)),
        compressed(bytes(1 << 24), write_content_size=False),
    ],
)
def test_payload_that_does_not_fit_is_refused(tmp_path: Path, payload: bytes) -> None:
    """Cut, doubled, for a tensor of another size, or a bomb, whatever size it states."""
    by_hand(tmp_path, payload)
    with pytest.raises(FormatError, match="w: "):
        read(tmp_path, 2, OLD)


def overwritten(count: int, positions: list[int], values: bytes) -> bytes:
    return struct.pack(f"<I{len(positions)}I", count, *positions) + values


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "number of changes"),
        (overwritten(1, [], b""), "number of changes"),
        (overwritten(0xFFFFFFFF, [0], b"x"), "number of changes"),
        (overwritten(1, [0], b"xy"), "number of changes"),
        (overwritten(1, [100], b"x"), "beyond the tensor"),
        (overwritten(2, [5, 5], b"xy"), "not ascending"),
        (overwritten(2, [6, 5], b"xy"), "not ascending"),
        (overwritten(0, [], b"") + bytes(600), "too large"),
    ],
)
def test_overwrites_are_checked_before_they_are_believed(tmp_path: Path, raw: bytes, words: str) -> None:
    """Counts, order and range."""
    by_hand(tmp_path, compressed(raw), metadata={"delta_encoding": "overwrite"})
    with pytest.raises(FormatError, match=words):
        read(tmp_path, 2, OLD)


def test_every_flipped_bit_of_the_shard_is_found(tmp_path: Path) -> None:
    """Or changes nothing: what is read is the new state or an error, never other bits."""
    shard = by_hand(tmp_path, compressed(XOR)) / "model-00000-of-00001.safetensors"
    raw = shard.read_bytes()
    for bit in range(8 * len(raw)):
        shard.write_bytes(raw[: bit // 8] + bytes([raw[bit // 8] ^ 1 << bit % 8]) + raw[bit // 8 + 1 :])
        try:
            assert read(tmp_path, 2, OLD) == {"w": NEW}
        except FormatError:
            continue


def test_golden_checkpoints_of_all_dtypes_round_trip(tmp_path: Path) -> None:
    """NaN payloads, -0.0, 0-d and empty tensors are bytes like any other."""
    folder = version_folder(tmp_path, 0)
    folder.mkdir()
    write_raw(folder / "model.safetensors", GOLDEN)
    old = {name: ("uint8", raw) for name, (_, _, raw) in GOLDEN.items()}
    write_delta(tmp_path, DeltaIndex(1, 0), changes(old, {name: ("uint8", raw) for name, (_, _, raw) in NEXT.items()}))
    assert pulled(tmp_path, 1) == {name: raw for name, (_, _, raw) in NEXT.items()}
