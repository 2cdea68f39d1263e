"""The golden bytes of docs/format.md, spelled by hand, decode to what the page says they mean."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import xxhash

import naive_container
from deltacast.delta.codec import decode_round, decode_update, read_header
from deltacast.delta.fingerprint import words_fingerprint
from deltacast.delta.patch import WeightUpdate
from deltacast.delta.table import ParameterTable, ParamMeta

PAGE = Path(__file__).parents[3] / "docs" / "format.md"
TABLE = ParameterTable([ParamMeta("b", "uint8", (3,)), ParamMeta("w", "bfloat16", (4, 100))])

CONTAINER = bytes.fromhex(
    """
894443550d0a1a0a480300000000000028b52ffd603e02f119007b22666f726d
6174223a312c2272756e5f6964223a22676f6c64656e222c2265706f6368223a
312c22626173655f76657273696f6e223a372c227461726765745f7665727369
6f6e223a382c22626173655f646967657374223a22787868335f3132383a3734
353435656639323637356632393033343131393136303137613435616332222c
227461726765745f646967657374223a22787868335f3132383a326164623334
3438396532353834633835616464616366386161383432333235222c22746162
6c655f646967657374223a22787868335f3132383a6665356439633064656564
396639396163623862666438386234373036626461222c226f7074696d697a65
725f73746570223a38302c22656e7472696573223a5b7b226e616d65223a2262
222c227368617065223a5b335d2c226474797065223a2275696e7438222c2265
6e636f64696e67223a2264656e7365222c2276616c756573223a226162736f6c
757465222c226e756d5f6368616e676564223a332c226265666f7265223a2230
303030303030303030303030303030222c226166746572223a22303830333766
63333839353064343163227d2c7b226e616d65223a2277222c22736861706522
3a5b342c3130305d2c226474797065223a2262666c6f61743136222c22656e63
6f64696e67223a22737061727365222c2276616c756573223a2264656c746122
2c226e756d5f6368616e676564223a342c226265666f7265223a223135336334
3430623063373966663030222c226166746572223a2233343364626235306531
653138663339222c226f6c645f73756d223a2234643266656430356632666336
653030227d5d2c2267726f757073223a5b7b226669727374223a302c22656e64
223a322c2273747265616d73223a5b5b226761705f6c6f77222c22726177222c
342c345d2c5b226761705f7175616473222c22726177222c312c315d2c5b226e
6962626c65733136222c22726177222c322c325d2c5b22657863657074696f6e
733136222c22726177222c342c345d2c5b22776f726473382e30222c22726177
222c332c335d5d2c22787868335f313238223a22653061353439663030353734
6338616335383538353436366433343632636334227d5d7d
010029621001ff0f100000010203
0000000000000000
5d36f2c1fa991c2af310a1daa26068b1
"""
)

ROWS = bytes.fromhex(
    """
