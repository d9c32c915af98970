"""Derives the places of a tensor in one kind of file from its role and the family's `FileForm`.

Knows names, fused tensors, row orders and the storage of experts. Knows no files and no values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from exl_core.arch.names import FileForm, Fused
from exl_core.arch.places import Place, RowPermutation
from exl_core.errors import UnsupportedModelError


class Owner(NamedTuple):
    """Layer of a tensor, if it has one, and the expert of it that the tensor belongs to."""

    layer: int | None = None
    expert: int | None = None
    experts: int = 0


NOWHERE = Owner()


class Wanted(NamedTuple):
    """The weight or the bias of a role, as `suffix` says. `heads` are those of its rows, with the
    rows of each that files may store as interleaved RoPE pairs. `stacked`, if not 0, is the number
    of matrices that the stored tensor has, one after the other."""

    role: str
    suffix: str
    num_rows: int
    heads: RowPermutation | None
    is_norm: bool
    stacked: int = 0


def places_of(
    wanted: Wanted, num_rows: Mapping[str, int], form: FileForm, owner: Owner
) -> tuple[Place, ...]:
    """Possible places, fused tensors first. `num_rows`: rows of all roles of the layer."""
    role, suffix, heads, layer = wanted.role, wanted.suffix, wanted.heads, owner.layer
    addend = form.norm_addend if wanted.is_norm else 0.0
    permutation = heads if form.is_interleaved and heads and heads.rotary_dim else None
    places = []
    for fused in form.fused:
        is_here = role in fused.roles and num_rows.keys() >= set(fused.roles)
        if not is_here or layer is None:
            continue
        tail = _ending(suffix, is_bare=fused.is_bare)
        for prefix in form.prefixes(layer):
            name = f"{prefix}{fused.name}{tail}"
            place = _fused_place(wanted, name, fused, num_rows, permutation)
            places.append(_of_expert(_turned(place, fused.name, suffix, form), owner))
    for stem in form.stems(role):
        for prefix in _head_prefixes(form) if role == "head" else form.prefixes(layer):
            name = prefix + stem + ending(role, stem, suffix, form)
            place = Place(name, 0, wanted.num_rows, permutation, addend)
            place = replace(place, is_decay=role in form.decays)
            places.append(_of_expert(_turned(place, stem, suffix, form), owner))
    if wanted.stacked:
        places = [replace(place, experts=wanted.stacked) for place in places]
    return tuple(places)


def canonical_name(role: str, form: FileForm, owner: Owner) -> str:
    """Canonical name of a role's tensors, without the ending."""
    if role not in form.names:
        raise UnsupportedModelError(f"the family has no name for the tensor of role {role!r}")
    prefix = "" if role == "head" else form.prefixes(owner.layer)[0]
    name = prefix + form.names[role]
    return name if owner.expert is None else name.format(owner.expert)


def ending(role: str, stem: str, suffix: str, form: FileForm) -> str:
    """End of the name of a role's weight or bias, after `stem`."""
    return _ending(suffix, is_bare=role in form.bare or stem in form.bare)


def _ending(suffix: str, *, is_bare: bool) -> str:
    if not is_bare:
        return f".{suffix}"
    return "" if suffix == "weight" else f"_{suffix}"


def _turned(place: Place, stem: str, suffix: str, form: FileForm) -> Place:
    """The place of a tensor that the file may store transposed."""
    if suffix != "weight":
        return place
    is_transposed, may_be = stem in form.transposed, stem in form.transposable
    return replace(place, is_transposed=is_transposed, may_be_transposed=may_be)


def _of_expert(place: Place, owner: Owner) -> Place:
    """The place of an expert's matrix, in a tensor of its own or in that of all experts."""
    if owner.expert is None:
        return place
    return place_of_expert(place, owner.expert, owner.experts)


def place_of_expert(place: Place, expert: int, experts: int) -> Place:
    """The place of one of `experts` experts, from a place without an expert: in a tensor of its
    own, whose name has a `{}` for the index, or in the tensor of all experts."""
    name, first, rows, stacked = place.name, place.first_row, place.num_rows, place.experts
    if "{}" in name:
        name = name.replace("{}", str(expert))
    else:
        first, rows, stacked = expert * rows + first, experts * rows, experts
    # The constructor, because `dataclasses.replace` takes three times as long.
    return Place(
        name,
        first,
        rows,
        place.permutation,
        place.addend,
        stacked,
        place.is_transposed,
        place.may_be_transposed,
        place.is_decay,
    )


def _fused_place(
    wanted: Wanted,
    name: str,
    fused: Fused,
    num_rows: Mapping[str, int],
    permutation: RowPermutation | None,
) -> Place:
    """The rows of a role in a tensor that consists of several."""
    rows = [num_rows[role] for role in fused.roles]
    before = fused.roles.index(wanted.role)
    if fused.is_interleaved:
        turns = RowPermutation(rows[before], head_dim=1, rotary_dim=0, stride=len(rows))
        return Place(name, before, sum(rows), turns)
    if fused.is_by_head:
        assert wanted.heads is not None, "only heads are stored so"
        step = sum(rows) // wanted.heads.num_heads
        rotated = 0 if permutation is None else permutation.rotary_dim
        by_head = replace(wanted.heads, rotary_dim=rotated, step=step)
        return Place(name, sum(rows[:before]) // wanted.heads.num_heads, sum(rows), by_head)
    if not fused.is_grouped:
        return Place(name, sum(rows[:before]), sum(rows), permutation)
    assert wanted.heads is not None, "only heads are stored in groups"
    head_dim = wanted.heads.head_dim
    groups = num_rows["k"] // head_dim
    sizes = [count // (groups * head_dim) for count in rows]  # heads of each role in a group
    grouped = replace(
        wanted.heads,
        rotary_dim=0 if permutation is None else permutation.rotary_dim,
        group=sizes[before],
        stride=sum(sizes),
    )
    return Place(name, sum(sizes[:before]) * head_dim, sum(rows), grouped)


def _head_prefixes(form: FileForm) -> tuple[str, ...]:
    """Prefixes of the head, which is beside the `model.` of a language model."""
    inner = [root.removesuffix("model.") for root in form.roots if root.endswith(".model.")]
    return ("", *inner)
