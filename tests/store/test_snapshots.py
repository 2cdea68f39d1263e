"""Snapshots, written and read. Right values: storage bytes, the stock library, transformers, xxhash, a naive digest."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from deltacast.delta.checkpoint import CheckpointSource
from deltacast.delta.checkpoint_digest import digest_checkpoint
from deltacast.delta.errors import (
    ChecksumError,
    DTypeError,
    FormatError,
    InputError,
    MissingObjectError,
    StoreError,
    TableError,
)
from deltacast.delta.module_source import ModuleSource, StateDictSource
from deltacast.delta.table import ParamMeta
from deltacast.store.backends.local import LocalBackend
from deltacast.store.backends.memory import MemoryBackend
from deltacast.store.objects import ObjectBackend
from deltacast.store.sealed import seal
from deltacast.store.snapshots import (
    Manifest,
    SnapshotFile,
    download_snapshot,
    extra_files_of,
    list_snapshots,
    open_snapshot,
    read_manifest,
    write_snapshot,
)
from deltacast.store.snapshots.manifest import is_extra_name
from fingerprint_twin import bytes_fingerprint, digests
from tensor_bytes import WORDS, flipped, random_tensor, raw_bytes

_KEY = b"a key of this test"
_WITHOUT_CODE = ("complex32", "complex128")  # safetensors has none for them
_INDEX = "model.safetensors.index.json"
_DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(params=["memory", "local"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectBackend:
    """A store in memory, and one in a folder, whose files are copied by the file system."""
    if request.param == "memory":
        return MemoryBackend(secrets.token_hex(8))
    return LocalBackend(tmp_path / "store", create=True)


@pytest.fixture
def local(tmp_path: Path) -> LocalBackend:
    return LocalBackend(tmp_path / "store", create=True)


def _mixed() -> dict[str, torch.Tensor]:
    """Every dtype and layout that a snapshot must keep, by names that sort otherwise than they are listed."""
    rng = np.random.default_rng(5)
    tensors = {f"z.{name}": random_tensor(rng, name, (3, 5)) for name in WORDS if name not in _WITHOUT_CODE}
    return tensors | {
        "b.scalar": random_tensor(rng, "int64", ()),
        "b.empty": random_tensor(rng, "float16", (0, 7)),
        "a.transposed": random_tensor(rng, "bfloat16", (6, 4)).t(),
        "a.stepped": random_tensor(rng, "float32", (8, 9))[::3, 1::2],
        "a.expanded": random_tensor(rng, "int16", (1, 4)).expand(3, 4),
        "gew\u00f6hnlich": torch.tensor([0x7FA00001, -1], dtype=torch.int32).view(torch.float32),
        "minus": torch.tensor([-0.0, 0.0]),
    }


def _small() -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(6)
    return {f"layer.{number}": random_tensor(rng, "bfloat16", (8, 16)) for number in range(6)}


def _write(backend: ObjectBackend, tensors: Mapping[str, torch.Tensor], **options: Any) -> Manifest:
    chosen: dict[str, Any] = {"run_id": "run", "version": 3, "threads": 2} | options
    return write_snapshot(backend, StateDictSource(tensors), **chosen)[0]


def _contents(folder: Path) -> dict[str, bytes]:
    """Every tensor's bytes as the stock library reads them from the folder's shards."""
    found: dict[str, bytes] = {}
    for shard in folder.glob("*.safetensors"):
        found |= {name: raw_bytes(tensor) for name, tensor in load_file(shard).items()}
    return found


def _objects(backend: ObjectBackend) -> dict[str, bytes]:
    return {info.name: backend.read(info.name) for info in backend.list("snapshots/")}


def _overwrite(local: LocalBackend, name: str, raw: bytes) -> None:
    path = local.path(name)
    path.write_bytes(raw)


# --- round trips ------------------------------------------------------------------------------------------------


@_DEVICES
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shard_bytes", [1, 200, 1 << 30])
def test_every_dtype_and_layout_comes_back_bit_by_bit(
    backend: ObjectBackend, tmp_path: Path, shard_bytes: int, threads: int, device: str
) -> None:
    """Through a module's kind of source, shards of any size, and the stock library."""
    tensors = _mixed()
    moved = {name: tensor.to(device) for name, tensor in tensors.items()}
    manifest = _write(backend, moved, shard_bytes=shard_bytes, threads=threads)
    download_snapshot(backend, manifest, tmp_path / "out", threads=threads)
    assert _contents(tmp_path / "out") == {name: raw_bytes(tensor) for name, tensor in tensors.items()}
    for shard in (tmp_path / "out").glob("*.safetensors"):
        for name, tensor in load_file(shard).items():
            assert (tensor.dtype, tensor.shape) == (tensors[name].dtype, tensors[name].shape)


