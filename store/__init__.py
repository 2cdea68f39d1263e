"""What is kept: the baseline that both sides agree on, and the durable store of a run's versions.

May import `deltacast.delta`, never `deltacast.engines`. `baseline.py` is the in-memory baseline of a trainer.
`version_store.py` is the one entry to the durable store, and says what lies behind it; `objects.py` is what it needs of
a disk or a bucket, `backends/` who gives it that. docs/store.md says what is in the files.
"""

from deltacast.store.anchors import Anchors
from deltacast.store.backends import open_backend
from deltacast.store.baseline import Baseline, Placement
from deltacast.store.objects import ObjectBackend
from deltacast.store.plan import Plan, Step
from deltacast.store.records import VersionRecord
from deltacast.store.version_store import VersionStore

__all__ = [
    "Anchors",
    "Baseline",
    "ObjectBackend",
    "Placement",
    "Plan",
    "Step",
    "VersionRecord",
    "VersionStore",
    "open_backend",
]
