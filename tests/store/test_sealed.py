"""Sealed files: checked before they are parsed, and only under their own name."""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

import pytest
import xxhash

from deltacast.delta.errors import ChecksumError, FormatError, InputError
from deltacast.store.sealed import check_key, is_signed, seal, unseal

PATH = "versions/7.json"
FIELDS: dict[str, Any] = {"path": PATH, "name": "modèle", "numbers": [1, 2], "none": None}
KEY = b"secret"


def read(raw: bytes, key: bytes | None) -> dict[str, Any]:
    fields = unseal(raw, key, PATH)
    return {"path": fields.text("path"), "name": fields.text("name"), "numbers": fields.items("numbers"), "none": None}


@pytest.mark.parametrize("key", [None, KEY])
def test_a_sealed_file_comes_back(key: bytes | None) -> None:
    """What was sealed is what is read, and the file is one plain JSON object for everybody else."""
    raw = seal(FIELDS, key)
    assert read(raw, key) == FIELDS
    assert is_signed(raw) == (key is not None)
    assert {name: value for name, value in json.loads(raw).items() if name not in ("checksum", "signature")} == FIELDS


def test_the_bytes_are_the_ones_that_are_documented() -> None:
    """The checksum covers what follows it, the signature what follows that, computed here with the stock libraries."""
    body = b'"path":"versions/7.json","a":1}'
    signature = hmac.new(KEY, body, hashlib.sha256).hexdigest().encode()
    rest = b'"signature":"hmac-sha256:' + signature + b'",' + body
    raw = b'{"checksum":"xxh3_128:' + xxhash.xxh3_128(rest).hexdigest().encode() + b'",' + rest
    assert seal({"path": PATH, "a": 1}, KEY) == raw
    rest = b'"signature":null,' + body
    raw = b'{"checksum":"xxh3_128:' + xxhash.xxh3_128(rest).hexdigest().encode() + b'",' + rest
    assert seal({"path": PATH, "a": 1}, None) == raw


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("key", [None, KEY])
def test_every_flipped_byte_is_noticed(*, signed: bool, key: bytes | None) -> None:
    """No byte of a sealed file, signed or not, can be changed, lost or added, whether or not its reader has a key."""
    raw = seal(FIELDS, KEY if signed else None)
    damaged = [raw[:at] + bytes([raw[at] ^ flip]) + raw[at + 1 :] for at in range(len(raw)) for flip in (1, 0x20, 0x80)]
    damaged += [raw[:at] for at in range(len(raw))] + [raw + b"\n", raw + b" ", b"\n" + raw, raw + raw]
    for one in damaged:
        with pytest.raises(FormatError, match="versions/7"):
            unseal(one, key, PATH)


def reseal(body: bytes, signature: bytes = b"null") -> bytes:
    """A file whose checksum is right, whatever it holds."""
    rest = b'"signature":' + signature + b"," + body
    return b'{"checksum":"xxh3_128:' + xxhash.xxh3_128_hexdigest(rest).encode() + b'",' + rest


def test_with_a_key_what_is_not_signed_with_it_is_refused_unparsed() -> None:
    """Unsigned files, other keys, and changed bodies under an old signature are refused before the JSON is read."""
    signed = seal(FIELDS, KEY)
    signature = json.loads(signed)["signature"].encode()
    for raw, message in (
        (seal(FIELDS, None), "not signed"),
        (seal(FIELDS, b"other"), "does not fit"),
        (reseal(b"not json", b'"' + signature + b'"'), "does not fit"),
        (reseal(b"not json"), "not signed"),
    ):
        with pytest.raises(ChecksumError, match=message):
            unseal(raw, KEY, PATH)


def test_without_a_key_a_signed_file_is_read() -> None:
    """Signatures bind those who have the key; others still have the checksum."""
    assert read(seal(FIELDS, KEY), None) == FIELDS


@pytest.mark.parametrize("key", [None, KEY])
def test_a_file_under_another_name_is_refused(key: bytes | None) -> None:
    """A good file that was copied to another place is no good there, signed or not."""
    with pytest.raises(ChecksumError, match="made for another place"):
        unseal(seal(FIELDS, key), key, "versions/8.json")


@pytest.mark.parametrize(
    "body", [b"}", b"", b"1", b'"path":1}', b'"path":"versions/7.json","a":1,"a":2}', b'"path":"versions/7.json"',
             b'"path":"versions/7.json"}}', b'"path":"\xff"}', b'"a":NaN}', b"[" * 100_000],
)  # fmt: skip
def test_json_that_is_not_strict_is_refused(body: bytes) -> None:
    """A right checksum around wrong JSON is still a named error."""
    with pytest.raises(FormatError):
        unseal(reseal(body), None, PATH)


def test_an_empty_key_is_refused() -> None:
    """An empty key would sign nothing and look as if it did."""
    assert check_key(None) is None
    assert check_key(b"k") == b"k"
    with pytest.raises(InputError, match="empty"):
        check_key(b"")
