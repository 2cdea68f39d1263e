"""Sources over modules and state dicts. Right values: hand-written names, torch's own casts, stock safetensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from deltacast.delta.bits import words
from deltacast.delta.errors import DTypeError, InputError, TableError
from deltacast.delta.module_source import ModuleSource, StateDictSource
from deltacast.delta.sources import ServingDType, VLLMSource, WeightSource, checked, matched, table_of
from deltacast.delta.table import ParamMeta


def _names(source: WeightSource) -> list[str]:
    return [meta.name for meta in source.metas()]


def _held(source: WeightSource) -> dict[str, torch.Tensor]:
    return {meta.name: tensor for meta, tensor in checked(source)}


def _compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")  # the wrapper without inductor's imports


class _Tied(nn.Module):
    """embed and lm_head are one parameter, as in Llama and Qwen2 with tied embeddings."""

    _tied_weights_keys: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(4, 6, bias=False)
        self.embed = nn.Embedding(6, 4)
        self.lm_head.weight = self.embed.weight


# --- the contract -----------------------------------------------------------------------------------------------


class _Listed:
    """A source made of what a test says."""

    def __init__(self, metas: list[ParamMeta], pairs: list[tuple[str, torch.Tensor]]) -> None:
        self._metas, self._pairs = metas, pairs
        self.closed = False

    aliases: Mapping[str, str] = {}
    not_covered: tuple[str, ...] = ()

    def metas(self) -> Sequence[ParamMeta]:
        return self._metas

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            yield from self._pairs
        finally:
            self.closed = True


_A, _B = ParamMeta("a", "float32", (2,)), ParamMeta("b", "int8", ())
_TA, _TB = torch.zeros(2), torch.zeros((), dtype=torch.int8)


def test_a_source_that_keeps_its_contract_is_yielded_whole() -> None:
    source = _Listed([_A, _B], [("a", _TA), ("b", _TB)])
    assert [(meta, tensor.dtype) for meta, tensor in checked(source)] == [(_A, torch.float32), (_B, torch.int8)]
    assert source.closed


@pytest.mark.parametrize(
    ("metas", "pairs", "parameter", "message"),
    [
        ([_A, _B], [("a", _TA)], "b", "ended before"),
        ([_A], [("a", _TA), ("b", _TB)], "b", "does not list"),
        ([_A, _B], [("b", _TB), ("a", _TA)], None, "own order"),
        ([_A, _A], [("a", _TA), ("a", _TA)], "a", "twice"),
        ([_A], [("a", _TA.double())], "a", "float64"),
        ([_A], [("a", _TA.reshape(2, 1))], "a", r"\[2, 1\]"),
        ([_A], [("a", torch.zeros(2, device="meta"))], "a", "no data"),
        ([], [("a", _TA)], "a", "does not list"),
    ],
)
def test_the_first_violation_is_named(
    metas: list[ParamMeta], pairs: list[tuple[str, torch.Tensor]], parameter: str | None, message: str
) -> None:
    """A parameter that is absent, extra, reordered, doubled or of another kind is an error, never a warning."""
    source = _Listed(metas, pairs)
    with pytest.raises(TableError, match=message) as info:
        list(checked(source))
    assert info.value.parameter == parameter
    assert source.closed


def test_a_consumer_that_stops_early_closes_the_source() -> None:
    source = _Listed([_A, _B], [("a", _TA), ("b", _TB)])
    iterator = checked(source)
    next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    assert source.closed


def test_tensors_may_be_any_iterable() -> None:
    assert [tensor.numel() for _, tensor in matched([_A], {"a": _TA}.items())] == [2]


def test_the_table_has_metas_and_aliases() -> None:
    table = table_of(ModuleSource(_Tied()))
    assert [meta.name for meta in table] == ["lm_head.weight"]
    assert table.aliases == {"embed.weight": "lm_head.weight"}
    assert table["embed.weight"].shape == (6, 4)


def test_a_vllm_source_is_adapted() -> None:
    """A ParamMeta of vLLM holds a torch dtype; its sources are re-iterable and drop tied names."""

    class Meta:
        def __init__(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
            self.name, self.dtype, self.shape = name, dtype, shape

    class Theirs:
        def __init__(self, module: nn.Module) -> None:
            self.module = module

        def metadata(self) -> list[Meta]:
            return [Meta(name, p.dtype, tuple(p.shape)) for name, p in self.module.named_parameters()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from self.module.named_parameters()

    source = VLLMSource(Theirs(_Tied()), aliases={"embed.weight": "lm_head.weight"}, not_covered=["cache"])
    for _ in range(2):
        assert not _held(source)["lm_head.weight"].requires_grad
    assert table_of(source) == table_of(ModuleSource(_Tied()))
    assert source.not_covered == ("cache",)


# --- what is covered --------------------------------------------------------------------------------------------


class _Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5))
        self.scalar = nn.Parameter(torch.tensor(2.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.register_parameter("absent", None)
        self.register_buffer("e_score_correction_bias", torch.randn(4))
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("cache", torch.zeros(9), persistent=False)
        self.plain = torch.ones(2)
        self.norm = nn.BatchNorm1d(3)

    def get_extra_state(self) -> dict[str, int]:
        return {"x": 1}

    def set_extra_state(self, state: object) -> None: ...


def test_parameters_and_persistent_buffers_are_covered_and_the_rest_is_named() -> None:
    module = _Everything()
    source = ModuleSource(module)
    stock = {key: value for key, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    assert _names(source) == list(stock)
    for name, tensor in _held(source).items():
        assert tensor.dtype == stock[name].dtype
        assert torch.equal(words(tensor), words(stock[name]))
        assert not tensor.requires_grad
    assert source.not_covered == ("cache", "plain", "_extra_state")


def test_module_and_its_state_dict_give_one_table() -> None:
    module = _Everything()
    by_dict = StateDictSource(module.state_dict())
    assert table_of(by_dict) == table_of(ModuleSource(module))
    assert by_dict.not_covered == ("_extra_state",)


def test_expanded_transposed_and_sliced_parameters_have_their_values() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    source = StateDictSource({"t": base.t(), "e": torch.tensor([[1.0], [2.0]]).expand(2, 3), "s": base[0, ::2]})
    held = _held(source)
    assert held["t"].contiguous().flatten().tolist() == [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]
    assert held["e"].tolist() == [[1, 1, 1], [2, 2, 2]]
    assert held["s"].tolist() == [0, 2]


def test_weights_are_read_when_iterated() -> None:
    """A baseline diffs what the optimizer left, not what was there when the source was made."""
    module = nn.Linear(2, 2, bias=False)
    source = ModuleSource(module)
    with torch.no_grad():
        module.weight.fill_(3)
    assert _held(source)["weight"].tolist() == [[3, 3], [3, 3]]
    module.weight = nn.Parameter(torch.full((2, 2), 4.0))  # replaced, not written
    assert _held(source)["weight"].tolist() == [[4, 4], [4, 4]]


def test_include_and_exclude_select_by_glob() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    source = ModuleSource(module, include=["0.*", "1.weight"], exclude=["*.bias"])
    assert _names(source) == ["0.weight", "1.weight"]
    assert source.not_covered == ("0.bias", "1.bias")


def test_a_single_pattern_in_place_of_a_list_is_refused() -> None:
    with pytest.raises(InputError, match="collection"):
        ModuleSource(nn.Linear(1, 1), exclude="*bias")


def test_prefix_is_put_before_every_name() -> None:
    """A language model inside a VLM checkpoint is served under the VLM's names."""
    module = nn.Linear(1, 1)
    source = ModuleSource(module, prefix="model.language_model.", exclude=["*.bias"])
    assert _names(source) == ["model.language_model.weight"]
    assert source.not_covered == ("model.language_model.bias",)
    assert _names(StateDictSource(module.state_dict(), prefix="x.")) == ["x.weight", "x.bias"]


