"""A small checkpoint, and how the ranks of a server hold it: cut by hand, for any number of ranks that divides four.

`Runtime` says where things are by views of its tensors; `cut_by_hand` says what must be in them, by numpy alone.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from deltacast.delta.pieces import View
from tensor_bytes import raw_bytes

VOCAB, PADDED, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 30, 32, 16, 4, 2, 8, 21
PADDING = 7
"""What is in the padded vocabulary's rows; no update may touch it."""


class Checkpoint(nn.Module):
    """One layer's parameters as a trainer has them: several dtypes, a tied pair, a 0-d and an empty one."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator).to(dtype))

        self.embed = make(VOCAB, HIDDEN)
        self.head = self.embed
        self.q = make(HEADS * HEAD_DIM, HIDDEN)
        self.k = make(KV_HEADS * HEAD_DIM, HIDDEN)
        self.v = make(KV_HEADS * HEAD_DIM, HIDDEN)
        self.o = make(HIDDEN, HEADS * HEAD_DIM)
        self.gate = make(INNER, HIDDEN)
        self.up = make(INNER, HIDDEN)
        self.down = make(HIDDEN, INNER)
        self.norm = make(HIDDEN)
        self.router = make(4, HIDDEN, dtype=torch.float32)
        self.scale = make(dtype=torch.float32)
        self.nothing = make(0, 8)
        self.register_buffer("codes", torch.randint(0, 255, (12,), dtype=torch.uint8, generator=generator))

    def step(self, seed: int, share: float = 0.05) -> None:
        """Change the lowest bit of a share of every tensor's elements, in place."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in dict.fromkeys(self.state_dict().values()):
            words = tensor.view(-1).view(torch.uint8).view(-1, tensor.element_size())
            words[:, 0] ^= (torch.rand(len(words), generator=generator) < share).to(torch.uint8)

    def weights(self) -> dict[str, NDArray[np.unsignedinteger]]:
        """Return the parameters' bits, without the alias."""
        return {name: bits_of(tensor) for name, tensor in self.state_dict().items() if name != "head"}


def spans(rank: int, num_ranks: int) -> dict[str, tuple[int, int]]:
    """Return which rows, or columns, of the sharded parameters a rank holds."""
    vocab, heads, inner = PADDED // num_ranks, HEADS * HEAD_DIM // num_ranks, -(-INNER // num_ranks)
    kv = KV_HEADS * HEAD_DIM // min(num_ranks, KV_HEADS)
    kv_first = rank * KV_HEADS // num_ranks * HEAD_DIM  # from as many ranks on as there are heads, some share one
    codes = 12 // num_ranks
    return {
        "vocab": (rank * vocab, min((rank + 1) * vocab, VOCAB)),
        "heads": (rank * heads, (rank + 1) * heads),
        "kv": (kv_first, kv_first + kv),
        "inner": (rank * inner, min((rank + 1) * inner, INNER)),
        "codes": (rank * codes, (rank + 1) * codes),
    }


def cut_by_hand(
    weights: dict[str, NDArray[np.unsignedinteger]], rank: int, num_ranks: int
) -> dict[str, NDArray[np.unsignedinteger]]:
    """Return the bits that a rank's runtime tensors must have."""
    cut = {name: slice(low, high) for name, (low, high) in spans(rank, num_ranks).items()}
    rows = weights["embed"][cut["vocab"]]
    padding = np.full((PADDED // num_ranks - len(rows), HIDDEN), PADDING, rows.dtype)
    return {
        "embed": np.concatenate([rows, padding]),
        "qkv": np.concatenate([weights["q"][cut["heads"]], weights["k"][cut["kv"]], weights["v"][cut["kv"]]]),
        "o": weights["o"][:, cut["heads"]],
        "gate_up": np.concatenate([weights["gate"][cut["inner"]], weights["up"][cut["inner"]]]),
        "down": weights["down"][:, cut["inner"]],
        "codes": weights["codes"][cut["codes"]],
        **{name: weights[name] for name in ("norm", "router", "scale", "nothing")},
    }


class Runtime:
    """One rank's tensors, fused and padded, and the views that say what of the checkpoint is where."""

    def __init__(self, checkpoint: Checkpoint, rank: int, num_ranks: int, device: str = "cpu") -> None:
        bits = cut_by_hand(checkpoint.weights(), rank, num_ranks)
        like = dict(checkpoint.state_dict(), qkv=checkpoint.q, gate_up=checkpoint.up)
        self.tensors = {
            name: torch.from_numpy(np.array(array, order="C", copy=True)).view(like[name].dtype).to(device)
            for name, array in bits.items()
        }
        self.views = self._views(rank, num_ranks)

    def bits(self) -> dict[str, NDArray[np.unsignedinteger]]:
        """Return the bits of every tensor."""
        return {name: bits_of(tensor) for name, tensor in self.tensors.items()}

    def flip(self, name: str, place: int, bit: int) -> None:
        """Flip a bit of one of a tensor's bytes."""
        self.tensors[name].view(-1).view(torch.uint8)[place] ^= 1 << bit

    def _views(self, rank: int, num_ranks: int) -> dict[str, list[View]]:
        held, tensors = spans(rank, num_ranks), self.tensors
        columns, heads, kv, inner = (0, HIDDEN), size(held["heads"]), size(held["kv"]), size(held["inner"])
        q, k, v = tensors["qkv"][:heads], tensors["qkv"][heads : heads + kv], tensors["qkv"][heads + kv :]
        gate, up = tensors["gate_up"][:inner], tensors["gate_up"][inner:]
        views = {
            "embed": [View((VOCAB, HIDDEN), (held["vocab"], columns), tensors["embed"][: size(held["vocab"])])],
            "q": [View((HEADS * HEAD_DIM, HIDDEN), (held["heads"], columns), q)],
            "k": [View((KV_HEADS * HEAD_DIM, HIDDEN), (held["kv"], columns), k)],
            "v": [View((KV_HEADS * HEAD_DIM, HIDDEN), (held["kv"], columns), v)],
            "o": [View((HIDDEN, HEADS * HEAD_DIM), ((0, HIDDEN), held["heads"]), tensors["o"])],
            "gate": [View((INNER, HIDDEN), (held["inner"], columns), gate)],
            "up": [View((INNER, HIDDEN), (held["inner"], columns), up)],
            "down": [View((HIDDEN, INNER), ((0, HIDDEN), held["inner"]), tensors["down"])],
            "codes": [View((12,), (held["codes"],), tensors["codes"])],
        }
        if rank % 2:  # the same place in another cut: rows that follow one another are one run
            low, high = held["heads"]
            views["q"] = [View((HEADS * HEAD_DIM * HIDDEN,), ((low * HIDDEN, high * HIDDEN),), q.flatten())]
        for name in ("norm", "router", "scale", "nothing"):
            whole = tensors[name] if tensors[name].ndim else tensors[name].view(1)
            views[name] = [View(tuple(whole.shape), tuple((0, n) for n in whole.shape), whole)]
        return views


def bits_of(tensor: torch.Tensor) -> NDArray[np.unsignedinteger]:
    """Return a tensor's bits in its shape."""
    return np.frombuffer(raw_bytes(tensor.detach().cpu()), f"<u{tensor.element_size()}").reshape(tensor.shape)


def size(span: tuple[int, int]) -> int:
    return span[1] - span[0]
