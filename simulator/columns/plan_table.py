"""Many plans as columns: the form in which thousands of candidates are costed at once.

Row i of every column belongs to `plans[i]`. Columns are float64 so that they broadcast in formulas; degrees stay exact
well beyond any cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from simulator.columns.experts import expert_sizes, expert_split
from simulator.columns.plan_columns import PlanColumns, plan_columns, rows_of, taken, words
from simulator.config.model import LatentAttention, Model
from simulator.config.overlap_sites import NONE, mode_at, modes_in
from simulator.config.plan import COPY_ENGINE, INTERLEAVED_SCHEDULE, PLAIN_SCHEDULE, SIZES, Plan
from simulator.config.workload import Workload
from topology.errors import BadPlan

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTable(PlanColumns):
    """Columns of one length: those of the plans, their sizes as floats by name (`table["tp"]`), micro batches, and the
    number of ranks that shard each kind of state. `schedule` is the default where a plan with a pipeline names none.

    `columns["etp"]` is how many ranks split each expert, the runtime's default where a plan states none.
    `plans`, if given, are the same rows as objects, for what columns do not have: layers and recomputation by stage.
    `state_shard[k]` is the number of ranks that share one copy of k in (`parameters`, `gradients`, `optimizer`) for
    everything but routed experts; `expert_shard[k]` likewise for routed experts, which expert parallelism has already
    divided by `ep`. `conditions` are what operators of a runtime description may ask of a plan: `sp`, `autocast`
    (16-bit compute by autocast rather than by a sharded copy: data parallel or a single GPU, nothing else), the three
    methods of context parallelism, `ep`, expert parallelism, and `rows_apart`: several sequences at a time are cut by
    tokens and not overlapped. `keeps_gathered`: parameters stay gathered between
    forward and backward. `fully_sharded`: a wrapper gathers parameters unit by unit, even if from one rank only.
    `casts_own`: of one rank, by casts alone, without a buffer or a list of gradients to reduce.
    `offloaded`: by kind of state, the plans that keep it in host memory.
    """

    plans: tuple[Plan, ...]
    columns: dict[str, Floats]
    micro_batches: Floats
    state_shard: dict[str, Floats]
    expert_shard: dict[str, Floats]
    conditions: dict[str, NDArray[np.bool_]]
    keeps_gathered: NDArray[np.bool_]
    fully_sharded: NDArray[np.bool_]
    casts_own: NDArray[np.bool_]
    offloaded: dict[str, NDArray[np.bool_]]

    @property
    def recompute_modes(self) -> tuple[str, ...]:
        """Every recompute mode of any layer of any plan."""
        per_stage = {mode for plan in self.plans for mode in plan.recompute_per_stage}
        return tuple(sorted({*words(self.recompute)} | per_stage))

    @property
    def paired(self) -> NDArray[np.bool_]:
        """Rows of the plans that run forward and backward passes of two micro batches at the same time."""
        return np.asarray(self.ep_overlap != "none")

    @property
    def pushed(self) -> NDArray[np.bool_]:
        """Rows of the plans in which copy engines exchange FSDP's blocks."""
        return np.asarray(self.fsdp_exchange == COPY_ENGINE)

    def __getitem__(self, name: str) -> Floats:
        return self.columns[name]

    @property
    def overlap_modes(self) -> tuple[str, ...]:
        """Every overlap mode at any site of any plan, except none."""
        return tuple(sorted({mode for text in words(self.tp_overlap) for mode in modes_in(text)}))

    def overlap_at(self, site: str) -> NDArray[np.str_]:
        """Return the overlap mode of each plan at a site; "" stands for all places outside the four sites where tokens
        move.
        """
        texts = words(self.tp_overlap)
        modes = np.array([mode_at(text, site) for text in texts], dtype=np.str_)
        return modes[np.searchsorted(np.array(texts, dtype=np.str_), self.tp_overlap)]

    def take(self, which: Any) -> Self:
        """Return the rows that `which` (a mask, indices or a slice) selects."""
        rows = rows_of(which)
        found: dict[str, Any] = {
            f.name: {k: taken(v, rows) for k, v in value.items()} if isinstance(value, dict) else taken(value, rows)
            for f in fields(self)
            if f.name != "plans" and (value := getattr(self, f.name)) is not None
        }
        plans = tuple(self.plans[row] for row in np.arange(len(self))[rows]) if self.plans else ()
        return type(self)(plans=plans, **found)


STATES = ("parameters", "gradients", "optimizer")
# ZeRO stage from which each kind of state is sharded (Rajbhandari et al., arXiv 1910.02054, section 5).
SHARDED_FROM_STAGE = {"parameters": 3, "gradients": 2, "optimizer": 1}


CP_METHODS = ("ring", "all_gather", "all_to_all")
WrapsOne = Literal["never", "grouped", "casts", "always"]


