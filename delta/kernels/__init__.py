"""GPU kernels that diff, apply, undo, advance and audit parameters, and their torch twin (docs/fingerprint.md).

Start with `operations.py`, whose functions are the API; `group.py`, `arena.py` and `undo.py` hold what they work on.
`twin.py` says in torch operations what the programs in `*_programs.py` (Triton) do; `launch.py` starts those.
"""

from deltacast.delta.kernels.arena import Arena, RawChunk, mask_bytes, masks
from deltacast.delta.kernels.block_table import BLOCK_WORDS
from deltacast.delta.kernels.group import ParamGroup
from deltacast.delta.kernels.key_tables import KeyTables
from deltacast.delta.kernels.operations import (
    Backend,
    advance_group,
    apply_group,
    audit_group,
    available,
    diff_group,
    gather_group,
    undo_group,
)
from deltacast.delta.kernels.undo import NO_FAULT, UndoLog, faults

__all__ = [
    "ParamGroup",
    "KeyTables",
    "Arena",
    "RawChunk",
    "UndoLog",
    "diff_group",
    "apply_group",
    "advance_group",
    "undo_group",
    "audit_group",
    "gather_group",
    "available",
    "masks",
    "mask_bytes",
    "faults",
    "Backend",
    "BLOCK_WORDS",
    "NO_FAULT",
]
