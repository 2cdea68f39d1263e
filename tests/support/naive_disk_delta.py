"""A naive reader of version folders, written from docs/disk_delta.md: json, struct, zstandard, xxhash and loops."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import xxhash
import zstandard


def tensors_of(folder: Path) -> dict[str, bytes]:
    """The bytes of each tensor of a checkpoint folder, by name."""
    return {name: data for path in folder.glob("*.safetensors") for name, data in _read(path)[1].items()}


def pulled(root: Path, target: int, base: Path | None = None) -> dict[str, bytes]:
    """The weights at a version: from the newest full version at or below it (0: `base`), then one delta at a time."""
    start = target
    while start > 0 and _metadata(_folder(root, start)) is not None:
        start -= 1
    weights = tensors_of(base if start == 0 and base is not None else _folder(root, start))
    for version in range(start + 1, target + 1):
        _apply(weights, _folder(root, version), version)
    return weights


def _folder(root: Path, version: int) -> Path:
    return root / ("weight_v" + str(version).rjust(6, "0"))


def _metadata(folder: Path) -> dict[str, Any] | None:
    index = folder / "model.safetensors.index.json"
    metadata: dict[str, Any] = json.loads(index.read_text()).get("metadata", {}) if index.exists() else {}
    return metadata if "delta_encoding" in metadata else None


def _read(path: Path) -> tuple[dict[str, str], dict[str, bytes]]:
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    metadata = header.pop("__metadata__", {})
    spans = {name: entry["data_offsets"] for name, entry in header.items()}
    return metadata, {name: raw[8 + size + begin : 8 + size + end] for name, (begin, end) in spans.items()}


def _apply(weights: dict[str, bytes], folder: Path, version: int) -> None:
    metadata = _metadata(folder)
    assert metadata is not None
    assert (int(metadata["version"]), int(metadata["base_version"])) == (version, version - 1)
    assert metadata["compression_format"] == "zstd"
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for file in set(weight_map.values()):
        checksums, tensors = _read(folder / file)
        assert set(tensors) == {name for name, its in weight_map.items() if its == file}
        for name, packed in tensors.items():
            delta = zstandard.ZstdDecompressor().decompress(packed)
            weights[name] = _patched(weights[name], delta, metadata["delta_encoding"])
            assert _checksum(weights[name], metadata["checksum_format"]) == checksums[name], name


def _patched(old: bytes, delta: bytes, encoding: str) -> bytes:
    if encoding == "xor":
        return bytes(a ^ b for a, b in zip(old, delta, strict=True))
    assert encoding == "overwrite"
    new = bytearray(old)
    (count,) = struct.unpack_from("<I", delta)
    for number in range(count):
        (position,) = struct.unpack_from("<I", delta, 4 + 4 * number)
        new[position] = delta[4 + 4 * count + number]
    return bytes(new)


def _checksum(data: bytes, algorithm: str) -> str:
    return xxhash.xxh3_128(data).hexdigest() if algorithm == "xxh3-128" else f"{zlib.adler32(data):08x}"