def test_the_digests_are_those_of_the_bits(backend: ObjectBackend) -> None:
    """State, table and content digests, counts and sizes, each computed another way."""
    tensors = _mixed()
    manifest, ref = write_snapshot(backend, StateDictSource(tensors), run_id="run", version=3, shard_bytes=300)
    rows = []
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        rows.append((name, dtype, tensor.shape, bytes_fingerprint(raw_bytes(tensor), WORDS[dtype][0])))
    assert (manifest.table_digest, manifest.state_digest) == digests(rows)
    per_element = (WORDS[str(tensor.dtype).removeprefix("torch.")][1] for tensor in tensors.values())
    assert manifest.num_words == sum(t.numel() * n for t, n in zip(tensors.values(), per_element, strict=True))
    for file in manifest.files:
        raw = backend.read(manifest.object_name(file))
        assert (file.num_bytes, file.digest) == (len(raw), f"xxh3_128:{xxhash.xxh3_128_hexdigest(raw)}")
        assert file.sha256 is None
    raw = backend.read(manifest.path)
    assert (ref.path, ref.num_bytes) == (manifest.path, len(raw))
    assert ref.digest == f"xxh3_128:{xxhash.xxh3_128_hexdigest(raw)}"
    assert ref.weights_bytes == sum(len(raw) for name, raw in _objects(backend).items() if name != manifest.path)


def test_pieces_of_large_tensors_meet(backend: ObjectBackend, tmp_path: Path) -> None:
    """A tensor of several pieces, contiguous or not, gives the file that the stock library reads."""
    raw = np.random.default_rng(7).integers(0, 1 << 16, (3, 7_000_001), np.uint16)
    whole = torch.from_numpy(raw).view(torch.bfloat16)
    tensors = {"rows": whole, "columns": whole[:, :3_000_001].t(), "bytes": whole[0].view(torch.uint8)[:17_000_001]}
    manifest = _write(backend, tensors, shard_bytes=1 << 26)
    done: list[int] = []
    download_snapshot(backend, manifest, tmp_path / "out", threads=2, progress=done.append)
    assert _contents(tmp_path / "out") == {name: raw_bytes(tensor) for name, tensor in tensors.items()}
    assert sum(done) == manifest.weights_bytes
    source = CheckpointSource(tmp_path / "out")
    assert digest_checkpoint(source).state_digest == manifest.state_digest


def test_a_checkpoint_is_a_source_and_progress_adds_up(backend: ObjectBackend, tmp_path: Path) -> None:
    """What is pushed from a file is what the file holds; writing tells about the tensors' bytes."""
    tensors = _small()
    save_file(tensors, tmp_path / "model.safetensors")
    done: list[int] = []
    with CheckpointSource(tmp_path / "model.safetensors") as source:
        manifest, _ = write_snapshot(backend, source, run_id="run", version=0, progress=done.append)
        assert manifest.state_digest == digest_checkpoint(source).state_digest
    download_snapshot(backend, manifest, tmp_path / "out")
    assert _contents(tmp_path / "out") == {name: raw_bytes(tensor) for name, tensor in tensors.items()}
    assert sum(done) == sum(tensor.numel() * 2 for tensor in tensors.values())


