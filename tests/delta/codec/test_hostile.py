"""Hand-made headers of an adversary whose checksums all fit: every one is a named error, and none is expensive."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import made_updates as made
from deltacast.delta.codec import decode_update, encode_update, read_header
from deltacast.delta.codec.envelope import load_json
from deltacast.delta.errors import FormatError
from deltacast.delta.patch import SparseWeightPatch
from deltacast.delta.table import ParamMeta

JSON = dict[str, Any]


def two_entries() -> bytes:
    """Return a container with a sparse and a bitmap entry in one group."""
    rng = np.random.default_rng(2)
    patches = []
    for name, size, num in (("a", 400, 9), ("b", 40, 20)):
        meta = ParamMeta(name, "bfloat16", (size,))
        old = made.random_words(rng, meta)
        at = np.sort(rng.choice(size, num, replace=False)).astype(np.int64)
        patches.append(made.patch_of(meta, old, made.step(rng, old, at)))
    return encode_update(made.update_of(patches))


RAW = two_entries()


def put(path: str, value: object) -> Callable[[JSON], None]:
    """Return a change that sets one field; `DEL` deletes it."""

    def change(header: JSON) -> None:
        steps: list[Any] = [int(key) if key.isdigit() else key for key in path.split(".")]
        *keys, last = steps
        target: Any = header
        for key in keys:
            target = target[key]
        if value is DEL:
            del target[last]
        elif isinstance(target, list) and last == len(target):
            target.append(value)
        else:
            target[last] = value

    return change


DEL = object()
HUGE = 1 << 62
DIGEST = "xxh3_128:" + "0" * 32

BAD_FIELDS: list[tuple[str, object, str]] = [
    ("format", 2, "bad format"), ("format", True, "bad format"), ("format", "1", "bad format"),
    ("requires", ["classes"], "requires features"), ("requires", "x", "bad requires"),
    ("run_id", "", "name"), ("run_id", 5, "bad run_id"), ("run_id", "x" * 257, "too long"), ("run_id", "\0", "name"),
    ("epoch", -1, "bad epoch"), ("epoch", True, "bad epoch"), ("epoch", 1.0, "bad epoch"), ("epoch", DEL, "bad epoch"),
    ("epoch", 1 << 63, "bad epoch"), ("base_version", "3", "bad base_version"), ("base_version", DEL, "go together"),
    ("base_version", 9, "only go up"), ("base_digest", DEL, "go together"), ("base_digest", 5, "bad base_digest"),
    ("target_digest", "sha256:00", "bad digest"), ("target_digest", DIGEST.upper(), "bad digest"),
    ("target_digest", DIGEST + "\n", "bad digest"), ("table_digest", None, "bad table_digest"),
    ("optimizer_step", -1, "bad optimizer_step"), ("optimizer_step", [], "bad optimizer_step"),
    ("removed", ["x", "x"], "listed twice"), ("removed", [7], "name"), ("removed", [[]], "name"),
    ("removed", {}, "bad removed"), ("removed", ["a"], "also removed"), ("removed", ["\ud800"], "Unicode"),
    ("aliases", [], "bad aliases"), ("aliases", {"x": 5}, "name"), ("aliases", {"a": "b"}, "alias"),
    ("aliases", {"": "b"}, "name"),
    ("entries", {}, "bad entries"), ("entries", [5], "list of objects"), ("entries", [], "groups do not carry"),
    ("entries", DEL, "groups do not carry"),
    ("entries.0.name", "b", "overlap|twice"), ("entries.0.name", 5, "bad name"), ("entries.0.name", "", "name"),
    ("entries.0.name", "x\0y", "name"), ("entries.0.name", "\udfff", "Unicode"),
    ("entries.0.name", "x" * 65536, "name"),
    ("entries.0.dtype", "bf16", "dtype"), ("entries.0.dtype", ["bfloat16"], "bad dtype"),
    ("entries.0.dtype", "float32", "size does not match"), ("entries.0.dtype", DEL, "bad dtype"),
    ("entries.0.shape", [-1], "bad shape"), ("entries.0.shape", [True], "bad shape"),
    ("entries.0.shape", [4.0], "bad shape"),
    ("entries.0.shape", "400", "bad shape"), ("entries.0.shape", None, "bad shape"),
    ("entries.0.shape", DEL, "bad shape"),
    ("entries.0.shape", [1 << 40, 1 << 40], "shape too large"), ("entries.0.shape", [1] * 65, "bad shape"),
    ("entries.0.shape", [3], "more changes than words"), ("entries.0.shape", [20], "outside its span"),
    ("entries.0.encoding", "classes", "unknown encoding"), ("entries.0.encoding", "dense", "dense entry must"),
    ("entries.0.encoding", "bitmap", "size does not match"), ("entries.0.encoding", 0, "bad encoding"),
    ("entries.0.values", "xor", "unknown values"), ("entries.0.values", "absolute", "size does not match"),
    ("entries.0.num_changed", 8, "does not match"), ("entries.0.num_changed", HUGE, "more changes than words"),
    ("entries.0.num_changed", -1, "bad num_changed"), ("entries.0.num_changed", False, "bad num_changed"),
    ("entries.1.num_changed", 41, "more changes than words"),
    ("entries.0.after", DEL, "bad after"), ("entries.0.after", "0" * 15, "bad after"),
    ("entries.0.after", "0" * 15 + "G", "bad after"), ("entries.0.after", 5, "bad after"),
    ("entries.0.before", "0" * 17, "bad before"), ("entries.0.old_sum", "0X" * 8, "bad old_sum"),
    ("entries.0.part", -1, "bad part"), ("entries.0.part", 1 << 32, "bad part"),
    ("entries.0.box", [[0, 401]], "outside the parameter"), ("entries.0.box", [[5, 4]], "outside the parameter"),
    ("entries.0.box", [[0, 4], [0, 4]], "outside the parameter"), ("entries.0.box", [[0]], "bad box"),
    ("entries.0.box", [0, 4], "bad box"), ("entries.0.box", [[0, 1 << 63]], "bad box"), ("entries.0.box", 5, "bad box"),
    ("entries.0.box", [[0, 5]], "more changes"), ("entries.0.box", [[-1, 5]], "bad box"),
    ("entries.0.base_dtype", "float32", "bad base_shape"), ("entries.0.base_shape", [4], "bad base_dtype"),
    ("groups", [], "groups do not carry"), ("groups", 5, "bad groups"), ("groups.0.first", 1, "groups do not carry"),
    ("groups.0.end", 1, "groups do not carry"), ("groups.0.end", 3, "groups do not carry"),
    ("groups.0.end", 1 << 32, "bad end"), ("groups.0.first", DEL, "bad first"),
    ("groups.0.xxh3_128", "00" * 16, "checksum"), ("groups.0.xxh3_128", "00", "bad xxh3_128"),
    ("groups.0.xxh3_128", DEL, "bad xxh3_128"), ("groups.0.sha256", "zz", "bad sha256"),
    ("groups.0.spans", [[5, 0, 400, 9]], "outside its"),
    ("groups.0.spans", [[0, 0, 399, 9]], "hole"), ("groups.0.spans", [[0, 1, 400, 9]], "hole"),
    ("groups.0.spans", [[0, 0, 400, 8]], "miscount"), ("groups.0.spans", [[0, 0, HUGE, 9]], "hole"),
    ("groups.0.spans", [[1, 0, 40, 20], [0, 0, 400, 9]], "entry order"), ("groups.0.spans", [[0, 0, 400]], "bad spans"),
    ("groups.0.spans", [[0, 0, 400, True]], "bad spans"), ("groups.0.spans", [[1 << 33, 0, 400, 9]], "bad spans"),
    ("groups.0.spans", [[0, 0, 1 << 63, 9]], "bad spans"), ("groups.0.spans", [[0, 0, 400, 9]] * 2, "entry order"),
    ("groups.0.streams", [], "does not match"), ("groups.0.streams", 5, "bad streams"),
    ("groups.0.streams.0", ["gap_low", "raw", 9], "bad streams"), ("groups.0.streams.0.0", "words", "unknown kind"),
    ("groups.0.streams.0.0", "gap_quads", "not in order"), ("groups.0.streams.0.0", 7, "bad kind"),
    ("groups.0.streams.0.1", "lz4", "unknown coding"), ("groups.0.streams.0.1", "zstd", "not a zstd frame"),
    ("groups.0.streams.0.2", 0, "impossible"), ("groups.0.streams.0.2", HUGE, "bad stored"),
    ("groups.0.streams.0.2", 8, "impossible"), ("groups.0.streams.0.2", -1, "bad stored"),
    ("groups.0.streams.0.3", 10, "impossible"), ("groups.0.streams.0.3", (64 << 20) + 1, "bad decoded"),
    ("groups.0.streams.0.3", True, "bad decoded"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "message"), BAD_FIELDS)
def test_bad_fields_are_named(path: str, value: object, message: str) -> None:
    """A header that is wrong in one place says in which."""
    with pytest.raises(FormatError, match=message):
        decode_update(made.reseal(RAW, put(path, value)))


@pytest.mark.parametrize("path", ["comment", "entries.0.comment", "groups.0.comment"])
@pytest.mark.parametrize("value", [None, 1.5, [[]], {"deep": [True]}])
def test_unknown_keys_are_ignored(path: str, value: object) -> None:
    """Later writers may add fields that readers can do without."""
    assert len(decode_update(made.reseal(RAW, put(path, value))).patches) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not valid JSON"), (b"5", "not a JSON object"), (b"[]", "not a JSON object"), (b"{", "not valid JSON"),
        (b"{}{}", "not valid JSON"), (b"\xff\xfe{}", "not valid JSON"), (b'{"format":1,"format":1}', "twice"),
        (b'{"a":{"b":1,"b":2}}', "twice"), (b'{"format":NaN}', "not finite"), (b'{"x":-Infinity}', "not finite"),
        (b'{"x":1e999}', "not finite"), (b'{"x":' + b"9" * 5000 + b"}", "too large"),
        (b'{"x":-99999999999999999999}', "too large"), (b"[" * 200_000, "not valid JSON"),
        (b'{"x":' * 100_000, "not valid JSON"), (b"\xef\xbb\xbf{}", "not valid JSON"), (b"\0", "not valid JSON"),
    ],
)  # fmt: skip
def test_bad_json_is_named(text: bytes, message: str) -> None:
    """What json.loads would let through, or would answer with an error of its own."""
    with pytest.raises(FormatError, match=message):
        decode_update(made.seal(text))


def zstd(data: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (b"", "zstd"), (b"\x28\xb5\x2f\xfd", "zstd"), (zstd(b"{}") + b"\0", "decompress"),
        (zstd(b"{}") + zstd(b"{}"), "decompress"), (zstd(b"{}", write_content_size=False), "states its size"),
        (b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + zstd(b"{}"), "plain zstd frame"), (zstd(b"{}")[:-1], "decompress"),
        (zstd(b"\0" * (80 << 20)), "too large"), (zstd(b" " * (2 << 20) + b"{}"), "too large"),
        (zstd(b"{}", dict_data=zstandard.ZstdCompressionDict(b"x" * 64, dict_type=1)), "decompress|JSON|format"),
    ],
)  # fmt: skip
def test_bad_header_frames_are_named(stored: bytes, message: str) -> None:
    """Exactly one frame that states its size, and not too much of it."""
    with pytest.raises(FormatError, match=message):
        decode_update(made.seal_stored(stored))


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 64) - 1, (1 << 64) - 16, 1 << 63])
def test_header_length_is_checked_first(size: int) -> None:
    """Nothing is allocated or read on the word of the length field."""
    raw = RAW[:8] + size.to_bytes(8, "little") + RAW[16:]
    with pytest.raises(FormatError):
        decode_update(raw)


def one_group(encoding: str, num: int, positions: int, streams: list[list[object]], payload: bytes) -> bytes:
    """Return a container with one uint8 entry and any stream table."""
    raw = encode_update(made.update_of([]))

    def change(header: JSON) -> None:
        header["entries"] = [{"name": "w", "dtype": "uint8", "shape": [positions], "encoding": encoding,
                              "values": "absolute", "num_changed": num, "after": "0" * 16}]  # fmt: skip
        header["groups"] = [{"first": 0, "end": 1, "streams": streams}]
        made.rehash(header["groups"][0], payload)

    return made.reseal(raw, change, payload)


def bomb(size: int) -> bytes:
    return zstd(b"\0" * size, level=19)


MIB = 1 << 20
BOMBS = {
    "dense beyond the bytes at hand": one_group("dense", MIB, MIB, [["words8.0", "zstd", 20, MIB]], b"\0" * 20),
    "a frame that states more": one_group("dense", 600_000, 600_000, [["words8.0", "zstd", len(bomb(MIB)), 600_000]],
                                          bomb(MIB)),
    "a frame that states less": one_group("dense", MIB, MIB, [["words8.0", "zstd", len(bomb(600_000)), MIB]],
                                          bomb(600_000)),
    "2^60 words": one_group("dense", 1 << 60, 1 << 60, [["words8.0", "zstd", 30, 64 * MIB]], b"\0" * 30),
    "2^60 bits": one_group("bitmap", 1, 1 << 60, [["bitmap", "zstd", 30, 64 * MIB], ["words8.0", "raw", 1, 1]],
                           b"\0" * 31),
    "2^60 changes": one_group("sparse", 1 << 60, 1 << 60, [], b""),
    "17 Mi changes": one_group("sparse", 17 * MIB, 1 << 40, [["gap_low", "zstd", 9999, 17 * MIB]], b"\0" * 9999),
    "raw beyond the payload": one_group("dense", MIB, MIB, [["words8.0", "raw", MIB, MIB]], b"\0" * 30),
}  # fmt: skip


@pytest.mark.parametrize("raw", BOMBS.values(), ids=BOMBS.keys())
def test_small_files_do_not_allocate_much(raw: bytes) -> None:
    """A few hundred bytes may not claim memory that they do not stand for."""
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            decode_update(raw)
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()


def test_the_reader_bounds_the_whole_update() -> None:
    """A legal file can stand for far more than its size; the reader says how much it takes."""
    patch = SparseWeightPatch(ParamMeta("w", "uint8", (MIB,)), None, np.zeros(MIB, "u1"), 0)
    zeros = encode_update(made.update_of([patch]))
    assert len(zeros) < 500
    assert decode_update(zeros, max_decoded_bytes=MIB).num_changed == MIB
    with pytest.raises(FormatError, match="more than its reader takes"):
        decode_update(zeros, max_decoded_bytes=MIB - 1)


def test_wrapping_positions() -> None:
    """Gaps whose sum would wrap around 2^64 into the parameter are refused."""
    for wide in ([(1 << 64) - 5], [1 << 63, 1 << 63], [(1 << 62) - 1] * 4, [1 << 61] * 2):
        num = len(wide)
        quads = sum(3 << 2 * i for i in range(num))
        payload = b"\xff" * num + bytes([quads]) + b"\xff" * num + b"".join(w.to_bytes(8, "little") for w in wide)
        streams = [["gap_low", "raw", num, num], ["gap_quads", "raw", 1, 1], ["gap_high", "raw", num, num],
                   ["wide", "raw", 8 * num, 8 * num], ["words8.0", "raw", num, num]]  # fmt: skip
        with pytest.raises(FormatError, match=r"62-bit|outside its span"):
            decode_update(one_group("sparse", num, 1 << 60, streams, payload + b"\1" * num))


def test_a_seed_with_sparse_entries() -> None:
    """What has no base cannot be sent as a change."""

    def change(header: JSON) -> None:
        del header["base_version"], header["base_digest"]

    with pytest.raises(FormatError, match="must be dense"):
        decode_update(made.reseal(RAW, change))


def test_overlapping_parts() -> None:
    """Parts of one parameter overlap, repeat a number, disagree, or stand beside the whole."""
    meta = ParamMeta("w", "uint8", (4, 4))
    boxes = [((0, 2), (0, 4)), ((2, 4), (0, 4))]
    halves = [SparseWeightPatch(meta, None, np.zeros(8, "u1"), 1, part=i, box=box) for i, box in enumerate(boxes)]
    raw = encode_update(made.update_of(halves))
    for path, value, message in (
        ("entries.1.box", [[1, 3], [0, 4]], "overlap"), ("entries.1.part", 0, "twice"),
        ("entries.1.shape", [4, 5], "disagree|dense entry"), ("entries.1.box", None, "covers the whole|dense entry"),
    ):  # fmt: skip
        with pytest.raises(FormatError, match=message):
            decode_update(made.reseal(raw, put(path, value)))


def paths(value: Any, prefix: str = "") -> list[str]:
    """Return the path of every field of a header."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = []
    for key, inner in items:
        found += [f"{prefix}{key}", *paths(inner, f"{prefix}{key}.")]
    return found


