"""Sharding cases of our own, written short, with what they must cost by formula."""

from __future__ import annotations

import ast
import re

import numpy as np

from planner.sharding.plans.report import planned_case
from planner.sharding.problem.problem import parse_problem

INTEGERS = ("ids", "targets")


def case(name, mesh, ops, inputs, sizes, pins=None, **more):
    """`inputs` as `{"w": "f h: R S(0)"}` (dims, placements, and a type if not bf16), `mesh` as `{"dp": 2, "tp": 4}`."""
    tensors = {}
    for tensor, text in inputs.items():
        dims, _, tokens = text.partition(":")
        axes, tokens = dims.split(), tokens.split()
        dtype = tokens.pop() if tokens and re.fullmatch(r"[a-z]+\d+", tokens[-1]) else "bf16"
        tensors[tensor] = {
            "axes": axes,
            "shape": [sizes[a] for a in axes],
            "dtype": dtype,
            "placements": tokens or None,
        }
    return {
        "id": name,
        "mesh": {"names": list(mesh), "shape": list(mesh.values())},
        "axes": sizes,
        "ops": ops,
        "inputs": tensors,
        "pins": {tensor: tokens.split() for tensor, tokens in (pins or {}).items()},
        **more,
    }


def names_in(formula):
    """The names that a formula reads."""
    return [node.id for node in ast.walk(ast.parse(formula.strip())) if isinstance(node, ast.Name)]


def values(problem, seed=0):
    """Random arrays for the inputs of a problem."""
    rng = np.random.default_rng(seed)
    out = {}
    for name in problem.inputs:
        tensor = problem.tensors[name]
        whole = tensor.dtype.startswith("i")
        out[name] = rng.integers(0, 8, size=tensor.shape) if whole else rng.normal(size=tensor.shape)
    return out


MLP = ["u = linear(x, w1) :: t h+, f h+ -> t f", "a = gelu(u) :: t f -> t f", "y = linear(a, w2) :: t f+, h f+ -> t h"]
BACKWARD = [
    *MLP[:2],
    "da = dy @ w2 :: t h+, h+ f -> t f",
    "du = gelu_bwd(da, u) :: t f, t f -> t f",
    "dw2 = dy.T @ a :: t+ h, t+ f -> h f",
    "dw1 = du.T @ x :: t+ f, t+ h -> f h",
    "dx = du @ w1 :: t f+, f+ h -> t h",
]
T, H, F = 24, 12, 48
S = {"t": T, "h": H, "f": F}
X, P = T * H * 2, F * H * 2  # bytes of the activations and of a weight
TP, DP = {"tp": 4}, {"dp": 4}
ATTN = "o = attn(q, k, v) :: b h s d^, b h z+ d^, b h z+ d^ -> b h s d"
HEADS = {"b": 2, "h": 8, "s": 16, "z": 16, "d": 4}
B = 2 * 8 * 16 * 4 * 2  # bytes of q, k or v


def problem(of):
    return parse_problem(of)


def report_case(data, number, cluster=None, calibration=None):
    """The row of one case."""
    return planned_case(data, number, cluster, calibration)[0]
