"""What is kept: the baseline that both sides agree on, and the durable store of a run's versions.

May import `deltacast.delta`, never `deltacast.engines`. `baseline.py` is the baseline in a trainer's memory,
`placement.py` where it lives. All else is the durable store. Read `version_store.py` first, its one entry; then

- what is on the disk: `names.py`, `sealed.py`, `records.py`, `snapshots/`. This is the format: change it together with
  docs/store.md, or not at all;
- how it gets there: `objects.py` (what a disk or a bucket must do), `backends/`, `writer.py`, and `gc.py`. That nothing
  is lost rests on the order of their calls; tests/store/test_crash.py ends a process at each of them;
- how it is read: `fetch.py` (one object), `log.py` (which versions), `plan.py`, `replay.py`, `materialize.py`;
- what makes reading cheap, and may be removed at any time: `folds.py`, `anchors.py`. Who must not be disturbed:
  `readers.py`. What is wrong: `fsck/`. Other people's layout: `disk_delta.py`, `disk_delta_exchange.py`.
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
