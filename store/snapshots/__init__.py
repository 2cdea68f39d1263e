"""Snapshots: all weights of one version, as a folder that `safetensors` and `transformers` load as it is.

`snapshots/<version>-<nonce>/` holds safetensors shards, the Hugging Face index, what else the model needs to be loaded,
and, written last, the manifest that makes these files a snapshot. Read `manifest.py` first, then `write.py` and
`read.py`.
"""

from deltacast.store.snapshots.manifest import Manifest, SnapshotFile, list_snapshots, read_manifest
from deltacast.store.snapshots.read import download_snapshot, open_snapshot, read_extra_files
from deltacast.store.snapshots.write import extra_files_of, write_snapshot

__all__ = [
    "Manifest",
    "SnapshotFile",
    "download_snapshot",
    "extra_files_of",
    "list_snapshots",
    "open_snapshot",
    "read_extra_files",
    "read_manifest",
    "write_snapshot",
]
