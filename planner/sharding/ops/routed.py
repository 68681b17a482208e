"""Experts to which tokens are sent: everything between tokens and their results, as one operator.

`frontends/routes.py` makes such a node of a captured graph. Its pairs of a token and one of its experts are
independent, so ranks may have any of them, and each needs only the matrices of its own expert. A mesh axis that shards
pairs and experts at once sends every pair to the rank of its expert and its result back (`backends/forward.py`).
"""

from __future__ import annotations

from planner.sharding.ops.aten import LETTERS, AtenCall, NotKnownError, Statement, annotated, made
from planner.sharding.ops.op import Op

ROUTED = "routed"  # a node of expert numbers, tensors by expert, tensors by token, others, operators, the result
SENT = "sent"  # the same, with tokens always sent to their experts
ROUTED_OF, SENT_OF = f"{ROUTED}_of(", f"{SENT}_of("  # prefix of their formulas


def _capture(call: AtenCall) -> list[Statement]:
    ids, by_expert, by_token, others = (call.argument(at) for at in range(4))
    times = max(every for _, every in by_token)
    pairs = "t" if times == 1 else f"(t k_{times})"
    operands = [(ids["tensor"], [pairs])]
    named = [(one["tensor"], "e^") for one in by_expert]
    named += [(one["tensor"], pairs if every < times else "t") for one, every in by_token if one != ids]
    named += [(one["tensor"], "") for one in others]
    if len({name for name, _ in (*operands, *named)}) != len(named) + 1:
        raise NotKnownError
    for number, (name, first) in enumerate(named):
        operands.append((name, _whole(number, len(call.shapes[name]), first)))
    result = [pairs, *(made(f"r{LETTERS[d]}", size) for d, size in enumerate(call.node.shape[1:]))]
    (line,) = annotated(call, operands, result)
    return [line]


def _whole(number: int, rank: int, first: str) -> list[str]:
    """Return the axes of operand `number`: axis `first` may be sharded, the others are needed whole."""
    axes = [f"x{number}{LETTERS[d]}^" for d in range(rank)]
    return [first, *axes[1:]] if first else axes


OPS = (Op(aten=f"{ROUTED} {SENT}", capture=_capture),)
