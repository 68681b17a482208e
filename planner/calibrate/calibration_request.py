"""What a calibration can measure, and which of it a profile lacks: operators of plans, from the runtime's
description.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from planner.calibrate.planned_step import PlannedStep
from simulator.calibration.items import CollectiveItem, ContentionItem, LayerItem, OperatorItem, OverlapItem
from simulator.calibration.kernel_samples import operators_of
from simulator.config.model import Model
from topology import codec
from topology.profile.profile import Profile
from topology.units import MIB

T = TypeVar("T")

# Layers whose shapes are measured when no plan is named: (hidden, heads, key/value heads, head width, feed-forward
# width).
TYPICAL_LAYERS = (
    (4096, 32, 8, 128, 14336),
    (2048, 32, 8, 64, 8192),
    (5120, 40, 40, 128, 13824),
    (3072, 24, 8, 128, 8192),
    (8192, 64, 8, 128, 28672),
)
VOCABULARY = 128256
COPIES = tuple(2**power for power in (16, 18, 20, 22, 24, 26, 28, 30))

# Sizes of collectives measured at the same time as compute: those of layers that FSDP gathers, 100 MB to 1 GB.
CONTENTION = tuple(
    ContentionItem(compute=compute, shape=shape, dtype=dtype, op=op, nbytes=nbytes)
    for op, nbytes in (("all_gather", 436 * 10**6), ("reduce_scatter", 872 * 10**6), ("all_reduce", 100 * MIB))
    for compute, shape, dtype in (
        ("matmul", {"m": 8192, "n": 14336, "k": 4096}, "bfloat16"),
        ("matmul", {"m": 4096, "n": 4096, "k": 4096}, "bfloat16"),
        ("copy", {"bytes": 2**28}, "bfloat16"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The executor's measurements, the most valuable first in each list.

    `layers` are runs of one and two layers (`planner.calibrate.layer_runs`).
    """

    operators: tuple[OperatorItem, ...] = ()
    contention: tuple[ContentionItem, ...] = ()
    layers: tuple[LayerItem, ...] = ()
    overlap: tuple[OverlapItem, ...] = ()
    collectives: tuple[CollectiveItem, ...] = ()

    @property
    def empty(self) -> bool:
        return self == Request()


