"""Rules of recompute, overlap and exchange policies, and of plans that the machine makes slow."""

# ruff: noqa: ARG005 - every predicate and sentence has the same signature, whether or not it reads all of it

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from simulator.columns.plan_columns import PlanColumns, words
from simulator.config.overlap_sites import NONE, SITES, USERBUFFERS, mode_at, modes_in
from simulator.config.plan import NCCL
from simulator.legality.rule import Grade, Mask, Rule, RuleFacts, batch_rule, one_of, policy_rule, rule
from simulator.runtimes.parts import MODULES
from topology.errors import BadPlan


def _method(c: PlanColumns, q: RuleFacts) -> NDArray[np.str_]:
    """Return how ranks exchange keys and values: as the plan states, else the runtime's default."""
    return np.where(c.cp_method == "", q.cp_method, c.cp_method)


def _recomputes_beside(q: RuleFacts) -> tuple[str, ...]:
    """Return the recompute modes under which layers of two micro batches can alternate: those that recompute no whole
    layer (Megatron-LM: transformer_config.py), none at all in torchtitan 0.2.2 (distributed/dual_pipe_v.py).
    """
    return ("none",) if q.framework.torch_pipelining else ("none", "selective")


def _runs_beside(word: str, q: RuleFacts) -> bool:
    """Return whether layers of two micro batches can alternate under a recompute mode; recomputed modules must not
    contain the exchange (Megatron-LM: transformer_config.py).
    """
    modules = q.framework.recomputes_as(word) and MODULES in word
    return word in _recomputes_beside(q) or (bool(modules) and "moe" not in word.split(MODULES))


def _keys_divide(c: PlanColumns, q: RuleFacts) -> NDArray[np.bool_]:
    """Return whether an exchange of heads gives every rank whole key/value heads, or a copy of one."""
    ranks, heads = c.tp * c.cp, q.model.kv_heads
    return np.asarray((heads % ranks == 0) | ((ranks % heads == 0) & q.framework.repeats_keys))


def _where_overlap(c: PlanColumns, broken: Callable[[str], bool]) -> Mask:
    """Return the rows whose tp_overlap is a text for which `broken` holds."""
    return one_of(c.tp_overlap, [text for text in words(c.tp_overlap) if broken(text)])


def _overlaps_at(text: str, site: str) -> bool:
    try:
        return mode_at(text, site) != NONE
    except BadPlan:
        return False  # another rule's business


BY_NCCL = "chunked"  # the mode that does not write to another GPU's memory itself


def _pushes(text: str) -> bool:
    try:
        return bool(set(modes_in(text)) - {"async", BY_NCCL})
    except BadPlan:
        return False  # another rule's business


# Modes that divide only the rows of tokens. The others choose a method by the size of the product, so that it must be
# the same on all ranks.
ANY_WIDTH = (NONE, BY_NCCL)


def _needs_equal_widths(text: str) -> bool:
    try:
        return any(mode_at(text, site) not in ANY_WIDTH for site in ("mlp_in", "mlp_out"))
    except BadPlan:
        return False  # another rule's business


def _overlap_fault(text: str, q: RuleFacts) -> str:
    """Return what is wrong with a tp_overlap; empty if nothing is."""
    sites = f"sites are {', '.join(SITES)}, " if q.framework.overlap_by_site else ""
    known = f"{sites}modes {', '.join((NONE, *q.framework.overlaps))}"
    try:
        unknown = [mode for mode in modes_in(text) if mode not in q.framework.overlaps]
    except BadPlan as error:
        return f"{error.what}; {known}"
    return f"tp_overlap {text}: {q.framework.title} has no {', '.join(unknown)}; {known}" if unknown else ""


