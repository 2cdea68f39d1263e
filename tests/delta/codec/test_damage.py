"""Damaged containers: any flipped bit, any missing or extra byte, any swap is an error, never other weights."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import made_updates as made
from deltacast.delta.codec import decode_round, decode_update, encode, encode_round, encode_update, read_header
from deltacast.delta.errors import ChecksumError, DeltacastError, FormatError
from deltacast.delta.patch import SparseWeightPatch, WeightUpdate
from deltacast.delta.table import ParameterTable, ParamMeta

METAS = (ParamMeta("a", "bfloat16", (40, 50)), ParamMeta("b", "uint8", (90,)), ParamMeta("c", "float32", (70,)))
TABLE = ParameterTable(METAS)


def small_update() -> WeightUpdate:
    """Return an update with a sparse, a bitmap and a dense entry."""
    rng = np.random.default_rng(3)
    patches = []
    for meta, num in zip(METAS, (60, 30, 0), strict=True):
        old = made.random_words(rng, meta)
        at = np.sort(rng.choice(meta.num_words, num, replace=False)).astype(np.int64)
        patches.append(made.patch_of(meta, old, made.step(rng, old, at), form="dense" if not num else "based"))
    return made.update_of(patches, TABLE)


PLAIN = encode_update(small_update())
SIGNED = encode_update(small_update(), signing_key=b"key")


@pytest.mark.parametrize(("raw", "key"), [(PLAIN, None), (SIGNED, b"key")])
def test_every_flipped_bit_is_noticed(raw: bytes, key: bytes | None) -> None:
    """One bit of a small container, wherever it is."""
    damaged = bytearray(raw)
    for place in range(len(raw)):
        for bit in range(8):
            damaged[place] ^= 1 << bit
            with pytest.raises(FormatError):
                decode_update(damaged, signing_key=key)
            damaged[place] ^= 1 << bit
    made.assert_same(small_update(), decode_update(damaged, signing_key=key))


def resummed(body: bytes) -> bytes:
    """Give a container the right whole-file checksum again, so that what is below it has to notice."""
    return body[:-16] + xxhash.xxh3_128_digest(body[:-16])


def test_a_flipped_byte_is_noticed_below_the_checksum() -> None:
    """With the file's checksum forged: group checksums and the header's rules find it, or nothing changed."""
    sent = small_update()
    for place in range(len(PLAIN) - 16):
        for mask in (0x01, 0x80, 0xFF):
            damaged = bytearray(PLAIN)
            damaged[place] ^= mask
            try:
                got = decode_update(resummed(bytes(damaged)))
            except FormatError:
                continue
            for a, b in zip(sent.patches, got.patches, strict=True):  # a digit of a label may have changed
                assert made.difference(a.meta, a.base_values, a.values).tobytes() == b.values.tobytes() \
                    if a.base_values is not None else a.values.tobytes() == b.values.tobytes()  # fmt: skip


def test_a_forged_checksum_does_not_pass_a_signature() -> None:
    """Everything before the trailer is covered by the signature or by a signed SHA-256."""
    end = len(SIGNED) - 16 - 32 - 8
    for place in range(0, end, 3):
        damaged = bytearray(SIGNED)
        damaged[place] ^= 0x10
        with pytest.raises(FormatError):
            decode_update(resummed(bytes(damaged)), signing_key=b"key")


def test_forged_group_with_forged_checksums_fails_the_signature() -> None:
    """A payload whose xxh3 sums were all made right again still lacks the signed SHA-256."""
    size = int.from_bytes(SIGNED[8:16], "little")
    start = (16 + size + 7) // 8 * 8
    body = bytearray(SIGNED)
    body[start] ^= 1
    with pytest.raises(ChecksumError, match="SHA-256"):
        decode_update(resummed(bytes(body)), signing_key=b"key")


@pytest.mark.parametrize("raw", [PLAIN, SIGNED])
def test_every_truncation_is_noticed(raw: bytes) -> None:
    """At every length, also with a checksum that fits."""
    for length in range(len(raw)):
        with pytest.raises(FormatError):
            decode_update(raw[:length])
        with pytest.raises(FormatError):
            read_header(raw[:length])
        if length >= 16:
            with pytest.raises(FormatError):
                decode_update(resummed(raw[:length]))


@pytest.mark.parametrize("extra", [b"\0", b"\0" * 8, b"\0" * 16, PLAIN])
def test_every_extension_is_noticed(extra: bytes) -> None:
    """Bytes after the end, before it, or between header and groups."""
    for raw in (PLAIN + extra, extra + PLAIN, PLAIN[:-24] + extra + PLAIN[-24:], PLAIN[:-16] + extra + PLAIN[-16:]):
        with pytest.raises(FormatError):
            decode_update(raw)
        with pytest.raises(FormatError):
            decode_update(resummed(raw))


def test_swapped_groups_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups of one size in each other's place, with and without their checksums swapped as well."""
    monkeypatch.setattr(encode, "GROUP_WEIGHT", 64)
    meta = ParamMeta("w", "uint16", (128,))
    rng = np.random.default_rng(1)
    patch = SparseWeightPatch(meta, None, rng.integers(0, 1 << 16, 128).astype("<u2"), 1)
    raw = encode_update(made.update_of([patch]))
    sizes = [group.num_bytes for group in read_header(raw).groups]
    assert sizes == [128, 128]
    payload = raw[-24 - 256 : -24]
    swapped = payload[128:] + payload[:128]
    with pytest.raises(ChecksumError):
        decode_update(resummed(raw[: -24 - 256] + swapped + raw[-24:]))

    def swap_groups(header: dict[str, list[object]]) -> None:
        header["groups"].reverse()

    with pytest.raises(FormatError, match="hole, overlap"):
        decode_update(made.reseal(raw, swap_groups, swapped))