def test_a_parameter_that_vanishes_is_an_error() -> None:
    module = nn.Linear(1, 1)
    source = ModuleSource(module)
    iterator = source.tensors()
    module.bias = None  # type: ignore[assignment]
    next(iterator)
    with pytest.raises(TableError, match="gone") as info:
        next(iterator)
    assert info.value.parameter == "bias"
    assert _names(source) == ["weight"]


# --- a model that changes between walks -------------------------------------------------------------------------


def _changing() -> Any:
    module: Any = nn.Module()
    module.embed, module.head = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
    module.mlp = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    module.head.weight = module.embed.weight
    return module


def _dtype(module: Any) -> None:
    module.mlp[0].weight.data = module.mlp[0].weight.data.double()


def _shape(module: Any) -> None:
    module.mlp[0].weight.data = torch.randn(8, 3)


def _strides(module: Any) -> None:
    module.embed.weight.data = module.embed.weight.data.t()


def _replaced_parameter(module: Any) -> None:
    module.mlp[0].weight = nn.Parameter(torch.randn(6, 4))


def _replaced_module(module: Any) -> None:
    module.mlp[0] = nn.Linear(4, 6)


def _replaced_buffer(module: Any) -> None:
    module.mlp[1].running_mean = torch.full((6,), 9.0)