POLICY_RULES: list[Rule] = [
    policy_rule(
        "recompute",
        "recompute",
        lambda c, q: ~one_of(c.recompute, [word for word in words(c.recompute) if q.framework.recomputes_as(word)]),
        lambda p, q: (
            f"recompute {p.recompute!r} is not known for {q.framework.title}; known:"
            f" {', '.join(q.framework.recomputes)}{q.framework.modules_text}"
        ),
        applies=lambda q: not q.framework.any_recompute,
    ),
    policy_rule(
        "recompute-sharded-norm",
        "recompute",
        lambda c, q: (c.tp > 1) & (c.dp_shard * c.cp == 1) & one_of(c.recompute, ("selective-op",)),
        lambda p, q: (
            f"recompute {p.recompute} with tp {p.tp} and no FSDP: torch 2.11 stops in {q.framework.title},"
            f" as it cannot view the heads of {q.model.name}, whose queries and keys are normalised,"
            " along a sharded dimension (aten._unsafe_view); recompute none or full, or dp_shard 2"
        ),
        applies=lambda q: q.model.qk_norm and not q.framework.norm_recomputed_unsharded and not q.compile,
    ),
    policy_rule(
        "ep-overlap-recompute",
        "recompute",
        lambda c, q: (
            (c.ep_overlap != "none")
            & ~one_of(c.recompute, [word for word in words(c.recompute) if _runs_beside(word, q)])
        ),
        lambda p, q: (
            f"ep_overlap {p.ep_overlap} with recompute {p.recompute!r}: {q.framework.title} cannot run passes of two"
            f" micro batches at the same time with it; {' or '.join(_recomputes_beside(q))} can"
        ),
    ),
    policy_rule(
        "ep-overlap-reshard",
        "reshard_after_forward",
        lambda c, q: (c.ep_overlap != "none") & (c.reshard_after_forward == 1),
        lambda p, q: (
            f"ep_overlap {p.ep_overlap} with parameters that are freed after each pass:"
            " two passes at once that gather the same layers are not modelled; reshard_after_forward false keeps them"
        ),
    ),
    policy_rule(
        "context-method",
        "cp_method",
        lambda c, q: (c.cp > 1) & (c.cp_method != "") & ~one_of(c.cp_method, (*q.framework.cp_methods, q.cp_method)),
        lambda p, q: (
            f"{q.framework.title} has no context parallelism by {p.cp_method}; it has "
            f"{', '.join(q.framework.cp_methods)}"
        ),
        applies=lambda q: bool(q.framework.cp_methods),
    ),
    policy_rule(
        "context-latent",
        "cp_method",
        lambda c, q: (c.cp > 1) & ~one_of(_method(c, q), q.framework.latent_cp_methods),
        lambda p, q: (
            f"context parallelism by {p.cp_method or q.cp_method} with latent attention, whose values are narrower"
            f" than its keys: cp_method {' or '.join(q.framework.latent_cp_methods)} can"
        ),
        applies=lambda q: q.model.latent is not None and bool(q.framework.latent_cp_methods),
    ),
    policy_rule(
        "context-window",
        "cp_method",
        lambda c, q: (c.cp > 1) & ~one_of(_method(c, q), q.framework.window_cp_methods),
        lambda p, q: (
            f"context parallelism by {p.cp_method or q.cp_method} with sliding windows, which reach over parts of"
            f" ranks: cp_method {' or '.join(q.framework.window_cp_methods)} can"
        ),
        applies=lambda q: (
            q.model.windowed_layers > 0
            and q.model.sliding_window < q.workload.seq_len
            and bool(q.framework.window_cp_methods)
        ),
    ),
    rule(
        "context-compile",
        lambda c, q: (c.cp > 1) & (c.tp > 1),
        lambda p, q: (
            f"compiled blocks with cp {p.cp} and tp {p.tp}: torch's partitioner fails on some (seen with 2.13);"
            " --no-compile, or one of the two alone"
        ),
        applies=lambda q: q.compile and not q.framework.compiled_context_tensor,
    ),
    policy_rule(
        "ulysses-heads",
        "cp_method",
        lambda c, q: (
            (c.cp > 1) & (_method(c, q) == "all_to_all") & ((q.model.heads % (c.tp * c.cp) != 0) | ~_keys_divide(c, q))
        ),
        lambda p, q: (
            f"context parallelism by all-to-all splits {q.model.heads} heads and {q.model.kv_heads} key/value heads"
            f" over tp {p.tp} x cp {p.cp} = {p.tp * p.cp} ranks, which must divide both"
            + (", or keys repeated for a multiple of their heads" if q.framework.repeats_keys else "")
        ),
    ),
    policy_rule(
        "overlap",
        "tp_overlap",
        lambda c, q: (c.tp_overlap != "none") & ((c.tp == 1) | ~c.sequence_parallel),
        lambda p, q: f"tp_overlap {p.tp_overlap} needs tp > 1 with sequence parallelism: there is nothing to pipeline",
    ),
    policy_rule(
        "overlap-compile",
        "tp_overlap",
        lambda c, q: c.tp_overlap != "none",
        lambda p, q: (
            'asynchronous tensor parallelism needs compile.enable with "model" among its components: --compile'
        ),
        applies=lambda q: q.framework.overlap_needs_compile and not q.compile,
    ),
    policy_rule(
        "overlap-compile",
        "tp_overlap",
        lambda c, q: c.tp_overlap != "none",
        lambda p, q: f"tp_overlap {p.tp_overlap} with compile: the overlapped products are eager",
        applies=lambda q: q.framework.overlap_needs_eager and q.compile,
    ),
    policy_rule(
        "overlap-mode",
        "tp_overlap",
        lambda c, q: _where_overlap(c, lambda text: bool(_overlap_fault(text, q))),
        lambda p, q: _overlap_fault(p.tp_overlap, q),
        applies=lambda q: not q.framework.any_recompute,  # frameworks that pass words on to their runtime
    ),
    policy_rule(
        "overlap-domain",
        "tp_overlap",
        lambda c, q: (c.tp > q.gpus_per_node) & (c.tp_overlap == USERBUFFERS),
        lambda p, q: (
            f"tp_overlap {p.tp_overlap} with tp {p.tp} on nodes of {q.gpus_per_node}:"
            " its copies go between GPUs of one NVLink domain"
        ),
        applies=lambda q: q.gpus_per_node > 0,
    ),
    policy_rule(
        "overlap-vendor",
        "tp_overlap",
        lambda c, q: _where_overlap(c, lambda text: USERBUFFERS in modes_in(text)),
        # ROCm/TransformerEngine: build_tools/pytorch.py leaves its sources out, and README.rst does not list it
        lambda p, q: f"tp_overlap {p.tp_overlap} is not among what TransformerEngine for ROCm supports",
        applies=lambda q: q.by_amd,
    ),
    policy_rule(
        "overlap-latent",
        "tp_overlap",
        lambda c, q: _where_overlap(c, lambda text: _overlaps_at(text, "attention_in")),
        lambda p, q: (
            f"tp_overlap {p.tp_overlap} with latent attention, whose first products are not cut: "
            "attention_out, mlp_in and mlp_out can"
        ),
        applies=lambda q: q.framework.overlap_by_site and q.model.latent is not None,
    ),
    policy_rule(
        "overlap-width",
        "tp_overlap",
        lambda c, q: (q.model.ffn % c.tp != 0) & _where_overlap(c, _needs_equal_widths),
        lambda p, q: (
            f"tp_overlap {p.tp_overlap} with feed-forward width {q.model.ffn} % tp {p.tp} = {q.model.ffn % p.tp}:"
            f" ranks with parts of unequal width would move them in different ways; {', '.join(ANY_WIDTH)} can"
        ),
        applies=lambda q: q.framework.uneven_widths and q.model.dense_layers > 0,
    ),
    policy_rule(
        "overlap-effective",
        "tp_overlap",
        lambda c, q: c.tp_overlap == "async",
        lambda p, q: (
            "with torch 2.11 asynchronous tensor parallelism is silently off unless enable_symm_mem_for_group is "
            "called, which torchtitan 0.2.2 does not (pytorch#193027): count fused ops in the compiled graph"
        ),
        grade=Grade.LEGAL,
        applies=lambda q: q.framework.overlap_needs_compile and q.version in {None, "0.2.2"},
    ),
    policy_rule(
        "overlap-peers",
        "tp_overlap",
        lambda c, q: (c.tp > 1) & _where_overlap(c, _pushes),
        lambda p, q: (
            f"tp_overlap {p.tp_overlap} without NVLink: copies into memory of other GPUs over PCIe are not modelled,"
            f" but {BY_NCCL} is"
        ),
        applies=lambda q: not q.nvlink,
    ),
    policy_rule(
        "overlap-pcie",
        "tp_overlap",
        lambda c, q: c.tp_overlap != "none",
        lambda p, q: "asynchronous tensor parallelism without NVLink: the copies compete with the matmul for PCIe",
        grade=Grade.SLOW,
        applies=lambda q: not q.nvlink,
    ),
    rule(
        "tensor-domain",
        lambda c, q: c.tp > q.gpus_per_node,
        lambda p, q: (
            f"tp {p.tp} leaves the {q.gpus_per_node} GPUs of a node: two collectives a layer cross the network"
        ),
        grade=Grade.SLOW,
        applies=lambda q: q.gpus_per_node > 0,
    ),
    rule(
        "tensor-pcie",
        lambda c, q: (c.tp > 1) & (c.tp <= q.gpus_per_node),
        lambda p, q: f"tp {p.tp} without NVLink: every layer's collectives cross PCIe",
        grade=Grade.SLOW,
        applies=lambda q: not q.nvlink,
    ),
]


