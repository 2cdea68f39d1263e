"""Packing and unpacking chunks. Right values: bytes written by hand, and a twin of plain Python loops."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltacast.bench.floors import Change, floors
from deltacast.bench.generator import make_model, take_step
from deltacast.delta.bits import Words
from deltacast.delta.chunk_codec import ChunkCodec, staged_bytes
from deltacast.delta.chunk_codec.transforms import encode_streams
from deltacast.delta.errors import InputError
from naive_chunk import make_streams, read_chunk, write_chunk

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
WIDTHS = pytest.mark.parametrize("word_bytes", [1, 2, 4, 8])

Block = list[tuple[int, int, int]]
Flags = bool | list[bool]


@pytest.fixture
def codecs() -> Iterator[dict[tuple[str, int], ChunkCodec]]:
    """Codecs by device and width, made when first asked for."""
    made: dict[tuple[str, int], ChunkCodec] = {}
    yield made
    for codec in made.values():
        codec.close()


def codec_for(made: dict[tuple[str, int], ChunkCodec], device: str, word_bytes: int) -> ChunkCodec:
    if (device, word_bytes) not in made:
        made[device, word_bytes] = ChunkCodec(torch.device(device), word_bytes, max_changes=1 << 22, threads=2)
    return made[device, word_bytes]


def words_tensor(words: Words, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(words.view(f"<i{words.itemsize}") if words.itemsize > 1 else words).to(device)


class Case:
    """Changes of a chunk as numpy arrays, in the form that the codec takes and returns."""

    def __init__(self, counts: Sequence[int], offsets: Words, new: Words, old: Words, flags: Flags = True) -> None:
        self.counts = np.array(counts, np.int32)
        self.offsets, self.new, self.old, self.flags = offsets.astype("<u2"), new, old, flags

    @classmethod
    def of(cls, blocks: Sequence[Block], word_bytes: int, flags: Flags) -> Case:
        rows = [row for block in blocks for row in block]
        columns = (np.array([row[column] for row in rows], np.uint64) for column in range(3))
        offsets, new, old = (column.astype(f"<u{word_bytes}") if i else column for i, column in enumerate(columns))
        return cls([len(block) for block in blocks], offsets, new, old, flags)

    def flags_on(self, device: torch.device) -> torch.Tensor | bool:
        return self.flags if isinstance(self.flags, bool) else torch.tensor(self.flags, dtype=torch.bool, device=device)

    def pack(self, codec: ChunkCodec) -> bytes:
        pending = codec.pack(
            torch.tensor(self.counts.tolist(), dtype=torch.int32, device=codec.device),
            torch.from_numpy(self.offsets.view("<i2")).to(codec.device),
            words_tensor(self.new, codec.device),
            words_tensor(self.old, codec.device),
            signed_magnitude=self.flags_on(codec.device),
        )
        return pending.result().numpy().tobytes()

    def check_unpacked(self, codec: ChunkCodec, packed: bytes, sizes: Sequence[int] | None = None) -> None:
        """Unpack, and compare by bits."""
        sizes = [65536] * self.counts.size if sizes is None else sizes
        found = codec.unpack(packed, torch.tensor(sizes, dtype=torch.int64, device=codec.device)).result()
        assert found.counts.cpu().numpy().tobytes() == self.counts.tobytes()
        assert found.offsets.cpu().numpy().tobytes() == self.offsets.tobytes()
        old = words_tensor(self.old, codec.device)
        new = found.values(old, signed_magnitude=self.flags_on(codec.device))
        assert new.dtype == old.dtype
        assert new.cpu().numpy().tobytes() == self.new.tobytes()
        blocks = np.repeat(np.arange(self.counts.size), self.counts)
        assert found.positions().tolist() == (blocks * 65536 + self.offsets).tolist()


GOLDEN_BLOCKS: list[Block] = [
    [(1, 0x3F81, 0x3F80), (2, 0x3F7F, 0x3F80), (1029, 0x3F88, 0x3F80)],
    [],
    [(65535, 0x3F77, 0x3F80)],
]
GOLDEN = bytes.fromhex(
    "30b58e9399369ced5af2515e26275211"  # checksum
    "0100 0200 03000000 04000000 02000000 02000000"  # version, word bytes, blocks, changes, high gaps, exceptions
    "0c000000 04000000 01000000 02000000 02000000 04000000"  # stored sizes
    "03000000 00000000 01000000"  # counts
    "010002ff"  # low bytes of the gaps 1, 0, 0402, ffff
    "f0"  # high bytes 0, 0, 3 and more, 3 and more
    "04ff"  # those
    "01ff"  # steps of +1, -1, +8, -9: codes 1, 0, 15 and more, 15 and more
    "0f10 0000"  # 15 and 16, in byte planes
)


@DEVICES
def test_a_chunk_by_hand(device: str, codecs: dict[tuple[str, int], ChunkCodec]) -> None:
    """Nothing this small shrinks, so every zstd makes these bytes; a gap of 65535 is no escape."""
    codec, case = codec_for(codecs, device, 2), Case.of(GOLDEN_BLOCKS, 2, flags=True)
    assert case.pack(codec).hex() == GOLDEN.hex()
    case.check_unpacked(codec, GOLDEN)
    assert write_chunk(make_streams(GOLDEN_BLOCKS, 2, [True] * 3)) == GOLDEN


@st.composite
def chunks(draw: st.DrawFn) -> tuple[int, list[Block], Flags]:
    word_bytes = draw(st.sampled_from([1, 2, 4, 8]))
    bits = 8 * word_bytes
    edges = [0, 1, (1 << (bits - 1)) - 1, 1 << (bits - 1), (1 << bits) - 1]
    words = st.integers(0, (1 << bits) - 1) | st.sampled_from(edges)
    steps = st.integers(-20, 20) | words
    offsets = st.integers(0, 65535) | st.integers(0, 40) | st.sampled_from([0, 255, 256, 767, 768, 65535])
    blocks = []
    for places in draw(st.lists(st.sets(offsets, max_size=12), max_size=6)):
        pairs = [(draw(words), draw(steps)) for _ in places]
        new = [(old + step) % (1 << bits) if step % (1 << bits) else old ^ 1 for old, step in pairs]
        blocks.append([(at, n, old) for at, n, (old, _) in zip(sorted(places), new, pairs, strict=True)])
    flags = draw(st.booleans() | st.lists(st.booleans(), min_size=len(blocks), max_size=len(blocks)))
    return word_bytes, blocks, flags


@DEVICES
@given(chunk=chunks())
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_streams_are_the_twins_and_come_back(
    device: str, codecs: dict[tuple[str, int], ChunkCodec], chunk: tuple[int, list[Block], Flags]
) -> None:
    """All widths, dtypes mixed in one chunk, blocks without changes, all bit patterns."""
    word_bytes, blocks, flags = chunk
    codec, case = codec_for(codecs, device, word_bytes), Case.of(blocks, word_bytes, flags)
    packed = case.pack(codec)
    per_block = [flags] * len(blocks) if isinstance(flags, bool) else flags
    assert read_chunk(packed) == make_streams(blocks, word_bytes, per_block)
    case.check_unpacked(codec, packed)
    sizes = [block[-1][0] + 1 if block else 0 for block in blocks]  # the last change is a block's last word
    case.check_unpacked(codec, packed, sizes)


@DEVICES
@pytest.mark.parametrize("num_blocks", [0, 1, 5])
def test_a_chunk_without_changes(device: str, codecs: dict[tuple[str, int], ChunkCodec], num_blocks: int) -> None:
    """It is legal, with blocks and without."""
    codec, case = codec_for(codecs, device, 2), Case.of([[]] * num_blocks, 2, flags=[True] * num_blocks)
    case.check_unpacked(codec, case.pack(codec))


@DEVICES
@WIDTHS
def test_full_blocks(device: str, codecs: dict[tuple[str, int], ChunkCodec], word_bytes: int) -> None:
    """Every word of two blocks changes, by every amount that fits 16 bits, -0.0, NaN and infinities among them."""
    rng = np.random.default_rng(word_bytes)
    old = rng.integers(0, 256, (131072, word_bytes), np.uint8).view(f"<u{word_bytes}").reshape(-1)
    new: Words = old + np.maximum(np.arange(131072) % min(65536, 256**word_bytes), 1).astype(old.dtype)
    case = Case([65536, 65536], np.tile(np.arange(65536), 2), new, old, [True, False])
    codec = codec_for(codecs, device, word_bytes)
    packed = case.pack(codec)
    case.check_unpacked(codec, packed)
    blocks = [[(at % 65536, int(new[at]), int(old[at])) for at in range(start, start + 65536)] for start in (0, 65536)]
    assert read_chunk(packed) == make_streams(blocks, word_bytes, [True, False])


@DEVICES
def test_negative_zero_and_nan_are_bits(device: str, codecs: dict[tuple[str, int], ChunkCodec]) -> None:
    """+0.0 to -0.0 is one step down; a NaN gets another payload, becomes a number, and comes from one."""
    block = [(0, 0x8000, 0x0000), (1, 0x0000, 0x8000), (2, 0x7FC1, 0x7FC0), (3, 0x3F80, 0xFFC0), (4, 0x7FFF, 0x3F80)]
    codec, case = codec_for(codecs, device, 2), Case.of([block], 2, flags=True)
    packed = case.pack(codec)
    assert read_chunk(packed)["nibbles"][0] == 0x10  # -1 and +1
    case.check_unpacked(codec, packed)


def bf16_step(share: float) -> tuple[Case, list[int], float]:
    """A generated step of bf16 parameters: changes, block sizes, and the entropy floor in bits."""
    model = make_model(1 << 22)
    counts, sizes, offsets, changes = [], [], [], []
    for meta, new in take_step(model, share, np.random.default_rng(1)):
        old = model.words[meta.name]
        if meta.dtype != "bfloat16" or not old.size:
            continue
        index = np.flatnonzero(old != new)
        counts += np.bincount(index // 65536, minlength=-(-old.size // 65536)).tolist()
        sizes += [min(65536, old.size - at) for at in range(0, old.size, 65536)]
        offsets.append(index % 65536)
        changes.append((meta, old, index, new[index]))
    floor = floors(Change(meta, old, index, new) for meta, old, index, new in changes).unconditional
    olds, news = (np.concatenate(parts) for parts in zip(*((o[i], n) for _, o, i, n in changes), strict=True))
    return Case(counts, np.concatenate(offsets), news, olds), sizes, floor


@DEVICES
@pytest.mark.parametrize(("share", "most"), [(1.2, 1.08), (45.0, 1.25)])
def test_a_step_of_training_is_near_its_entropy(
    device: str, codecs: dict[tuple[str, int], ChunkCodec], share: float, most: float
) -> None:
    """Streams of several pieces come back, are the same bytes on every run and device, and about the floor's size."""
    codec = codec_for(codecs, device, 2)
    case, sizes, floor = bf16_step(share)
    packed = case.pack(codec)
    assert packed == case.pack(codec_for(codecs, "cpu", 2))
    case.check_unpacked(codec, packed, sizes)
    assert 8 * len(packed) < most * floor