def _added(module: Any) -> None:
    module.mlp.append(nn.Linear(6, 1))


def _removed(module: Any) -> None:
    module.mlp[0].bias = None


def _untied(module: Any) -> None:
    module.head.weight = nn.Parameter(module.embed.weight.detach().clone())


def _untied_in_place(module: Any) -> None:
    module.head.weight = nn.Parameter(module.embed.weight.detach())
    module.head.weight.data = module.head.weight.data.t()


def _hidden(module: Any) -> None:
    module.mlp[1].register_buffer("running_var", torch.ones(6), persistent=False)


def _wrapped(module: Any) -> None:
    module.mlp = nn.DataParallel(module.mlp)


def _reordered(module: Any) -> None:
    module.embed = module._modules.pop("embed")


_CHANGES = [_dtype, _shape, _strides, _replaced_parameter, _replaced_module, _replaced_buffer, _added, _removed,
            _untied, _untied_in_place, _hidden, _wrapped, _reordered]  # fmt: skip


@pytest.mark.parametrize("change", _CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("serving_dtype", [None, ServingDType("bfloat16")], ids=["as it is", "bf16"])
def test_a_second_walk_sees_what_changed_since_the_first(change: Any, serving_dtype: ServingDType | None) -> None:
    """What a walk keeps of the one before is no more than a first walk over the changed model would find."""
    module = _changing()
    source = ModuleSource(module, serving_dtype=serving_dtype)
    change(module)
    again, fresh = source.metas(), ModuleSource(module, serving_dtype=serving_dtype)
    assert again == fresh.metas()
    assert (source.aliases, source.not_covered) == (fresh.aliases, fresh.not_covered)
    held = _held(source)
    stock = {key.replace("mlp.module", "mlp"): tensor for key, tensor in module.state_dict().items()}
    assert {*held, *source.aliases} == stock.keys()
    for name, tensor in stock.items():
        sent = held[source.aliases.get(name, name)]
        assert torch.equal(words(sent), words(tensor.to(sent.dtype))), name


def test_a_walk_over_the_same_model_makes_nothing_anew() -> None:
    module = _changing()
    source = ModuleSource(module)
    first = source.metas()
    with torch.no_grad():
        module.embed.weight.mul_(2)
    _replaced_module(module)  # elsewhere in memory, but of the same name, dtype and shape
    second = source.metas()
    same = [a is b for a, b in zip(first, second, strict=True)]
    assert [meta.name for meta, is_same in zip(second, same, strict=True) if not is_same] == [
        "mlp.0.weight",
        "mlp.0.bias",
    ]


def test_a_parameter_that_lost_its_bits_since_the_first_walk_is_refused() -> None:
    """ZeRO-3 takes a parameter's bits away in place, whenever it was listed."""
    module = nn.Linear(2, 3)
    source = ModuleSource(module)
    weight: Any = module.weight
    weight.ds_shape, weight.data = weight.shape, torch.empty(0)
    for read in (source.metas, lambda: list(source.tensors())):
        with pytest.raises(InputError, match="ZeRO-3") as info:
            read()
        assert info.value.parameter == "weight"


def test_tied_tensors_whose_layout_parts_in_place_are_no_longer_tied() -> None:
    """The same memory read in another order is another parameter."""
    one = torch.randn(3, 3)
    state = {"a": nn.Parameter(one), "b": nn.Parameter(one)}
    source = StateDictSource(state)
    assert source.aliases == {"b": "a"}
    state["b"].data = one.t()
    with pytest.raises(TableError, match="no longer tied"):
        list(source.tensors())


# --- ties -------------------------------------------------------------------------------------------------------


def test_tied_head_travels_once_under_the_first_registered_name() -> None:
    source = ModuleSource(_Tied())
    assert _names(source) == ["lm_head.weight"]
    assert source.aliases == {"embed.weight": "lm_head.weight"}


def test_hugging_face_tied_keys_decide_which_name_travels() -> None:
    for keys in (["lm_head.weight"], {"lm_head.weight": "embed.weight"}, {r"lm_head\.weigh.": "embed.weight"}):
        module = _Tied()
        module._tied_weights_keys = keys
        for wrapped in (module, _compiled(module), nn.DataParallel(module)):
            source = ModuleSource(wrapped)
            assert _names(source) == ["embed.weight"]
            assert source.aliases == {"lm_head.weight": "embed.weight"}
        assert _names(ModuleSource(nn.ModuleDict({"policy": module}))) == ["policy.embed.weight"]


def test_the_serving_checkpoint_has_the_last_word() -> None:
    module = _Tied()
    module._tied_weights_keys = ["embed.weight"]
    assert _names(ModuleSource(module, serving_names=["embed.weight"])) == ["embed.weight"]
    assert _names(StateDictSource(module.state_dict(), serving_names={"embed.weight"})) == ["embed.weight"]


def test_a_module_under_two_names_is_aliased() -> None:
    layer = nn.Linear(2, 2, bias=False)
    source = ModuleSource(nn.ModuleDict({"a": layer, "b": layer}))
    assert (_names(source), source.aliases) == (["a.weight"], {"b.weight": "a.weight"})


def test_views_with_another_geometry_are_not_tied() -> None:
    """Tied means the same elements in the same order; sharing a storage is not enough."""
    base = torch.arange(8.0)
    views = {
        "whole": base,
        "front": base[:4],
        "back": base[4:],
        "matrix": base[:4].view(2, 2),
        "turned": base[:4].view(2, 2).t(),
        "bits": base.view(torch.int32),
        "stride": base[::2],
        "again": base[:4],
    }
    source = StateDictSource(views)
    assert source.aliases == {"again": "front"}
    assert _names(source) == ["whole", "front", "back", "matrix", "turned", "bits", "stride"]
    assert _held(source)["turned"].flatten().tolist() == [0, 2, 1, 3]


def test_conjugate_views_are_not_tied() -> None:
    base = torch.tensor([1 + 2j])
    assert StateDictSource({"a": base, "b": base.conj()}).aliases == {}


def test_zero_size_and_meta_tensors_are_tied_by_identity_only() -> None:
    empty, meta = torch.empty(0), torch.empty(3, device="meta")
    source = StateDictSource({"a": empty, "b": torch.empty(0), "c": empty, "m": meta, "n": meta.clone(), "o": meta})
    assert source.aliases == {"c": "a", "o": "m"}


def test_excluding_the_name_that_would_travel_sends_the_other() -> None:
    source = ModuleSource(_Tied(), exclude=["lm_head.*"])
    assert (_names(source), source.aliases, source.not_covered) == (["embed.weight"], {}, ("lm_head.weight",))


def test_untying_after_the_table_was_agreed_is_an_error() -> None:
    """A tied head that is untied in mid-run would leave the workers' head stale."""
    module = _Tied()
    source = ModuleSource(module)
    table_of(source)
    module.embed.weight = nn.Parameter(module.embed.weight.detach().clone())
    with pytest.raises(TableError, match=r"no longer tied.*metas\(\)") as info:
        list(source.tensors())
    assert info.value.parameter == "lm_head.weight"
    assert sorted(_names(source)) == ["embed.weight", "lm_head.weight"]


def test_tied_tensors_that_are_served_in_two_dtypes_travel_twice() -> None:
    source = ModuleSource(_Tied(), serving_dtype=ServingDType("bfloat16", keep=("lm_head*",)))
    assert {meta.name: meta.dtype for meta in source.metas()} == {
        "lm_head.weight": "float32",
        "embed.weight": "bfloat16",
    }


@given(st.lists(st.integers(0, 2), min_size=1, max_size=8))
@settings(max_examples=30, deadline=None)
def test_every_name_resolves_to_its_own_bits(which: list[int]) -> None:
    storages = [torch.full((2,), float(i)) for i in range(3)]
    state = {f"p{i}": storages[index] for i, index in enumerate(which)}
    source = StateDictSource(state)
    held = _held(source)
    assert len(held) == len(set(which))
    for name, tensor in state.items():
        assert torch.equal(held[source.aliases.get(name, name)], tensor)


# --- wrappers ---------------------------------------------------------------------------------------------------


def test_wrapper_prefixes_are_stripped_wherever_they_are() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), _compiled(nn.Linear(2, 2)))
    plain = ["0.weight", "0.bias", "1.weight", "1.bias"]
    for wrapped in (inner, nn.DataParallel(inner), _compiled(nn.DataParallel(inner))):
        assert _names(ModuleSource(wrapped)) == plain
    assert _names(StateDictSource(_compiled(inner).state_dict())) == plain
    assert _names(StateDictSource(nn.DataParallel(inner).state_dict(), strip_prefix="module.")) == plain


