"""An operator is a formula over named axes; its work on a rank follows from the axis sizes.

    matmul = "t h, h q -> t q"          a matrix product, batched over axes that all three share
    reads = ["u h"], writes = ["u h"]   a kernel that only moves memory
    attention = "flash"                 a fused attention kernel over the axes b s j a d
    collective = "all_gather", tensor = "t h", over = "tp"
                                        a collective; "ring" passes a tensor's shards round its ranks, "pass_back" sends
                                        a gradient to the next rank in the backward pass
    waits = true                        the host reads a value from the device, and waits for it

A tensor is its axes, optionally with a dtype: `"t v:f32"`; without one it is in the compute dtype. Axis sizes are
numbers or columns of a plan table, so the same description costs one plan or ten thousand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache

import numpy as np

from simulator.columns.plan_table import Floats, PlanTable
from simulator.config.runtime import ELEMENT_BYTES
from topology.errors import BadInput

# Dtype names of descriptions; `compute`, `param` and `reduce` follow the runtime's configuration.
FIXED_DTYPE_BYTES = {name: float(ELEMENT_BYTES[name]) for name in ("f32", "bf16", "f16", "i64")} | {
    "mask": float(ELEMENT_BYTES["bool"])
}


class WorkKind(StrEnum):
    MATMUL = "matmul"
    ATTENTION = "attention"
    MOVE = "move"
    COLLECTIVE = "collective"
    WAIT = "wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSpec:
    """One operator of a runtime description: its forward pass, the tensors it saves, and how its backward pass differs.

    `when` lists features of the model, plan or runtime that must hold (`gated`, `!sp`). `saves` are tensors autograd
    keeps for the backward pass. A `low` product has operands in the type `low`, a `low` collective gathers in it.
    `units` are what a kernel's time is proportional to where memory does not limit it: rows, or elements, of these axes
    by kind (`unit_s` of efficiency.toml), in the forward and the backward pass. `scattered` operators move rows to
    positions given by an index. A matmul's backward pass is its two products; other operators state `backward_reads`
    and `backward_writes`, and a collective `backward_tensors` where it moves other tensors backward; one of integers
    has no `gradient`. `hidden_by` names the operator, earlier in the block, whose kernels a collective runs alongside;
    `site` is the name of a tensor-parallel collective in plans (`simulator.config.overlap_sites`). In forward passes an
    operator that `waits` makes the host wait for everything it has launched. `launches` are kernels (and host
    dispatches) forward, `backward_launches` backward; an operator without reads and writes does nothing forward.
    `allocates` lists the tensors that its forward pass allocates, if these are not what it `writes` since some of its
    kernels work in place; `backward_allocates` those of its backward pass, none if it overwrites the incoming gradient.
    A product whose weight is `packed` reads a copy of it (its `reads`), which a `transient` operator makes and which is
    freed after the product; products of an `adapter` come in addition to those of the model. `replayed`: a CUDA graph
    launches it together with the operator before it. For each expert but the first the host issues `by_expert` more
    launches a kernel, and works for as long as `around_expert` launches forward and backward; kernels that run
    `one_by_one` run once per expert. A product with `again` is first computed again in its backward pass.
    """

    name: str
    when: tuple[str, ...] = ()
    matmul: str = ""
    attention: str = ""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    backward_reads: tuple[str, ...] = ()
    backward_writes: tuple[str, ...] = ()
    collective: str = ""
    tensor: str = ""
    backward_tensors: tuple[str, ...] = ()
    gradient: bool = True
    over: str = ""
    site: str = ""
    hidden_by: str = ""
    saves: tuple[str, ...] = ()
    allocates: tuple[str, ...] | None = None
    backward_allocates: tuple[str, ...] | None = None
    weight_gradient: bool = True
    weight_gradient_dtype: str = "compute"
    wide_weight_gradient: bool = False  # computed in 16 bits where the other products are in a low type
    low: bool = False
    scattered: bool = False
    waits: bool = False
    packed: bool = False
    transient: bool = False
    adapter: bool = False
    units: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    backward_units: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    launches: float = 1.0
    backward_launches: float = 1.0
    replayed: bool = False
    by_expert: float = 0.0
    around_expert: tuple[float, float] = (0.0, 0.0)
    one_by_one: bool = False
    again: bool = False

    @property
    def weight(self) -> tuple[str, ...]:
        """The axes of the matrix that it multiplies with; none for a product of activations, or no product."""
        return _weight_axes(self.matmul) if self.matmul else ()


def active_rows(operator: OperatorSpec, table: PlanTable) -> Floats:
    """Return 1 where the operator runs under the plan, else 0."""
    active = np.ones(len(table))
    for condition in operator.when:
        met = table.conditions[condition.removeprefix("!")]
        active = active * (~met if condition.startswith("!") else met)
    return active


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of one kernel on one rank: sizes as plan-table columns. Collectives carry nccl-tests bytes."""

    kind: WorkKind
    name: str
    flops: Floats | float = 0.0
    bytes: Floats | float = 0.0
    batch: Floats | float = 1.0
    m: Floats | float = 0.0
    n: Floats | float = 0.0
    k: Floats | float = 0.0
    collective: str = ""
    over: str = ""
    launches: float = 1.0
    backward: bool = False
    scattered: bool = False  # moves rows to positions given by an index
    added_bytes: Floats | float = 0.0  # of a stored tensor that the product adds its result to
    units: Mapping[str, Floats | float] = field(default_factory=dict)  # see `OperatorSpec`
    low: bool = False  # operands have a low type, the result has 16 bits
    parts: Floats | float = 1.0  # attention goes through the keys of so many ranks one after another
    grouped_rows: Floats | float = 0.0  # in grouped products of experts, the rows of each expert; 0 for all others
    one_kernel: bool = False  # one kernel multiplies all experts


