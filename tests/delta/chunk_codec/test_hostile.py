"""What a receiver refuses. The naive twin makes these chunks, with a right checksum unless that is the point."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltacast.delta.chunk_codec import ChunkCodec, UnpackedChunk
from deltacast.delta.errors import ChecksumError, FormatError, InputError
from naive_chunk import STREAMS, make_streams, sealed, write_chunk

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
SIZES = [65536, 65536, 1000]

BLOCKS = [
    [(1, 0x3F81, 0x3F80), (2, 0x3F7F, 0x3F80), (1029, 0x3F88, 0x3F80)],
    [],
    [(998, 0x3F77, 0x3F80), (999, 0x3F81, 0x3F80)],
]
GOOD = make_streams(BLOCKS, 2, [True] * 3)
"""counts 3 0 2; gaps 1 0 0402 03e6 0; codes 1 0 15 16 1."""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def codec(request: pytest.FixtureRequest) -> Iterator[ChunkCodec]:
    with ChunkCodec(torch.device(request.param), 2, max_changes=1000, threads=2) as made:
        yield made


def unpack(codec: ChunkCodec, packed: bytes) -> UnpackedChunk:
    return codec.unpack(packed, torch.tensor(SIZES, dtype=torch.int32, device=codec.device)).result()


def test_the_undamaged_chunk_is_taken(codec: ChunkCodec) -> None:
    """What the cases below start from."""
    found = unpack(codec, write_chunk(GOOD))
    assert (found.counts.tolist(), found.offsets.tolist()) == ([3, 0, 2], [1, 2, 1029, 998, 999])
    assert found.differences.tolist() == [1, -1, 8, -9, 1]


def test_every_flipped_byte_is_noticed(codec: ChunkCodec) -> None:
    """By the checksum, wherever it is."""
    packed = write_chunk(GOOD)
    for place in range(len(packed)):
        for flip in (1, 0x80, 0xFF):
            with pytest.raises(ChecksumError):
                unpack(codec, packed[:place] + bytes([packed[place] ^ flip]) + packed[place + 1 :])


def test_every_truncation_and_trailing_bytes_are_noticed(codec: ChunkCodec) -> None:
    """With the old checksum, and with one that fits."""
    packed = write_chunk(GOOD)
    for size in range(len(packed)):
        with pytest.raises(FormatError):
            unpack(codec, packed[:size])
        with pytest.raises(FormatError):
            unpack(codec, sealed(packed[16:size]))
    with pytest.raises(ChecksumError):
        unpack(codec, packed + b"\0")
    with pytest.raises(FormatError, match="do not fill it"):
        unpack(codec, sealed(packed[16:] + b"\0"))


@pytest.mark.parametrize(
    ("offset", "form", "value", "message"),
    [
        (0, "<H", 2, "unknown version"),
        (2, "<H", 4, "other words"),
        (2, "<H", 0, "other words"),
        (4, "<I", 2, "other blocks"),
        (4, "<I", 2**32 - 1, "other blocks"),
        (8, "<I", 1001, "more changes"),
        (8, "<I", 2**32 - 1, "more changes"),
        (12, "<I", 6, "stream gap_high"),
        (12, "<I", 2**32 - 1, "stream gap_high"),
        (16, "<I", 6, "stream exceptions"),
        (16, "<I", 2**31, "stream exceptions"),
        (20, "<I", 13, "stream counts is stored in more bytes"),
        (24, "<I", 2**32 - 1, "stream gap_low is stored in more bytes"),
        (24, "<I", 4, "do not fill it"),
        (40, "<I", 0, "do not fill it"),
    ],
)
def test_absurd_numbers_are_refused(codec: ChunkCodec, offset: int, form: str, value: int, message: str) -> None:
    """Before anything is allocated for them."""
    rest = bytearray(write_chunk(GOOD)[16:])
    struct.pack_into(form, rest, offset, value)
    with pytest.raises(FormatError, match=message):
        unpack(codec, sealed(bytes(rest)))


def test_a_table_that_is_not_there_is_refused(codec: ChunkCodec) -> None:
    """Pieces are announced, and the bytes end."""
    with pytest.raises(FormatError, match="inside its table"):
        unpack(codec, sealed(write_chunk(GOOD)[16 : 36 + 8]))


def replaced(**streams: bytes) -> dict[str, bytes]:
    return {name: streams.get(name, GOOD[name]) for name in STREAMS}


def u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


@pytest.mark.parametrize(
    ("streams", "message"),
    [
        (replaced(counts=u32(3, 0, 3)), "stream counts does not add up"),
        (replaced(counts=u32(3, 2**32 - 1, 3)), "count in stream counts exceeds"),
        (replaced(counts=u32(2**32 - 1, 0, 6)), "count in stream counts exceeds"),
        (replaced(counts=u32(65537, 0, 0)), "count in stream counts exceeds"),
        (replaced(counts=u32(0, 0, 5)), "outside its block"),  # 1, 2, 1029, ... of 1000 words
        (replaced(counts=u32(2, 1, 2)), None),  # other blocks, but in range: only the sums of a round tell
        (replaced(gap_low=bytes([1, 0, 2, 0xE6, 1])), "outside its block"),
        (replaced(gap_high=bytes([4, 255])), "outside its block"),
        (replaced(gap_high=bytes([2, 3])), "gap_high is below 3"),
        (replaced(gap_high=bytes([4])), "gap_high does not match its escapes"),
        (replaced(gap_high=bytes([4, 3, 3])), "gap_high does not match its escapes"),
        (replaced(gap_quads=bytes([0b11_11_00_01, 1 << 2])), "padding of stream gap_quads"),
        (replaced(nibbles=bytes([0x01, 0xFF, 0x11])), "padding of stream nibbles"),
        (replaced(nibbles=bytes([0x01, 0xF0, 0x01])), "exceptions does not match its escapes"),
        (replaced(nibbles=bytes([0xF1, 0xFF, 0x01])), "exceptions does not match its escapes"),
        (replaced(exceptions=bytes([14, 16, 0, 0])), "stream exceptions is below 15"),
        (replaced(exceptions=bytes([15, 255, 0, 255])), "stands for no change"),
    ],
)
def test_contradictions_are_named(codec: ChunkCodec, streams: dict[str, bytes], message: str | None) -> None:
    """Each stream against the others and against the blocks."""
    packed = write_chunk(streams)
    if message is None:
        unpack(codec, packed)
        return
    with pytest.raises(FormatError, match=message):
        unpack(codec, packed)


@DEVICES
@pytest.mark.parametrize("num_changes", [2, 32768, 32769, 65535, 65536])
def test_gaps_that_sum_to_2_to_the_32_do_not_wrap_into_range(device: str, num_changes: int) -> None:
    """The largest gaps, so many that 32 bits hold their sum only just, or not as a positive number."""
    every = bytes([255]) * num_changes
    streams = {
        "counts": u32(num_changes, 0, 0), "gap_low": every, "gap_quads": every[: num_changes // 4] + bytes(
            [(1 << 2 * (num_changes % 4)) - 1] if num_changes % 4 else []), "gap_high": every,
        "nibbles": bytes((num_changes + 1) // 2), "exceptions": b"",
    }  # fmt: skip
    with (
        ChunkCodec(torch.device(device), 2, max_changes=65536, threads=1) as codec,
        pytest.raises(FormatError, match="outside its block"),
    ):
        unpack(codec, write_chunk(streams))


ZEROS = {
    "counts": u32(900, 0, 0), "gap_low": bytes(900), "gap_quads": bytes(225), "gap_high": b"",
    "nibbles": bytes(450), "exceptions": b"",
}  # fmt: skip
SIZED = zstandard.ZstdCompressor(level=1)
UNSIZED = zstandard.ZstdCompressor(level=1, write_content_size=False)


@pytest.mark.parametrize(
    ("nibbles", "message"),
    [
        (SIZED.compress(bytes(451)), "stream nibbles states another size"),
        (SIZED.compress(bytes(1 << 20)), "stream nibbles states another size"),
        (UNSIZED.compress(bytes(450)), "stream nibbles is not a plain zstd frame"),
        (SIZED.compress(bytes(450)) + b"\0", "stream nibbles does not decompress"),
        (SIZED.compress(bytes(200)) + SIZED.compress(bytes(250)), "stream nibbles states another size"),
        (SIZED.compress(bytes(450))[:-1], "stream nibbles does not decompress"),
        (b"", "stream nibbles is not a zstd frame"),
        (bytes(449), "stream nibbles is not a zstd frame"),
    ],
)
def test_frames_that_are_not_exactly_one_of_the_right_size_are_refused(
    codec: ChunkCodec, nibbles: bytes, message: str
) -> None:
    """Before they are decompressed, where the size says so."""
    pieces = [ZEROS["counts"], ZEROS["gap_low"], ZEROS["gap_quads"], nibbles]
    with pytest.raises(FormatError, match=message):
        unpack(codec, write_chunk(ZEROS, stored=pieces))


@given(data=st.data())
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damage_under_a_right_checksum_gives_an_error_or_a_sound_chunk(codec: ChunkCodec, data: st.DataObject) -> None:
    """Whatever bytes change: positions ascend inside their blocks, and every difference is one."""
    good = data.draw(st.sampled_from([write_chunk(GOOD), write_chunk(ZEROS), write_chunk(ZEROS, stored=[
        SIZED.compress(ZEROS[name]) for name in ("counts", "gap_low", "gap_quads", "nibbles")])]))  # fmt: skip
    rest = bytearray(good[16:])
    for _ in range(data.draw(st.integers(1, 4))):
        rest[data.draw(st.integers(0, len(rest) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = unpack(codec, sealed(bytes(rest)))
    except FormatError:
        return
    counts, offsets = found.counts.cpu().numpy(), found.offsets.cpu().numpy().view(np.uint16).astype(np.int64)
    assert counts.min() >= 0
    assert counts.sum() == offsets.size == found.differences.numel()
    for size, block in zip(SIZES, np.split(offsets, np.cumsum(counts)[:-1]), strict=True):
        assert (np.diff(block) > 0).all()
        assert (block < size).all()
    assert (found.differences != 0).all()


def test_a_chunk_that_a_sender_packed_wrongly_is_refused(codec: ChunkCodec) -> None:
    """Offsets that descend, and values that did not change."""
    counts = torch.tensor([0, 2, 0], dtype=torch.int32, device=codec.device)
    old = torch.zeros(2, dtype=torch.int16, device=codec.device)
    for offsets, new, message in (((5, 5), 1, "outside its block"), ((9, 5), 1, "outside its block"),
                                  ((5, 9), 0, "stands for no change")):  # fmt: skip
        places = torch.tensor(offsets, dtype=torch.int16, device=codec.device)
        packed = codec.pack(counts, places, old + new, old, signed_magnitude=True).result()
        with pytest.raises(FormatError, match=message):
            unpack(codec, packed.numpy().tobytes())


def test_unfit_block_sizes_are_refused(codec: ChunkCodec) -> None:
    """They are the caller's, not the sender's."""
    with pytest.raises(InputError, match="block_sizes"):
        codec.unpack(write_chunk(GOOD), torch.tensor([1.0, 2.0, 3.0], device=codec.device))