def test_an_honest_submodule_called_module_keeps_its_name() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)

    assert _names(ModuleSource(Holder())) == ["module.weight", "module.bias"]
    assert _names(ModuleSource(nn.DataParallel(Holder()))) == ["module.weight", "module.bias"]
    assert _names(StateDictSource(Holder().state_dict())) == ["module.weight", "module.bias"]


def test_a_subclass_of_a_wrapper_is_a_wrapper() -> None:
    class Mine(nn.DataParallel[nn.Module]):
        pass

    assert _names(ModuleSource(Mine(nn.Linear(1, 1, bias=False)))) == ["weight"]


def test_a_wrappers_own_tensors_are_listed_and_not_sent() -> None:
    averaged = torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1))
    source = ModuleSource(averaged)
    assert _names(source) == ["weight", "bias"]
    assert source.not_covered == ("n_averaged",)

    class Mine(nn.DataParallel[nn.Module]):
        def __init__(self, module: nn.Module) -> None:
            super().__init__(module)
            self.scale = nn.Parameter(torch.ones(1))

    source = ModuleSource(Mine(nn.Linear(1, 1)))
    assert (_names(source), source.not_covered) == (["weight", "bias"], ("scale",))


def test_checkpoint_wrappers_are_stripped() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    module = nn.Sequential(checkpoint_wrapper(nn.Linear(1, 1)))
    assert _names(ModuleSource(module)) == ["0.weight", "0.bias"]