SIZE = int.from_bytes(RAW[8:16], "little")
PATHS = paths(json.loads(zstandard.ZstdDecompressor().decompress(RAW[16 : 16 + SIZE])))
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 70), st.integers(), st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5), st.builds(list), st.builds(dict), st.lists(st.integers(0, 400), max_size=5),
    st.sampled_from([1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, "sparse", "dense", "bitmap", "delta", "absolute", DEL]),
)  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from(PATHS), ODD), min_size=1, max_size=3))
@settings(deadline=None, max_examples=400)
def test_fuzzed_headers(changes: list[tuple[str, object]]) -> None:
    """Whatever a header says, the answer is a FormatError or an update whose patches keep the policy."""

    def change(header: JSON) -> None:
        for path, value in changes:
            try:
                put(path, value)(header)
            except (KeyError, IndexError, TypeError):
                continue  # an earlier change took the place away

    raw = made.reseal(RAW, change)
    try:
        update = decode_update(raw)
        read_header(raw)
    except FormatError:
        return
    for patch in update.patches:
        patch.check_indices()


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_fuzzed_payloads(data: st.DataObject) -> None:
    """Any stream bytes under right checksums decode to patches that keep the policy, or fail by name."""
    size = int.from_bytes(RAW[8:16], "little")
    payload = bytearray(RAW[(16 + size + 7) // 8 * 8 : -24])
    for place in data.draw(st.lists(st.integers(0, len(payload) - 1), min_size=1, max_size=4)):
        payload[place] = data.draw(st.integers(0, 255))
    raw = made.reseal(RAW, lambda header: made.rehash(header["groups"][0], bytes(payload)), bytes(payload))
    try:
        update = decode_update(raw)
    except FormatError:
        return
    for patch in update.patches:
        patch.check_indices()


def test_a_key_that_appears_twice_among_many_is_named_without_delay() -> None:
    """Comparing each with each would take hours, and a manifest may be of 64 MiB."""
    keys = ",".join(f'"{number}":0' for number in range(300_000))
    with pytest.raises(FormatError, match=r"twice.*'299999'"):
        load_json(f'{{{keys},"299999":1}}'.encode(), "a manifest")
