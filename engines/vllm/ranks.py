"""How the tensor parallel ranks of one vLLM server tell one another what they hold: a Gloo group of their own."""

# pyright: reportMissingImports=false

from __future__ import annotations

from datetime import timedelta

import torch.distributed

from deltacast.engines.shard_exchange import Exchange

__all__ = ["tensor_parallel_exchange"]


def tensor_parallel_exchange(*, timeout_s: float = 30.0, patience_s: float = 600.0) -> Exchange:
    """Make the exchange of the ranks that hold this server's model together.

    Collective over these ranks alone, in a worker process once vLLM has made its groups; each rank of the world may
    make it for the group that it is in. vLLM's own groups are not used: a message of ours must not meet one of vLLM's.

    Args:
        timeout_s: as for `Exchange`.
        patience_s: likewise; and for the group to come about.
    """
    from vllm.distributed.parallel_state import get_tp_group

    group = torch.distributed.new_group(
        get_tp_group().ranks, timeout=timedelta(seconds=patience_s), backend="gloo", use_local_synchronization=True
    )
    return Exchange(group, timeout_s=timeout_s, patience_s=patience_s)
