"""What travels: a sparse patch per parameter, and the update that binds them to two versions.

Patches hold *words* (delta/dtypes.py). Where they come from and go to: `diff` makes absolute patches, the
container may carry either form, `apply` resolves both against the weights it is about to write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from deltacast.delta.bits import Words
from deltacast.delta.errors import InputError, PatchError
from deltacast.delta.fingerprint import Box
from deltacast.delta.table import ParameterTable, ParamMeta

__all__ = ["Form", "SparseWeightPatch", "WeightUpdate", "ordered", "unordered"]

Form: TypeAlias = Literal["absolute", "delta"]


def ordered(array: Words, *, signed_magnitude: bool) -> Words:
    """Map words to integers in the order of the values they stand for; its own inverse.

    `o(s) = s ^ ((s >> n-1) & (2^(n-1) - 1))` with an arithmetic shift: negative floats have their magnitude
    flipped, so that one step of the integer is one step of the float. Identity for integers, bool and e8m0.
    """
    if not signed_magnitude:
        return array
    bits = array.itemsize * 8
    low = array.dtype.type((1 << (bits - 1)) - 1)
    sign = (array.view(f"<i{array.itemsize}") >> (bits - 1)).view(array.dtype)
    sign &= low
    sign ^= array
    return sign


unordered = ordered


@dataclass(frozen=True, slots=True, eq=False)
class SparseWeightPatch:
    """What changed in one parameter, or in one part of it.

    Attributes:
        meta: name, dtype and full shape after the update.
        indices: int64 flat word positions in the full parameter, strictly ascending; None where every word of
            the parameter (of the box) is sent.
        values: one unsigned word per position, contiguous, in row-major order. New bits in the `absolute` form;
            in the `delta` form `o(new) - o(old) mod 2^n`, never 0.
        form: which of the two.
        base_values: the old words at `indices`, where the maker knows them (lets the codec choose the delta form).
        old_sum: sum of old unit * key over the positions; None if unknown (the reader then audits first).
        fingerprint_before: of the part before, None for a parameter that is new or changed dtype or shape.
        fingerprint_after: of the part after.
        part: number of this part of the parameter; parts have disjoint boxes.
        box: the part's `[lo, hi)` per dim; None for the whole.
        base_meta: what the parameter was, if its dtype or shape changed (then `indices` is None).

    Raises:
        PatchError: lengths or dtypes that do not fit. Order and range are checked by `check_indices`.
    """

    meta: ParamMeta
    indices: NDArray[np.int64] | None
    values: Words
    fingerprint_after: int
    form: Form = "absolute"
    base_values: Words | None = None
    old_sum: int | None = None
    fingerprint_before: int | None = None
    part: int = 0
    box: Box | None = None
    base_meta: ParamMeta | None = None

    def __post_init__(self) -> None:
        name = self.meta.name
        for label in ("indices", "values", "base_values"):
            array = getattr(self, label)
            if not isinstance(array, np.ndarray) and (array is not None or label == "values"):
                raise PatchError(f"{label} are not a numpy array", parameter=name, found=type(array).__name__)
        if self.form not in get_args(Form):
            raise PatchError("unknown form", parameter=name, expected=get_args(Form), found=repr(self.form))
        if self.values.dtype != self.meta.row.numpy_word or self.values.ndim != 1 or not self.values.flags.c_contiguous:
            raise PatchError(
                "bad values",
                parameter=name,
                expected=f"flat contiguous {self.meta.row.numpy_word}",
                found=f"{self.values.dtype}[{self.values.ndim}-d]",
            )
        if self.indices is None:
            if self.form != "absolute" or self.values.size != self.num_box_words:
                raise PatchError(
                    "a dense patch must hold every word, absolute",
                    parameter=name,
                    expected=self.num_box_words,
                    found=f"{self.values.size} {self.form}",
                )
            return
        if self.indices.dtype != np.int64 or self.indices.shape != self.values.shape:
            raise PatchError(
                "indices do not fit values",
                parameter=name,
                expected=f"int64[{self.values.size}]",
                found=f"{self.indices.dtype}{list(self.indices.shape)}",
            )
        old = self.base_values
        if old is not None and (old.dtype != self.values.dtype or old.shape != self.values.shape):
            raise PatchError(
                "base_values do not fit values",
                parameter=name,
                expected=f"{self.values.dtype}[{self.values.size}]",
                found=f"{old.dtype}{list(old.shape)}",
            )

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self.meta.name

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The parameter's full shape."""
        return self.meta.shape

    @property
    def is_dense(self) -> bool:
        """Whether every word is sent."""
        return self.indices is None

    @property
    def num_box_words(self) -> int:
        """Words of the box, or of the whole parameter."""
        if self.box is None:
            return self.meta.num_words
        return int(np.prod([hi - lo for lo, hi in self.box], dtype=object)) * self.meta.row.words_per_element

    @property
    def num_changed(self) -> int:
        """Words that this patch sends."""
        return int(self.values.size)

    def check_indices(self) -> None:
        """Check order and range in O(changes): strictly ascending, so unique, in `[0, num_words)`.

        Raises:
            PatchError: naming the first position that breaks the policy.
        """
        indices = self.indices
        if indices is None or indices.size == 0:
            return
        first, last = int(indices[0]), int(indices[-1])
        if first < 0 or last >= self.meta.num_words:
            raise PatchError(
                "an index lies outside the parameter",
                parameter=self.name,
                expected=f"0 to {self.meta.num_words - 1}",
                found=first if first < 0 else last,
            )
        steps = indices[1:] <= indices[:-1]
        if steps.any():
            at = int(steps.argmax())
            raise PatchError(
                "indices are not strictly ascending",
                parameter=self.name,
                expected=f"more than {indices[at]} at {at + 1}",
                found=int(indices[at + 1]),
            )


