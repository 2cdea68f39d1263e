"""Live weights with running fingerprints. Right values: the plain-integer twin, and bits that a test flips itself."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from deltacast.delta.bits import strided_words
from deltacast.delta.errors import DTypeError, InputError, TableError
from deltacast.delta.state import Damage, WeightState, rolling_slices
from deltacast.delta.table import ParameterTable, ParamMeta
from fingerprint_twin import bytes_fingerprint, digests
from tensor_bytes import WORDS, random_tensor, raw_bytes

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def _tensors(device: str = "cpu") -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(0)
    made = {f"p.{name}": random_tensor(rng, name, (3, 5)) for name in WORDS}
    made["scalar"] = random_tensor(rng, "float32", ())
    made["empty"] = random_tensor(rng, "bfloat16", (0, 4))
    made["transposed"] = random_tensor(rng, "bfloat16", (6, 4)).t()
    return {name: tensor.to(device) for name, tensor in made.items()}


def _flip(tensor: torch.Tensor, position: int, bit: int = 0) -> None:
    words = strided_words(tensor)
    words.view(-1)[position] ^= 1 << bit


def _fingerprint(tensor: torch.Tensor) -> int:
    return bytes_fingerprint(raw_bytes(tensor.cpu()), WORDS[str(tensor.dtype).removeprefix("torch.")][0])


def _twin_digest(tensors: dict[str, torch.Tensor]) -> str:
    rows = []
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        rows.append((name, dtype, tuple(tensor.shape), _fingerprint(tensor)))
    return digests(rows)[1]


@DEVICES
@pytest.mark.parametrize("threads", [1, 3])
def test_the_digest_is_the_twins_of_every_dtype_and_layout(threads: int, device: str) -> None:
    """All dtypes, 0-d, empty and transposed together give the digest of their canonical bytes."""
    tensors = _tensors(device)
    state = WeightState(tensors, version=4, threads=threads)
    assert state.digest == _twin_digest(tensors)
    assert (state.version, state.audited_through) == (4, 4)
    assert state.audit() == []


def test_tensors_are_not_copied() -> None:
    """A state addresses the caller's memory."""
    tensors = _tensors()
    state = WeightState(tensors)
    for name, tensor in tensors.items():
        assert state.memory(name).tensor.data_ptr() == tensor.data_ptr()


@DEVICES
@pytest.mark.parametrize("name", sorted(_tensors()))
def test_an_audit_names_the_parameter_with_a_flipped_bit(name: str, device: str) -> None:
    """One bit, anywhere, of any dtype is found under its name, with both fingerprints; flipping it back clears it."""
    tensors = _tensors(device)
    state = WeightState(tensors, version=1)
    tensor = tensors[name]
    if not tensor.numel():
        return
    before = int(state.fingerprints[state.table.index(name)])
    flat = strided_words(tensor)
    place = tuple(extent - 1 for extent in flat.shape)
    flat[place] ^= 1
    assert state.audit([other for other in tensors if other != name]) == []
    found = _fingerprint(tensor)
    assert state.audit() == [Damage(name, before, found)]
    assert f"{name}: expected {before:016x}, found {found:016x}" in str(state.audit()[0])
    flat[place] ^= 1
    assert state.audit() == []


def test_an_audit_changes_no_fingerprint_and_takes_aliases() -> None:
    """The running values stay what was agreed on; a tied name audits its storage once."""
    weight = torch.zeros(8)
    state = WeightState({"embed": weight}, aliases={"lm_head": "embed"}, version=1)
    digest = state.digest
    _flip(weight, 3, 30)
    assert [item.parameter for item in state.audit(["lm_head", "embed"])] == ["embed"]
    assert state.digest == digest
    with pytest.raises(TableError, match="no such parameter"):
        state.audit(["nobody"])


# --- rolling audits ------------------------------------------------------------------------------------------------


def _table(seed: int, num: int) -> ParameterTable:
    sizes = np.random.default_rng(seed).integers(0, 5000, num)
    return ParameterTable([ParamMeta(f"p{i}", "float32", (int(size),)) for i, size in enumerate(sizes)])


