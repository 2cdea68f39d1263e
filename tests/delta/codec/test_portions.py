"""Containers decoded some patches at a time. Right value: the update that was encoded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import made_updates as made
from deltacast.delta.codec import decode_portions, encode, encode_update, read_header
from deltacast.delta.errors import ChecksumError, FormatError
from deltacast.delta.patch import SparseWeightPatch, WeightUpdate
from deltacast.delta.table import ParamMeta


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "GROUP_WEIGHT", 64)


def an_update(*counts: int, form: str = "delta") -> WeightUpdate:
    """Parameters of 1000 words, of which so many change."""
    rng = np.random.default_rng(3)
    patches: list[SparseWeightPatch] = []
    for number, count in enumerate(counts):
        meta = ParamMeta(f"p{number}", "bfloat16", (40, 25))
        old = made.random_words(rng, meta)
        at = np.sort(rng.choice(1000, count, replace=False))
        patches.append(made.patch_of(meta, old, made.step(rng, old, at), form=form))
    return made.update_of(patches)


@pytest.mark.parametrize("form", ["delta", "absolute", "dense"])
@pytest.mark.parametrize("key", [None, b"key"])
@pytest.mark.parametrize("most", [1, 150, 400, 1 << 20])
def test_portions_add_up_to_the_update(form: str, key: bytes | None, most: int) -> None:
    """Entries in one group, over several, and many in one: every patch comes once, in order, none in halves."""
    update = an_update(150, 0, 3, 700, 10, 10, 10, 90, 64, form=form)
    raw = encode_update(update, signing_key=key)
    assert len(read_header(raw).groups) > 5
    head, portions = decode_portions(raw, signing_key=key, threads=2, max_changes=most)
    found = list(portions)
    assert head.patches == ()
    made.assert_same(update, replace(head, patches=tuple(patch for each in found for patch in each)))
    assert (len(found) == 1) == (most == 1 << 20)


def test_portions_hold_no_more_changes_than_asked_for() -> None:
    """As long as entries are small: sixteen of ten changes fill two groups and a half, and more do not fit into 160."""
    _, portions = decode_portions(encode_update(an_update(*[10] * 40)), max_changes=160)
    sizes = [sum(patch.num_changed for patch in each) for each in portions]
    assert sum(sizes) == 400
    assert all(100 <= size <= 160 for size in sizes[:-1])


def test_an_empty_update_has_no_portion() -> None:
    """It advances the version all the same."""
    head, portions = decode_portions(encode_update(made.update_of([])))
    assert (head.target_version, list(portions)) == (made.update_of([]).target_version, [])


def test_damage_is_found_before_the_first_portion_and_too_much_is_not_decoded() -> None:
    """The file's checksum comes first; the bound is on all portions together."""
    raw = encode_update(an_update(150, 150, 150))
    with pytest.raises(ChecksumError):
        decode_portions(raw[:-40] + bytes([raw[-40] ^ 1]) + raw[-39:])
    assert len(list(decode_portions(raw, max_decoded_bytes=4500, max_changes=1)[1])) == 3
    with pytest.raises(FormatError, match="decodes to more"):
        decode_portions(raw, max_decoded_bytes=4499, max_changes=1)


def test_a_damaged_group_is_named_when_its_turn_comes() -> None:
    """Under a checksum of the file that fits: the portions before it are good."""
    update = an_update(150, 150, 150)
    raw = encode_update(update)
    size = sum(group.num_bytes for group in read_header(raw).groups)
    payload = bytearray(raw[-24 - size : -24])
    payload[-1] ^= 1
    _, portions = decode_portions(made.reseal(raw, lambda _: None, bytes(payload)), max_changes=1)
    assert next(portions)[0].name == "p0"
    with pytest.raises(ChecksumError, match="group"):
        list(portions)