@DEVICES
def test_chunks_in_flight_do_not_mix(device: str, codecs: dict[tuple[str, int], ChunkCodec]) -> None:
    """Inputs may be overwritten once `pack` returned, and results taken in any order, or never."""
    codec = codec_for(codecs, device, 2)
    counts = torch.full((3,), 65536, dtype=torch.int32, device=codec.device)
    offsets = torch.arange(3 * 65536, device=codec.device).to(torch.int16)
    old = torch.zeros(3 * 65536, dtype=torch.int16, device=codec.device)
    values, pending = torch.empty_like(old), []
    for step in range(1, 9):
        values.fill_(step)
        pending.append(codec.pack(counts, offsets, values, old, signed_magnitude=False))
    packed = {step: pending[step - 1].result() for step in (8, 1, 3, 6, 2)}
    sizes = torch.full((3,), 65536, device=codec.device)
    unpacking = {step: codec.unpack(data.numpy(), sizes) for step, data in packed.items()}
    for step in (2, 6, 8):
        found = unpacking[step].result().values(old, signed_magnitude=False)
        assert bool((found == step).all())


@DEVICES
@pytest.mark.parametrize("flags", [True, [True, False]])
@pytest.mark.parametrize(
    ("counts", "message"),
    [([2, 2], "found 4, 0 out"), ([0, 1], "found 1, 0 out"), ([-1, 4], "found 3, 1 out"), ([65537, -65534], "2 out"),
     ([2**31 - 1, 2**31 - 1], "found 4294967294, 2 out")],
)  # fmt: skip
def test_counts_that_cannot_be_are_refused_once_they_are_on_the_host(
    device: str, codecs: dict[tuple[str, int], ChunkCodec], counts: list[int], message: str, flags: Flags
) -> None:
    """Until then they do no harm: the device takes the next chunk as ever."""
    codec = codec_for(codecs, device, 2)
    words = np.arange(3, dtype=np.uint16)
    case = Case(counts, words, words + 1, words, flags)
    with pytest.raises(InputError, match=f"counts do not add up, or are out of range: expected 3 changes.*{message}"):
        case.pack(codec)
    assert Case.of(GOLDEN_BLOCKS, 2, flags=True).pack(codec) == GOLDEN