def test_text_mode_damage_is_named() -> None:
    """The magic breaks when line ends are rewritten or the high bit is stripped."""
    for damaged in (PLAIN.replace(b"\r\n", b"\n", 1), bytes([PLAIN[0] & 0x7F]) + PLAIN[1:]):
        with pytest.raises(FormatError, match="bad magic"):
            decode_update(damaged)


@given(st.binary(max_size=300))
@settings(deadline=None, max_examples=200)
def test_noise_is_not_a_container(noise: bytes) -> None:
    """Random bytes, bare and behind a valid prefix, fail by name."""
    with pytest.raises(FormatError):
        decode_update(noise)
    with pytest.raises(FormatError):
        decode_update(made.seal_stored(noise))
    with pytest.raises(FormatError):
        decode_update(made.seal(noise))


ROUND = encode_round(small_update(), TABLE)


def test_every_flipped_byte_of_a_round_is_noticed() -> None:
    """In rows and payload alike."""
    payload = b"".join(ROUND.groups)
    made.assert_same(small_update(), decode_round(ROUND.rows, payload, TABLE))
    for place in range(len(ROUND.rows)):
        rows = bytearray(ROUND.rows)
        rows[place] ^= 1 << place % 8
        with pytest.raises(FormatError):
            decode_round(rows, payload, TABLE)
    for place in range(len(payload)):
        damaged = bytearray(payload)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(ChecksumError):
            decode_round(ROUND.rows, damaged, TABLE)
    for wrong in (payload[:-1], payload + b"\0", b""):
        with pytest.raises(FormatError, match="another size"):
            decode_round(ROUND.rows, wrong, TABLE)


def test_a_flipped_byte_of_rows_below_their_checksum() -> None:
    """With the checksum forged, every byte change is an error of ours or leaves well-formed patches."""
    payload = b"".join(ROUND.groups)
    for place in range(len(ROUND.rows) - 16):
        for mask in (0x01, 0x02, 0x80, 0xFF):
            rows = bytearray(ROUND.rows)
            rows[place] ^= mask
            try:
                got = decode_round(resummed(bytes(rows)), payload, TABLE)
            except DeltacastError:
                continue
            for patch in got.patches:
                patch.check_indices()