def test_only_whole_parts_of_names_are_stripped() -> None:
    state = {"my_orig_mod.weight": torch.zeros(1), "a._orig_mod.b": torch.zeros(1), "_orig_mod": torch.zeros(1)}
    with pytest.raises(InputError, match="parameter name"):  # nothing is left of the third
        StateDictSource(state)
    del state["_orig_mod"]
    assert _names(StateDictSource(state)) == ["my_orig_mod.weight", "a.b"]


def test_two_names_that_become_one_are_an_error() -> None:
    one = torch.zeros(1)
    with pytest.raises(TableError, match="one name") as info:
        StateDictSource({"_orig_mod.a": one, "a": one.clone()})
    assert info.value.parameter == "a"
    with pytest.raises(TableError, match="one name"):
        StateDictSource({"module.a": one, "a": one.clone()}, strip_prefix="module.")

    class Sneaky(nn.DataParallel[nn.Module]):
        def __init__(self, module: nn.Module) -> None:
            super().__init__(module)
            self.weight = nn.Linear(1, 1)

    inner = nn.ModuleDict({"weight": nn.Linear(1, 1)})
    with pytest.raises(TableError, match="one name") as info:
        ModuleSource(Sneaky(inner))
    assert info.value.parameter == "weight.weight"


def test_a_child_that_refers_to_its_parent_ends_the_walk() -> None:
    class Node(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))
            self.child = nn.Module()
            self.child.parent = self

    assert _names(ModuleSource(Node())) == ["weight"]


# --- serving dtype ----------------------------------------------------------------------------------------------


def test_masters_are_rounded_to_nearest_even() -> None:
    """1 + 2^-8 lies half way between two bf16 and goes to the even one, 1.0; 1 + 3*2^-8 goes up to 1 + 2^-6."""
    weight = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 1 + 2**-8 + 2**-20])
    source = StateDictSource({"w": weight}, serving_dtype=ServingDType("bfloat16"))
    assert source.metas() == [ParamMeta("w", "bfloat16", (4,))]
    assert _held(source)["w"].view(torch.int16).tolist() == [0x3F80, 0x3F82, 0x3F80 - 0x8000, 0x3F81]


