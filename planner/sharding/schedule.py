"""How a planned collective is carried out: whole, as a ring of permutes, in pieces, or as two.

The layouts on both sides stay what they are; what changes is what can run meanwhile. So it is data
on a tensor (`"schedule": {"y": "ring"}` on the result of an operator) and not another graph:

    whole           one collective (default)
    stay            no operator that uses this tensor moves it; it may be cut where it holds copies
    gather          operands come by all-gather, and no piece goes to one rank only: every rank then sees all of them
    ring            an all-gather that an operator needs, as n-1 permutes of the piece held, each used on arrival;
                    several operands with equal pieces travel in one buffer, as keys and values do in ring attention
    chunked:k       k collectives of a k-th each
    scatter_gather  an all-reduce as reduce-scatter and all-gather
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.sharding.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, PERMUTE, REDUCE_SCATTER, Collective
from topology.errors import BadInput

KINDS = ("whole", "stay", "gather", "ring", "chunked", "scatter_gather")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    kind: str = "whole"
    pieces: int = 1

    @property
    def without(self) -> frozenset[str]:
        """Primitives that operands are not to be moved with."""
        if self.kind == "stay":
            return frozenset({ALL_GATHER, ALL_TO_ALL, ALL_REDUCE, REDUCE_SCATTER, PERMUTE})
        return frozenset({ALL_TO_ALL, PERMUTE}) if self.kind in {"gather", "ring"} else frozenset()


def schedule_of(name: str, value: Any, tensors: Container[str]) -> Schedule:
    """Return the schedule that a case gives the tensor `name`. Raises BadInput."""
    if name not in tensors:
        raise BadInput(f"{name[:60]!r} has a schedule, and no operator makes it", remedy="name a tensor of the graph")
    kind, colon, pieces = value.partition(":") if isinstance(value, str) else ("", "", "")
    if kind not in KINDS or bool(colon) != (kind == "chunked") or (colon and not 1 < _number(pieces) <= 4096):
        raise BadInput(
            f"{name}: {str(value)[:40]!r} is no schedule",
            remedy=f"{', '.join(KINDS[:-2])}, chunked:2 (or more) or scatter_gather",
        )
    return Schedule(kind=kind, pieces=_number(pieces) if colon else 1)


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0


def carried_out(collectives: Sequence[Collective], schedule: Schedule) -> tuple[Collective, ...]:
    """Return what runs in place of the collectives of one tensor. Raises BadInput where a piece would be uneven."""
    match schedule.kind:
        case "ring":
            return _ring(collectives)
        case "chunked":
            return tuple(piece for one in collectives for piece in _chunked(one, schedule.pieces))
        case "scatter_gather":
            return tuple(part for one in collectives for part in _scatter_gather(one))
    return tuple(collectives)


def _ring(collectives: Sequence[Collective]) -> tuple[Collective, ...]:
    gathers = [one for one in collectives if one.kind == ALL_GATHER]
    if not gathers:
        raise BadInput("there is no all-gather that a ring could replace", remedy="a schedule of whole")
    out: list[Collective] = []
    rest = list(collectives)
    while rest:
        first = rest.pop(0)
        if first.kind != ALL_GATHER:
            out.append(first)
            continue
        alike = [
            o
            for o in rest
            if (o.kind, o.axes, o.local_in, o.dtype) == (ALL_GATHER, first.axes, first.local_in, first.dtype)
        ]
        rest = [o for o in rest if o not in alike]
        packed = (1 + len(alike), *first.local_in) if alike else first.local_in
        together = ", ".join(dict.fromkeys([first.tensor, *(o.tensor for o in alike)]))
        step = replace(first, kind=PERMUTE, local_in=packed, local_out=packed, tensor=together, note="ring")
        out += [step] * (first.group - 1)
    return tuple(out)


def _chunked(one: Collective, pieces: int) -> tuple[Collective, ...]:
    both = zip(one.local_in, one.local_out, strict=True)
    for dim, (before, after) in enumerate(both):
        if before % pieces == 0 and after % pieces == 0:
            small = replace(
                one,
                local_in=(*one.local_in[:dim], before // pieces, *one.local_in[dim + 1 :]),
                local_out=(*one.local_out[:dim], after // pieces, *one.local_out[dim + 1 :]),
                note=f"1/{pieces}",
            )
            return (small,) * pieces
    raise BadInput(f"{one.tensor} does not divide into {pieces} pieces", remedy="fewer pieces")


def _scatter_gather(one: Collective) -> tuple[Collective, ...]:
    if one.kind != ALL_REDUCE:
        return (one,)
    for dim, size in enumerate(one.local_in):
        if size % one.group == 0:
            piece = (*one.local_in[:dim], size // one.group, *one.local_in[dim + 1 :])
            return (replace(one, kind=REDUCE_SCATTER, local_out=piece), replace(one, kind=ALL_GATHER, local_in=piece))
    raise BadInput(f"no dim of {one.tensor} divides by the group of {one.group}", remedy="a schedule of whole")