def collective_item(op: str, ranks: int, sizes: Iterable[int]) -> CollectiveItem:
    """Return a collective to measure at `sizes` in bytes, rounded down so that all ranks have equal whole numbers of
    elements.
    """
    whole = ranks * 256
    rounded = {max(whole, size // whole * whole) for size in sizes}
    return CollectiveItem(op=op, ranks=ranks, sizes=tuple(sorted(rounded)))


def copies() -> Request:
    """Return plain memory copies of all sizes, the reference for kernels that are not measured."""
    return Request(operators=tuple(_copies()))


def one_layer(shape: tuple[int, int, int, int, int], vocabulary: int) -> Model:
    """Return a model of one layer; `shape` is (hidden, heads, key/value heads, head width, feed-forward width)."""
    hidden, heads, kv_heads, head_dim, ffn = shape
    return Model(
        name=f"layer of width {hidden}",
        family="llama",
        layers=1,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        vocab=vocabulary,
    )


def missing_from(request: Request, profile: Profile | None) -> Request:
    """Return the part of `request` of which the profile has no valid sample."""
    if profile is None:
        return request
    known = {sample.key for sample in profile.operators if not sample.invalid and sample.regime == "sustained"}
    pairs = {sample.key for sample in profile.contention if not sample.invalid}
    sites = {sample.key for sample in profile.overlap if not sample.invalid}
    ran = {(_layer_key(s.model, s.plan, s.workload, s.runtime), s.layers) for s in profile.layers if not s.invalid}

    def have_layer(one: LayerItem) -> bool:
        key = _layer_key(*map(codec.to_builtins, (one.model, one.plan, one.workload, one.runtime)))
        return all((key, count) in ran for count in one.counts)

    return replace(
        request,
        operators=tuple(one for one in request.operators if _operator_key(one) not in known),
        contention=tuple(one for one in request.contention if not any(_same_pair(one, key) for key in pairs)),
        layers=tuple(one for one in request.layers if not have_layer(one)),
        overlap=tuple(one for one in request.overlap if one.key not in sites),
        collectives=tuple(
            replace(one, sizes=sizes) for one in request.collectives if (sizes := _sizes_missing(one, profile))
        ),
    )


def _sizes_missing(one: CollectiveItem, profile: Profile) -> tuple[int, ...]:
    """Return the sizes of a collective that are not yet measured. A size that ranks share evenly is timed unchanged."""
    known = {s.nbytes for s in profile.collectives if (s.op, s.ranks, s.nodes) == (one.op, one.ranks, 1)}
    return tuple(size for size in one.sizes if size not in known)


def plan_operators(question: PlannedStep) -> list[OperatorItem]:
    """Return the compute operators of one rank of the plan in a step, from its runtime's description."""
    return operators_of(question.model, question.plan, question.workload, question.runtime)


# --- typical layers -------------------------------------------------------------------------------------------------


def _copies() -> Iterator[OperatorItem]:
    for nbytes in reversed(COPIES):
        yield OperatorItem(kind="move", name="copy", shape={"bytes": nbytes}, dtype="bfloat16")


def unique(found: Iterable[T]) -> list[T]:
    """Return items without duplicates."""
    return list({codec.fingerprint(one): one for one in found}.values())


def _operator_key(one: OperatorItem) -> tuple[Any, ...]:
    return one.kind, one.name, tuple(sorted(one.shape.items())), one.dtype, one.direction, one.runtime, "sustained"


def _layer_key(model: codec.JsonObject, *rest: codec.JsonObject) -> str:
    """Return a key that is equal for runs that differ only in their number of layers, decoded or as plain data."""
    return codec.fingerprint(({name: value for name, value in model.items() if name != "layers"}, *rest))


def _same_pair(one: ContentionItem, key: tuple[Any, ...]) -> bool:
    compute, shape, dtype, op, _, nbytes = key
    wanted = one.compute, tuple(sorted(one.shape.items())), one.dtype, one.op, one.nbytes
    return wanted == (compute, shape, dtype, op, nbytes)


def shrink(request: Request) -> Request:
    """Return a few tiny measurements of each kind, to exercise the code path without a GPU."""

    def shrunk(shape: Mapping[str, int], kind: str = "") -> dict[str, int]:
        if kind == "attention":
            return {"b": 1, "a": 4, "kv": 2, "s": 16, "S": 16, "d": 16}
        small = {axis: max(2, min(size, 64)) for axis, size in shape.items()}
        if "q" in small:
            small |= {"q": 64, "kv": 32} | {axis: size for axis, size in (("d", 16), ("ranks", 2)) if axis in small}
        return small

    def shrunk_layers(one: LayerItem) -> LayerItem:
        """A layer of minimal size with the same parallelism."""
        moe = one.model.moe and replace(one.model.moe, experts=4, experts_per_token=2, ffn=32)
        model = replace(one.model, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=64, vocab=64, moe=moe)
        return replace(one, model=model, workload=replace(one.workload, seq_len=16 * one.plan.cp))

    first = {
        (one.kind, one.name, one.direction): replace(one, shape=shrunk(one.shape, one.kind))
        for one in reversed(request.operators)
    }
    sites = {
        one.operation: replace(one, ranks=2, rows=16, depth=8, dtype="float32", columns=(8,) * len(one.columns))
        for one in request.overlap[:2]
    }
    return replace(
        request,
        operators=tuple(first.values()),
        contention=tuple(
            replace(one, shape=shrunk(one.shape), dtype="float32", nbytes=4096) for one in request.contention[:1]
        ),
        layers=tuple(shrunk_layers(one) for one in request.layers[:1]),
        overlap=tuple(sites.values()),
        collectives=tuple(collective_item(one.op, 2, (2**10, 2**14)) for one in request.collectives[:2]),
    )