def test_a_file_system_that_cannot_copy_is_no_hindrance(local: LocalBackend, tmp_path: Path) -> None:
    """From one file system to another, the bytes go through buffers instead; damage is found all the same."""
    tensors = _small()
    manifest = _write(local, tensors, shard_bytes=600)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        if Path(folder).stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("/dev/shm is no file system of its own here")
        download_snapshot(local, manifest, Path(folder) / "out")
        assert _contents(Path(folder) / "out") == {name: raw_bytes(tensor) for name, tensor in tensors.items()}
        name = manifest.object_name(manifest.files[1])
        _overwrite(local, name, flipped(local.read(name), 4000))
        with pytest.raises(ChecksumError, match=name):
            download_snapshot(local, manifest, Path(folder) / "again")


# --- layout -----------------------------------------------------------------------------------------------------


def test_shards_keep_to_their_bound_and_the_source_to_its_order(backend: ObjectBackend) -> None:
    """Tensors of 100, 300, 1000, 50, 0 and 350 bytes in shards of 400: the large one has its own."""
    sizes = {"a": 100, "b": 300, "c": 1000, "d": 50, "e": 0, "f": 350}
    tensors = {name: torch.full((size,), 1, dtype=torch.uint8) for name, size in sizes.items()}
    manifest = _write(backend, tensors, shard_bytes=400)
    index = json.loads(backend.read(manifest.path.replace("manifest.json", _INDEX)))
    names = [f"weights-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert index == {
        "metadata": {"total_size": 1800},
        "weight_map": {"a": names[0], "b": names[0], "c": names[1], "d": names[2], "e": names[2], "f": names[2]},
    }
    assert [(file.name, file.role) for file in manifest.files] == [*((n, "weights") for n in names), (_INDEX, "index")]