def plan_table(
    plans: Sequence[Plan] | PlanColumns,
    workload: Workload,
    *,
    cp_method: str = "all_gather",
    wraps_one: WrapsOne = "never",
    splits_experts: str = "whole",
) -> PlanTable:
    """Return `plans`, or columns of them, as a table. Micro batches are fractional where the global batch does not
    divide evenly.

    `cp_method` and `splits_experts` (`EXPERT_SPLITS`) are the runtime's defaults. `wraps_one`: tensor- and
    pipeline-parallel plans that shard nothing are wrapped all the same, which gives them 16-bit compute; `grouped`:
    unless all they have is tensor parallelism; `casts`: those cast their own. Raises BadPlan for a method or an overlap
    mode that does not exist.
    """
    given = plans if isinstance(plans, PlanColumns) else plan_columns(plans)
    method = np.where(given.cp_method == "", cp_method, given.cp_method)
    for name in words(method):
        if name not in CP_METHODS:
            raise BadPlan(f"context-parallel method {name!r} is unknown", why=f"known: {', '.join(CP_METHODS)}")
    for text in words(given.tp_overlap):
        modes_in(text)
    columns = {name: np.asarray(getattr(given, name), dtype=np.float64) for name in SIZES}
    dp = columns["dp_replicate"] * columns["dp_shard"]
    zero = given.zero_stage
    # Where the runtime uses ZeRO, the ranks it shards over are those of whichever data-parallel degree was given.
    spoken = np.where(columns["dp_shard"] > 1, columns["dp_shard"], columns["dp_replicate"])
    group = np.where(zero < 0, columns["dp_shard"], spoken) * columns["cp"]
    stage = np.where(zero < 0, 3, zero)
    columns["dp"] = dp
    columns["placing"] = given.placing.astype(np.float64)
    columns["sharded_over"] = group
    columns["gpus"] = dp * columns["cp"] * columns["tp"] * columns["pp"]
    # Experts live on etp x ep ranks taken from (dp_shard x cp x tp); what is left of that product shards each expert.
    columns["etp"] = expert_split(given, splits_experts).astype(np.float64)
    expert_ranks = np.where(zero < 0, columns["dp_shard"], dp) * columns["cp"] * columns["tp"]
    expert_group = np.maximum(expert_ranks / (columns["etp"] * columns["ep"]), 1.0)
    state_shard = {k: np.where(stage >= SHARDED_FROM_STAGE[k], group, 1.0) for k in STATES}
    expert_shard = {k: np.where(stage >= SHARDED_FROM_STAGE[k], expert_group, 1.0) for k in STATES}
    unsharded = (zero == 0) | ((zero < 0) & (group <= 1))
    piped = columns["pp"] > 1
    grouped = piped | (columns["dp_replicate"] > 1) | (columns["ep"] > 1)
    alone = (zero < 0) & (group <= 1) & ((columns["tp"] > 1) | piped)
    wrapped = alone & (grouped if wraps_one == "grouped" else np.bool_(wraps_one != "never"))
    away, parameters_away = given.offload != "none", given.offload == "parameters"
    stated: dict[str, Any] = {one.name: getattr(given, one.name) for one in fields(PlanColumns)}
    default = np.where(given.virtual_stages > 1, INTERLEAVED_SCHEDULE, PLAIN_SCHEDULE)
    stated["schedule"] = np.where((given.schedule == "") & piped, default, given.schedule)
    return PlanTable(
        **stated,
        plans=() if isinstance(plans, PlanColumns) else tuple(plans),
        columns=columns,
        micro_batches=workload.global_batch_size / (dp * columns["micro_batch_size"]),
        state_shard=state_shard,
        expert_shard=expert_shard,
        conditions={
            "sp": given.sequence_parallel,
            "rows_apart": given.sequence_parallel & (columns["micro_batch_size"] > 1) & (given.tp_overlap == NONE),
            "autocast": unsharded & (columns["tp"] == 1) & ~piped & ~parameters_away,
            **{f"cp_{m}": method == m for m in CP_METHODS},
            "cp": columns["cp"] > 1,
            "ep": columns["ep"] > 1,
            "etp": columns["etp"] > 1,
        },
        # Under pipelining, parameters stay gathered by default.
        keeps_gathered=np.where(given.reshard_after_forward < 0, piped, given.reshard_after_forward == 0),
        fully_sharded=(state_shard["parameters"] > 1) | wrapped | parameters_away,
        casts_own=alone & ~grouped & ~parameters_away & np.bool_(wraps_one == "casts"),
        # Sharded gradients are where the optimizer is; unsharded ones stay on the GPU.
        offloaded={"parameters": parameters_away, "gradients": away & (stage >= 2), "optimizer": away},
    )


