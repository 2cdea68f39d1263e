"""The worked example of docs/format.md, section 6: by hand, by twins, from a sender, and into a receiver."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from deltacast.delta.chunk_codec import ChunkCodec
from deltacast.delta.chunks import Begin, ChunkCoder, ChunkReceiver, ChunkSender, SentChunk, Sums
from deltacast.delta.errors import ChecksumError, FormatError
from deltacast.delta.kernels import RawChunk
from deltacast.delta.state import WeightState
from fingerprint_twin import bytes_fingerprint, digests, unit_key
from naive_chunk import make_streams, read_chunk, write_chunk
from tensor_bytes import tensor_of

PAGE = (Path(__file__).parents[3] / "docs" / "format.md").read_text()
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
NUM_WORDS = 66_000
CHANGES = {1: 0x3F81, 2: 0x3F7F, 1029: 0x3F88, 65_999: 0x3F77}
BLOCKS = [[(1, 0x3F81, 0x3F80), (2, 0x3F7F, 0x3F80), (1029, 0x3F88, 0x3F80)], [(463, 0x3F77, 0x3F80)]]


def golden(label: str) -> bytes:
    """Return the bytes that the page shows: what stands left of two spaces in a block."""
    block = re.search(rf"```{label}\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    return bytes.fromhex("".join(line.split("  ")[0] for line in block.group(1).splitlines()))


def words(*, changed: bool) -> bytes:
    new = CHANGES if changed else {}
    return b"".join(struct.pack("<H", new.get(at, 0x3F80)) for at in range(NUM_WORDS))


BASE = {"b": bytes(3), "w": words(changed=False)}
NEW = {"b": b"\0\0\1", "w": words(changed=True)}


def digests_of(weights: dict[str, bytes]) -> tuple[str, str]:
    """Return table and state digest, by the twin."""
    return digests([
        ("b", "uint8", [3], bytes_fingerprint(weights["b"], 1)),
        ("w", "bfloat16", [2, 33_000], bytes_fingerprint(weights["w"], 2)),
    ])  # fmt: skip


def tensors_of(weights: dict[str, bytes], device: str) -> dict[str, torch.Tensor]:
    return {
        "b": tensor_of("uint8", weights["b"], [3]).to(device),
        "w": tensor_of("bfloat16", weights["w"], [2, 33_000]).to(device),
    }


def sealed(body: bytes) -> bytes:
    return body + xxhash.xxh3_128(body).digest()


def begin_by_hand() -> bytes:
    table, base = (bytes.fromhex(digest.removeprefix("xxh3_128:")) for digest in digests_of(BASE))
    head = struct.pack("<8sIIQq", b"\x89DCB\r\n\x1a\n", 2, 2, 524_288, 7)
    return sealed(head + base + table + struct.pack("<QQII", NUM_WORDS + 16, 3 + 16, 1, 0))


def sums_by_hand() -> bytes:
    after = (bytes_fingerprint(NEW["b"], 1), bytes_fingerprint(NEW["w"], 2))
    old_sum = sum(0x3F80 * unit_key(at) for at in CHANGES) % 2**64
    return sealed(struct.pack("<8sIIII4Q", b"\x89DCS\r\n\x1a\n", 2, 0, 0, 1, *after, 0, old_sum))


class Sender:
    """A sender at version 7 that has found the example's changes."""

    def __init__(self, device: str) -> None:
        state = WeightState(tensors_of(BASE, device), version=7)
        self.table = state.table
        self.sender = ChunkSender(
            state, [1, 0], torch.device(device), chunk_bytes=524_288, max_density=1.0, keeps_old=True
        )
        self.sender.begin()
        self.coder = ChunkCoder(state.table, self.sender.plan, self.sender.groups, threads=1)
        new = tensors_of(NEW, device)
        self.chunks: list[SentChunk] = list(self.sender.chunks([new["w"], new["b"]]))

    def close(self) -> None:
        self.coder.close()


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def made(request: pytest.FixtureRequest) -> Iterator[Sender]:
    with closing(Sender(request.param)) as sender:
        yield sender


def test_begin_is_written_and_read(made: Sender) -> None:
    """Its digests are the twin's."""
    page = golden("golden-begin")
    assert page == begin_by_hand() == made.sender.header().to_bytes()
    read = Begin.from_bytes(page, made.table)
    assert (read.table_digest, read.base_digest) == digests_of(BASE)
    assert (read.base_version, read.chunk_bytes, read.capacities) == (7, 524_288, (66_016, 19))
    assert read.order.tolist() == [1, 0]


def test_sums_are_written_and_read(made: Sender) -> None:
    """Fingerprints are the twin's; the target digest is the one that the page promises."""
    page = golden("golden-sums")
    sums, digest = made.sender.sums()
    assert page == sums_by_hand() == sums.to_bytes()
    assert digest == digests_of(NEW)[1]
    assert f"version 8, `{digest}`" in PAGE
    read = Sums.from_bytes(page, made.table)
    assert (read.places.tolist(), read.old_sums.tolist()[0]) == ([0, 1], 0)