DtypeBytes = Callable[[str], float]
# Axes along which tokens lie, or their heads: a tensor without one is a weight.
TOKEN_AXES = frozenset(["b", "s", "S", "j", "w", "t", "u", "x", "r", "a"])

# The backward of a collective is its transpose (Korthikanti et al., arXiv 2205.05198, section 4.2.2).
TRANSPOSED = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all",
    "ring": "ring",  # keys and values in the forward pass; in the backward pass their gradients too
    "all_reduce": "",  # forward reduction of a row-parallel product: its backward is the identity
    "pass_back": "send_recv",  # nothing forward; gradients of gathered tensors are sent back
    "copy": "all_reduce",  # the identity forward, into a column-parallel region; its backward pass is a sum
}

BACKWARD_ONLY = frozenset({"copy", "pass_back"})  # collectives without communication in the forward pass


def tensor_bytes(tensor: str, sizes: Mapping[str, Floats], dtype_bytes: DtypeBytes) -> Floats:
    """Return the bytes of a tensor annotation such as `"t h"` or `"t v:f32"`."""
    axes, _, dtype = tensor.partition(":")
    return product(axes.split(), sizes) * dtype_bytes(dtype or "compute")


@lru_cache(maxsize=1 << 10)
def _factor(axis: str) -> tuple[float, str]:
    """Return the factor and the name of an axis such as `2*f`."""
    factor, _, name = axis.rpartition("*")
    return float(factor) if factor else 1.0, name


@lru_cache(maxsize=1 << 10)
def _weight_axes(matmul: str) -> tuple[str, ...]:
    right = parse_matmul(matmul)[1]
    return () if TOKEN_AXES & set(right) else tuple(right)


def product(axes: Sequence[str], sizes: Mapping[str, Floats]) -> Floats:
    total = sizes["one"]
    for axis in axes:
        factor, name = _factor(axis)
        if name not in sizes:
            raise BadInput(
                f"runtime description uses unknown axis {name!r}", why=f"known here: {', '.join(sorted(sizes))}"
            )
        total = total * sizes[name] * factor
    return total


def forward_work(spec: OperatorSpec, sizes: Mapping[str, Floats], dtype_bytes: DtypeBytes) -> list[Work]:
    """Return the kernels of one operator's forward pass."""
    if spec.matmul:
        left, right, out = parse_matmul(spec.matmul)
        return [
            _matmul(
                spec.name,
                left,
                right,
                out,
                sizes,
                dtype_bytes,
                launches=spec.launches,
                low=spec.low,
                one_kernel=not spec.by_expert,
            )
        ]
    if spec.attention:
        return [_attention(spec, sizes, dtype_bytes, backward=False)]
    if spec.collective:
        return [] if spec.collective in BACKWARD_ONLY else [_collective(spec.collective, spec, sizes, dtype_bytes)]
    if spec.waits:
        return [Work(kind=WorkKind.WAIT, name=spec.name, launches=spec.launches)]
    if not spec.reads and not spec.writes:
        return []  # an operator of the backward pass only
    moved = sum((tensor_bytes(x, sizes, dtype_bytes) for x in (*spec.reads, *spec.writes)), np.zeros(1))
    return [
        Work(
            kind=WorkKind.MOVE,
            name=spec.name,
            bytes=moved,
            launches=spec.launches,
            scattered=spec.scattered,
            units=_units(spec.units, sizes),
        )
    ]


def backward_work(spec: OperatorSpec, sizes: Mapping[str, Floats], dtype_bytes: DtypeBytes) -> list[Work]:
    """Return the kernels of one operator's backward pass."""
    if spec.matmul:
        left, right, out = parse_matmul(spec.matmul)
        low = spec.low
        work = [replace(one, backward=True) for one in forward_work(spec, sizes, dtype_bytes) if spec.again]
        work.append(
            _matmul(
                f"{spec.name}.dgrad",
                out,
                right,
                left,
                sizes,
                dtype_bytes,
                backward=True,
                low=low,
                one_kernel=not spec.by_expert,
            )
        )
        if spec.weight_gradient:
            stored = product(right, sizes) * dtype_bytes(spec.weight_gradient_dtype)
            wgrad = _matmul(
                f"{spec.name}.wgrad",
                left,
                out,
                right,
                sizes,
                dtype_bytes,
                backward=True,
                extra=stored - product(right, sizes) * dtype_bytes("compute"),
                low=low and not spec.wide_weight_gradient,
                one_kernel=not spec.by_expert,
            )
            work.append(wgrad if spec.weight_gradient_dtype == "compute" else replace(wgrad, added_bytes=stored))
        return work
    if spec.attention:
        return [_attention(spec, sizes, dtype_bytes, backward=True)]
    if spec.collective:
        kind = TRANSPOSED[spec.collective] if spec.gradient else ""
        return [_collective(kind, spec, sizes, dtype_bytes, backward=True)] if kind else []
    if not spec.backward_reads and not spec.backward_writes:
        return []
    moved = sum(
        (tensor_bytes(x, sizes, dtype_bytes) for x in (*spec.backward_reads, *spec.backward_writes)), np.zeros(1)
    )
    return [
        Work(
            kind=WorkKind.MOVE,
            name=f"{spec.name}.backward",
            bytes=moved,
            launches=spec.backward_launches,
            backward=True,
            scattered=spec.scattered,
            units=_units(spec.backward_units, sizes),
        )
    ]


