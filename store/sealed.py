"""Sealed JSON: the form of every small file of a store, checked byte by byte before a byte of it is parsed.

A sealed file is one JSON object that begins with exactly

    {"checksum":"xxh3_128:<32 hex>","signature":null,                         or
    {"checksum":"xxh3_128:<32 hex>","signature":"hmac-sha256:<64 hex>",

The checksum is that of every byte after its comma, the signature included; the HMAC-SHA256 is over every byte after
the signature's comma. Among the fields that follow is the `path` of the file itself, so that a file that was signed
for one place is refused in another. What the fields are held to beside that, whoever wrote them, is here too.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from typing import Final

import xxhash

from deltacast.delta.codec.envelope import MAX_RUN_ID_BYTES, Fields, dump_json, load_json
from deltacast.delta.errors import ChecksumError, FormatError, InputError
from deltacast.delta.table import check_name

__all__ = ["check_digest", "check_key", "check_number", "check_run_id", "is_signed", "seal", "unseal"]

_SEAL: Final = re.compile(rb'\{"checksum":"xxh3_128:([0-9a-f]{32})","signature":(?:null|"hmac-sha256:([0-9a-f]{64})"),')
_CHECKSUM_BYTES: Final = len(b'{"checksum":"xxh3_128:",') + 32
_DIGEST: Final = re.compile(r"xxh3_128:[0-9a-f]{32}")
_HIGHEST: Final = (1 << 63) - 1


def check_digest(value: object) -> None:
    """Check a digest that a file states.

    Raises:
        InputError: it is not `xxh3_128:<32 hex>`.
    """
    if type(value) is not str or not _DIGEST.fullmatch(value):
        raise InputError("bad digest", expected=_DIGEST.pattern, found=ascii(value)[:80])


def check_number(value: object, what: str) -> None:
    """Check a version, an epoch, a count or a size that a file states.

    Raises:
        InputError: it is no integer from 0 to 2^63 - 1.
    """
    if type(value) is not int or not 0 <= value <= _HIGHEST:
        raise InputError(f"bad {what}", expected="0 to 2^63 - 1", found=ascii(value)[:80])


def check_run_id(run_id: str) -> None:
    """Check a run id.

    Raises:
        InputError: it is no name of 1 to 256 bytes.
    """
    if len(check_name(run_id).encode()) > MAX_RUN_ID_BYTES:
        raise InputError("run_id is too long", expected=f"at most {MAX_RUN_ID_BYTES} bytes")


def check_key(key: bytes | None) -> bytes | None:
    """Return a signing key, or None for none.

    Raises:
        InputError: an empty key, which would pass for a signature and be none.
    """
    if key is not None and not key:
        raise InputError("the signing key is empty", hint="Make one: head -c 32 /dev/urandom > key")
    return key


def seal(fields: Mapping[str, object], key: bytes | None) -> bytes:
    """Return a sealed file.

    Args:
        fields: what it says; `path` among them is the name that it will have.
        key: signs it; None leaves it unsigned.
    """
    assert isinstance(fields.get("path"), str)
    body = dump_json(fields)[1:]
    signature = b"null" if key is None else b'"hmac-sha256:%s"' % hmac.digest(key, body, "sha256").hex().encode()
    rest = b'"signature":%s,%s' % (signature, body)
    return b'{"checksum":"xxh3_128:%s",%s' % (xxhash.xxh3_128_hexdigest(rest).encode(), rest)


def is_signed(raw: bytes) -> bool:
    """Whether a sealed file has a signature, right or wrong."""
    found = _SEAL.match(raw)
    return found is not None and found[2] is not None


def unseal(raw: bytes, key: bytes | None, path: str) -> Fields:
    """Check a sealed file from outside, and return its fields.

    Args:
        raw: the whole file; who reads it bounds its size.
        key: with one, the file must be signed with it. Without one, a signed file is read like an unsigned one.
        path: the name that it was found under.

    Raises:
        ChecksumError: other bytes than were sealed, no signature where there must be one, a wrong one, or a file
            that belongs under another name.
        FormatError: not a sealed file, or not strict JSON.
    """
    found = _SEAL.match(raw)
    if found is None:
        raise FormatError(f"{path} is not a sealed file", found=ascii(raw[:24]))
    if xxhash.xxh3_128_hexdigest(raw[_CHECKSUM_BYTES:]).encode() != found[1]:
        raise ChecksumError(f"{path} does not have its checksum")
    body = raw[found.end() :]
    if key is not None:
        _check_signature(found[2], body, key, path)
    fields = load_json(b"{" + body, path)
    if fields.text("path") != path:
        raise ChecksumError(f"{path} was made for another place", expected=path, found=ascii(fields.text("path")))
    return fields


def _check_signature(signature: bytes | None, body: bytes, key: bytes, path: str) -> None:
    if signature is None:
        raise ChecksumError(f"{path} is not signed", hint="A signing key is configured, so it must be.")
    if not hmac.compare_digest(signature, hmac.digest(key, body, "sha256").hex().encode()):
        raise ChecksumError(f"the signature of {path} does not fit its bytes and this key")
