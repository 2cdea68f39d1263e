"""Tensors as bits. Right values: bytes written by hand, and torch storage read through numpy strides."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deltacast.delta.bits import Words, from_words, numpy_words, strided_words, words
from deltacast.delta.dtypes import DTYPES
from deltacast.delta.errors import DTypeError, InputError
from tensor_bytes import WORDS, element_bytes, random_raw, random_tensor, raw_bytes, tensor_of

_HAND_WRITTEN = {
    "float32": (torch.tensor([1.0, -0.0, float("inf")]), [0x3F800000, 0x80000000, 0x7F800000]),
    "bfloat16": (torch.tensor([-1.0, 0.0], dtype=torch.bfloat16), [0xBF80, 0x0000]),
    "float64": (torch.tensor([2.0], dtype=torch.float64), [0x4000000000000000]),
    "int64": (torch.tensor([-1, 256]), [0xFFFFFFFFFFFFFFFF, 256]),
    "bool": (torch.tensor([True, False]), [1, 0]),
    "complex64": (torch.tensor([1 - 2j], dtype=torch.complex64), [0x3F800000, 0xC0000000]),
    "float8_e5m2": (torch.tensor([-1.5]).to(torch.float8_e5m2), [0xBE]),
}


@pytest.mark.parametrize("name", _HAND_WRITTEN)
def test_words_are_the_numbers_of_the_ieee_tables(name: str) -> None:
    """Known values give the words that are written down for them."""
    tensor, expected = _HAND_WRITTEN[name]
    assert numpy_words(tensor).tolist() == expected


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (7,), (3, 5), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("name", WORDS)
def test_words_hold_the_bytes_of_every_dtype_and_shape(name: str, shape: tuple[int, ...]) -> None:
    """Random bits, NaNs and all, come out as they went in, and go back."""
    raw = random_raw(np.random.default_rng(1), name, int(np.prod(shape)))
    tensor = tensor_of(name, raw, shape)
    array = numpy_words(tensor)
    assert array.dtype.str == DTYPES[name].numpy_word.str
    assert array.ndim == 1
    assert array.tobytes() == raw
    assert words(tensor).dtype is DTYPES[name].torch_word
    back = from_words(array.copy(), DTYPES[name], shape)
    assert (back.dtype, tuple(back.shape)) == (tensor.dtype, shape)
    assert raw_bytes(back) == raw


@pytest.mark.parametrize("name", WORDS)
def test_words_of_any_layout_are_row_major(name: str) -> None:
    """Transposed, stepped, offset and expanded tensors are read in the order of their indices."""
    tensor = random_tensor(np.random.default_rng(2), name, (6, 8))
    layouts = {
        "transposed": tensor.t(),
        "stepped": tensor[::2, 1::3],
        "offset": tensor[2:, 3:],
        "one column": tensor[:, 1],
        "expanded": tensor[:1].expand(4, 8),
        "0-d view": tensor[3, 4],
    }
    for layout, view in layouts.items():
        assert numpy_words(view).tobytes() == raw_bytes(view), layout


def test_contiguous_words_share_memory_and_others_do_not() -> None:
    """A word view of a contiguous tensor is the tensor; of any other it is a copy."""
    tensor = torch.zeros(2, 3)
    numpy_words(tensor)[4] = 0x3F800000
    assert tensor[1, 1] == 1.0
    numpy_words(tensor.t())[0] = 7
    assert tensor[0, 0] == 0.0


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_lazy_conjugates_are_resolved_to_the_bits_they_stand_for(dtype: str) -> None:
    """conj() flips the imaginary sign bit, `.imag` of it is a lazily negated view; both are read as resolved."""
    raw = random_raw(np.random.default_rng(3), dtype, 5)
    tensor, word = tensor_of(dtype, raw, (5,)), WORDS[dtype][0]
    parts = [raw[at : at + word] for at in range(0, len(raw), word)]
    negated = [part[:-1] + bytes([part[-1] ^ 0x80]) for part in parts]
    conjugate = tensor.conj()
    assert conjugate.is_conj()
    expected = b"".join(negated[i] if i % 2 else parts[i] for i in range(len(parts)))
    assert numpy_words(conjugate).tobytes() == expected
    imaginary = conjugate.imag
    assert imaginary.is_neg()
    assert numpy_words(imaginary).tobytes() == b"".join(negated[1::2])
    for lazy in (conjugate, imaginary):
        with pytest.raises(InputError, match="lazily"):
            strided_words(lazy, name="w")


def test_strided_words_write_through_to_the_tensor() -> None:
    """The strided view has the tensor's own memory, also where it is transposed, complex or requires grad."""
    weight = torch.zeros(2, 3, requires_grad=True)
    strided_words(weight.t())[2, 1] = 0x3F800000
    assert weight.tolist() == [[0, 0, 0], [0, 0, 1]]
    number = torch.zeros(2, dtype=torch.complex64)
    strided_words(number)[1, 1] = 0x3F800000
    assert number.tolist() == [0, 1j]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_without_plain_memory_are_refused_by_name() -> None:
    """Sparse, nested, mkldnn and meta tensors are an InputError that names the parameter and the layout."""
    dense = torch.eye(3)
    for tensor, said in {
        dense.to_sparse(): "sparse_coo",
        dense.to_sparse_csr(): "sparse_csr",
        torch.zeros(3, device="meta"): "meta",
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]): "nested",
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged): "jagged|nested",
    }.items():
        with pytest.raises(InputError, match=said) as caught:
            words(tensor, name="odd.weight")
        assert caught.value.parameter == "odd.weight"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantised_and_shell_tensors_are_refused_by_dtype() -> None:
    """Live tensors of a refused dtype name it."""
    for tensor in (
        torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.qint8),
        torch.empty(3, dtype=torch.bits8),
        torch.empty(3, dtype=vars(torch)["uint4"]),
    ):
        with pytest.raises(DTypeError, match=str(tensor.dtype)):
            words(tensor)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(3, np.uint16), "do not fill"),
        (np.zeros(5, np.uint16), "do not fill"),
        (np.zeros(4, np.uint8), "another size"),
        (np.zeros(4, np.uint32), "another size"),
    ],
)
def test_words_that_do_not_fit_a_shape_are_refused(array: Words, message: str) -> None:
    """Too few, too many, too narrow and too wide words are an InputError, not a torch error."""
    with pytest.raises(InputError, match=message):
        from_words(array, DTYPES["bfloat16"], (2, 2))


def test_from_words_shares_the_memory_it_was_given() -> None:
    """The tensor is a view of the words."""
    array = np.zeros(4, np.uint32)
    tensor = from_words(array, DTYPES["complex64"], (2,))
    array[3] = 0x3F800000
    assert tensor.tolist() == [0, 1j]
    assert element_bytes("complex64") == 8
