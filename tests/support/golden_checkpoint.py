"""A safetensors file put together by hand, and the fingerprints and digests that a naive twin gave for it."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

Raw: TypeAlias = tuple[str, Sequence[int], bytes]
"""safetensors dtype code, shape, little-endian bytes."""


def _ramp(size: int) -> bytes:
    return bytes((i * 7 + 3) % 251 for i in range(size))


GOLDEN: dict[str, Raw] = {
    "one": ("BF16", [1], bytes.fromhex("803f")),
    "neg_zero": ("BF16", [2], bytes.fromhex("00000080")),
    "pos_zero": ("BF16", [2], bytes.fromhex("00000000")),
    "nan_payload": ("BF16", [3], bytes.fromhex("c17f817fffff")),
    "scalar": ("F32", [], bytes.fromhex("0000c03f")),
    "empty": ("BF16", [0, 4], b""),
    "fp8": ("F8_E4M3", [5], bytes.fromhex("00807fff38")),
    "int64": ("I64", [2], bytes.fromhex("ffffffffffffffff0000000000010000")),
    "bool": ("BOOL", [3], bytes.fromhex("010001")),
    "complex": ("C64", [2], bytes.fromhex("0000803f000000c00000003f00000080")),
    "model.layers.0.w": ("BF16", [40, 64], _ramp(5120)),
    "model.layers.0.w_t": ("BF16", [64, 40], _ramp(5120)),
    "router": ("F32", [30, 50], _ramp(6000)),
    "modèle.ß": ("F16", [2, 2], bytes.fromhex("0100020003000400")),
    "f64": ("F64", [3, 1], bytes.fromhex("9a9999999999b93f0000000000000080000000000000f07f")),
}
GOLDEN_FINGERPRINTS = {
    "one": "3157a14ef8d42d80",
    "neg_zero": "036cad6a081c8000",
    "pos_zero": "0000000000000000",
    "nan_payload": "042986c1e96e66c7",
    "scalar": "6c34a05e4f0a31c0",
    "empty": "0000000000000000",
    "fp8": "26d0ddb5021dd84c",
    "int64": "159924b71bc92c86",
    "bool": "d2b0d0efc90fd7fc",
    "complex": "30c09d817ce4aa80",
    "model.layers.0.w": "fe21545982e65588",
    "model.layers.0.w_t": "fe21545982e65588",
    "router": "2831a0185bdd9992",
    "modèle.ß": "9dd9097f6d2ee530",
    "f64": "2bef71ecc95c177f",
}
GOLDEN_TABLE_DIGEST = "xxh3_128:eefc1b67857bf122c80752eda65274f9"
GOLDEN_STATE_DIGEST = "xxh3_128:d69024f5c5f547be9f4407bc6567e015"


def write_raw(path: Path, tensors: Mapping[str, Raw], metadata: Mapping[str, str] | None = None) -> Path:
    """Write a safetensors file in the order given; see https://github.com/huggingface/safetensors#format."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, (code, shape, data) in tensors.items():
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"".join(data for _, _, data in tensors.values()))
    return path


def _next() -> dict[str, Raw]:
    router, w = bytearray(GOLDEN["router"][2]), bytearray(GOLDEN["model.layers.0.w"][2])
    router[0] ^= 1
    router[-1] ^= 0x80
    w[2 * 65] ^= 1
    return GOLDEN | {"router": ("F32", [30, 50], bytes(router)), "model.layers.0.w": ("BF16", [40, 64], bytes(w))}


NEXT = _next()
"""The golden checkpoint with three elements changed: the first and last of `router`, [1, 1] of `model.layers.0.w`."""
NEXT_STATE_DIGEST = "xxh3_128:0dc11f63a7750db2b6afedd496436f52"
