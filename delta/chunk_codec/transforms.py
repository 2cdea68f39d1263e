"""Between the changes of a chunk and its byte streams, in torch operations that run on any device.

Words are handled as signed integers of their width, whose sums wrap modulo 2^n on every device. Encoding never waits
for the device: no size depends on the data. Decoding waits three times, because it checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from deltacast.delta.chunk_codec.layout import BLOCK_WORDS, ChunkHeader
from deltacast.delta.errors import FormatError, InputError

__all__ = ["UnpackedChunk", "decode_streams", "encode_streams", "transform_bytes"]

_SIGNED: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_HIGH_ESCAPE: Final = 3
_CODE_ESCAPE: Final = 15


@dataclass(frozen=True, slots=True, eq=False)
class UnpackedChunk:
    """A chunk that was received: where words change and by how much. Its tensors are its own.

    Attributes:
        counts: int32 [num_blocks], changes of each block; they add up.
        offsets: int16 [num_changes], the bits of u16 offsets, strictly ascending and inside their block.
        differences: [num_changes] signed words, `o(new) - o(old) mod 2^n`, none of them 0.
    """

    counts: torch.Tensor
    offsets: torch.Tensor
    differences: torch.Tensor

    def positions(self) -> torch.Tensor:
        """Return int64 [num_changes]: number of the block (from 0) * 65,536 + offset."""
        blocks = torch.repeat_interleave(self.counts, output_size=self.offsets.numel()).to(torch.int64)
        return blocks.mul_(BLOCK_WORDS).add_(self.offsets.to(torch.int32).bitwise_and_(0xFFFF))

    def values(self, old: torch.Tensor, *, signed_magnitude: torch.Tensor | bool) -> torch.Tensor:
        """Return the new words, given the old ones.

        Args:
            old: [num_changes] words at the chunk's positions, on its device; read only.
            signed_magnitude: as the sender's, see `ChunkCodec.pack`.

        Raises:
            InputError: another number of words or blocks, another width or device.
        """
        signed, shape, device = self.differences.dtype, self.differences.shape, self.differences.device
        if old.itemsize != signed.itemsize or old.shape != shape or old.device != device:
            raise InputError("old words do not fit the chunk", expected=f"words of {signed} {list(shape)} on {device}",
                             found=f"{old.dtype} {list(old.shape)} on {old.device}")  # fmt: skip
        masks = magnitude_masks(self.counts, self.differences, signed_magnitude=signed_magnitude)
        new = _ordered(_ordered(old.view(signed), masks).add_(self.differences), masks)
        return new.view(old.dtype)


def transform_bytes(word_bytes: int, num_changes: int) -> int:
    """Return the device memory that encoding or decoding a chunk takes meanwhile, about: by torch's profiler."""
    return (16 + 3 * word_bytes) * num_changes


def magnitude_masks(
    counts: torch.Tensor, words: torch.Tensor, *, signed_magnitude: torch.Tensor | bool
) -> torch.Tensor | int:
    """Return the bits that a negative word has flipped in the order of values: all but the sign, or none.

    Args:
        counts: changes of each block, adding up to the number of words.
        words: gives width and number.
        signed_magnitude: one bool for all words, or bool [num_blocks] on their device.

    Returns:
        A number for all words, or a tensor with one for each.

    Raises:
        InputError: flags of another dtype, number or device.
    """
    magnitude = torch.iinfo(_SIGNED[words.itemsize]).max
    if isinstance(signed_magnitude, bool):
        return magnitude if signed_magnitude else 0
    flags = signed_magnitude
    if flags.dtype != torch.bool or flags.shape != counts.shape or flags.device != counts.device:
        raise InputError("unfit flags", expected=f"bool {list(counts.shape)} on {counts.device}",
                         found=f"{flags.dtype} {list(flags.shape)} on {flags.device}")  # fmt: skip
    per_block = flags.to(_SIGNED[words.itemsize]).mul_(magnitude)
    return torch.repeat_interleave(per_block, counts, output_size=words.numel())


