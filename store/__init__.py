"""What is kept: the baseline that both sides agree on, and (to come) snapshots and the version chain.

May import `deltacast.delta`, never `deltacast.engines`. `baseline.py` is the in-memory baseline of a trainer. The
durable store (object backends, version files, folds, gc) belongs here too: docs/protocol.md, "Not yet".
"""

from deltacast.store.baseline import Baseline, Placement

__all__ = ["Baseline", "Placement"]