def axis_sizes(
    model: Model,
    workload: Workload,
    table: PlanTable,
    *,
    autocast_width: float = 1.0,
    expert_spread: float = 0.0,
    rank: int = 0,
    domain: int = 1 << 20,
    pads: bool = True,
) -> dict[str, Floats]:
    """Return the size of every named axis on one rank, one value per plan.

    `autocast_width` is the width of a parameter over that of the type of products; under autocast, operators other than
    products keep the wider type. `expert_spread` is the standard deviation of the load of one of two ranks with experts
    over the mean, where the workload does not state loads. `domain` is the number of ranks that reach each other
    without a network. `pads`: experts with fewer rows than their capacity are padded to it.

    b sequences of a micro batch; s query positions, S key positions, D of a document and j keys a query sees on
    average; w partial results of attention beyond the first, one from each other context-parallel rank's keys, and P
    the ranks through whose keys whole sequences are attended to one after another; t tokens
    inside a tensor-parallel region and u outside it (fewer with sequence parallelism); h hidden, and hr the width of
    the residual stream in numbers of the products' type (larger under autocast, which adds in the wider type); d head
    width; a query and k key/value heads; q, kv and qkv their widths, qa and ka those of all ranks' heads, qkx that of
    qkv with keys repeated until each rank of an exchange of heads has one; f feed-forward width and gf with the gate
    alongside it; v vocabulary. MoE: E experts in all, e on this rank, x rows of each, p tokens that the ranks which
    split experts route together, n rows that the rank sends to experts, m those that the busiest receives and r those
    that its experts compute, fe and gfe expert widths, fs and gfs shared-expert widths; g tokens of all ranks that
    share experts; z rows that reach a rank where each token is sent once to a rank, and y the rows of an all-to-all
    that takes as long. Latent attention: ql, cl compressed ranks (cr with the rotary part), qk and vv total head
    widths, kx expanded keys/values. R is the `rank` of adapters.
    """
    tp, cp = table["tp"], table["cp"]
    ones = np.ones(len(table))
    gate = 2.0 if model.gated_mlp else 1.0
    b = table["micro_batch_size"]
    s = workload.seq_len / cp
    t = b * s
    u = np.where(table.sequence_parallel, t / tp, t)
    a = model.heads / tp
    # Fewer key/value heads than ranks: Megatron replicates them, so a rank never holds less than one.
    k = np.maximum(model.kv_heads / tp, 1.0)
    sizes: dict[str, Floats | float] = {
        "b": b,
        "s": s,
        "S": workload.seq_len,
        "D": workload.attended_len,
        "j": sum(model.keys_by_layers(workload.attended_len)),
        "w": cp - 1.0,
        "P": np.where(table.conditions["cp_all_to_all"] | (workload.attended_len < workload.seq_len), 1.0, cp),
        "t": t,
        "u": u,
        "h": model.hidden,
        "hr": model.hidden * np.where(table.conditions["autocast"], autocast_width, 1.0),
        "d": model.head_dim,
        "a": a,
        "k": k,
        "q": a * model.head_dim,
        "kv": k * model.head_dim,
        "qkv": a * model.head_dim + 2 * k * model.head_dim,
        "qkx": a * model.head_dim
        + 2 * np.maximum(k, np.where(table.conditions["cp_all_to_all"], cp, 0.0)) * model.head_dim,
        "qa": model.heads * model.head_dim,
        "ka": model.kv_heads * model.head_dim,
        "f": model.ffn / tp,
        "gf": gate * model.ffn / tp,
        "v": model.vocab / tp,
        "one": ones,
        "T": np.minimum(t, float(model.hidden)),
        "R": rank,
    }
    if model.latent:
        sizes |= _latent_sizes(model, model.latent, a)
    if model.moe:
        sizes |= expert_sizes(
            workload,
            model.moe,
            table,
            table.columns,
            tokens=u,
            gate=gate,
            spread=expert_spread,
            pads=pads,
            domain=domain,
        )
    return {name: value * ones for name, value in sizes.items()}


def _latent_sizes(model: Model, latent: LatentAttention, heads: Floats) -> dict[str, Floats | float]:
    """Return the axes of latent attention for a rank with `heads` query heads."""
    return {
        "ql": latent.q_lora_rank,
        "cl": latent.kv_lora_rank,
        "cr": latent.kv_lora_rank + latent.qk_rope_head_dim,
        "rd": latent.qk_rope_head_dim,
        "qk": heads * model.qk_dim,
        "vv": heads * model.v_dim,
        "kx": heads * (latent.qk_nope_head_dim + latent.v_head_dim),
    }


def windowed_share(model: Model, seq_len: int) -> float:
    """Return the share of attention's arithmetic in layers whose window is shorter than the sequence."""
    if not 0 < model.sliding_window < seq_len:
        return 0.0
    sliding, whole = model.keys_by_layers(seq_len)
    return sliding / (sliding + whole)