def encode_streams(
    counts: torch.Tensor,
    offsets: torch.Tensor,
    values: torch.Tensor,
    old: torch.Tensor,
    *,
    signed_magnitude: torch.Tensor | bool,
) -> torch.Tensor:
    """Turn changes into streams, in the form that `staging.py` reads; waits for nothing.

    Counts that do not add up do no harm here; whoever reads the streams refuses them.

    Args:
        counts: int32 [num_blocks], at least one block if there are changes.
        offsets: int16 [num_changes].
        values: [num_changes] words after.
        old: [num_changes] words before.
        signed_magnitude: see `ChunkCodec.pack`.

    Returns:
        uint8 on the device, new memory.

    Raises:
        InputError: flags of another dtype, number or device.
    """
    safe = _safe_counts(counts, offsets.numel())
    low, high = _gaps(safe, offsets).view(torch.uint8).view(-1, 2).unbind(1)
    gap_high, num_high = _escapes_first(high, high >= _HIGH_ESCAPE)
    codes = _difference_codes(values, old, magnitude_masks(safe, values, signed_magnitude=signed_magnitude))
    nibbles = (
        codes.clamp(-1, _CODE_ESCAPE).bitwise_and_(0xF).to(torch.uint8)
    )  # a code with its top bit set looks negative
    exceptions, num_exceptions = _escapes_first(codes, nibbles == _CODE_ESCAPE)
    planes = exceptions.view(torch.uint8).view(-1, values.itemsize).t().reshape(-1)
    quads = _pack_bits(high.clamp(max=_HIGH_ESCAPE), 2)
    numbers = torch.stack((num_high, num_exceptions)).to(torch.int32).view(torch.uint8)
    return torch.cat((counts.view(torch.uint8), low, quads, gap_high, _pack_bits(nibbles, 4), planes, numbers))


def _safe_counts(counts: torch.Tensor, num_changes: int) -> torch.Tensor:
    """Return int64 counts that add up to the number of changes: right ones as they are, wrong ones somehow.

    Counts address memory on the device, where a wrong one would end the process; and they may be overwritten while
    they are read, in a round that was given up.
    """
    ends = torch.cat((counts.new_zeros(1, dtype=torch.int64), counts.cumsum(0).clamp_(0, num_changes)))
    ends = ends.cummax(0).values
    ends[-1:] = num_changes
    return ends.diff()