def _starts(raw: bytes) -> dict[str, int]:
    length = int.from_bytes(raw[:8], "little")
    header: dict[str, Any] = json.loads(raw[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items()}


@pytest.mark.parametrize(
    ("sizes", "order"),
    [
        ({"z": (4, torch.bfloat16), "a": (2, torch.float32), "m": (1, torch.uint8)}, ["z", "a", "m"]),
        ({"z": (3, torch.uint8), "a": (2, torch.float32), "m": (1, torch.bfloat16)}, ["a", "m", "z"]),
    ],
    ids=["aligned as they come", "one is odd"],
)
def test_every_tensor_is_aligned(
    backend: ObjectBackend, sizes: dict[str, tuple[int, torch.dtype]], order: list[str]
) -> None:
    """In the source's order where that will do, else widest first."""
    tensors = {name: torch.ones(size).to(dtype) for name, (size, dtype) in sizes.items()}
    manifest = _write(backend, tensors)
    starts = _starts(backend.read(manifest.object_name(manifest.files[0])))
    assert sorted(starts, key=starts.__getitem__) == order
    assert all(start % tensors[name].element_size() == 0 for name, start in starts.items())


def test_a_snapshot_holds_exactly_its_files(local: LocalBackend, tmp_path: Path) -> None:
    """In the store and in the folder that is downloaded; the store's own folder is a checkpoint as it lies."""
    (tmp_path / "config.json").write_bytes(b"{}")
    manifest = _write(local, _small(), extra_files={"config.json": tmp_path / "config.json"})
    names = ["config.json", _INDEX, "weights-00001-of-00001.safetensors"]
    folder = local.path(manifest.path).parent
    assert sorted(path.name for path in folder.iterdir()) == sorted([*names, "manifest.json"])
    download_snapshot(local, manifest, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(names)
    assert (tmp_path / "out" / "config.json").read_bytes() == b"{}"
    with CheckpointSource(folder) as source:
        assert digest_checkpoint(source).state_digest == manifest.state_digest


def test_extra_files_are_what_a_model_needs_beside_its_weights(tmp_path: Path) -> None:
    """Weights of any format, indices, journals, folders, hidden, large and oddly named files stay."""
    for name in (
        "config.json", "tokenizer.model", "chat_template.jinja", "merges.txt", "model.safetensors", _INDEX,
        "pytorch_model.bin", "pytorch_model.bin.index.json", "model.gguf", "adapter.pt", "manifest.json",
        ".gitattributes", "model.safetensors.deltacast-undo", "a b.txt", "gew\u00f6hnlich.json",
    ):  # fmt: skip
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "onnx").mkdir()
    (tmp_path / "vocab.json").symlink_to(tmp_path / "merges.txt")
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate((64 << 20) + 1)
    found = extra_files_of(tmp_path)
    assert list(found) == ["chat_template.jinja", "config.json", "merges.txt", "tokenizer.model", "vocab.json"]
    assert found["config.json"] == tmp_path / "config.json"


@_DEVICES
def test_tied_names_are_recorded_and_stored_once(backend: ObjectBackend, tmp_path: Path, device: str) -> None:
    """The alias is in no file and no index, as in what transformers saves."""
    module = torch.nn.Module()
    module.a, module.b = torch.nn.Linear(4, 4, bias=False, device=device), torch.nn.Linear(4, 4, device=device)
    module.b.weight = module.a.weight
    manifest, _ = write_snapshot(backend, ModuleSource(module), run_id="run", version=0)
    assert manifest.aliases == {"b.weight": "a.weight"}
    assert read_manifest(backend, manifest.path).aliases == manifest.aliases
    download_snapshot(backend, manifest, tmp_path / "out")
    assert set(_contents(tmp_path / "out")) == {"a.weight", "b.bias"}
    assert set(json.loads((tmp_path / "out" / _INDEX).read_bytes())["weight_map"]) == {"a.weight", "b.bias"}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_transformers_loads_a_downloaded_snapshot(
    backend: ObjectBackend, tmp_path: Path, family: str, tied: bool
) -> None:
    """From a live model to `from_pretrained`: the same names, ties, bits, and state digest."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, dtype="bfloat16",
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForCausalLM")(config).bfloat16()
    (tmp_path / "made").mkdir()
    config.save_pretrained(tmp_path / "made")
    model.generation_config.save_pretrained(tmp_path / "made")
    extra = extra_files_of(tmp_path / "made")
    assert set(extra) == {"config.json", "generation_config.json"}
    manifest, _ = write_snapshot(
        backend, ModuleSource(model), run_id="run", version=0, shard_bytes=10_000, extra_files=extra
    )
    assert manifest.aliases == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    download_snapshot(backend, manifest, tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert type(loaded) is type(model)
    assert {n: raw_bytes(t) for n, t in loaded.state_dict().items()} == {
        n: raw_bytes(t) for n, t in model.state_dict().items()
    }
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
    again, _ = write_snapshot(MemoryBackend(secrets.token_hex(8)), ModuleSource(loaded), run_id="run", version=0)
    assert again.state_digest == manifest.state_digest
    with CheckpointSource(tmp_path / "out") as source:
        assert digest_checkpoint(source).state_digest == manifest.state_digest


# --- what is there ----------------------------------------------------------------------------------------------


def test_only_folders_with_a_manifest_are_snapshots(backend: ObjectBackend) -> None:
    """Listed by version; an unfinished one, and names that are no manifest's, are passed over."""
    manifests = [_write(backend, _small(), version=version) for version in (20, 3, 100, 3)]
    backend.write(f"snapshots/{7:020}-{'0' * 16}/weights-00001-of-00001.safetensors", [b"x"])
    backend.write("snapshots/7-0000000000000000/manifest.json", [b"x"])
    backend.write(f"snapshots/{1 << 63:020}-{'0' * 16}/manifest.json", [b"x"])
    listed = list_snapshots(backend)
    assert sorted(listed) == sorted((manifest.version, manifest.path) for manifest in manifests)
    assert [version for version, _ in listed] == [3, 3, 20, 100]
    assert [read_manifest(backend, path) for _, path in listed] == sorted(manifests, key=lambda m: m.path)
    assert list_snapshots(MemoryBackend(secrets.token_hex(8))) == []


def test_a_snapshot_on_a_disk_is_mapped_where_it_lies(local: LocalBackend) -> None:
    """No download; the bits are the source's."""
    tensors = _small()
    manifest = _write(local, tensors, shard_bytes=600)
    with open_snapshot(local, manifest) as source:
        assert {name: raw_bytes(tensor) for name, tensor in source.tensors()} == {
            name: raw_bytes(tensor) for name, tensor in tensors.items()
        }
    with pytest.raises(InputError, match="not on this machine"):
        open_snapshot(MemoryBackend(secrets.token_hex(8)), manifest)


def test_a_mapped_snapshot_is_held_to_its_manifest(local: LocalBackend) -> None:
    """Sizes, listed files and the parameter table; what is wrong is named."""
    one, two = _write(local, _small()), _write(local, {"other": torch.zeros(8)})
    with pytest.raises(ChecksumError, match="hold other parameters"):
        open_snapshot(local, replace(one, table_digest=two.table_digest))
    shard, index = (local.path(one.object_name(file)) for file in one.files)
    whole = index.read_bytes()
    index.write_bytes(whole.replace(b"weights-00001-of-00001", b"weights-00001-of-00002"))
    shard.with_name("weights-00001-of-00002.safetensors").write_bytes(shard.read_bytes())
    with pytest.raises(FormatError, match="list other files"):
        open_snapshot(local, one)
    index.write_bytes(whole[:-1])
    with pytest.raises(ChecksumError, match=f"{_INDEX} has another size"):
        open_snapshot(local, one)
    index.unlink()
    with pytest.raises(MissingObjectError, match=_INDEX):
        open_snapshot(local, one)


# --- damage -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, _KEY], ids=["unsigned", "signed"])
@pytest.mark.parametrize("number", [0, 1, 2, 3], ids=["shard 1", "shard 2", "index", "extra"])
def test_a_flipped_bit_in_any_file_is_named(
    local: LocalBackend, tmp_path: Path, number: int, key: bytes | None
) -> None:
    """First, middle and last bit of each object; nothing stays in the folder, which can be used again."""
    (tmp_path / "config.json").write_bytes(b'{"a": 1}')
    manifest = _write(
        local, _small(), shard_bytes=800, extra_files={"config.json": tmp_path / "config.json"}, signing_key=key
    )
    assert len(manifest.files) == 4
    name = manifest.object_name(manifest.files[number])
    whole = local.read(name)
    for bit in (0, len(whole) * 4, len(whole) * 8 - 1):
        _overwrite(local, name, flipped(whole, bit))
        with pytest.raises(ChecksumError, match=f"{name} does not have its content digest"):
            download_snapshot(local, manifest, tmp_path / "out")
        assert list((tmp_path / "out").iterdir()) == []
    _overwrite(local, name, whole)
    download_snapshot(local, manifest, tmp_path / "out")


class _Remote(MemoryBackend):
    """Objects whose bytes can be changed behind the store's back."""

    def damage(self, name: str, raw: bytes) -> None:
        self.delete(name)
        self.write(name, [raw])


def test_damage_is_found_without_files_too(tmp_path: Path) -> None:
    """From a store without paths: a flipped bit, a byte less, a byte more, an object gone."""
    remote = _Remote(secrets.token_hex(8))
    manifest = _write(remote, _small())
    name = manifest.object_name(manifest.files[0])
    whole = remote.read(name)
    for raw, message in ((flipped(whole, 9999), "content digest"), (whole[:-1], "size"), (whole + b"x", "size")):
        remote.damage(name, raw)
        with pytest.raises(ChecksumError, match=message) as caught:
            download_snapshot(remote, manifest, tmp_path / "out")
        assert name in str(caught.value)
    remote.delete(name)
    with pytest.raises(MissingObjectError, match=name):
        download_snapshot(remote, manifest, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_every_flipped_bit_of_a_manifest_is_refused(backend: ObjectBackend) -> None:
    """Each byte of a whole manifest, signed or not, read with the key or without."""
    for key in (None, _KEY):
        manifest = _write(backend, _small(), signing_key=key)
        raw = backend.read(manifest.path)
        for at in range(len(raw)):
            with pytest.raises(FormatError, match=manifest.path):
                Manifest.from_bytes(flipped(raw, 8 * at + at % 8), key, manifest.path)
        for end in (0, 1, len(raw) // 2, len(raw) - 1):
            with pytest.raises(FormatError):
                Manifest.from_bytes(raw[:end], key, manifest.path)


def test_a_missing_or_other_manifest(local: LocalBackend) -> None:
    """Missing, too large, under another name, or not the one that a record speaks of."""
    manifest, ref = write_snapshot(local, StateDictSource(_small()), run_id="run", version=3)
    assert read_manifest(local, ref.path, digest=ref.digest) == manifest
    with pytest.raises(ChecksumError, match="content digest"):
        read_manifest(local, ref.path, digest="xxh3_128:" + "0" * 32)
    other = f"snapshots/{4:020}-{'0' * 16}/manifest.json"
    with pytest.raises(MissingObjectError):
        read_manifest(local, other)
    local.create(other, local.read(ref.path))
    with pytest.raises(ChecksumError, match="another place"):
        read_manifest(local, other)
    with local.path(ref.path).open("r+b") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(FormatError, match="too large"):
        read_manifest(local, ref.path)


# --- signatures -------------------------------------------------------------------------------------------------


def test_a_signed_manifest_covers_the_files_with_sha256(backend: ObjectBackend) -> None:
    """The signature is the HMAC of the rest of the file; each file's SHA-256 is in it."""
    manifest = _write(backend, _small(), signing_key=_KEY)
    raw = backend.read(manifest.path)
    signature, _, body = raw.partition(b'"signature":"hmac-sha256:')[2].partition(b'",')
    assert signature.decode() == hmac.new(_KEY, body, "sha256").hexdigest()
    for file in manifest.files:
        assert file.sha256 == hashlib.sha256(backend.read(manifest.object_name(file))).hexdigest()
    assert read_manifest(backend, manifest.path, _KEY) == manifest
    assert read_manifest(backend, manifest.path) == manifest


def test_with_a_key_unsigned_and_wrongly_signed_manifests_are_refused(backend: ObjectBackend) -> None:
    unsigned, signed = _write(backend, _small()), _write(backend, _small(), signing_key=_KEY)
    with pytest.raises(ChecksumError, match="not signed"):
        read_manifest(backend, unsigned.path, _KEY)
    with pytest.raises(ChecksumError, match="signature"):
        read_manifest(backend, signed.path, b"another key")
    bare = tuple(replace(file, sha256=None) for file in signed.files)
    with pytest.raises(ChecksumError, match="sha256"):
        Manifest.from_bytes(replace(signed, files=bare).to_bytes(_KEY), _KEY, signed.path)


def test_a_file_with_a_forged_content_digest_is_refused(tmp_path: Path) -> None:
    """With a SHA-256 in the manifest, a file that has the right xxh3 and other bytes does not pass."""
    remote = _Remote(secrets.token_hex(8))
    manifest = _write(remote, _small(), signing_key=_KEY)
    first = manifest.files[0]
    name = manifest.object_name(first)
    changed = flipped(remote.read(name), 9999)
    remote.damage(name, changed)
    forged = replace(first, digest=f"xxh3_128:{xxhash.xxh3_128_hexdigest(changed)}")
    with pytest.raises(ChecksumError, match=name):
        download_snapshot(remote, replace(manifest, files=(forged, *manifest.files[1:])), tmp_path / "out")


# --- hostile manifests ------------------------------------------------------------------------------------------


def _fields(manifest: Manifest) -> dict[str, Any]:
    raw = manifest.to_bytes(None)
    fields: dict[str, Any] = json.loads(raw)
    return {key: value for key, value in fields.items() if key not in ("checksum", "signature")}


@pytest.mark.parametrize(
    "name",
    ["../config.json", "/etc/passwd", "a/b.json", "..", ".", "", ".bashrc", "a\\b", "a\0b", "con fig", "manifest.json",
     _INDEX, "model.safetensors", "pytorch_model.bin", "x.pt", "weights-00001-of-00001.safetensors", "x" * 201],
)  # fmt: skip
def test_names_that_would_leave_the_folder_or_be_loaded_are_refused(name: str) -> None:
    """In a manifest that is otherwise right, and for files that a caller hands in."""
    memory = MemoryBackend(secrets.token_hex(8))
    fields = _fields(_write(memory, _small()))
    fields["files"].append({"name": name, "num_bytes": 1, "digest": "xxh3_128:" + "0" * 32, "role": "extra"})
    with pytest.raises(FormatError, match=fields["path"]):
        Manifest.from_bytes(seal(fields, None), None, fields["path"])
    before = _objects(memory)
    with pytest.raises(InputError, match="must not go along"):
        _write(memory, _small(), extra_files={name: Path(__file__)})
    assert _objects(memory) == before
    assert not is_extra_name(name)


def _set(fields: dict[str, Any], place: str, value: object) -> None:
    *parents, last = place.split("/")
    holder: Any = fields
    for key in parents:
        holder = holder[int(key) if key.isdigit() else key]
    holder[int(last) if last.isdigit() else last] = value


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("format", 2), ("run_id", ""), ("run_id", "x" * 257), ("version", 4), ("version", -1), ("version", "3"),
        ("state_digest", "xxh3_128:0"), ("table_digest", None), ("num_words", -1), ("num_words", 1.0),
        ("files", []), ("files", {}), ("files/0", 1), ("files/0/role", "script"), ("files/0/role", "extra"),
        ("files/0/name", "weights-00002-of-00002.safetensors"), ("files/0/name", "../weights"),
        ("files/0/num_bytes", -1), ("files/0/num_bytes", 1 << 63), ("files/0/digest", "sha256:0"),
        ("files/0/sha256", "0"), ("files/1/name", "x.json"),
        ("files/1/num_bytes", (256 << 20) + 1), ("files/1/role", "weights"), ("aliases", []), ("aliases", {"": "a"}),
        ("aliases", {"a": 1}), ("aliases", {"a": "b\0"}),
    ],
)  # fmt: skip
def test_a_field_that_cannot_be_is_a_format_error(place: str, value: object) -> None:
    """Whatever a manifest with a right checksum says."""
    fields = _fields(_write(MemoryBackend(secrets.token_hex(8)), _small()))
    _set(fields, place, value)
    with pytest.raises(FormatError):
        Manifest.from_bytes(seal(fields, None), None, fields["path"])


def test_a_file_listed_twice_and_large_extras_are_refused() -> None:
    fields = _fields(_write(MemoryBackend(secrets.token_hex(8)), _small()))
    extra = {"name": "a.json", "num_bytes": 1, "digest": "xxh3_128:" + "0" * 32, "role": "extra"}
    for more in ([extra, extra], [extra | {"num_bytes": (64 << 20) + 1}], [fields["files"][1]]):
        raw = seal(fields | {"files": fields["files"] + more}, None)
        with pytest.raises(FormatError):
            Manifest.from_bytes(raw, None, fields["path"])
    with pytest.raises(InputError):
        SnapshotFile("x", 1, "xxh3_128:" + "0" * 32, "index")


# --- failures of the writer and of the reader -------------------------------------------------------------------


class _Source:
    """A source that does what a test wants after its first tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor], then: Exception | tuple[str, torch.Tensor] | None) -> None:
        self.aliases: Mapping[str, str] = {}
        self.not_covered = ()
        self._tensors = tensors
        self._then = then

    def metas(self) -> list[ParamMeta]:
        names = [*self._tensors, "last"] if self._then is None or isinstance(self._then, Exception) else self._tensors
        return [ParamMeta(name, "bfloat16", (8, 16)) for name in names]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()
        if isinstance(self._then, Exception):
            raise self._then
        if self._then is not None:
            yield self._then


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("then", "error"),
    [
        (RuntimeError("the trainer died"), RuntimeError),
        (None, TableError),
        (("more", torch.zeros(1)), TableError),
    ],
    ids=["raises", "ends early", "goes on"],
)
def test_a_source_that_fails_leaves_no_snapshot(
    backend: ObjectBackend, then: Exception | tuple[str, torch.Tensor] | None, error: type[Exception], threads: int
) -> None:
    """Shards before the failure may lie there; nobody lists them."""
    with pytest.raises(error):
        write_snapshot(
            backend, _Source(_small(), then), run_id="run", version=1, shard_bytes=600, threads=threads
        )  # fmt: skip
    assert list_snapshots(backend) == []
    assert any("/weights-00001-of-0000" in name for name in _objects(backend))


@pytest.mark.parametrize(
    ("options", "tensors", "error"),
    [
        ({"shard_bytes": 0}, {"a": torch.zeros(1)}, InputError),
        ({"version": -1}, {"a": torch.zeros(1)}, InputError),
        ({"run_id": "x" * 257}, {"a": torch.zeros(1)}, InputError),
        ({}, {}, InputError),
        ({}, {"a": torch.zeros(1, dtype=torch.complex128)}, DTypeError),
        ({}, {"__metadata__": torch.zeros(1)}, InputError),
    ],
)
def test_what_cannot_be_stored_is_refused_before_the_first_write(
    backend: ObjectBackend, options: dict[str, Any], tensors: dict[str, torch.Tensor], error: type[Exception]
) -> None:
    with pytest.raises(error):
        _write(backend, tensors, **options)
    assert _objects(backend) == {}


class _LostAnswer(MemoryBackend):
    """A store whose first create succeeds and is answered as if an earlier attempt had."""

    changed = b""

    def create(self, name: str, data: bytes | bytearray | memoryview) -> None:
        super().create(name, self.changed or data)
        super().create(name, data)


def test_a_manifest_that_exists_already_is_ours_if_its_bytes_are() -> None:
    """A retried request is no failure; another object of that name is."""
    lost = _LostAnswer(secrets.token_hex(8))
    manifest = _write(lost, _small())
    assert list_snapshots(lost) == [(manifest.version, manifest.path)]
    lost.changed = b"another's"
    with pytest.raises(StoreError, match="already"):
        _write(lost, _small())


def test_a_folder_that_holds_something_is_left_alone(backend: ObjectBackend, tmp_path: Path) -> None:
    """A full folder, a file, and a folder whose parent does not exist."""
    manifest = _write(backend, _small())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_bytes(b"x")
    for out in (tmp_path / "out", tmp_path / "out" / "mine"):
        with pytest.raises(InputError, match="no empty folder"):
            download_snapshot(backend, manifest, out)
    with pytest.raises(FileNotFoundError):
        download_snapshot(backend, manifest, tmp_path / "none" / "out")
    assert (tmp_path / "out" / "mine").read_bytes() == b"x"


def test_a_download_that_is_interrupted_leaves_nothing_behind(backend: ObjectBackend, tmp_path: Path) -> None:
    """Whatever ends it, here the caller's own progress function in the second file."""
    manifest = _write(backend, _small(), shard_bytes=600)

    calls: list[int] = []

    def stop(num_bytes: int) -> None:
        calls.append(num_bytes)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download_snapshot(backend, manifest, tmp_path / "out", progress=stop)
    assert list((tmp_path / "out").iterdir()) == []


def test_the_index_is_the_last_file_of_a_download(backend: ObjectBackend, tmp_path: Path) -> None:
    """Until then the folder is no checkpoint, should the process be killed."""
    extra = {"config.json": Path(__file__)}
    manifest = _write(backend, _small(), shard_bytes=600, extra_files=extra)
    seen: list[set[str]] = []
    out = tmp_path / "out"
    download_snapshot(backend, manifest, out, progress=lambda _: seen.append({path.name for path in out.iterdir()}))
    assert [len(names) for names in seen] == [1, 2, 3, 4, 5]
    assert [_INDEX in names for names in seen] == [False] * 4 + [True]