@dataclass(frozen=True, slots=True, eq=False)
class WeightUpdate:
    """All patches from `base_version` to `target_version`, with the digests that make them checkable.

    Attributes:
        run_id: the lineage of versions that this belongs to.
        epoch: which writer of that run made it.
        base_version: the version it applies to; None for a seed, which needs no base.
        target_version: the version it makes; above `base_version` (equal for a repair of damaged parameters).
        base_digest: state digest that the base must have; None for a seed.
        target_digest: state digest of the result.
        table_digest: of the parameter table after the update.
        patches: in header order. A parameter without a patch did not change.
        optimizer_step: the trainer's own counter; metadata only.
        removed: names that exist in the base only.
        aliases: alias -> name, of tied parameters.

    Raises:
        InputError: versions or epoch out of order; other bits under the same version; a (name, part) twice.
    """

    run_id: str
    epoch: int
    base_version: int | None
    target_version: int
    base_digest: str | None
    target_digest: str
    table_digest: str
    patches: tuple[SparseWeightPatch, ...]
    optimizer_step: int | None = None
    removed: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.base_version is None) != (self.base_digest is None):
            raise InputError("a base version and its digest go together", version=self.target_version)
        floor = 0 if self.base_version is None else self.base_version
        if floor < 0 or self.epoch < 0 or self.target_version < floor:
            raise InputError(
                "epochs and versions count from 0 and only go up",
                expected=f"a version of at least {max(floor, 0)}",
                found=f"version {self.target_version}, base {self.base_version}, epoch {self.epoch}",
            )
        if self.base_version == self.target_version and self.base_digest != self.target_digest:
            raise InputError(
                "a version never stands for other bits",
                version=self.target_version,
                expected=self.base_digest,
                found=self.target_digest,
                hint="Publish them as a new version.",
            )
        seen = {(patch.name, patch.part) for patch in self.patches}
        if len(seen) != len(self.patches):
            raise InputError("a parameter part has two patches", version=self.target_version)

    @property
    def num_changed(self) -> int:
        """Words sent, over all patches."""
        return sum(patch.num_changed for patch in self.patches)

    @property
    def is_seed(self) -> bool:
        """Whether this needs no base: every parameter is sent whole."""
        return self.base_version is None

    def sent_whole(self) -> frozenset[str]:
        """Return the names of parameters whose every word is sent, in one patch or in parts that are disjoint."""
        num_words: dict[str, int] = {}
        for patch in self.patches:
            if patch.is_dense:
                num_words[patch.name] = num_words.get(patch.name, 0) + patch.values.size
        metas = {patch.name: patch.meta for patch in self.patches}
        return frozenset(name for name, num in num_words.items() if num == metas[name].num_words)

    def check_covers(self, table: ParameterTable) -> None:
        """Check that a seed sends every word of every parameter of the table.

        Raises:
            InputError: naming the first parameter that is not sent whole.
        """
        if not self.is_seed:
            return
        whole = self.sent_whole()
        missing = next((meta.name for meta in table if meta.name not in whole), None)
        if missing is not None:
            raise InputError("a seed must send every parameter whole", parameter=missing, version=self.target_version)
