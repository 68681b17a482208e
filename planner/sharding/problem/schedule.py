"""How a planned collective is executed: as one, as a ring of permutes, in chunks, or as two collectives.

The layouts before and after stay the same; only what can overlap with it changes. A schedule is therefore an attribute
of a tensor (`"schedule": {"y": "ring"}`, where y is the result of an operator) and not another graph:

    whole           one collective (default)
    stay            no consumer of this tensor may redistribute it, except by slicing a replicated one
    gather          operands are redistributed without all-to-all and permute, so that every rank sees all pieces
    ring            an all-gather of an operand becomes n-1 permutes, and each shard is used when it arrives; operands
      of
                    equal local shape travel in one buffer, as keys and values do in ring attention
    chunked:k       k collectives of a k-th each
    scatter_gather  an all-reduce becomes a reduce-scatter and an all-gather
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.sharding.layouts.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, PERMUTE, REDUCE_SCATTER, Collective
from topology.errors import BadInput

KINDS = ("whole", "stay", "gather", "ring", "chunked", "scatter_gather")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    kind: str = "whole"
    pieces: int = 1

    @property
    def excluded_kinds(self) -> frozenset[str]:
        """Primitives that must not be used to redistribute operands."""
        if self.kind == "stay":
            return frozenset({ALL_GATHER, ALL_TO_ALL, ALL_REDUCE, REDUCE_SCATTER, PERMUTE})
        return frozenset({ALL_TO_ALL, PERMUTE}) if self.kind in {"gather", "ring"} else frozenset()


def parse_schedule(name: str, value: Any, tensors: Container[str]) -> Schedule:
    """Parse the schedule of the tensor `name`. Raises BadInput."""
    if name not in tensors:
        raise BadInput(f"{name[:60]!r} has a schedule, and no operator makes it", remedy="name a tensor of the graph")
    kind, colon, pieces = value.partition(":") if isinstance(value, str) else ("", "", "")
    if kind not in KINDS or bool(colon) != (kind == "chunked") or (colon and not 1 < _parse_count(pieces) <= 4096):
        raise BadInput(
            f"{name}: {str(value)[:40]!r} is no schedule",
            remedy=f"{', '.join(KINDS[:-2])}, chunked:2 (or more) or scatter_gather",
        )
    return Schedule(kind=kind, pieces=_parse_count(pieces) if colon else 1)


def _parse_count(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0


def apply_schedule(collectives: Sequence[Collective], schedule: Schedule) -> tuple[Collective, ...]:
    """Return the collectives that run instead of `collectives`. Raises BadInput if chunks would be uneven."""
    match schedule.kind:
        case "ring":
            return _ring(collectives)
        case "chunked":
            return tuple(piece for collective in collectives for piece in _chunked(collective, schedule.pieces))
        case "scatter_gather":
            return tuple(part for collective in collectives for part in _scatter_gather(collective))
    return tuple(collectives)


def _ring(collectives: Sequence[Collective]) -> tuple[Collective, ...]:
    gathers = [collective for collective in collectives if collective.kind == ALL_GATHER]
    if not gathers:
        raise BadInput("there is no all-gather that a ring could replace", remedy="a schedule of whole")
    out: list[Collective] = []
    rest = list(collectives)
    while rest:
        first = rest.pop(0)
        if first.kind != ALL_GATHER:
            out.append(first)
            continue
        same_shape = [
            o
            for o in rest
            if (o.kind, o.axes, o.local_in, o.dtype) == (ALL_GATHER, first.axes, first.local_in, first.dtype)
        ]
        rest = [o for o in rest if o not in same_shape]
        packed = (1 + len(same_shape), *first.local_in) if same_shape else first.local_in
        together = ", ".join(dict.fromkeys([first.tensor, *(o.tensor for o in same_shape)]))
        step = replace(first, kind=PERMUTE, local_in=packed, local_out=packed, tensor=together, note="ring")
        out += [step] * (first.group - 1)
    return tuple(out)


def _chunked(collective: Collective, pieces: int) -> tuple[Collective, ...]:
    both = zip(collective.local_in, collective.local_out, strict=True)
    for dim, (before, after) in enumerate(both):
        if before % pieces == 0 and after % pieces == 0:
            small = replace(
                collective,
                local_in=(*collective.local_in[:dim], before // pieces, *collective.local_in[dim + 1 :]),
                local_out=(*collective.local_out[:dim], after // pieces, *collective.local_out[dim + 1 :]),
                note=f"1/{pieces}",
            )
            return (small,) * pieces
    raise BadInput(f"{collective.tensor} does not divide into {pieces} pieces", remedy="fewer pieces")


def _scatter_gather(collective: Collective) -> tuple[Collective, ...]:
    if collective.kind != ALL_REDUCE:
        return (collective,)
    for dim, size in enumerate(collective.local_in):
        if size % collective.group == 0:
            piece = (*collective.local_in[:dim], size // collective.group, *collective.local_in[dim + 1 :])
            return (
                replace(collective, kind=REDUCE_SCATTER, local_out=piece),
                replace(collective, kind=ALL_GATHER, local_in=piece),
            )
    raise BadInput(
        f"no dim of {collective.tensor} divides by the group of {collective.group}", remedy="a schedule of whole"
    )
