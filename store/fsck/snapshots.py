"""Read a stored snapshot from end to end: each file's digest and each parameter's fingerprint, a few MiB at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deltacast.delta.checkpoint_digest import CheckpointDigest
from deltacast.delta.errors import ChecksumError, FormatError, VerificationError
from deltacast.delta.fingerprint import add, words_fingerprint
from deltacast.delta.safetensors_header import MAX_HEADER_BYTES, SafetensorsHeader, parse_header
from deltacast.delta.table import ParamMeta
from deltacast.store.fsck.findings import Findings
from deltacast.store.objects import ObjectBackend
from deltacast.store.snapshots.manifest import FileHash, Manifest, SnapshotFile

__all__ = ["check_snapshot"]

_PIECE_BYTES: Final = 16 << 20


def check_snapshot(backend: ObjectBackend, manifest: Manifest, findings: Findings) -> bool:
    """Read every file of a snapshot.

    Args:
        backend: where it is.
        manifest: a snapshot that says of its weights what its version's record says.
        findings: gets each file that is damaged, and the manifest if its files are whole and hold other weights.

    Returns:
        Whether the version can be made from it.
    """
    parameters: list[tuple[ParamMeta, int]] = []
    whole = True
    for file in manifest.files:
        scan = _Scan(backend, manifest.object_name(file), file, findings)
        found = findings.attempt(scan.path, manifest.version, scan.run)
        whole = whole and found is not None
        parameters += found or []
    return whole and findings.attempt(manifest.path, manifest.version, lambda: _state(manifest, parameters)) is not None


def _state(manifest: Manifest, parameters: list[tuple[ParamMeta, int]]) -> str:
    """Return the digest of the weights that were read, if it is the manifest's."""
    found = CheckpointDigest.of(parameters)
    if (found.table.digest, found.state_digest) != (manifest.table_digest, manifest.state_digest):
        raise VerificationError("its files hold other weights", expected=manifest.state_digest,
                                found=found.state_digest)  # fmt: skip
    return found.state_digest


class _Scan:
    """One pass over one file, in order."""

    def __init__(self, backend: ObjectBackend, path: str, file: SnapshotFile, findings: Findings) -> None:
        self.path = path
        self._backend, self._file, self._findings = backend, file, findings
        self._hash = FileHash(secure=file.sha256 is not None)

    def run(self) -> list[tuple[ParamMeta, int]]:
        """Read the file; return the parameters that it holds with their fingerprints: none, if it is no weights."""
        found = self._backend.stat(self.path).num_bytes
        if found != self._file.num_bytes:
            raise ChecksumError("it has another size", expected=self._file.num_bytes, found=found)
        header = self._header() if self._file.role == "weights" else None
        for _ in self._pieces(0, found if header is None else header.data_start):
            pass
        slots = () if header is None else header.slots  # in the order of the file, which they fill to its end
        parameters = [(slot.meta, _fingerprint(slot.meta, self._pieces(slot.begin, slot.end))) for slot in slots]
        self._hash.require(self._file, self.path)
        return parameters

    def _header(self) -> SafetensorsHeader:
        # As large as the file, because the parser looks at a whole one; only pages that are filled take memory.
        file = np.empty(self._file.num_bytes, np.uint8)
        self._backend.read_into(self.path, 0, file[:8].data)
        end = 8 + int.from_bytes(file[:8].tobytes(), "little")
        if end > min(file.size, 8 + MAX_HEADER_BYTES):
            raise FormatError("bad header length", expected=f"at most {MAX_HEADER_BYTES}", found=end - 8)
        self._backend.read_into(self.path, 8, file[8:end].data)
        return parse_header(file.data, where=self.path)

    def _pieces(self, begin: int, end: int) -> Iterator[NDArray[np.uint8]]:
        """Yield a range of the file piece by piece, each in the same buffer; what is read is hashed."""
        buffer = np.empty(min(_PIECE_BYTES, end - begin), np.uint8)
        for start in range(begin, end, _PIECE_BYTES):
            piece = buffer[: end - start]
            self._backend.read_into(self.path, start, piece.data)
            self._hash.update(piece.data)
            self._findings.read(piece.size)
            yield piece


def _fingerprint(meta: ParamMeta, pieces: Iterator[NDArray[np.uint8]]) -> int:
    total, first = 0, 0
    for piece in pieces:
        words = piece.view(meta.row.numpy_word)
        total, first = add(total, words_fingerprint(words, first)), first + words.size
    return total