@pytest.mark.parametrize(("num", "of"), [(100, 16), (3, 16), (1, 1), (0, 4), (40, 1), (16, 16), (257, 7)])
def test_slices_cover_every_parameter_once_and_are_balanced(num: int, of: int) -> None:
    """Each place in exactly one slice; no slice is heavier than the lightest by more than its largest parameter."""
    table = _table(num, num)
    slices = rolling_slices(table, of)
    assert len(slices) == of
    assert sorted(itertools.chain.from_iterable(slices)) == list(range(num))
    weights = [sum(table.metas[i].nbytes for i in places) for places in slices]
    largest = max((meta.nbytes for meta in table), default=0)
    assert max(weights) - min(weights) <= largest


def test_slices_are_the_same_for_equal_tables_in_any_order() -> None:
    """Trainer and workers mean the same slice, wherever their tables came from."""
    table = _table(5, 60)
    assert rolling_slices(ParameterTable(reversed(table.metas), {"tied": "p3"}), 16) == rolling_slices(table, 16)
    metas = [ParamMeta(name, "int8", (size,)) for name, size in (("a", 5), ("b", 3), ("c", 3), ("d", 1))]
    assert rolling_slices(ParameterTable(metas), 2) == ((0, 3), (1, 2))


@pytest.mark.parametrize("of", [0, -1])
def test_a_rolling_audit_without_slices_is_refused(of: int) -> None:
    """A count that is not positive is an InputError."""
    state = WeightState({"w": torch.zeros(3)})
    with pytest.raises(InputError, match="slices"):
        state.audit_rolling(0, of)


@DEVICES
@pytest.mark.parametrize("first_step", [0, 5, 1001])
def test_a_rolling_audit_finds_a_flip_within_one_turn(first_step: int, device: str) -> None:
    """Whichever parameter is damaged, exactly one of any `of` consecutive steps names it."""
    tensors = {f"p{i}": torch.full((i + 1,), float(i), device=device) for i in range(20)}
    state = WeightState(tensors, version=0)
    for name, tensor in tensors.items():
        _flip(tensor, 0, 17)
        found = [state.audit_rolling(step, 7) for step in range(first_step, first_step + 7)]
        assert [[item.parameter for item in damage] for damage in found if damage] == [[name]]
        _flip(tensor, 0, 17)


def test_audited_through_is_the_oldest_version_that_any_parameter_was_scanned_at() -> None:
    """It advances once a whole turn of slices has passed, and not over damage."""
    tensors = {f"p{i}": torch.zeros(4) for i in range(4)}
    state = WeightState(tensors, version=10)
    slices = rolling_slices(state.table, 4)
    for step in range(4):
        state.version = 11 + step
        assert state.audit_rolling(step, 4) == []
        assert state.audited_through == (11 if step == 3 else 10)
    assert state.audited_versions[list(slices[2])].tolist() == [13]
    _flip(tensors["p0"], 1)
    state.version = 20
    assert [item.parameter for item in state.audit()] == ["p0"]
    assert state.audited_through == 11
    assert state.audit(["p1"]) == []
    assert state.audited_versions[state.table.index("p1")] == 20
    assert state.audited_through == 11
    _flip(tensors["p0"], 1)
    assert state.audit() == []
    assert state.audited_through == 20


def test_a_state_without_a_version_was_never_audited_through_one() -> None:
    """Before its first seed a worker has no version, whatever it scans; forgetting goes back there."""
    weight = torch.ones(3)
    state = WeightState({"w": weight})
    assert state.version is None
    assert state.audit() == []
    assert state.audited_through is None
    state.version = 3
    state.mark_audited()
    assert state.audited_through == 3
    _flip(weight, 0)
    state.forget()
    assert [state.version, state.audited_through] == [None, None]
    assert state.digest == _twin_digest({"w": weight})
    assert state.audit() == []