def test_raw_chunks_are_written(made: Sender) -> None:
    """Counts, offsets, values."""
    by_hand = struct.pack("<2I4H4H", 3, 1, 1, 2, 1029, 463, *CHANGES.values())
    found = [b"".join(tensor.cpu().numpy().tobytes() for tensor in chunk.tensors) for chunk in made.chunks]
    assert [golden("golden-raw"), golden("golden-raw-bytes")] == [by_hand, struct.pack("<IHB", 1, 2, 1)] == found


def test_a_coded_chunk_is_written(made: Sender) -> None:
    """By the twin as well: nothing of it is compressed."""
    by_twin = write_chunk(make_streams(BLOCKS, 2, [True, True]))
    assert golden("golden-coded") == by_twin == made.coder.pack(made.chunks[0]).result().numpy().tobytes()


class Receiver:
    """A receiver at version 7 that knows nothing but the page's bytes."""

    def __init__(self, device: str) -> None:
        self.state = WeightState(tensors_of(BASE, device), version=7)
        begin = Begin.from_bytes(golden("golden-begin"), self.state.table)
        self.receiver = ChunkReceiver(self.state, begin)
        self.receiver.begin(begin)

    def take_raw(self, label: str, num_changes: int) -> None:
        chunk, raw = self.receiver.take(num_changes), golden(label)
        for tensor in (chunk.counts, chunk.offsets, chunk.values):
            part, raw = raw[: tensor.nbytes], raw[tensor.nbytes :]
            tensor.view(torch.uint8).copy_(torch.frombuffer(bytearray(part), dtype=torch.uint8))
        assert raw == b""
        self.receiver.apply(self.receiver.num_taken - 1)

    def take_coded(self, label: str, num_changes: int) -> None:
        plan, groups = self.receiver.plan, self.receiver.groups
        chunk: RawChunk = self.receiver.take(num_changes)
        packed = torch.frombuffer(bytearray(golden(label)), dtype=torch.uint8)
        with closing(ChunkCoder(self.state.table, plan, groups, threads=1)) as coder:
            coder.finish(0, chunk, coder.unpack(0, chunk, packed))
        self.receiver.apply(self.receiver.num_taken - 1)

    def require_version_8(self) -> None:
        sums = Sums.from_bytes(golden("golden-sums"), self.state.table)
        self.receiver.finish(8, sums, digests_of(NEW)[1])
        held = {memory.name: memory.tensor.cpu().view(torch.uint8).numpy().tobytes() for memory in self.state.memories}
        assert (self.state.version, held) == (8, NEW)


@DEVICES
@pytest.mark.parametrize("label", ["golden-raw", "golden-coded"])
def test_a_receiver_of_the_pages_bytes_holds_version_8(label: str, device: str) -> None:
    """Whichever form the first chunk has, and nothing from a sender."""
    receiver = Receiver(device)
    take = receiver.take_raw if label == "golden-raw" else receiver.take_coded
    take(label, 4)
    receiver.take_raw("golden-raw-bytes", 1)
    receiver.require_version_8()


@DEVICES
def test_frames_made_by_hand_are_read(device: str) -> None:
    """They are not what our encoder makes; the twin reads the same."""
    packed = golden("golden-frames")
    streams = make_streams([[(at, 0x3F81, 0x3F80) for at in range(40)]], 2, [True])
    assert read_chunk(packed) == streams
    with ChunkCodec(torch.device(device), 2, max_changes=40, threads=1) as codec:
        found = codec.unpack(packed, torch.tensor([464], device=codec.device)).result()
    assert (found.counts.tolist(), found.offsets.tolist()) == ([40], list(range(40)))
    assert found.differences.tolist() == [1] * 40


def unpack_coded(raw: bytes) -> object:
    with ChunkCodec(torch.device("cpu"), 2, max_changes=NUM_WORDS, threads=1) as codec:
        return codec.unpack(raw, torch.tensor([65536, 464])).result()


TABLE = WeightState(tensors_of(BASE, "cpu")).table
SEALED: dict[str, tuple[Callable[[bytes], object], type[FormatError]]] = {
    "golden-begin": (lambda raw: Begin.from_bytes(raw, TABLE), FormatError),
    "golden-sums": (lambda raw: Sums.from_bytes(raw, TABLE), FormatError),
    "golden-coded": (unpack_coded, ChecksumError),
}


@pytest.mark.parametrize("label", SEALED)
def test_every_flipped_bit_of_what_is_sealed_is_refused(label: str) -> None:
    """By the checksum; a magic that is none by name."""
    read, in_magic = SEALED[label]
    good = golden(label)
    read(good)
    for place, bit in np.ndindex(len(good), 8):
        bad = bytearray(good)
        bad[place] ^= 1 << bit
        with pytest.raises(in_magic if place < 8 else ChecksumError):
            read(bytes(bad))
