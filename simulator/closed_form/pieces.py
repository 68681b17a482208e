"""Products that a torch graph pass cuts into pieces beside their collective: what they read and give, and how long pieces take."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from simulator.columns.plan_table import Floats
from simulator.kernels.operators import OperatorSpec, Work, WorkKind
from simulator.step.context import CostContext

# The ending of a weight gradient's name.
WEIGHT_GRADIENT = ".wgrad"


def ends_of(work: Work, operator: OperatorSpec) -> tuple[str, str]:
    """Return (the tensor a product reads, the one it gives) in the words of the runtime's description, else ("", "")."""
    if work.kind is not WorkKind.MATMUL or work.name.endswith(WEIGHT_GRADIENT) or not operator.matmul:
        return "", ""
    operands, _, result = operator.matmul.partition("->")
    ends = operands.split(",")[0].strip(), result.strip()
    return (ends[1], ends[0]) if work.backward else ends


def pieces_s(work: Work, context: CostContext) -> Floats:
    """Return seconds of a product cut into one piece for each tensor-parallel rank, along tokens."""
    ranks = context.table["tp"]
    piece = replace(work, flops=work.flops / ranks, bytes=work.bytes / ranks)
    if work.name.endswith(WEIGHT_GRADIENT):
        piece = replace(piece, k=work.k / ranks)
    else:
        piece = replace(piece, m=work.m / ranks)
    return np.asarray(ranks * context.roofline.seconds(piece))


def copy_hop_s(nbytes: Floats, context: CostContext) -> Floats:
    """Return the seconds in which a copy engine moves one rank's shard of a tensor of `nbytes` to a peer."""
    return context.groups.time_s("send_recv", "tp_pair", nbytes / context.table["tp"], algorithm="copy_engine")
