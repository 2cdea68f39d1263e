"""Read everything that a store holds, and say what is damaged and what can still be made of the rest.

Read `check.py` first; `versions.py` and `snapshots.py` do the two larger parts, and note what they find as
`findings.py` has it.
"""

from deltacast.store.fsck.check import check, find_log
from deltacast.store.fsck.findings import Damage, FsckReport

__all__ = ["Damage", "FsckReport", "check", "find_log"]
