"""GPU kernels that diff, apply, undo and audit groups of parameters, and their torch twin (docs/fingerprint.md).

Start with `operations.py`, whose functions are the API; `group.py` and `chunk.py` hold what they work on. `twin.py`
says in torch operations what the programs in `*_programs.py` (Triton) do; `launch.py` starts those.
"""

from deltacast.delta.kernels.chunk import NO_FAULT, RawChunk, UndoLog, faults, masks
from deltacast.delta.kernels.group import BLOCK_WORDS, ParamGroup
from deltacast.delta.kernels.operations import (
    Backend,
    apply_group,
    audit_group,
    available,
    diff_group,
    undo_group,
)

__all__ = [
    "ParamGroup",
    "RawChunk",
    "UndoLog",
    "diff_group",
    "apply_group",
    "undo_group",
    "audit_group",
    "available",
    "masks",
    "faults",
    "Backend",
    "BLOCK_WORDS",
    "NO_FAULT",
]
