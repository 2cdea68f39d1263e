"""Format 1: updates as compact bytes, read by a strict parser (docs/format.md is normative).

`container.py` reads and writes whole files, `rows.py` the rounds that engines send; both fill the tables of
`layout.py`. `encode.py` and `decode.py` turn patches into groups and back with the transforms of `streams.py`.
Bytes from outside that break a rule are a `FormatError`; nothing is unpickled, and nothing is allocated on the word
of a number that the bytes at hand do not bear out. Start with `container.py`.
"""

from deltacast.delta.codec.choose import ValuesChoice
from deltacast.delta.codec.container import (
    MAGIC,
    decode_portions,
    decode_update,
    encode_update,
    read_header,
    read_update,
    write_update,
)
from deltacast.delta.codec.header import EntryHeader, GroupHeader, UpdateHeader
from deltacast.delta.codec.rows import EncodedRound, RoundRows, decode_round, encode_round, read_rows

__all__ = [
    "encode_update",
    "decode_update",
    "decode_portions",
    "write_update",
    "read_update",
    "read_header",
    "encode_round",
    "decode_round",
    "read_rows",
    "EncodedRound",
    "RoundRows",
    "UpdateHeader",
    "EntryHeader",
    "GroupHeader",
    "ValuesChoice",
    "MAGIC",
]
