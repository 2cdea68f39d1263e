"""Safetensors files read and written by our own code, against the stock library and hand-written bytes."""

from __future__ import annotations

import gc
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file

from deltacast.delta.bits import words
from deltacast.delta.checkpoint import CheckpointSource, CheckpointWriter, write_checkpoint
from deltacast.delta.dtypes import DTYPES
from deltacast.delta.errors import DTypeError, FormatError, InputError, StateError, TableError
from deltacast.delta.fingerprint import fingerprint
from deltacast.delta.sources import checked, table_of
from deltacast.delta.table import ParamMeta


def _listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _metas(tensors: dict[str, torch.Tensor]) -> list[ParamMeta]:
    return [ParamMeta(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(words(a), words(b))


def _every_dtype() -> dict[str, torch.Tensor]:
    """A tensor of random bits in each dtype that the stock library writes."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, row in DTYPES.items():
        if row.safetensors is None:
            continue
        raw = torch.randint(0, 256, (3, 4 * row.itemsize), generator=generator, dtype=torch.uint8)
        tensors[f"w.{name}"] = (raw & 1).bool() if name == "bool" else raw.view(row.torch_dtype)
    return tensors


_MIXED = {
    "model.embed.weight": torch.arange(12.0).reshape(3, 4).bfloat16(),
    "a": torch.tensor(1.5),
    "empty": torch.empty(0, 7, dtype=torch.float16),
    "odd": torch.tensor([1, 2, 3], dtype=torch.uint8),
    "gew\u00f6hnlich": torch.tensor([True, False]),
    "nan": torch.tensor([0x7FA00001, -1], dtype=torch.int32).view(torch.float32),
}


# --- reading ----------------------------------------------------------------------------------------------------


def test_a_stock_file_is_read_with_every_dtype(tmp_path: Path) -> None:
    """F4, F8_E8M0, C64 and the fnuz forms too, which other loaders refuse."""
    tensors = _every_dtype()
    save_file(tensors, tmp_path / "m.safetensors")
    with CheckpointSource(tmp_path / "m.safetensors") as source:
        held = {meta.name: tensor for meta, tensor in checked(source)}
    assert held.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert _same(held[name], tensor), name


def test_a_hand_written_file_is_read(tmp_path: Path) -> None:
    """Bytes spelled out: an F4 of [2, 4] elements is [2, 2] in torch; a 0-d and a zero-size tensor beside it."""
    header = (
        b'{"f4":{"dtype":"F4","shape":[2,4],"data_offsets":[0,4]},"z":{"dtype":"BF16","shape":[0],"data_offsets":[4,4]},'
        b'"s":{"dtype":"I32","shape":[],"data_offsets":[4,8]},"__metadata__":{"format":"pt"}}'
    )
    path = tmp_path / "x"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\x12\x34\x56\x78" + b"\x01\x02\x00\x00")
    source = CheckpointSource(path)
    assert source.metas() == [
        ParamMeta("f4", "float4_e2m1fn_x2", (2, 2)),
        ParamMeta("z", "bfloat16", (0,)),
        ParamMeta("s", "int32", ()),
    ]
    assert source.tensor("f4").view(torch.uint8).tolist() == [[0x12, 0x34], [0x56, 0x78]]
    assert source.tensor("s").item() == 0x201
    assert source.tensor("z").numel() == 0
    assert source.metadata == {"format": "pt"}
    assert (source.aliases, source.not_covered) == ({}, ())
    with pytest.raises(TableError, match="no such tensor"):
        source.tensor("nope")


def test_a_file_with_unaligned_tensors_is_read(tmp_path: Path) -> None:
    """Files that are not sorted by width exist; their bits are as good as any."""
    header = b'{"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
    header += b'"f":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}}'
    path = tmp_path / "x"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\x07" + struct.pack("<2f", 1.5, -2.0))
    tensor = CheckpointSource(path).tensor("f")
    assert tensor.tolist() == [1.5, -2.0]
    assert fingerprint(tensor) == fingerprint(torch.tensor([1.5, -2.0]))


def test_writing_to_a_tensor_changes_neither_the_file_nor_another_source(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(4)}, path)
    before = path.read_bytes()
    one, two = CheckpointSource(path), CheckpointSource(path)
    one.tensor("a").fill_(7)
    assert two.tensor("a").tolist() == [0] * 4
    assert path.read_bytes() == before


def test_tensors_outlive_the_source_and_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.arange(4)}, path)
    with CheckpointSource(path) as source:
        tensor = source.tensor("a")
        iterator = source.tensors()
    source.close()
    path.unlink()
    assert tensor.tolist() == [0, 1, 2, 3]
    with pytest.raises(InputError, match="closed"):
        source.tensor("a")
    with pytest.raises(InputError, match="closed"):
        next(iterator)


def test_no_descriptor_and_no_mapping_is_left(tmp_path: Path) -> None:
    path = tmp_path / "leaktest.safetensors"
    save_file({"a": torch.arange(4)}, path)

    def held() -> tuple[int, int]:
        gc.collect()
        return len(_listing(Path("/proc/self/fd"))), Path("/proc/self/maps").read_text().count(path.name)

    before = held()
    for _ in range(5):
        with CheckpointSource(path) as source:
            tensor = source.tensor("a")
        CheckpointSource(path)  # never closed: let go with its last reference
        del tensor, source
    path.write_bytes(b"\xff" * 40)
    with pytest.raises(FormatError):
        CheckpointSource(path)
    assert held() == before


_SPARSE = """
import resource, struct, sys
from deltacast.delta.checkpoint import CheckpointSource
rss = lambda: int(next(l for l in open("/proc/self/status") if l.startswith("VmRSS")).split()[1])
before = rss()
source = CheckpointSource(sys.argv[1])
assert source.tensor("small").tolist() == [5.0, 6.0]
assert source.tensor("big")[1 << 29].item() == 0.0
for _ in source.tensors(): pass
print(rss() - before)
"""


def test_a_checkpoint_is_never_whole_in_memory(tmp_path: Path) -> None:
    """A sparse file of 2 GiB: opening it, listing it and reading parts of it take a few MiB."""
    path = tmp_path / "m.safetensors"
    size = 1 << 31
    header = json.dumps(
        {
            "big": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]},
            "small": {"dtype": "F32", "shape": [2], "data_offsets": [size, size + 8]},
        }
    ).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.seek(size, os.SEEK_CUR)
        file.write(struct.pack("<2f", 5, 6))
    done = subprocess.run([sys.executable, "-P", "-c", _SPARSE, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 64 * 1024  # KiB


# --- folders ----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder of two shards."""
    folder = tmp_path / "hf"
    folder.mkdir()
    shards = {"model-00001-of-00002.safetensors": ["a", "odd"], "model-00002-of-00002.safetensors": ["empty", "nan"]}
    for file, names in shards.items():
        save_file({name: _MIXED[name] for name in names}, folder / file, metadata={"format": "pt"})
    _write_index(folder, {name: file for file, names in shards.items() for name in names})
    return folder


def _write_index(folder: Path, weight_map: dict[str, Any]) -> None:
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _weight_map(folder: Path) -> dict[str, str]:
    weight_map: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return weight_map


def test_a_folder_of_shards_is_one_source(folder: Path) -> None:
    with CheckpointSource(folder) as source:
        held = dict(source.tensors())
    assert sorted(held) == ["a", "empty", "nan", "odd"]
    assert all(_same(held[name], _MIXED[name]) for name in held)


def test_a_folder_with_one_file_and_linked_shards_works(folder: Path, tmp_path: Path) -> None:
    """The Hugging Face cache is made of links to blobs elsewhere."""
    single = tmp_path / "single"
    single.mkdir()
    save_file(_MIXED, single / "model.safetensors")
    assert len(CheckpointSource(single).metas()) == len(_MIXED)
    blob = tmp_path / "blob"
    shard = folder / "model-00001-of-00002.safetensors"
    shard.rename(blob)
    shard.symlink_to(blob)
    assert table_of(CheckpointSource(folder))["a"].dtype == "float32"


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b", "..", "", ".", "a\\b", "a\0b", 7, None])
def test_an_index_cannot_escape_its_folder(folder: Path, name: Any) -> None:
    _write_index(folder, _weight_map(folder) | {"a": name})
    with pytest.raises(FormatError, match="plain file name") as info:
        CheckpointSource(folder)
    assert info.value.parameter == "a"


def test_index_and_files_must_agree(folder: Path) -> None:
    good = _weight_map(folder)
    for weight_map, parameter in (
        (good | {"ghost": "model-00001-of-00002.safetensors"}, "ghost"),
        ({name: file for name, file in good.items() if name != "odd"}, "odd"),
        (good | {"a": good["nan"]}, "a"),
    ):
        _write_index(folder, weight_map)
        with pytest.raises(FormatError, match="disagree") as info:
            CheckpointSource(folder)
        assert info.value.parameter == parameter
    _write_index(folder, good | {"a": "missing.safetensors"})
    with pytest.raises(FileNotFoundError):
        CheckpointSource(folder)


def test_a_tensor_in_two_shards_is_an_error(folder: Path) -> None:
    tensors = {"a": torch.zeros(1), "empty": _MIXED["empty"], "nan": _MIXED["nan"]}
    save_file(tensors, folder / _weight_map(folder)["nan"])
    with pytest.raises(FormatError, match="also in") as info:
        CheckpointSource(folder)
    assert info.value.parameter == "a"


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"weight_map":{}}', '{"weight_map":[1]}', "{", '{"weight_map":{"a":"x","a":"y"}}']
)
def test_a_damaged_index_is_an_error(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(FormatError):
        CheckpointSource(folder)


def test_two_layouts_in_one_folder_are_ambiguous(folder: Path) -> None:
    save_file(_MIXED, folder / "model.safetensors")
    with pytest.raises(FormatError, match="both"):
        CheckpointSource(folder)


def test_nothing_there_is_a_file_not_found_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.safetensors"):
        with pytest.raises(FileNotFoundError):
            CheckpointSource(path)


def test_an_interrupted_patch_blocks_reading(folder: Path) -> None:
    journal = folder / "model.safetensors.index.json.deltacast-undo"
    journal.touch()
    for path in (folder, folder / "model-00001-of-00002.safetensors"):
        with pytest.raises(StateError, match=r"patched in place.*recover"):
            CheckpointSource(path)


# --- hostile headers --------------------------------------------------------------------------------------------


def _entry(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def _file(header: object, data: bytes = b"abcd", *, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


_HOSTILE = {
    "empty file": b"",
    "seven bytes": b"\x01" * 7,
    "length beyond the file": _file({"a": _entry()}, length=10**6),
    "length of 2^64 - 1": _file({"a": _entry()}, length=2**64 - 1),
    "length cuts the data": _file({"a": _entry()}, length=80),
    "zero length": _file(b"", b""),
    "no object": _file(b"[1]", b""),
    "leading space": _file(b' {"a":1}', b""),
    "bad UTF-8": _file(b'{"\xff":1}', b""),
    "no JSON": _file(b'{"a":', b""),
    "trailing text": _file(json.dumps({"a": _entry()}).encode() + b"x"),
    "NaN": _file(b'{"a":NaN}', b""),
    "deep nesting": _file(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b""),
    "huge integer": _file(b'{"a":' + b"9" * 5000 + b"}", b""),
    "duplicate tensor": _file(b'{"a":%b,"a":%b}' % ((json.dumps(_entry()).encode(),) * 2)),
    "duplicate key": _file(b'{"a":{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}}'),
    "entry is no object": _file({"a": 1}),
    "missing key": _file({"a": {"dtype": "U8", "shape": [4]}}),
    "extra key": _file({"a": _entry() | {"x": 1}}),
    "unknown dtype": _file({"a": _entry("F7")}),
    "dtype is no string": _file({"a": _entry(["U8"])}),
    "negative dim": _file({"a": _entry(shape=[-4])}),
    "two negative dims": _file({"a": _entry(shape=[-2, -2])}),
    "float dim": _file({"a": _entry(shape=[4.0])}),
    "bool dim": _file({"a": _entry(shape=[True, 4])}),
    "shape is no list": _file({"a": _entry(shape="4")}),
    "product overflows": _file({"a": _entry(shape=[2**32, 2**32, 4])}),
    "dim beyond int64": _file({"a": _entry(shape=[2**64, 0])}),
    "hundred dims": _file({"a": _entry(shape=[1] * 100)}),
    "bytes do not fill the shape": _file({"a": _entry(shape=[3])}),
    "wider dtype": _file({"a": _entry("F32")}),
    "reversed offsets": _file({"a": _entry(offsets=[4, 0])}),
    "negative offset": _file({"a": _entry(offsets=[-4, 0])}),
    "one offset": _file({"a": _entry(offsets=[0])}),
    "three offsets": _file({"a": _entry(offsets=[0, 4, 8])}),
    "data outside": _file({"a": _entry(offsets=[4, 8])}),
    "data cut": _file({"a": _entry()}, b"abc"),
    "trailing data": _file({"a": _entry()}, b"abcde"),
    "hole at the start": _file({"a": _entry(offsets=[1, 5])}, b"abcde"),
    "hole": _file({"a": _entry(), "b": _entry(offsets=[5, 9])}, b"abcdefghi"),
    "overlap": _file({"a": _entry(), "b": _entry(offsets=[2, 6])}, b"abcdef"),
    "the same bytes twice": _file({"a": _entry(), "b": _entry()}),
    "F4 of odd width": _file({"a": _entry("F4", [3], [0, 1])}, b"a"),
    "F4 without dims": _file({"a": _entry("F4", [], [0, 1])}, b"a"),
    "empty name": _file({"": _entry()}),
    "name with NUL": _file({"a\0": _entry()}),
    "lone surrogate": _file(b'{"\\ud800":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'),
    "metadata is a list": _file({"a": _entry(), "__metadata__": []}),
    "metadata holds a number": _file({"a": _entry(), "__metadata__": {"x": 1}}),
}


@pytest.mark.parametrize("kind", _HOSTILE)
def test_a_hostile_header_is_a_format_error_naming_the_file(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(_HOSTILE[kind])
    with pytest.raises(FormatError, match=r"hostile\.safetensors"):
        CheckpointSource(path)


@pytest.mark.parametrize("kind", ["wider dtype", "overlap", "hole", "unknown dtype", "F4 of odd width"])
def test_the_tensor_is_named(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(_HOSTILE[kind])
    with pytest.raises(FormatError) as info:
        CheckpointSource(path)
    assert info.value.parameter in {"a", "b"}


def test_a_header_above_the_stock_bound_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 100_000_001) + b"{")
        file.truncate(200_000_000)
    with pytest.raises(FormatError, match="header length"):
        CheckpointSource(path)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_flipped_header_byte_never_does_worse_than_a_format_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever still parses stays inside the file and agrees with its own shape."""
    raw = bytearray(save({"a": torch.arange(4.0), "b": torch.zeros(2, 2, dtype=torch.bfloat16)}))
    length = struct.unpack("<Q", raw[:8])[0]
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, 7 + length))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "flipped"
    path.write_bytes(raw)
    try:
        source = CheckpointSource(path)
    except FormatError:
        return
    assert sum(meta.nbytes for meta, _ in checked(source)) == 24


# --- writing ----------------------------------------------------------------------------------------------------


def test_the_stock_library_reads_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_checkpoint(path, _metas(_MIXED), _MIXED.items(), metadata={"format": "pt"})
    stock = load_file(path)
    assert stock.keys() == _MIXED.keys()
    assert all(_same(stock[name], _MIXED[name]) for name in stock)
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_files_are_laid_out_like_the_stock_ones(tmp_path: Path) -> None:
    """Widest first, then by name, header padded to 8: the same bytes."""
    half, byte = torch.ones(3, dtype=torch.float16), torch.tensor([3], dtype=torch.uint8)
    tensors = {"b": torch.ones(3), "a": torch.ones(1), "c": half, "d": byte}
    write_checkpoint(tmp_path / "m", _metas(tensors), tensors.items())
    assert (tmp_path / "m").read_bytes() == save(tensors)


def test_every_dtype_survives_writing(tmp_path: Path) -> None:
    tensors = _every_dtype()
    write_checkpoint(tmp_path / "m", _metas(tensors), tensors.items())
    held = dict(CheckpointSource(tmp_path / "m").tensors())
    assert all(_same(held[name], tensors[name]) for name in tensors)
    assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in held.values())
    for name, tensor in tensors.items():
        write_checkpoint(tmp_path / "one", _metas({name: tensor}), [(name, tensor)])
        assert (tmp_path / "one").read_bytes() == save({name: tensor}), name


def test_other_layouts_are_written_in_row_major_order(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "turned": base.t(),
        "expanded": torch.tensor([[1], [2]]).expand(2, 3),
        "conj": torch.tensor([1 + 2j]).conj(),
        "grad": torch.nn.Parameter(torch.ones(2)),
    }
    write_checkpoint(tmp_path / "m", _metas(tensors), tensors.items())
    stock = load_file(tmp_path / "m")
    assert stock["turned"].tolist() == base.t().tolist()
    assert stock["expanded"].tolist() == [[1, 1, 1], [2, 2, 2]]
    assert stock["conj"].tolist() == [1 - 2j]


def test_an_empty_checkpoint_is_legal(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", [], [])
    assert load_file(tmp_path / "m") == {}
    assert CheckpointSource(tmp_path / "m").metas() == []


def test_the_writer_takes_tensors_in_any_order(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "m", _metas(_MIXED)) as writer:
        for name in sorted(_MIXED, reverse=True):
            writer.write(name, _MIXED[name])
        with pytest.raises(TableError, match="written before"):
            writer.write("a", _MIXED["a"])
    assert load_file(tmp_path / "m").keys() == _MIXED.keys()


def _failing(error: BaseException) -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", torch.zeros(4)
    raise error


_TWO = [ParamMeta("a", "float32", (4,)), ParamMeta("b", "float32", (4,))]


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_failed_write_leaves_what_was_there(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"before")
    with pytest.raises(type(error)):
        write_checkpoint(path, _TWO, _failing(error))
    assert path.read_bytes() == b"before"
    assert _listing(tmp_path) == ["m.safetensors"]


@pytest.mark.parametrize(
    "pairs",
    [
        [("a", torch.zeros(4))],
        [("a", torch.zeros(4)), ("b", torch.zeros(4).double())],
        [("b", torch.zeros(4)), ("a", torch.zeros(4))],
        [("a", torch.zeros(4)), ("b", torch.zeros(4)), ("c", torch.zeros(4))],
    ],
)
def test_tensors_that_are_not_what_was_listed_leave_no_file(
    tmp_path: Path, pairs: list[tuple[str, torch.Tensor]]
) -> None:
    with pytest.raises(TableError):
        write_checkpoint(tmp_path / "m", _TWO, pairs)
    assert _listing(tmp_path) == []


def test_what_cannot_be_laid_out_is_refused_before_a_file_is_made(tmp_path: Path) -> None:
    for metas, error in (
        ([_TWO[0], _TWO[0]], InputError),
        ([ParamMeta("__metadata__", "int8", ())], InputError),
        ([ParamMeta("h", "complex32", (1,))], DTypeError),
        ([ParamMeta("f", "float4_e2m1fn_x2", ())], DTypeError),
    ):
        with pytest.raises(error):
            write_checkpoint(tmp_path / "m", metas, [])
    with pytest.raises(FileNotFoundError):
        write_checkpoint(tmp_path / "none" / "m", [], [])
    assert _listing(tmp_path) == []


def test_a_reader_keeps_the_file_that_a_writer_replaces(tmp_path: Path) -> None:
    path = tmp_path / "m"
    old, new = {"a": torch.zeros(4)}, {"a": torch.ones(4)}
    write_checkpoint(path, _metas(old), old.items())
    source = CheckpointSource(path)
    write_checkpoint(path, _metas(new), new.items())
    assert source.tensor("a").tolist() == [0] * 4
    assert CheckpointSource(path).tensor("a").tolist() == [1] * 4


_SHAPES = st.lists(st.integers(0, 4), max_size=3)
_LISTED = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=6).filter(
        lambda name: name != "__metadata__"
    ),
    st.tuples(st.sampled_from(sorted(n for n, row in DTYPES.items() if row.safetensors not in {None, "F4"})), _SHAPES),
    max_size=6,
)


@given(_LISTED)
@settings(max_examples=80, deadline=None)
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, listed: dict[str, tuple[str, list[int]]]
) -> None:
    metas = [ParamMeta(name, dtype, tuple(shape)) for name, (dtype, shape) in listed.items()]
    tensors = {meta.name: torch.ones(meta.shape).to(meta.row.torch_dtype) for meta in metas}
    path = tmp_path_factory.getbasetemp() / "written"
    write_checkpoint(path, metas, tensors.items())
    source = CheckpointSource(path)
    assert sorted(source.metas(), key=lambda meta: meta.name) == sorted(metas, key=lambda meta: meta.name)
    assert all(_same(tensor, tensors[name]) for name, tensor in source.tensors())
    with safe_open(path, "pt") as opened:
        assert set(opened.keys()) == set(tensors)
