"""The functions that are known, and what each does along every axis of its arguments.

Names and arguments are torch's, as functions or as methods: `torch.softmax(x, -1)`, `x.softmax(-1)`, `F.linear(x, w)`.
Besides those: `set` (a tensor as it is), `rearrange` (whatever its annotation says), `attn`, `rmsnorm`, `layernorm`,
`grouped_mm`, `rope`, and gradients as `NAME_bwd(gradient, ...)`.

A rule takes the call and returns the value of it; `AxisFlow` keeps what it says of axes. What has no rule here raises
`NotUnderstood` and is opaque: it is computed on whole tensors.
"""

from __future__ import annotations

import ast

from planner.sharding.formulas.axis_flow import AxisFlow
from planner.sharding.formulas.formula import ATTENTION, ELEMENTWISE, IDENTITIES
from planner.sharding.functions.attention import attention, attention_gradient, attention_rows
from planner.sharding.functions.gradients import gradient_rule
from planner.sharding.functions.products import (
    addmm,
    convolved,
    einsum,
    grouped_mm,
    grouped_mm_weight_gradient,
    linear,
    matmul,
    outer,
    pooled,
)
from planner.sharding.functions.reductions import (
    arg,
    cross_entropy,
    group_norm,
    layer_norm,
    logsumexp,
    reduced,
    root_mean_square,
    softmax,
    top_k,
)
from planner.sharding.functions.rows import embedding, embedding_bwd, one_hot, rotary, scattered
from planner.sharding.functions.views import (
    chunked,
    elementwise,
    expanded,
    flattened,
    identity,
    joined,
    movedim,
    narrowed,
    ordered,
    padded,
    permuted,
    rearranged,
    repeated,
    reshaped,
    selected,
    shaped,
    squeezed,
    transposed,
    triangle,
    unflattened,
    unsqueezed,
)
from planner.sharding.functions.walker import Made, Rule, Walker

_BY_RULE: tuple[tuple[Rule, str], ...] = (
    (transposed, "transpose swapaxes t"),
    (permuted, "permute"),
    (movedim, "movedim"),
    (reshaped, "reshape view"),
    (flattened, "flatten"),
    (unflattened, "unflatten"),
    (unsqueezed, "unsqueeze"),
    (squeezed, "squeeze"),
    (expanded, "expand expand_as broadcast_to"),
    (repeated, "repeat repeat_interleave"),
    (joined, "cat stack concat"),
    (chunked, "chunk split"),
    (narrowed, "narrow"),
    (selected, "index_select gather select take_along_dim"),
    (ordered, "sort argsort cumsum cumprod flip roll cummax logcumsumexp diff"),
    (triangle, "tril triu"),
    (padded, "pad"),
    (shaped, "zeros ones full empty zeros_like ones_like"),
    (matmul, "matmul mm bmm dot"),
    (outer, "outer"),
    (linear, "linear"),
    (addmm, "addmm baddbmm"),
    (einsum, "einsum"),
    (grouped_mm, "grouped_mm"),
    (grouped_mm_weight_gradient, "grouped_mm_weight_bwd"),
    (convolved, "conv1d conv2d conv3d"),
    (pooled, "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d"),
    (reduced, "sum mean amax max amin min prod var std norm any all"),
    (softmax, "softmax log_softmax"),
    (logsumexp, "logsumexp"),
    (cross_entropy, "cross_entropy"),
    (root_mean_square, "rmsnorm rms_norm"),
    (layer_norm, "layernorm layer_norm"),
    (group_norm, "group_norm batch_norm instance_norm"),
    (top_k, "topk"),
    (arg, "argmax argmin"),
    (attention_rows, "attention_rows"),
    (attention_gradient, "attention_bwd_q attention_bwd_k attention_bwd_v"),
    (embedding, "embedding"),
    (embedding_bwd, "embedding_bwd"),
    (scattered, "index_add scatter_add index_put"),
    (one_hot, "one_hot"),
    (rotary, "rope rotary apply_rotary rope_bwd"),
    (rearranged, "rearrange"),
)
_RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(IDENTITIES, identity),
    **dict.fromkeys(ATTENTION, attention),
    **{name: rule for rule, names in _BY_RULE for name in names.split()},
}


def rule_of(name: str) -> Rule | None:
    """Return the rule of the function called `name`, or None where it is not known."""
    rule = _RULES.get(name)
    if rule is None and name.endswith(("_bwd", "_backward")):
        return gradient_rule(name.removesuffix("_bwd").removesuffix("_backward"))
    return rule


def walk(flow: AxisFlow, tree: ast.expr, merges: str) -> Made:
    """Return what a formula computes; `flow` learns what it does to axes. Raises NotUnderstood.

    `merges` is the kind of statistics that the formula may be computed from where its axes are sharded, or empty.
    """
    return Walker(flow, tree, merges, rule_of).made(tree)