@DEVICES
@pytest.mark.parametrize(
    ("sizes", "dtype", "message"),
    [((2, 3), torch.int32, "unfit values"), ((1, 65537), torch.int16, "more changes than words"),
     ((0, 1), torch.int16, "more changes than words")],
)  # fmt: skip
def test_unfit_arguments_are_refused(
    device: str, codecs: dict[tuple[str, int], ChunkCodec], sizes: tuple[int, int], dtype: torch.dtype, message: str
) -> None:
    """Words of another width, and more changes than the blocks have words."""
    codec = codec_for(codecs, device, 2)
    counts = torch.ones(sizes[0], dtype=torch.int32, device=codec.device)
    words = torch.zeros(sizes[1], dtype=torch.int16, device=codec.device)
    with pytest.raises(InputError, match=message):
        codec.pack(counts, words, words.to(dtype), words, signed_magnitude=True)


@DEVICES
def test_a_chunk_is_staged_in_the_bytes_that_are_announced(device: str) -> None:
    """Counts, low bytes, quads, and for the worst case high bytes, nibbles and words; two numbers behind."""
    counts = torch.tensor([2, 0, 3], dtype=torch.int32, device=device)
    words = torch.arange(5, dtype=torch.int16, device=device)
    staged = encode_streams(counts, words, words + 1, words, signed_magnitude=True)
    assert staged.numel() == staged_bytes(2, 3, 5) == 12 + 5 + 2 + 5 + 3 + 10 + 8


