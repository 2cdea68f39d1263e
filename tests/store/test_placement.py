"""Flat memory of a baseline. Right values: places worked out by hand, and the bytes that a test wrote."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deltacast.delta.bits import strided_words
from deltacast.delta.errors import InputError
from deltacast.delta.table import ParamMeta
from deltacast.store.placement import FlatMemory, check_placement
from tensor_bytes import WORDS, listed, random_tensor, raw_bytes

PLACEMENTS = ["cpu", "mmap", *(pytest.param(place, marks=pytest.mark.gpu) for place in ("pinned", "cuda", "cuda:0"))]


@pytest.fixture(params=PLACEMENTS)
def where(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Options for each placement."""
    folder = {"folder": tmp_path} if request.param == "mmap" else {}
    return {"placement": request.param, **folder}


def _metas() -> list[ParamMeta]:
    shapes = {
        "z.half": ("bfloat16", (3,)),
        "a.float": ("float32", (5,)),
        "scalar": ("float16", ()),
        "none": ("bfloat16", (0, 7)),
        "flags": ("bool", (17,)),
        "b.complex": ("complex64", (1, 2)),
        "last": ("int16", (8,)),
    }
    return [ParamMeta(name, dtype, shape) for name, (dtype, shape) in shapes.items()]


def test_parameters_lie_in_the_listed_order_each_at_sixteen_bytes(where: dict[str, Any]) -> None:
    """Not by name: a source's order is the order in which a diff streams. One buffer for each word width."""
    memory = FlatMemory(_metas(), **where)
    assert {
        name: (extent.word_bytes, extent.first_word, extent.num_words) for name, extent in memory.extents.items()
    } == {
        "z.half": (2, 0, 3),
        "a.float": (4, 0, 5),
        "scalar": (2, 8, 1),
        "none": (2, 16, 0),
        "flags": (1, 0, 17),
        "b.complex": (4, 8, 4),
        "last": (2, 16, 8),
    }
    assert list(memory.extents) == [meta.name for meta in _metas()]
    assert {width: (buffer.dtype, tuple(buffer.shape)) for width, buffer in memory.buffers.items()} == {
        1: (torch.uint8, (32,)),
        2: (torch.int16, (24,)),
        4: (torch.int32, (12,)),
    }
    for name, extent in memory.extents.items():
        tensor, buffer = memory.tensor(name), memory.buffers[extent.word_bytes]
        assert (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) == (extent.meta.dtype, extent.meta.shape)
        assert tensor.is_contiguous()
        if tensor.numel():
            assert tensor.data_ptr() == buffer.data_ptr() + extent.first_word * extent.word_bytes
            assert tensor.data_ptr() % 16 == 0


def test_neighbours_are_one_run_of_the_buffer(where: dict[str, Any]) -> None:
    """One slice of the buffer holds the end of one parameter, what lies between, and the start of a later one."""
    rng = np.random.default_rng(3)
    tensors = {f"p{i}": random_tensor(rng, "bfloat16", (size,)) for i, size in enumerate((40, 0, 13, 64, 9))}
    memory = FlatMemory([meta for meta, _ in listed(tensors)], **where)
    for name, tensor in tensors.items():
        memory.write(name, tensor)
    run = memory.buffers[2][24:120].cpu().numpy().tobytes()
    raw = {name: raw_bytes(tensor) for name, tensor in tensors.items()}
    assert run[: 2 * 16] == raw["p0"][48:]
    assert run[2 * 16 : 2 * 29] == raw["p2"]
    assert run[2 * 32 :] == raw["p3"]


@pytest.mark.parametrize("dtype", WORDS)
def test_every_dtype_and_layout_is_written_as_bits(dtype: str, where: dict[str, Any]) -> None:
    """0-d, empty, odd and strided tensors of random bits, NaNs among them, next to each other."""
    rng = np.random.default_rng(4)
    tensors = {f"{size}": random_tensor(rng, dtype, (size,)) for size in (1, 0, 7, 33)}
    tensors |= {"scalar": random_tensor(rng, dtype, ()), "turned": random_tensor(rng, dtype, (3, 5)).t()}
    tensors["stepped"] = random_tensor(rng, dtype, (9,))[::2]
    memory = FlatMemory([meta for meta, _ in listed(tensors)], **where)
    for name, tensor in tensors.items():
        memory.write(name, tensor)
    for name, tensor in tensors.items():
        assert raw_bytes(memory.tensor(name).cpu()) == raw_bytes(tensor)


def test_views_outlive_the_memory_object(where: dict[str, Any]) -> None:
    """A tensor keeps its buffer alive; a write to it is a write to the buffer."""
    memory = FlatMemory([ParamMeta("w", "float32", (4,))], **where)
    buffer, tensor = memory.buffers[4], memory.tensor("w")
    del memory
    gc.collect()
    tensor.fill_(-0.0)
    assert buffer.tolist() == [-(2**31)] * 4


def test_no_parameters_at_all_need_no_memory(where: dict[str, Any]) -> None:
    """An empty model, and one whose parameters are all empty."""
    assert FlatMemory([], **where).buffers == {}
    memory = FlatMemory([ParamMeta("w", "float64", (0, 2))], **where)
    assert (tuple(memory.buffers[8].shape), tuple(memory.tensor("w").shape)) == ((0,), (0, 2))