894443520d0a1a0a110100000200000001000000000000000500000000000000
7b22666f726d6174223a312c2272756e5f6964223a22676f6c64656e222c2265
706f6368223a312c22626173655f76657273696f6e223a372c22746172676574
5f76657273696f6e223a382c22626173655f646967657374223a22787868335f
3132383a37343534356566393236373566323930333431313931363031376134
35616332222c227461726765745f646967657374223a22787868335f3132383a
3261646233343438396532353834633835616464616366386161383432333235
222c227461626c655f646967657374223a22787868335f3132383a6665356439
633064656564396639396163623862666438386234373036626461222c226f70
74696d697a65725f73746570223a38307d00000000000000
0000000000000000020101000000000003000000000000000000000000000000
1cd45089c37f0308000000000000000001000000000000000000030000000000
040000000000000000ff790c0b443c15398fe1e150bb3d34006efcf205ed2f4d
00000000020000000000000005000000e0a549f00574c8ac58585466d3462cc4
000000000000000004000000000000000400000000000000
010000000000000001000000000000000100000000000000
060000000000000002000000000000000200000000000000
0a0000000000000004000000000000000400000000000000
0d0000000000000003000000000000000300000000000000
94aec9d2ea04042393dd726a0894b320
"""
)


def by_hand() -> bytes:
    """Put the container together from its parts."""
    group = bytes([1, 0, 0x29, 0x62]) + bytes([0x10]) + bytes([0x01, 0xFF]) + bytes([15, 16, 0, 0]) + bytes([1, 2, 3])
    text = (
        '{"format":1,"run_id":"golden","epoch":1,"base_version":7,"target_version":8,'
        '"base_digest":"xxh3_128:74545ef92675f2903411916017a45ac2",'
        '"target_digest":"xxh3_128:2adb34489e2584c85addacf8aa842325",'
        '"table_digest":"xxh3_128:fe5d9c0deed9f99acb8bfd88b4706bda","optimizer_step":80,"entries":['
        '{"name":"b","shape":[3],"dtype":"uint8","encoding":"dense","values":"absolute","num_changed":3,'
        '"before":"0000000000000000","after":"08037fc38950d41c"},'
        '{"name":"w","shape":[4,100],"dtype":"bfloat16","encoding":"sparse","values":"delta","num_changed":4,'
        '"before":"153c440b0c79ff00","after":"343dbb50e1e18f39","old_sum":"4d2fed05f2fc6e00"}],'
        '"groups":[{"first":0,"end":2,"streams":[["gap_low","raw",4,4],["gap_quads","raw",1,1],'
        '["nibbles16","raw",2,2],["exceptions16","raw",4,4],["words8.0","raw",3,3]],'
        f'"xxh3_128":"{xxhash.xxh3_128_hexdigest(group)}"'
        "}]}"
    ).encode()
    # zstd: magic, single segment with a 2-byte content size (less 256), one last raw block
    frame = b"\x28\xb5\x2f\xfd\x60" + (len(text) - 256).to_bytes(2, "little")
    frame += (len(text) << 3 | 1).to_bytes(3, "little") + text
    body = b"\x89DCU\r\n\x1a\n" + len(frame).to_bytes(8, "little") + frame
    body += bytes(-len(body) % 8) + group + bytes(8)
    return body + xxhash.xxh3_128_digest(body)


def check(update: WeightUpdate) -> None:
    assert (update.run_id, update.epoch, update.base_version, update.target_version) == ("golden", 1, 7, 8)
    assert (update.optimizer_step, update.table_digest) == (80, TABLE.digest)
    b, w = update.patches
    assert (b.name, b.is_dense, b.values.tolist()) == ("b", True, [1, 2, 3])
    assert w.indices is not None
    assert (w.name, w.form, w.indices.tolist()) == ("w", "delta", [1, 2, 300, 399])
    assert w.values.tolist() == [1, 0xFFFF, 8, 0x10000 - 9]
    old = np.full(400, 0x3F80, "<u2")
    new = old.copy()
    new[[1, 2, 300, 399]] = [0x3F81, 0x3F7F, 0x3F88, 0x3F77]
    assert (w.fingerprint_before, w.fingerprint_after) == (words_fingerprint(old), words_fingerprint(new))
    assert update.target_digest == TABLE.state_digest(
        np.array([words_fingerprint(b.values), words_fingerprint(new)], np.uint64)
    )


def test_golden_container() -> None:
    """The bytes are what the page spells out, and decode to what it says."""
    assert by_hand() == CONTAINER
    check(decode_update(CONTAINER))
    assert read_header(CONTAINER).stream_bytes == {
        "gap_low": 4, "gap_quads": 1, "nibbles16": 2, "exceptions16": 4, "words8.0": 3,
    }  # fmt: skip
    _, entries = naive_container.read(CONTAINER)
    assert [entry.values for entry in entries] == [[1, 2, 3], [1, 0xFFFF, 8, 0x10000 - 9]]
    assert entries[1].indices == [1, 2, 300, 399]


def test_golden_rows() -> None:
    """The same round as rows, its payload the container's group."""
    check(decode_round(ROWS, CONTAINER[-24 - 14 : -24], TABLE))


@pytest.mark.parametrize(("label", "wanted"), [("golden-container", CONTAINER), ("golden-rows", ROWS)])
def test_the_page_shows_the_same_bytes(label: str, wanted: bytes) -> None:
    """docs/format.md and this test cannot drift apart."""
    block = re.search(rf"```{label}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None
    assert bytes.fromhex(block.group(1)) == wanted
