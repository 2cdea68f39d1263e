"""The common sparse wire, as others build it: int32 indices and values of each parameter, two broadcasts for each.

The trainer finds changes with `ne` and `nonzero` against a copy of what it last sent, tells the workers how many
there are per parameter, and broadcasts; a worker writes them with `index_copy_`. Nothing is packed and nothing is
verified. vLLM's `sparse_nccl` works like this.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch

from deltacast.engines.control import Deadline
from deltacast.engines.group import PayloadGroup
from deltacast.engines.pace import Pace

__all__ = ["PeerSender", "receive_peer"]

_PACED_BYTES: Final = 1 << 20  # what the simulated link delivers at once: to sleep for less would overshoot

Patch = tuple[torch.Tensor, torch.Tensor]


class PeerSender:
    """The trainer's side. Holds a copy of the weights on their device, as much again as they take.

    Args:
        group: rank 0 of it.
        tensors: live bf16 tensors, contiguous, of at most 2^31 - 1 elements each; what workers hold at this time.
    """

    def __init__(self, group: PayloadGroup, tensors: Iterable[torch.Tensor]) -> None:
        self._group = group
        self._live = [_words(tensor) for tensor in tensors]
        self._sent = [words.clone() for words in self._live]

    def diff(self) -> list[Patch]:
        """Return indices and new values of every parameter; waits for the device once per parameter."""
        patches = []
        for live, sent in zip(self._live, self._sent, strict=True):
            index = (live != sent).nonzero().flatten()
            patches.append((index.int(), live[index]))
        return patches

    def send(self, patches: Sequence[Patch], deadline: Deadline, pace: Pace | None) -> None:
        """Broadcast them, parameter by parameter, and remember what was sent. Collective; the workers know the counts.

        Raises:
            TransportError: a worker is gone.
        """
        due = 0
        for sent, (index, values) in zip(self._sent, patches, strict=True):
            if not index.numel():
                continue
            due += index.nbytes + values.nbytes
            if pace is not None and due >= _PACED_BYTES:
                pace.pass_on(due, deadline)
                due = 0
            self._group.post([index], deadline)
            self._group.post([values], deadline)
            sent.index_copy_(0, index.long(), values)
        if pace is not None:
            pace.pass_on(due, deadline)
        self._group.wait(deadline)


def receive_peer(
    group: PayloadGroup, tensors: Iterable[torch.Tensor], counts: Sequence[int], deadline: Deadline
) -> None:
    """Receive what `PeerSender.send` sends, and write it. Collective; blocks until it is written.

    Args:
        group: a rank above 0.
        tensors: live tensors, the trainer's in the same order; written in place.
        counts: changes of each.
        deadline: for all of it.

    Raises:
        TransportError: the trainer is gone; some parameters are written, others not.
    """
    for tensor, count in zip(tensors, counts, strict=True):
        if not count:
            continue
        words = _words(tensor)
        index = torch.empty(count, dtype=torch.int32, device=words.device)
        values = torch.empty(count, dtype=words.dtype, device=words.device)
        group.post([index], deadline)
        group.post([values], deadline)
        words.index_copy_(0, index.long(), values)
    group.wait(deadline)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.int16)