# What exchanges FSDP's parameters and gradients (`Plan.fsdp_exchange`).

# Degrees with which copy engines were not tried: other groups, and other orders of gathers, than FSDP alone has.
UNTRIED = ("dp_replicate", "tp", "pp", "ep")


def _other(c: PlanColumns) -> Mask:
    return np.asarray(c.fsdp_exchange != NCCL)


def _untried(c: PlanColumns) -> Mask:
    return np.asarray(np.logical_or.reduce([getattr(c, name) > 1 for name in UNTRIED]))


EXCHANGE_RULES: list[Rule] = [
    batch_rule(
        "fsdp-exchange",
        lambda c, q: _other(c) & ~one_of(c.fsdp_exchange, q.framework.fsdp_exchanges),
        lambda p, q: (
            f"fsdp_exchange {p.fsdp_exchange}: {q.framework.title} has {', '.join((NCCL, *q.framework.fsdp_exchanges))}"
        ),
    ),
    batch_rule(
        "fsdp-exchange-sharding",
        lambda c, q: _other(c) & (c.dp_shard * c.cp == 1),
        lambda p, q: f"fsdp_exchange {p.fsdp_exchange} needs dp_shard x cp > 1: there is nothing to exchange",
    ),
    batch_rule(
        "fsdp-exchange-degrees",
        lambda c, q: _other(c) & _untried(c),
        lambda p, q: (
            f"fsdp_exchange {p.fsdp_exchange} was tried with dp_shard and cp alone, not with "
            f"{', '.join(f'{name} {degree}' for name in UNTRIED if (degree := getattr(p, name)) > 1)}; {NCCL} can"
        ),
    ),
    batch_rule(
        "fsdp-exchange-peers",
        lambda c, q: _other(c) & (np.asarray(c.gpus > _peers(q)) | (not q.nvlink)),
        lambda p, q: (
            f"fsdp_exchange {p.fsdp_exchange} on {p.gpus} GPUs"
            + (f", {q.gpus_per_node} to a node" if q.nvlink else " without NVLink")
            + ": its copies go between GPUs of one node over NVLink"
        ),
    ),
    batch_rule(
        "fsdp-exchange-adapter",
        lambda c, q: _other(c),
        lambda p, q: f"fsdp_exchange {p.fsdp_exchange} was tried with all parameters trained; {NCCL} runs others",
        applies=lambda q: q.runtime is not None and q.runtime.adapter is not None,
    ),
]


def _peers(q: RuleFacts) -> float:
    """Return how many GPUs a node has; infinite where that is not known."""
    return q.gpus_per_node or float("inf")
