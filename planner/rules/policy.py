"""Recompute and overlap policies, and what the machine makes slow."""

# ruff: noqa: ARG005 - every predicate and sentence has the same signature, whether or not it reads all of it

from __future__ import annotations

from planner.legality import Grade
from planner.rules.rule import Level, Rule, one_of, rule

POLICY_RULES: list[Rule] = [
    rule(
        "recompute",
        lambda c, q: ~one_of(c.recompute, q.framework.recomputes),
        lambda p, q: (
            f"recompute {p.recompute!r} is not known for {q.framework.title}; known: {', '.join(q.framework.recomputes)}"
        ),
        level=Level.POLICY,
        applies=lambda q: not q.framework.any_recompute,
    ),
    rule(
        "context-method",
        lambda c, q: (c.cp > 1) & (c.cp_method != "") & ~one_of(c.cp_method, (*q.framework.cp_methods, q.cp_method)),
        lambda p, q: (
            f"{q.framework.title} has no context parallelism by {p.cp_method}; it has "
            f"{', '.join(q.framework.cp_methods)}"
        ),
        level=Level.POLICY,
        applies=lambda q: bool(q.framework.cp_methods),
    ),
    rule(
        "ulysses-heads",
        lambda c, q: (
            (c.cp > 1)
            & (c.cp_method == "all_to_all")
            & ((q.model.heads % (c.tp * c.cp) != 0) | (q.model.kv_heads % (c.tp * c.cp) != 0))
        ),
        lambda p, q: (
            f"context parallelism by all-to-all splits {q.model.heads} heads and {q.model.kv_heads} key/value heads over "
            f"tp {p.tp} x cp {p.cp} = {p.tp * p.cp} ranks: the remainders must be 0"
        ),
        level=Level.POLICY,
    ),
    rule(
        "overlap",
        lambda c, q: (c.tp_overlap != "none") & ((c.tp == 1) | ~c.sequence_parallel),
        lambda p, q: f"tp_overlap {p.tp_overlap} needs tp > 1 with sequence parallelism: there is nothing to pipeline",
        level=Level.POLICY,
    ),
    rule(
        "overlap-compile",
        lambda c, q: c.tp_overlap != "none",
        lambda p, q: (
            'asynchronous tensor parallelism needs compile.enable with "model" among its components: --compile'
        ),
        level=Level.POLICY,
        applies=lambda q: q.framework.overlap_needs_compile and not q.compile,
    ),
    rule(
        "overlap-compile",
        lambda c, q: c.tp_overlap != "none",
        lambda p, q: f"tp_overlap {p.tp_overlap} with compile: the overlapped products are eager",
        level=Level.POLICY,
        applies=lambda q: q.framework.overlap_needs_eager and q.compile,
    ),
    rule(
        "overlap-latent",
        lambda c, q: c.tp_overlap != "none",
        lambda p, q: (
            f"tp_overlap {p.tp_overlap} with latent attention, whose first products are not cut: mlp_in and mlp_out can"
        ),
        level=Level.POLICY,
        applies=lambda q: q.framework.overlap_by_site and q.model.latent is not None,
    ),
    rule(
        "overlap-effective",
        lambda c, q: c.tp_overlap != "none",
        lambda p, q: (
            "with torch 2.11 asynchronous tensor parallelism is silently off unless enable_symm_mem_for_group is "
            "called, which torchtitan 0.2.2 does not (pytorch#193027): count fused ops in the compiled graph"
        ),
        grade=Grade.LEGAL,
        level=Level.POLICY,
        applies=lambda q: q.framework.overlap_needs_compile and q.version in {None, "0.2.2"},
    ),
    rule(
        "overlap-pcie",
        lambda c, q: c.tp_overlap != "none",
        lambda p, q: "asynchronous tensor parallelism without NVLink: the copies compete with the matmul for PCIe",
        grade=Grade.SLOW,
        level=Level.POLICY,
        applies=lambda q: not q.nvlink,
    ),
    rule(
        "tensor-domain",
        lambda c, q: c.tp > q.gpus_per_node,
        lambda p, q: (
            f"tp {p.tp} leaves the {q.gpus_per_node} GPUs of a node: two collectives a layer cross the network"
        ),
        grade=Grade.SLOW,
    ),
    rule(
        "tensor-pcie",
        lambda c, q: (c.tp > 1) & (c.tp <= q.gpus_per_node),
        lambda p, q: f"tp {p.tp} without NVLink: every layer's collectives cross PCIe",
        grade=Grade.SLOW,
        applies=lambda q: not q.nvlink,
    ),
]
