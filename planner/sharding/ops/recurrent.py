"""Recurrent layers: rows of a batch pass, time and weights are needed whole.

Torch has one operator for all layers and both directions: `lstm(x, states, weights, has_biases, num_layers, dropout,
train, bidirectional, batch_first)`; dropout is refused at the capture.
"""

from __future__ import annotations

from planner.sharding.ops.aten import AtenCall, NotKnownError, Statement, annotated, axes_but, made
from planner.sharding.ops.op import Op


def _capture(call: AtenCall) -> list[Statement]:
    if len(call.node.args) < 9 or len(call.shape(0)) != 3:  # packed sequences, and inputs without a batch
        raise NotKnownError
    states = call.argument(1) if isinstance(call.argument(1), list) and call.name == "lstm" else [call.argument(1)]
    first = bool(call.argument(8))
    operands = [(call.tensor(0), ["b", "t^", "i^"] if first else ["t^", "b", "i^"])]
    operands += [(str(one["tensor"]), ["l^", "b", f"s{n}^"]) for n, one in enumerate(states)]
    names = list(dict.fromkeys(str(one["tensor"]) for one in call.argument(2)))
    for number, name in enumerate(names):
        axes = axes_but(len(call.shapes[name]), range(len(call.shapes[name])))
        operands.append((name, [f"p{number}{axis}" for axis in axes]))
    if call.node.index == 0:
        time, width = made("t", call.node.shape[1 if first else 0]), made("r", call.node.shape[2])
        return annotated(call, operands, ["b", time, width] if first else [time, "b", width])
    layers, _, width_of_state = call.node.shape
    return annotated(call, operands, [made("l", layers), "b", made("r", width_of_state)])


OPS = (Op(aten="lstm gru rnn_tanh rnn_relu", capture=_capture),)
