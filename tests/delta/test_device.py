"""Weights that live on a GPU: the same bits, sums and patches as on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deltacast.delta.apply import apply_update
from deltacast.delta.bits import from_words, numpy_words
from deltacast.delta.diff import diff_parameter, diff_state
from deltacast.delta.dtypes import DTYPES
from deltacast.delta.fingerprint import fingerprint
from deltacast.delta.state import WeightState
from deltacast.delta.table import ParamMeta

pytestmark = pytest.mark.gpu


def random_tensor(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    row = DTYPES[dtype]
    count = int(np.prod(shape)) * row.words_per_element
    high = 2 if dtype == "bool" else 1 << (8 * row.word_bytes)
    words = np.random.default_rng(seed).integers(0, high, count, dtype=np.uint64).astype(row.numpy_word)
    return from_words(words, row, shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 1031), (3, 7, 211)])
def test_fingerprint_diff_and_apply_on_the_gpu_equal_the_cpus(dtype: str, shape: tuple[int, ...]) -> None:
    """All bit patterns, NaN payloads among them."""
    old, new = random_tensor(dtype, shape, 1), random_tensor(dtype, shape, 1)
    flat = numpy_words(new)
    flat[::3] = numpy_words(random_tensor(dtype, shape, 2))[::3]
    assert fingerprint(new.cuda()) == fingerprint(new)
    on_cpu, on_gpu = WeightState({"w": old.clone()}, version=0), WeightState({"w": old.cuda()}, version=0)
    meta = ParamMeta("w", dtype, shape)
    before = int(on_cpu.fingerprints[0])
    a = diff_parameter(meta, on_cpu.memories[0], new, before)
    b = diff_parameter(meta, on_gpu.memories[0], new.cuda(), before)
    assert (a is None) == (b is None)
    if a is not None and b is not None and not a.is_dense:
        assert b.indices is not None
        assert a.indices is not None
        assert (a.indices.tolist(), a.values.tolist()) == (b.indices.tolist(), b.values.tolist())
        assert (a.old_sum, a.fingerprint_after) == (b.old_sum, b.fingerprint_after)
    update = diff_state(on_cpu, [(meta, new)], run_id="r")
    apply_update(on_gpu, update)
    assert numpy_words(on_gpu.memories[0].tensor).tolist() == flat.tolist()
    assert on_gpu.audit() == []


def test_a_transposed_parameter_on_the_gpu_is_written_in_place() -> None:
    """Strided memory is addressed through its strides; the pointer stays."""
    base = random_tensor("bfloat16", (64, 48), 1).cuda()
    served = base.t()
    new = random_tensor("bfloat16", (48, 64), 2)
    state = WeightState({"w": served}, version=0)
    pointer = served.data_ptr()
    target = served.cpu().clone()
    numpy_words(target)[5:900:7] = numpy_words(new)[5:900:7]
    apply_update(state, diff_state(state, [(ParamMeta("w", "bfloat16", (48, 64)), target)], run_id="r"))
    assert served.data_ptr() == pointer
    assert torch.equal(base.t().cpu().view(torch.int16), target.view(torch.int16))
