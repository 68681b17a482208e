"""Gradients written as `NAME_bwd(gradient, ...)`: linear in the gradient."""

from __future__ import annotations

from collections.abc import Callable

from planner.sharding.formulas.axis_flow import NotUnderstood, Value
from planner.sharding.formulas.formula import ATTENTION, ELEMENTWISE, IDENTITIES
from planner.sharding.functions.attention import batch_of_attention
from planner.sharding.functions.reductions import merge_or_keep
from planner.sharding.functions.walker import Call, Made


def gradient_rule(name: str) -> Callable[[Call], Made] | None:
    """Return the rule of `NAME_bwd(gradient, ...)`, which is linear in the gradient."""
    if name in ELEMENTWISE or name in IDENTITIES:
        return _elementwise_gradient
    if name in {"softmax", "log_softmax", "rmsnorm", "rms_norm", "layernorm", "layer_norm"}:
        return _normalized_gradient
    if name in ATTENTION:
        return _attention_gradient
    return None


def _elementwise_gradient(call: Call) -> Value:
    gradient, *saved = call.values()
    finished = [call.flow.finish(value, "a gradient needs finished values") for value in saved]
    return call.flow.multiply([gradient, *finished], call.name)


def _normalized_gradient(call: Call) -> Value:
    flow, values = call.flow, [call.flow.finish(value, "a gradient needs finished sums") for value in call.values()]
    kind = call.name.removesuffix("_bwd").removesuffix("_backward") + "_bwd"
    merge_or_keep(call, kind, values[0].dims[-1], "the gradient of a norm takes means over it")
    return Value(flow.broadcast([value.dims for value in values], call.name))


def _attention_gradient(call: Call) -> Value:
    flow, values = call.flow, call.values()
    for value in values:
        for dim in value.dims[-2:]:
            flow.keep_unsharded(dim, "the gradient of attention needs all queries and keys")
    for value in values[1:]:
        batch_of_attention(flow, values[0].dims[:-2], (value.dims[:-2],))
    raise NotUnderstood(f"which gradient {call.name} is")