def test_an_empty_state_has_a_digest_and_its_own_version() -> None:
    """No parameters at all is a legal state."""
    state = WeightState({}, version=2)
    assert state.digest == digests([])[1]
    assert state.audited_through == 2
    assert state.audit() == []
    assert state.audit_rolling(3, 16) == []


# --- words that came by other means -----------------------------------------------------------------------------------


@DEVICES
def test_advancing_takes_over_version_and_fingerprints_and_audits_nothing(device: str) -> None:
    """Whoever wrote the words says what they are: the digest follows, and the next audit is the first to look."""
    tensors = _tensors(device)
    state = WeightState(tensors, version=4)
    _flip(tensors["p.float32"], 7)
    _flip(tensors["p.bool"], 0)
    said = np.array([_fingerprint(tensors[meta.name]) for meta in state.table], np.uint64)
    state.advance(6, said)
    said[:] = 0  # the caller's own again
    assert (state.version, state.audited_through) == (6, 4)
    assert state.digest == _twin_digest(tensors)
    assert state.audit() == []
    assert state.audited_through == 6


def test_an_audit_finds_words_that_are_not_what_advancing_said() -> None:
    """The claim is not believed for longer than until the next scan."""
    weight = torch.zeros(4)
    state = WeightState({"w": weight}, version=0)
    state.advance(1, np.array([77], np.uint64))
    assert state.audit() == [Damage("w", 77, 0)]
    assert state.audited_through == 0


@pytest.mark.parametrize(
    ("version", "fingerprints", "said"),
    [
        (-1, np.zeros(2, np.uint64), "from 0"),
        (2, np.zeros(3, np.uint64), r"uint64 \[2\], found uint64 \[3\]"),
        (2, np.zeros((2, 1), np.uint64), "unfit"),
        (2, np.zeros(2, np.int64), "int64"),
        (2, np.zeros(2), "float64"),
    ],
)
def test_advancing_to_what_cannot_be_moves_nothing(version: int, fingerprints: Any, said: str) -> None:
    """A negative version, or not one unsigned sum per parameter."""
    state = WeightState({"a": torch.ones(1), "b": torch.ones(2)}, version=1)
    before = (state.digest, state.version, state.audited_through)
    with pytest.raises(InputError, match=said):
        state.advance(version, fingerprints)
    assert (state.digest, state.version, state.audited_through) == before


# --- what cannot be a state ----------------------------------------------------------------------------------------


def test_undeclared_ties_are_refused_by_both_names() -> None:
    """Two names of one storage would let an update of one change the other behind its fingerprint."""
    weight = torch.zeros(4, 6)
    with pytest.raises(InputError, match=r"'embed'.*alias") as caught:
        WeightState({"embed": weight, "lm_head": weight})
    assert caught.value.parameter == "lm_head"
    with pytest.raises(InputError, match="share memory"):
        WeightState({"q": weight[:, :4], "k": weight[:, 3:]})
    WeightState({"q": weight[:, :4], "k": weight[:, 4:]})
    WeightState({"embed": weight}, aliases={"lm_head": "embed"})


def test_what_has_no_bits_or_names_is_refused() -> None:
    """Shell dtypes, meta tensors, expanded destinations, bad names, bad aliases and negative versions."""
    with pytest.raises(DTypeError, match=r"uint4.*'w'"):
        WeightState({"w": torch.empty(2, dtype=vars(torch)["uint4"])})
    for tensor in (torch.zeros(2, device="meta"), torch.zeros(1).expand(4), torch.eye(2).to_sparse()):
        with pytest.raises(InputError) as caught:
            WeightState({"w": tensor})
        assert caught.value.parameter == "w"
    with pytest.raises(InputError, match="name"):
        WeightState({"": torch.zeros(1)})
    with pytest.raises(TableError, match="alias"):
        WeightState({"w": torch.zeros(1)}, aliases={"w": "w"})
    with pytest.raises(InputError, match="from 0"):
        WeightState({"w": torch.zeros(1)}, version=-1)
    with pytest.raises(TableError, match="another parameter table"):
        WeightState({"w": torch.zeros(1)}).require_table("xxh3_128:" + "0" * 32)