def test_router_correction_bias_and_buffers_are_not_cast() -> None:
    """fp32 routers and e_score_correction_bias cast to bf16 change which expert a token goes to."""
    state = {
        "model.layers.0.mlp.router.weight": torch.randn(2, 2),
        "router.weight": torch.randn(2),
        "model.layers.0.mlp.gate.e_score_correction_bias": torch.randn(4),
        "model.layers.0.self_attn.q_proj.bias": torch.randn(2),
        "model.layers.0.self_attn.q_proj.weight_scale_inv": torch.randn(1),
        "num_batches": torch.tensor(3),
        "mask": torch.tensor([True]),
        "half": torch.randn(2).half(),
        "fp8": torch.randn(2).to(torch.float8_e4m3fn),
    }
    source = StateDictSource(state, serving_dtype=ServingDType("bfloat16"))
    for name, tensor in _held(source).items():
        assert tensor.dtype == state[name].dtype, name
        assert torch.equal(words(tensor), words(state[name]))


def test_kept_patterns_are_configurable() -> None:
    state = {"a.gate.weight": torch.zeros(1), "a.bias": torch.zeros(1), "b": torch.zeros(1, dtype=torch.float64)}
    source = StateDictSource(state, serving_dtype=ServingDType("float16", keep=("*.gate.*",)))
    assert [meta.dtype for meta in source.metas()] == ["float32", "float16", "float16"]


def test_without_a_policy_nothing_is_cast_and_nan_payloads_stay() -> None:
    bits = torch.tensor([0x7FA00001, -0x3FFFFF, -0x80000000], dtype=torch.int32)
    state = {"w": bits.view(torch.float32), "bias": bits.view(torch.float32).clone()}
    assert words(_held(StateDictSource(state))["w"]).tolist() == bits.tolist()
    kept = _held(StateDictSource(state, serving_dtype=ServingDType("bfloat16")))["bias"]
    assert words(kept).tolist() == bits.tolist()


def test_the_serving_checkpoint_decides_dtypes_exactly() -> None:
    served = [ParamMeta("w", "bfloat16", (1,)), ParamMeta("q.bias", "bfloat16", (1,)), ParamMeta("r", "float32", (1,))]
    state = {"w": torch.ones(1), "q.bias": torch.ones(1), "r": torch.ones(1).bfloat16(), "new": torch.ones(1)}
    source = StateDictSource(state, serving_dtype=ServingDType.like(served))
    assert [meta.dtype for meta in source.metas()] == ["bfloat16", "bfloat16", "float32", "float32"]
    assert _held(source)["q.bias"].dtype == torch.bfloat16


def test_a_cast_that_needs_a_scale_is_refused() -> None:
    with pytest.raises(DTypeError, match="cannot be cast") as info:
        StateDictSource({"w": torch.ones(1)}, serving_dtype=ServingDType(dtypes={"w": "float8_e4m3fn"}))
    assert info.value.parameter == "w"
    with pytest.raises(InputError, match="default serving dtype"):
        ServingDType("float8_e4m3fn")
    with pytest.raises(DTypeError):
        ServingDType(dtypes={"w": "bf16"})
    with pytest.raises(InputError, match="tuple"):
        ServingDType("bfloat16", keep="*bias*")  # type: ignore[arg-type]


def test_casting_takes_one_tensor_at_a_time() -> None:
    source = ModuleSource(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), serving_dtype=ServingDType("bfloat16"))
    first, second = itertools.islice(source.tensors(), 2)
    assert first[1].untyped_storage().nbytes() == 32
    assert second[1].dtype == torch.float32  # a bias: kept, and still the module's own memory


# --- what has no whole bits here ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_lazy_and_quantised_parameters_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="lazy") as info:
        ModuleSource(nn.Sequential(nn.LazyLinear(2)))
    assert info.value.parameter == "0.weight"
    quantised = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(DTypeError, match="qint8") as info:
        StateDictSource({"a.weight": quantised})
    assert info.value.parameter == "a.weight"


def test_a_partitioned_zero3_parameter_is_refused() -> None:
    """Between forward passes DeepSpeed ZeRO-3 leaves an empty placeholder that knows its real shape."""
    module = nn.Linear(2, 3)
    placeholder: Any = nn.Parameter(torch.empty(0))
    placeholder.ds_shape = torch.Size([3, 2])
    module.weight = placeholder
    with pytest.raises(InputError, match=r"ZeRO-3.*Gather") as info:
        ModuleSource(module)
    assert info.value.parameter == "weight"
    module.weight.data = torch.zeros(3, 2)  # what GatheredParameters does
    assert ModuleSource(module).metas()[0].shape == (3, 2)


def test_sparse_layouts_have_no_plain_memory() -> None:
    with pytest.raises(InputError, match="strided") as info:
        StateDictSource({"w": torch.eye(3).to_sparse()})
    assert info.value.parameter == "w"