def _escapes_first(items: torch.Tensor, escaped: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the items, those of escapes in front and in order, and int64 [] how many these are.

    Selecting them alone would make a size depend on the data, and the host wait for it.
    """
    count = escaped.sum()
    places = _places_escapes_first(escaped, count).to(torch.int64)
    return torch.empty(items.shape, dtype=items.dtype, device=items.device).scatter_(0, places, items), count


def _places_escapes_first(escaped: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return where each item goes, int32; apart from `_escapes_first`, so that what it needs is free again before."""
    ranks = escaped.cumsum(0, dtype=torch.int32)
    behind = torch.arange(escaped.numel(), dtype=torch.int32, device=escaped.device).sub_(ranks).add_(count)
    return torch.where(escaped, ranks.sub_(1), behind)


def _gaps(counts: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the words between changes, as the bits of u16, from the previous change or the block's start."""
    previous = torch.empty(offsets.numel() + 1, dtype=torch.int16, device=offsets.device)
    previous[1:] = offsets
    starts = counts.cumsum(0).sub_(counts)
    previous.index_fill_(0, starts, -1)  # an empty block starts where the next one does: the same -1 twice
    return (offsets - previous[:-1]).sub_(1)


def _ordered(words: torch.Tensor, masks: torch.Tensor | int) -> torch.Tensor:
    """Return signed words as integers in the order of their values, in new memory; its own inverse."""
    return (words >> (8 * words.itemsize - 1)).bitwise_and_(masks).bitwise_xor_(words)


def _difference_codes(values: torch.Tensor, old: torch.Tensor, masks: torch.Tensor | int) -> torch.Tensor:
    """Return `zigzag(o(new) - o(old)) - 1` as signed words."""
    signed = _SIGNED[values.itemsize]
    difference = _ordered(values.view(signed), masks).sub_(_ordered(old.view(signed), masks))
    sign = difference >> (8 * values.itemsize - 1)
    return difference.bitwise_left_shift_(1).bitwise_xor_(sign).sub_(1)


def _pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Put 8 / `bits` uint8 codes into each byte, lowest bits first, padded with zeros."""
    per_byte = 8 // bits
    padded = torch.zeros(-(-codes.numel() // per_byte) * per_byte, dtype=torch.uint8, device=codes.device)
    padded[: codes.numel()] = codes
    lanes = padded.view(-1, per_byte).unbind(1)
    packed = lanes[0].clone()
    for lane, part in enumerate(lanes[1:], 1):
        packed |= part << bits * lane
    return packed


def _unpack_bits(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return the first `count` codes of `bits` bits as uint8."""
    codes = torch.empty(packed.numel(), 8 // bits, dtype=torch.uint8, device=packed.device)
    for lane in range(8 // bits):
        codes[:, lane] = packed >> bits * lane
    return codes.bitwise_and_((1 << bits) - 1).view(-1)[:count]


def decode_streams(header: ChunkHeader, streams: torch.Tensor, block_sizes: torch.Tensor) -> UnpackedChunk:
    """Turn checked streams (`layout.check_streams`) back into changes; waits for the device three times.

    Args:
        header: the header.
        streams: uint8 on the device, all streams back to back; not kept.
        block_sizes: int32 or int64 [num_blocks] on the device, words of each block.

    Raises:
        FormatError: a stream does not match its codes, or a position lies outside its block.
    """
    parts = {stream: streams[place] for stream, place in header.streams().items()}
    counts = parts["counts"].view(torch.int32).clone()
    high = _unpack_bits(parts["gap_quads"], 2, header.num_changes)
    _fill_escapes(high, high == _HIGH_ESCAPE, parts["gap_high"], "gap_high")
    offsets, outside = _offsets(counts, parts["gap_low"], high, block_sizes)

    planes = parts["exceptions"].view(header.word_bytes, header.num_exceptions)
    exceptions = _join_planes(planes, _SIGNED[header.word_bytes])
    nibbles = _unpack_bits(parts["nibbles"], 4, header.num_changes)
    codes = nibbles.to(exceptions.dtype)
    _fill_escapes(codes, nibbles == _CODE_ESCAPE, exceptions, "exceptions")

    small = (parts["gap_high"] < _HIGH_ESCAPE).any()
    range_error = ((exceptions >= 0) & (exceptions < _CODE_ESCAPE) | (exceptions == -1)).any()
    _raise_faults(torch.stack((small, outside, range_error)).tolist())
    return UnpackedChunk(counts, offsets, _differences(codes))


def _join_planes(planes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the words that byte planes stand for, least significant first."""
    words = torch.empty(planes.shape[1], dtype=dtype, device=planes.device)  # new, so aligned, as no stream need be
    words.view(torch.uint8).view(-1, planes.shape[0]).copy_(planes.t())
    return words


def _raise_faults(found: list[bool]) -> None:
    messages = (
        "a byte of stream gap_high is below 3",
        "an offset in stream gap_low lies outside its block",
        "a code of stream exceptions is below 15 or stands for no change",
    )
    for fault, message in zip(found, messages, strict=True):
        if fault:
            raise FormatError(message)


def _fill_escapes(codes: torch.Tensor, escaped: torch.Tensor, items: torch.Tensor, stream: str) -> None:
    """Put the items of a stream in the places of their escapes."""
    places = torch.nonzero(escaped).view(-1)
    if places.numel() != items.numel():
        raise FormatError(f"stream {stream} does not match its escapes", expected=places.numel(), found=items.numel())
    codes.index_copy_(0, places, items)


def _offsets(
    counts: torch.Tensor, low: torch.Tensor, high: torch.Tensor, block_sizes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the offsets as int16, and whether any block's last one, so any at all, lies outside its block.

    Sums are int32 that wrap. That is exact: a block's 65,536 steps of at most 65,536 come to 2^32, so that its last
    offset, one less, fits 32 bits. With the top bit set it looks negative, and is outside like any that is too large.
    """
    num_changes = low.numel()
    steps = high.to(torch.int32).mul_(256).add_(low).add_(1)
    sums = torch.zeros(num_changes + 1, dtype=torch.int32, device=low.device)
    torch.cumsum(steps, 0, dtype=torch.int32, out=sums[1:])
    ends = counts.cumsum(0)
    before = sums[ends - counts].add_(1)
    last = sums[ends] - before
    outside = ((last < 0) | (last >= block_sizes)) & (counts > 0)
    first = torch.repeat_interleave(before, counts, output_size=num_changes)
    return (sums[1:] - first).to(torch.int16), outside.any()


def _differences(codes: torch.Tensor) -> torch.Tensor:
    """Undo `zigzag(d) - 1`, in the memory of the codes."""
    zigzag = codes.add_(1)
    sign = (zigzag & 1).neg_()
    logical = torch.iinfo(codes.dtype).max  # torch shifts the sign in
    return zigzag.bitwise_right_shift_(1).bitwise_and_(logical).bitwise_xor_(sign)