def _units(units: Mapping[str, tuple[str, ...]], sizes: Mapping[str, Floats]) -> dict[str, Floats | float]:
    return {kind: sum((product(axes.split(), sizes) for axes in tensors), 0.0) for kind, tensors in units.items()}


def parse_matmul(annotation: str) -> tuple[list[str], list[str], list[str]]:
    """Split `"t h, h q -> t q"` into the axes of its operands and result. Raises BadInput when malformed."""
    inputs, arrow, out = annotation.partition("->")
    left, comma, right = inputs.partition(",")
    if not (arrow and comma):
        raise BadInput(f"matmul annotation {annotation!r} is malformed", remedy='write it as "t h, h q -> t q"')
    return left.split(), right.split(), out.split()


def _matmul(
    name: str,
    left: list[str],
    right: list[str],
    out: list[str],
    sizes: Mapping[str, Floats],
    dtype_bytes: DtypeBytes,
    *,
    backward: bool = False,
    launches: float = 1.0,
    extra: Floats | float = 0.0,
    low: bool = False,
    one_kernel: bool = True,
) -> Work:
    """Sort the axes into batch, m, n and k by the operands that have them, and count FLOPs and bytes."""
    batch = [x for x in left if x in right and x in out]
    m = product([x for x in left if x in out and x not in batch], sizes)
    n = product([x for x in right if x in out and x not in batch], sizes)
    k = product([x for x in left if x in right and x not in batch], sizes)
    count = product(batch, sizes)
    operand = dtype_bytes("low" if low else "compute")
    moved = count * ((m * k + k * n) * operand + m * n * dtype_bytes("compute")) + extra
    return Work(
        kind=WorkKind.MATMUL,
        name=name,
        flops=2.0 * count * m * n * k,
        bytes=moved,
        batch=count,
        m=m,
        n=n,
        k=k,
        launches=launches,
        backward=backward,
        low=low,
        grouped_rows=sizes["x"] if batch == ["e"] else 0.0,
        one_kernel=one_kernel,
    )


# FLOPs of the backward pass over those of the forward pass in FlashAttention-2: five products instead of two (arXiv
# 2307.08691, section 3.1).
ATTENTION_BACKWARD = 2.5


def _attention(spec: OperatorSpec, sizes: Mapping[str, Floats], dtype_bytes: DtypeBytes, *, backward: bool) -> Work:
    """A fused causal attention kernel. `j` is the mean number of keys that a query sees."""
    query, value = sizes.get("qk", sizes["q"]), sizes.get("vv", sizes["q"])
    flops = 2.0 * sizes["t"] * sizes["j"] * (query + value)
    moved = (sizes["t"] * (query + value) * 2.0 + 2.0 * sizes["b"] * sizes["S"] * sizes["kv"]) * dtype_bytes("compute")
    return Work(
        kind=WorkKind.ATTENTION,
        name=f"{spec.name}.backward" if backward else spec.name,
        flops=flops * (ATTENTION_BACKWARD if backward else 1.0),
        bytes=moved * (2.0 if backward else 1.0),
        m=sizes["s"],
        n=sizes["D"],
        k=sizes["d"],
        parts=sizes["P"],
        batch=sizes["b"] * sizes["a"],
        launches=spec.backward_launches if backward else spec.launches,
        backward=backward,
    )


def _collective(
    op: str,
    spec: OperatorSpec,
    sizes: Mapping[str, Floats],
    dtype_bytes: DtypeBytes,
    *,
    backward: bool = False,
) -> Work:
    tensor = f"{spec.tensor}:low" if spec.low and op == "all_gather" else spec.tensor
    if backward and spec.backward_tensors:
        moved = sum((tensor_bytes(x, sizes, dtype_bytes) for x in spec.backward_tensors), np.zeros(1))
    else:
        moved = tensor_bytes(tensor, sizes, dtype_bytes) * (2.0 if op == "ring" and backward else 1.0)
    return Work(
        kind=WorkKind.COLLECTIVE,
        name=f"{spec.name}.backward" if backward else spec.name,
        bytes=moved,
        collective=op,
        over=spec.over,
        launches=spec.backward_launches if backward else spec.launches,
        backward=backward,
    )