def test_tensor_subclasses_that_wrap_others_are_refused() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    with pytest.raises(InputError, match="subclass") as info:
        StateDictSource({"w": TwoTensor(torch.ones(2), torch.zeros(2))})  # type: ignore[no-untyped-call]
    assert info.value.found == "TwoTensor"


def test_a_module_on_meta_lists_but_does_not_send() -> None:
    source = ModuleSource(nn.Linear(2, 3, device="meta"))
    assert [(meta.name, meta.shape) for meta in source.metas()] == [("weight", (3, 2)), ("bias", (3,))]
    with pytest.raises(TableError, match="no data"):
        list(checked(source))


@pytest.fixture
def fake_mesh() -> Iterator[Any]:
    """Rank 0 of two, without a second process."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_shards_are_refused_and_replicas_are_sent(fake_mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    local = torch.arange(3.0)
    replica = DTensor.from_local(local, fake_mesh, [Replicate()])
    assert _held(StateDictSource({"w": replica}))["w"].tolist() == [0, 1, 2]
    for placement, kind in ((Shard(0), "S"), (Partial(), "P")):
        with pytest.raises(InputError, match=r"only a shard.*Gather") as info:
            StateDictSource({"model.w": DTensor.from_local(local, fake_mesh, [placement], run_check=False)})
        assert info.value.parameter == "model.w", kind
    uneven = DTensor.from_local(local, fake_mesh, [Shard(0)], shape=torch.Size([5]), stride=(1,), run_check=False)
    with pytest.raises(InputError, match=r"\[5\].*\[3\]"):
        StateDictSource({"w": uneven})


def test_fsdp2_modules_are_refused_by_name(fake_mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    module = nn.Sequential(nn.Linear(4, 4))
    fully_shard(module, mesh=fake_mesh)
    with pytest.raises(InputError, match="shard") as info:
        ModuleSource(module)
    assert info.value.parameter == "0.weight"


@pytest.mark.filterwarnings("ignore:The `NO_SHARD`:FutureWarning")
def test_fsdp1_is_sent_only_where_it_does_not_shard(fake_mesh: Any) -> None:
    """With use_orig_params its shards look like ordinary flat parameters."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    def wrapped(strategy: Any, *, use_orig_params: bool) -> nn.Module:
        module: nn.Module = FullyShardedDataParallel(
            nn.Sequential(nn.Linear(3, 3)), process_group=fake_mesh.get_group(), sharding_strategy=strategy,
            use_orig_params=use_orig_params, device_id=torch.device("cpu"),
        )  # fmt: skip
        return module

    for use_orig_params in (True, False):
        with pytest.raises(InputError, match="FSDP1"):
            ModuleSource(wrapped(ShardingStrategy.FULL_SHARD, use_orig_params=use_orig_params))
    with pytest.raises(InputError, match="flat parameter"):
        ModuleSource(wrapped(ShardingStrategy.NO_SHARD, use_orig_params=False))
    source = ModuleSource(wrapped(ShardingStrategy.NO_SHARD, use_orig_params=True))
    assert [(meta.name, meta.shape) for meta in source.metas()] == [("0.weight", (3, 3)), ("0.bias", (3,))]


def test_names_of_ddp_are_stripped(fake_mesh: Any) -> None:
    module = nn.parallel.DistributedDataParallel(nn.Linear(1, 1), process_group=fake_mesh.get_group())
    assert _names(ModuleSource(module)) == ["weight", "bias"]


# --- transformers -----------------------------------------------------------------------------------------------


def _tiny(tied: bool) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=32, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.Qwen2ForCausalLM(config)


@pytest.mark.parametrize("tied", [True, False])
def test_a_hugging_face_model_sends_what_save_pretrained_writes(tied: bool, tmp_path: Any) -> None:
    """Names, dtypes and bits equal those of the checkpoint that transformers itself writes."""
    from safetensors.torch import load_file

    model = _tiny(tied)
    model.save_pretrained(tmp_path)
    stock = load_file(tmp_path / "model.safetensors")
    for wrapped in (model, _compiled(model)):
        source = ModuleSource(wrapped)
        held = _held(source)
        assert held.keys() == stock.keys()
        assert all(torch.equal(words(held[name]), words(stock[name])) for name in stock)
        assert source.aliases == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    assert "model.rotary_emb.inv_freq" in source.not_covered
