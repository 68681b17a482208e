"""Which measured operator stands for which operator of a runtime's description, and with what shape.

Matrix products and attention are the same kernels in every framework, so a shape identifies them. Kernels that move
memory depend on the framework's code, so each measured one names the operators of the descriptions that it stands for,
and its shape has the axes of those operators.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from simulator.calibration.items import OperatorItem
from simulator.columns.plan_table import Floats, axis_sizes, plan_table
from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.kernels.operators import OperatorSpec, Work, WorkKind, backward_work, forward_work
from simulator.kernels.roofline import PACKING
from simulator.runtimes.library import runtime_spec
from simulator.runtimes.model_operators import operators_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Movement:
    """One measured kind of kernel that moves memory: the operators it stands for, and its axes.

    Several operators may be one call of the framework (a loss is a cast, a softmax and a lookup); they are measured
    together and share one curve.
    """

    name: str
    operators: tuple[str, ...]
    axes: tuple[str, ...]
    runtime: str = ""  # the runtime whose kernels these are; empty: the same in every framework


MOVEMENTS = (
    Movement(name="rms_norm", operators=("attention_norm", "ffn_norm", "norm", "norm_1", "norm_2"), axes=("u", "h")),
    Movement(name="rotary_complex", operators=("rotary",), axes=("t", "q", "kv", "d"), runtime="torchtitan"),
    Movement(name="rotary_halves", operators=("rotary",), axes=("t", "q", "kv", "d"), runtime="pytorch"),
    Movement(name="silu", operators=("silu",), axes=("t", "f")),
    Movement(name="gate", operators=("gate",), axes=("t", "f")),
    Movement(name="residual", operators=("residual",), axes=("u", "h")),
    Movement(name="embedding", operators=("tok_embeddings", "embedding"), axes=("t", "v", "h")),
    Movement(name="cross_entropy", operators=("to_float", "log_softmax", "nll", "loss"), axes=("t", "v")),
    Movement(name="loss_in_parts", operators=("loss_to_float", "loss_softmax", "loss_slope"), axes=("t", "v")),
)
# Kernels outside the layers' lists: FSDP's copies (`PACKING`) and the optimizer; their axes are a layer's parameters
# and the ranks that share them.
UPDATES = ("adamw", "clip")
PARAMETER_AXES = ("h", "q", "kv", "f")

DIRECTION_OF = {".dgrad": "dgrad", ".wgrad": "wgrad"}


def direction_of(work: Work) -> str:
    """Return a product's direction (its memory layout); for other kernels `forward` or `backward`."""
    for ending, direction in DIRECTION_OF.items():
        if work.name.endswith(ending):
            return direction
    return "backward" if work.backward else "forward"


def movement_of(operator: str, runtime: str) -> Movement | None:
    """Return the measured kernel that stands for an operator that moves memory; `runtime` is its description's first
    name.
    """
    name = operator.removesuffix(".backward")
    for movement in MOVEMENTS:
        if name in movement.operators and movement.runtime in {"", runtime}:
            return movement
    return None


def attention_shape(sizes: Mapping[str, Floats]) -> dict[str, Floats]:
    """Return the axes of a fused attention kernel. `S` counts all keys, also those that a causal kernel skips."""
    return {"b": sizes["b"], "a": sizes["a"], "kv": sizes["k"], "s": sizes["s"], "S": sizes["S"], "d": sizes["d"]}


def operators_of(model: Model, plan: Plan, workload: Workload, runtime: Runtime) -> list[OperatorItem]:
    """Return the compute operators of one rank, as they are to be measured.

    Compiled fusions are left out: they are not kernels of their own, and runs of layers include them.
    """
    operators = operators_for(model, runtime)
    table = plan_table([plan], workload, cp_method=operators.spec.context_parallel)
    sizes = axis_sizes(model, workload, table)
    first = runtime_spec(runtime.name).measured_as
    found: list[OperatorItem] = []
    lists = (operators.dense_layer, operators.moe_layer, operators.embedding, operators.head)
    for specs in lists:
        for spec in specs:
            if all(_is_met(condition, table.conditions) for condition in spec.when):
                found += _requests(spec, sizes, runtime, first)
    ranks = int(table["sharded_over"][0])
    if ranks > 1 and model.moe is None:
        shape = {axis: _whole(sizes[axis]) for axis in PARAMETER_AXES}
        for name in PACKING:
            found.append(_move(name, {**shape, "ranks": ranks}, runtime.activation_dtype))
    if model.moe is None:
        shape = {axis: _whole(sizes[axis]) for axis in PARAMETER_AXES}
        for name in UPDATES:
            found.append(_move(name, {**shape, "ranks": ranks}, runtime.param_dtype))
    return found


def _requests(
    spec: OperatorSpec, sizes: Mapping[str, Floats], runtime: Runtime, runtime_name: str
) -> list[OperatorItem]:
    def width(_: str) -> float:
        return 2.0

    works = [*forward_work(spec, sizes, width), *backward_work(spec, sizes, width)]
    found = []
    for work in works:
        direction = direction_of(work)
        if work.kind is WorkKind.MATMUL:
            shape = {"m": _whole(work.m), "n": _whole(work.n), "k": _whole(work.k)}
            if _whole(work.batch) > 1:
                shape["batch"] = _whole(work.batch)
            dtype = runtime.compute_dtype
            found.append(OperatorItem(kind="matmul", name="matmul", shape=shape, dtype=dtype, direction=direction))
        elif work.kind is WorkKind.ATTENTION:
            shape = {axis: _whole(size) for axis, size in attention_shape(sizes).items()}
            dtype = runtime.activation_dtype
            found.append(
                OperatorItem(kind="attention", name="attention", shape=shape, dtype=dtype, direction=direction)
            )
        elif work.kind is WorkKind.MOVE and not runtime.compile:
            movement = movement_of(work.name, runtime_name)
            if movement is not None:
                shape = {axis: _whole(sizes[axis]) for axis in movement.axes}
                dtype = runtime.activation_dtype
                found.append(_move(movement.name, shape, dtype, direction=direction, runtime=movement.runtime))
    return found


def _move(name: str, shape: dict[str, int], dtype: str, **more: str) -> OperatorItem:
    return OperatorItem(kind="move", name=name, shape=shape, dtype=dtype, **more)


def _is_met(condition: str, conditions: Mapping[str, Any]) -> bool:
    value = bool(np.asarray(conditions[condition.removeprefix("!")]).flat[0])
    return not value if condition.startswith("!") else value


def _whole(value: Any) -> int:
    return round(float(np.asarray(value, dtype=np.float64).flat[0]))
