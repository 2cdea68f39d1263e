"""Folding consecutive updates: one update that does what they do, by bits, fingerprints and sums."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import made_updates as made
from deltacast.delta.bits import Words
from deltacast.delta.codec import decode_update, encode_update
from deltacast.delta.errors import BaseError, InputError
from deltacast.delta.fingerprint import change_sums, words_fingerprint
from deltacast.delta.fold import fold
from deltacast.delta.patch import SparseWeightPatch, WeightUpdate, ordered, unordered
from deltacast.delta.table import ParamMeta

State = dict[str, Words]
METAS = {meta.name: meta for meta in (
    ParamMeta("a", "bfloat16", (40,)), ParamMeta("b", "float32", (5, 4)), ParamMeta("c", "uint8", (30,)),
    ParamMeta("d", "complex64", (6,)),
)}  # fmt: skip


def digest(version: int) -> str:
    return f"xxh3_128:{version:032x}"


def update_from(version: int, patches: list[SparseWeightPatch], **changes: Any) -> WeightUpdate:
    fields = {"base_version": version, "target_version": version + 1, "base_digest": digest(version),
              "target_digest": digest(version + 1)}  # fmt: skip
    return made.update_of(patches, None, **(fields | changes))


def start(seed: int = 0) -> State:
    rng = np.random.default_rng(seed)
    return {name: made.random_words(rng, meta) for name, meta in METAS.items()}


def applied(state: State, update: WeightUpdate) -> State:
    """Apply an update the plain way, checking what each patch says about sums and fingerprints."""
    after = {name: words.copy() for name, words in state.items() if name not in update.removed}
    for patch in update.patches:
        if patch.indices is None:
            after[patch.name] = patch.values.copy()
            continue
        words, at = after[patch.name], patch.indices
        patch.check_indices()
        assert patch.fingerprint_before == words_fingerprint(words)
        if patch.old_sum is not None:
            assert patch.old_sum == change_sums(at, words[at], words[at])[0], patch.name
        if patch.base_values is not None:
            assert patch.base_values.tolist() == words[at].tolist()
        if patch.form == "absolute":
            words[at] = patch.values
        else:
            signed = patch.meta.row.signed_magnitude
            moved = ordered(words[at], signed_magnitude=signed) + patch.values
            words[at] = unordered(moved, signed_magnitude=signed)
        assert patch.fingerprint_after == words_fingerprint(words)
    return after


def same_bits(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


def chain(seed: int, forms: list[str], touched: float = 0.3) -> tuple[list[State], list[WeightUpdate]]:
    """Return states and the updates between them; each update changes some parameters at some positions."""
    rng = np.random.default_rng(seed)
    states, updates = [start(seed)], []
    for version, form in enumerate(forms):
        after = {name: words.copy() for name, words in states[-1].items()}
        patches = []
        for name, meta in METAS.items():
            if rng.random() < 0.3:
                continue
            at = np.flatnonzero(rng.random(meta.num_words) < touched)
            after[name] = made.step(rng, after[name], at)
            if rng.random() < 0.2:  # and back to an earlier value, so that nets of zero occur
                after[name][at] = states[0][name][at]
            if after[name].tobytes() != states[-1][name].tobytes():
                patches.append(made.patch_of(meta, states[-1][name], after[name], form=form))
        states.append(after)
        updates.append(update_from(version, patches))
    return states, updates


@given(st.integers(0, 10_000), st.sampled_from(["based", "absolute", "delta"]), st.integers(1, 5))
@settings(deadline=None, max_examples=80)
def test_fold_of_a_chain_equals_its_ends(seed: int, form: str, length: int) -> None:
    """In one form, without the base: the bits of the last state, from the first."""
    states, updates = chain(seed, [form] * length)
    folded = fold(updates)
    assert (folded.base_version, folded.target_version) == (0, length)
    assert (folded.base_digest, folded.target_digest) == (digest(0), digest(length))
    assert same_bits(applied(states[0], folded), states[-1])
    if form != "absolute":
        for patch in folded.patches:  # nothing idle is sent
            assert states[0][patch.name].tobytes() != states[-1][patch.name].tobytes()


FORMS = st.sampled_from(["based", "absolute", "delta", "dense"])


@given(st.integers(0, 10_000), st.lists(FORMS, min_size=1, max_size=5))
@settings(deadline=None, max_examples=80)
def test_any_forms_fold_with_the_base(seed: int, forms: list[str]) -> None:
    """With the base at hand, any mix folds, and equals the diff of the ends exactly."""
    states, updates = chain(seed, forms)
    folded = fold(updates, base=lambda name: states[0][name])
    assert same_bits(applied(states[0], folded), states[-1])
    if len(updates) > 1 and "dense" not in forms:
        assert all(patch.old_sum is not None for patch in folded.patches)
        for patch in folded.patches:
            wanted = made.patch_of(patch.meta, states[0][patch.name], states[-1][patch.name])
            assert wanted.indices is not None
            assert patch.indices is not None
            assert patch.indices.tolist() == wanted.indices.tolist()
            assert patch.values.tolist() == wanted.values.tolist()
            assert (patch.old_sum, patch.fingerprint_after) == (wanted.old_sum, wanted.fingerprint_after)


@given(st.integers(0, 10_000))
@settings(deadline=None, max_examples=30)
def test_folds_fold_again_and_travel(seed: int) -> None:
    """Folding in any grouping, through the container, gives the same bits."""
    states, updates = chain(seed, ["based", "delta", "based", "delta"])
    travelled = [decode_update(encode_update(update, values="delta")) for update in updates]
    left = fold([fold(travelled[:2]), fold(travelled[2:])])
    right = decode_update(encode_update(fold(travelled)))
    assert same_bits(applied(states[0], left), states[-1])
    assert same_bits(applied(states[0], right), states[-1])


def one(old: list[int], new: list[int], form: str) -> SparseWeightPatch:
    """Return a patch of parameter `w`, uint16[len(old)]."""
    meta = ParamMeta("w", "uint16", (len(old),))
    return made.patch_of(meta, np.array(old, "<u2"), np.array(new, "<u2"), form=form)


@pytest.mark.parametrize(
    ("first", "then", "exact"),
    [("delta", "delta", False), ("absolute", "absolute", True), ("based", "based", True), ("based", "delta", True)],
)
def test_old_sum_of_overlapping_updates(first: str, then: str, exact: bool) -> None:
    """Where the first update's words are known, the base's sum follows from the two sums; else it is None."""
    old, middle, new = [5, 6, 7, 8], [9, 1, 7, 8], [9, 2, 3, 8]
    folded = fold([update_from(0, [one(old, middle, first)]), update_from(1, [one(middle, new, then)])]).patches[0]
    wanted = one(old, new, "based").old_sum
    assert folded.indices is not None
    assert folded.indices.tolist() == [0, 1, 2]
    assert folded.old_sum == (wanted if exact else None)
    assert folded.fingerprint_after == one(middle, new, then).fingerprint_after


def test_old_sum_of_disjoint_updates() -> None:
    """Sums of different positions just add up, in any form."""
    old, middle, new = [5, 6, 7, 8], [9, 6, 7, 8], [9, 6, 3, 8]
    folded = fold([update_from(0, [one(old, middle, "delta")]), update_from(1, [one(middle, new, "delta")])]).patches[0]
    assert folded.old_sum == one(old, new, "based").old_sum


@pytest.mark.parametrize("form", ["delta", "based"])
def test_no_net_change_is_dropped(form: str) -> None:
    """A position that ends where it began is not sent, nor a parameter of such positions."""
    there = update_from(0, [one([1, 2, 3], [1, 9, 3], form)])
    back = update_from(1, [one([1, 9, 3], [1, 2, 3], form)])
    partly = update_from(1, [one([1, 9, 3], [1, 2, 4], form)])
    assert fold([there, back]).patches == ()
    indices = fold([there, partly]).patches[0].indices
    assert indices is not None
    assert indices.tolist() == [2]


@pytest.mark.parametrize("forms", [("absolute", "delta"), ("delta", "absolute")])
def test_mixed_forms_need_the_base(forms: tuple[str, str]) -> None:
    """Differences at one position and bare words at another cannot be one patch, unless the base is given."""
    old, middle, new = [5, 6, 7], [9, 6, 7], [9, 1, 7]
    updates = [update_from(0, [one(old, middle, forms[0])]), update_from(1, [one(middle, new, forms[1])])]
    with pytest.raises(InputError, match="parameter 'w'"):
        fold(updates)
    folded = fold(updates, base=lambda _: np.array(old, "<u2"))
    assert folded.patches[0].values.tolist() == [9, 1]


def test_differences_on_known_words() -> None:
    """Differences at positions whose words the first update sent resolve to words, and words cover differences."""
    old, middle, new = [5, 6, 7], [9, 1, 7], [3, 1, 7]
    for forms, words in ((("absolute", "delta"), [3, 1]), (("delta", "absolute"), [9, 1])):
        third = new if forms[0] == "absolute" else [9, 1, 7]
        first = update_from(0, [one(old, middle if forms[0] == "absolute" else [4, 6, 7], forms[0])])
        then = update_from(1, [one(middle if forms[0] == "absolute" else [4, 6, 7], third, forms[1])])
        folded = fold([first, then]).patches[0]
        assert (folded.form, folded.values.tolist()) == ("absolute", words)


def test_dense_then_sparse() -> None:
    """A sparse patch is applied to dense words, in place of the update."""
    meta = ParamMeta("w", "bfloat16", (3,))
    a, b, c = (np.array(words, "<u2") for words in ([1, 2, 3], [0x8000, 5, 6], [0x8001, 5, 7]))
    dense = update_from(0, [made.patch_of(meta, a, b, form="dense")])
    forms: tuple[Literal["based", "delta", "absolute"], ...] = ("based", "delta", "absolute")
    for form in forms:
        folded = fold([dense, update_from(1, [made.patch_of(meta, b, c, form=form)])]).patches[0]
        assert folded.is_dense
        assert folded.values.tolist() == c.tolist()
        assert folded.fingerprint_after == words_fingerprint(c)


def test_a_seed_and_what_follows_is_a_seed() -> None:
    """Nothing before the seed is needed, and what was removed since is gone without a trace."""
    meta = ParamMeta("w", "uint16", (3,))
    seed = update_from(0, [made.patch_of(meta, np.zeros(3, "<u2"), np.array([1, 2, 3], "<u2"), form="dense")],
                       base_version=None, base_digest=None, target_version=1, target_digest=digest(1))  # fmt: skip
    folded = fold([seed, update_from(1, [one([1, 2, 3], [1, 2, 9], "delta")])])
    assert folded.is_seed
    assert folded.patches[0].values.tolist() == [1, 2, 9]
    assert fold([seed, update_from(1, [], removed=("w",))]).patches == ()
    assert fold([seed, update_from(1, [], removed=("w",))]).removed == ()


def dense(meta: ParamMeta, word: int, **changes: Any) -> SparseWeightPatch:
    values = np.full(meta.num_words, word, meta.row.numpy_word)
    return SparseWeightPatch(meta, None, values, words_fingerprint(values), **changes)


def test_removed_and_added_again() -> None:
    """A name that goes and comes back replaces what the base has; a new one that goes was never there."""
    was, now = ParamMeta("w", "uint16", (3,)), ParamMeta("w", "float32", (2,))
    touched = update_from(0, [one([1, 2, 3], [1, 2, 4], "delta")])
    gone = update_from(1, [], removed=("w",))
    assert fold([touched, gone]).removed == ("w",)
    assert fold([touched, gone]).patches == ()
    back = fold([touched, gone, update_from(2, [dense(now, 5)])])
    assert back.removed == ()
    assert back.patches[0].base_meta == was
    again = fold([touched, gone, update_from(2, [dense(now, 5)]), update_from(3, [], removed=("w",))])
    assert (again.removed, again.patches) == (("w",), ())
    new = fold([update_from(0, [dense(now, 5)]), update_from(1, [], removed=("w",))])
    assert (new.removed, new.patches) == ((), ())


def test_changed_dtype() -> None:
    """A parameter that changed its dtype on the way remembers what the base had."""
    was, now = ParamMeta("w", "uint16", (3,)), ParamMeta("w", "float32", (2,))
    first = update_from(0, [one([1, 2, 3], [1, 2, 4], "delta")])
    folded = fold([first, update_from(1, [dense(now, 5, base_meta=was)])]).patches[0]
    assert (folded.meta, folded.base_meta, folded.is_dense) == (now, was, True)
    there_and_back = fold([first, update_from(1, [dense(now, 5, base_meta=was)]),
                           update_from(2, [dense(was, 6, base_meta=now)])]).patches[0]  # fmt: skip
    assert there_and_back.base_meta is None
    assert there_and_back.fingerprint_before == first.patches[0].fingerprint_before


def test_parts_fold_by_part() -> None:
    """Parts fold each for itself; another cut is refused."""
    meta = ParamMeta("w", "uint16", (2, 2))
    old, new = np.array([1, 2, 3, 4], "<u2"), np.array([1, 9, 3, 8], "<u2")
    top, bottom = ((0, 1), (0, 2)), ((1, 2), (0, 2))

    def part(number: int, box: Any, at: int) -> SparseWeightPatch:
        indices = np.array([at], np.int64)
        return made.patch_of(meta, old, new, form="absolute", part=number, box=box, indices=indices)

    first = update_from(0, [part(0, top, 1)])
    folded = fold([first, update_from(1, [part(1, bottom, 3)])])
    assert [(patch.part, patch.values.tolist()) for patch in folded.patches] == [(0, [9]), (1, [8])]
    with pytest.raises(InputError, match="cut into other parts"):
        fold([first, update_from(1, [part(0, bottom, 3)])])
    with pytest.raises(InputError, match="cut into other parts"):
        fold([first, update_from(1, [made.patch_of(meta, old, new, part=1)])])


def test_aliases_and_metadata_are_the_last_ones() -> None:
    """What describes the result comes from the last update."""
    updates = [update_from(0, [], aliases={"x": "a"}, optimizer_step=7),
               update_from(1, [], aliases={"y": "a"}, optimizer_step=9, epoch=2)]  # fmt: skip
    folded = fold(updates)
    assert (dict(folded.aliases), folded.optimizer_step, folded.epoch) == ({"y": "a"}, 9, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"run_id": "other"}, "two runs"), ({"base_version": 0}, "does not follow"), ({"epoch": 0}, "older epoch"),
     ({"base_digest": digest(9)}, "follow"), ({"base_version": None, "base_digest": None}, "does not follow")],
)  # fmt: skip
def test_updates_that_do_not_follow(change: dict[str, Any], message: str) -> None:
    """Another run, base or digest, or an older writer, is named."""
    with pytest.raises(BaseError, match=message):
        fold([update_from(0, []), update_from(1, [], **change)])


def test_patches_that_do_not_follow() -> None:
    """Fingerprints of consecutive patches have to meet, and a sparse patch needs its dtype."""
    first = update_from(0, [one([1, 2], [1, 3], "delta")])
    with pytest.raises(BaseError, match="other bits"):
        fold([first, update_from(1, [one([5, 2], [1, 3], "delta")])])
    other = ParamMeta("w", "int16", (2,))
    odd = made.patch_of(other, np.array([1, 3], "<u2"), np.array([1, 4], "<u2"), form="delta")
    with pytest.raises(BaseError, match="another dtype or shape"):
        fold([first, update_from(1, [odd])])


def test_nothing_to_fold() -> None:
    """No update is an error; one is itself."""
    with pytest.raises(InputError):
        fold([])
    update = update_from(0, [])
    assert fold([update]) is update