def test_a_chunk_pending_when_the_codec_closes_is_packed_or_cancelled() -> None:
    """Never anything else, however far it was."""
    for _ in range(20):
        codec = ChunkCodec(torch.device("cpu"), 2, max_changes=4, threads=1)
        counts = torch.full((8,), 65536, dtype=torch.int32)
        old = torch.zeros(8 * 65536, dtype=torch.int16)
        pending = [codec.pack(counts, old, old + 1, old, signed_magnitude=True) for _ in range(3)]
        codec.close()
        for chunk in pending:
            with contextlib.suppress(CancelledError):
                assert chunk.result().numel()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_packing_never_waits_for_the_device() -> None:
    """Torch raises at any call that would; memory of the caller's tensors is not handed out while it is still read."""
    blocks: list[Block] = [[(at, 1 + at * 7 % 500, 0) for at in range(60_000)]] * 4
    case, cuda = Case.of(blocks, 2, flags=[True, False, True, True]), cast("Any", torch.cuda)  # untyped
    with ChunkCodec(torch.device("cuda"), 2, max_changes=1, threads=2) as codec:
        first = case.pack(codec)  # memory is allocated
        columns = [torch.from_numpy(part).to(codec.device) for part in (case.counts, case.offsets.view("<i2"))]
        columns += [words_tensor(words, codec.device) for words in (case.new, case.old)]
        flags = case.flags_on(codec.device)
        torch.cuda.synchronize()
        try:
            torch.cuda.set_sync_debug_mode("error")
            with torch.cuda.stream(cuda.Stream()):
                cuda._sleep(200_000_000)  # cycles
                pending = codec.pack(columns[0], columns[1], columns[2], columns[3], signed_magnitude=flags)
            sizes = [column.nbytes for column in columns]
            columns.clear()
            others = [torch.zeros(size, dtype=torch.uint8, device=codec.device) for size in sizes]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert pending.result().numpy().tobytes() == first
        assert not any(other.any() for other in others)


@DEVICES
def test_unfit_flags_and_old_words_are_refused(device: str, codecs: dict[tuple[str, int], ChunkCodec]) -> None:
    """A flag per block, and a word per change of the chunk's width."""
    codec = codec_for(codecs, device, 2)
    found = codec.unpack(GOLDEN, torch.full((3,), 65536, device=codec.device)).result()
    old = torch.zeros(4, dtype=torch.int16, device=codec.device)
    flags = torch.ones(2, dtype=torch.bool, device=codec.device)
    with pytest.raises(InputError, match="unfit flags"):
        found.values(old, signed_magnitude=flags)
    for wrong in (old[:3], old.to(torch.int32)):
        with pytest.raises(InputError, match="old words do not fit"):
            found.values(wrong, signed_magnitude=True)


@pytest.mark.parametrize(("word_bytes", "max_changes", "threads"), [(3, 1, 1), (2, -1, 1), (2, 2**31, 1), (2, 1, 0)])
def test_a_codec_of_unfit_sizes_is_refused(word_bytes: int, max_changes: int, threads: int) -> None:
    """No such words, too many changes, no thread."""
    with pytest.raises(InputError, match="unfit sizes"):
        ChunkCodec(torch.device("cpu"), word_bytes, max_changes=max_changes, threads=threads)