def test_what_has_no_memory_cannot_be_written() -> None:
    """Sparse and meta tensors, by name."""
    memory = FlatMemory([ParamMeta("odd", "float32", (3, 3))])
    strided_words(memory.tensor("odd")).fill_(7)
    for tensor in (torch.eye(3).to_sparse(), torch.zeros(3, 3, device="meta")):
        with pytest.raises(InputError) as caught:
            memory.write("odd", tensor)
        assert caught.value.parameter == "odd"
    assert memory.buffers[4][:9].tolist() == [7] * 9


# --- each placement's own ------------------------------------------------------------------------------------------


def _mapped_in(folder: Path) -> list[str]:
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if f" {folder}/" in line]


def test_a_file_on_disk_has_no_name_and_goes_with_the_memory(tmp_path: Path) -> None:
    """The folder stays empty; one file per width is mapped from it, and none any more at the end."""
    memory = FlatMemory(_metas(), "mmap", folder=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert len(_mapped_in(tmp_path)) == 3
    assert all(line.endswith("(deleted)") for line in _mapped_in(tmp_path))
    del memory
    gc.collect()
    assert _mapped_in(tmp_path) == []


def test_a_full_disk_is_an_error_at_once_that_leaves_nothing_behind(tmp_path: Path) -> None:
    """A limit on file sizes stands for the full disk. The second buffer is too large: the first one goes as well."""
    child = """
        import gc, os, resource, sys
        from deltacast.delta.errors import InputError
        from deltacast.delta.table import ParamMeta
        from deltacast.store.placement import FlatMemory

        folder = sys.argv[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        metas = [ParamMeta("small", "bfloat16", (8,)), ParamMeta("large", "float32", ((1 << 14) + 1,))]
        try:
            FlatMemory(metas, "mmap", folder=folder)
        except InputError as err:
            print(err)
        gc.collect()
        print([line for line in open("/proc/self/maps") if f" {folder}/" in line], os.listdir(folder))
        FlatMemory(metas[:1], "mmap", folder=folder)
        """
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(child), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    said, left = done.stdout.splitlines()
    assert said == (f"no file for the baseline could be made: expected 65552 bytes in {tmp_path}, found File too large")
    assert left == "[] []"


@pytest.mark.parametrize("kind", ["missing", "file", "forbidden"])
def test_a_folder_that_cannot_be_used_is_named(kind: str, tmp_path: Path) -> None:
    """One that does not exist, is no folder, or takes no files."""
    (tmp_path / "file").touch()
    folder = Path("/proc") if kind == "forbidden" else tmp_path / kind  # root may write wherever there are permissions
    with pytest.raises(InputError, match=str(folder)):
        FlatMemory(_metas(), "mmap", folder=folder)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.gpu
def test_pinned_memory_is_page_locked_and_unlocked_at_the_end() -> None:
    """For torch too, so that copies from it overlap with kernels; and again and again."""
    for _ in range(3):
        memory = FlatMemory(_metas(), "pinned")
        assert all(buffer.is_pinned() for buffer in memory.buffers.values())
        assert memory.tensor("last").is_pinned()
        memory.tensor("last").fill_(3)
        assert memory.tensor("last").to("cuda", non_blocking=True).tolist() == [3] * 8
        del memory
        gc.collect()


@pytest.mark.gpu
def test_the_device_is_the_one_asked_for() -> None:
    """`cuda` is the current GPU, `cuda:N` that one, whichever is current."""
    last = torch.cuda.device_count() - 1
    with torch.cuda.device(last):
        assert FlatMemory(_metas(), "cuda").tensor("last").device == torch.device("cuda", last)
        assert FlatMemory(_metas(), "cuda:0").tensor("last").device == torch.device("cuda", 0)
    assert FlatMemory(_metas(), f"cuda:{last}").tensor("last").device == torch.device("cuda", last)
    with pytest.raises(InputError, match=f"below cuda:{last + 1}, found cuda:999"):
        FlatMemory(_metas(), "cuda:999")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("placement", ["pinned", "cuda", "cuda:0"])
def test_placements_for_gpus_need_one(placement: str) -> None:
    """Without CUDA they are refused by name, with what to use instead."""
    with pytest.raises(InputError, match=f"'{placement}' needs a GPU. Use placement='cpu'"):
        FlatMemory(_metas(), placement)


@pytest.mark.parametrize("placement", ["cpu", "pinned", "cuda", "cuda:0", "cuda:12"])
def test_known_placements_pass(placement: str) -> None:
    """Whether there is such a device is not asked yet: a trainer may be configured elsewhere."""
    assert check_placement(placement) == placement
    assert check_placement("mmap", "/nowhere") == "mmap"


@pytest.mark.parametrize(
    "placement",
    ["disk", "CPU", "", "cuda:", "cuda:-1", "cuda:01", "cuda:1 ", "cuda:²", "cuda0", "cpu:0", None, 3, ["cpu"]],
)
def test_unknown_placements_are_named(placement: object) -> None:
    """Anything else, of any type."""
    with pytest.raises(InputError, match="unknown baseline placement") as caught:
        check_placement(placement)
    assert caught.value.found == repr(placement)


def test_a_folder_goes_with_mmap_and_with_nothing_else() -> None:
    """Neither is left to a default."""
    with pytest.raises(InputError, match="needs a folder"):
        check_placement("mmap")
    for placement in ("cpu", "pinned", "cuda:0"):
        with pytest.raises(InputError, match=f"found {placement}"):
            check_placement(placement, "/tmp")
