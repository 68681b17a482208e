"""What the tables and charts of the pages are made of: answers in, rows of plain values out. Pure.

Nothing is computed here that the command line does not say too; names are made into words, and bytes into GiB.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from math import log2
from typing import TYPE_CHECKING, Any

from planner.palette import TIME, colour
from planner.tables import HEADINGS, arithmetic, flip_text, policy
from planner.tables import figures as cells
from planner.waterfall import waterfall
from ui.charts.look import GIB, rate, seconds, words
from ui.charts.topology import NAMES
from ui.state import plan_name

if TYPE_CHECKING:
    from planner.runs_store import RunSummary
    from planner.search import RankedPlan, SearchResult
    from simulator.estimate import Estimate
    from simulator.model import Model
    from simulator.plan import Plan
    from ui.topology_view import Cable, NodeView

# --- plans ------------------------------------------------------------------------------------------------------------


def plan_rows(result: SearchResult) -> list[dict[str, Any]]:
    """Return the listed plans as rows of the table: the numbers are those of `planner suggest --json`."""
    return [
        {
            "rank": ranked.rank,
            "plan": plan_name(ranked.plan),
            "gpus": arithmetic(ranked.plan),
            "policy": policy(ranked.plan),
            "step_s": ranked.estimate.step_s.value,
            "simulated_s": ranked.simulated_s,
            "low_s": ranked.estimate.step_s.low,
            "high_s": ranked.estimate.step_s.high,
            "range": f"{digits(ranked.estimate.step_s.low)} to {digits(ranked.estimate.step_s.high)}",
            "tokens": round(ranked.estimate.tokens_per_s_per_gpu),
            "mfu": ranked.estimate.mfu,
            "peak_gib": ranked.estimate.memory.reserved_bytes / GIB,
            "exposed": _share(ranked, "exposed_communication"),
            "bubble": _share(ranked, "bubble"),
            "why": _why(ranked),
        }
        for ranked in result.plans
    ]


def _share(ranked: RankedPlan, part: str) -> float:
    step = ranked.estimate.step_s.value
    return ranked.estimate.breakdown_s.get(part, 0.0) / step if step else 0.0


def digits(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _why(ranked: RankedPlan) -> str:
    if ranked.rank == 1:
        return "best"
    return "; ".join([ranked.lost_because or "", *(flip_text(flip) for flip in ranked.flips)]).strip("; ")


def figure_rows(first: RankedPlan, second: RankedPlan) -> list[dict[str, str]]:
    """Return the figures of two plans beside each other, as the terminal prints them."""
    both = zip(HEADINGS, cells(first.estimate), cells(second.estimate), strict=True)
    return [{"what": name, "first": a, "second": b} for name, a, b in both]


def differing_rows(first: Plan, second: Plan) -> list[dict[str, str]]:
    """Return the fields in which two plans differ, in words."""

    def said(value: object) -> str:
        if value is None or value == ():
            return "the framework's own"
        return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)

    return [
        {
            "what": words(field.name),
            "first": said(getattr(first, field.name)),
            "second": said(getattr(second, field.name)),
        }
        for field in fields(first)
        if getattr(first, field.name) != getattr(second, field.name)
    ]


DEGREES = ("tp", "pp", "cp", "ep", "micro_batch_size", "virtual_stages", "dp_replicate")


def degrees_of(plan: Plan) -> dict[str, int]:
    """Return the degrees that say which plan it is; the data-parallel one follows where there is a ZeRO stage."""
    named = DEGREES if plan.zero_stage is None else DEGREES[:-1]
    return {name: int(getattr(plan, name)) for name in named}


def changed_flags(plan: Plan, degrees: Mapping[str, int], recompute: str) -> dict[str, Any]:
    """Return a plan with other degrees as flags of `planner estimate`: unchanged ones give the same plan again.

    What follows from a degree that changed (a schedule, a placement) is left to the framework's defaults.
    """
    flags: dict[str, Any] = {**degrees, "recompute": recompute, "tp_overlap": plan.tp_overlap}
    same = all(getattr(plan, name) == value for name, value in degrees.items())
    if degrees["tp"] > 1 and plan.tp > 1:
        flags["sequence_parallel"] = plan.sequence_parallel
    if degrees["pp"] == plan.pp and degrees["virtual_stages"] == plan.virtual_stages:
        flags["schedule"] = plan.schedule
    if plan.zero_stage is not None:
        flags["zero_stage"] = plan.zero_stage
    if plan.reshard_after_forward is not None:
        flags["reshard_after_forward"] = plan.reshard_after_forward
    if same and plan.placement:
        flags["placement"] = list(plan.placement)
    if same and plan.layers_per_stage:
        flags["layers_per_stage"] = list(plan.layers_per_stage)
    return flags


def fall_rows(estimate: Estimate) -> list[dict[str, Any]]:
    """Return the waterfall of an estimate as rows of the chart, each in the palette's colour of its idea."""
    fall = waterfall(estimate)
    rows = [
        {
            "name": "model FLOPs at peak",
            "seconds": fall.peak_s,
            "share": fall.peak_s / fall.step_s,
            "meaning": "what the datasheet would allow",
            "colour": TIME["compute"],
        }
    ]
    rows += [
        {
            "name": term.name,
            "seconds": term.seconds,
            "share": term.share,
            "meaning": term.meaning,
            "colour": _colour(term.name),
        }
        for term in fall.terms
    ]
    return [
        *rows,
        {
            "name": "step",
            "seconds": fall.step_s,
            "share": 1.0,
            "meaning": "predicted step time",
            "total": True,
        },
    ]


def _colour(name: str) -> str:
    if name.startswith("exposed"):
        return TIME["exposed_communication"]
    return colour("time", "compute" if name.startswith("compute") else name.replace(" ", "_"))


def flips_together(result: SearchResult) -> list[tuple[str, list[str]]]:
    """Return what would change the answer, nearest first, each with the plans that would win then, best first."""
    found: dict[str, tuple[float, list[str]]] = {}
    for runner in result.plans[1:]:
        for flip in runner.flips:
            _, names = found.setdefault(flip_text(flip), (abs(log2(flip.at / flip.now)), []))
            names.append(plan_name(runner.plan))
    return [(text, names) for text, (_, names) in sorted(found.items(), key=lambda item: item[1][0])]


# --- the machine, the model --------------------------------------------------------------------------------------------


def link_rows(view: NodeView) -> list[dict[str, Any]]:
    """Return links that are alike as one row: how many, nominal and measured rate, state and source."""
    alike: dict[tuple[Any, ...], list[Any]] = {}
    for cable in view.cables:
        alike.setdefault((cable.kind, cable.label, cable.count, cable.nominal, cable.state, cable.source), []).append(
            cable
        )
    rows = []
    for (kind, label, count, nominal, link_state, source), cables in alike.items():
        seen = [cable.measured for cable in cables if cable.measured]
        low, high = (rate(min(seen)), rate(max(seen))) if seen else ("", "")
        rows.append(
            {
                "link": NAMES[kind],
                "class": label or "-",
                "count": len(cables),
                "links": count,
                "nominal": rate(nominal),
                "measured": (low if low == high else f"{low} to {high}") or "not measured",
                "share": min(seen) / nominal if seen and nominal else None,
                "state": link_state,
                "source": source,
                "between": _between(cables),
            }
        )
    return rows


def _between(cables: list[Cable]) -> str:
    shown = ", ".join(f"{cable.a} - {cable.b}" for cable in cables[:4])
    return shown + (f" and {len(cables) - 4} more" if len(cables) > 4 else "")


def part_rows(model: Model) -> list[dict[str, object]]:
    """Return parameters by part; they add up to `model.parameters`."""
    attention = model.layers * model.attention_parameters
    dense = model.dense_layers * (model.dense_layer_parameters - model.attention_parameters)
    experts = model.moe_layers * (model.moe_layer_parameters - model.attention_parameters)
    named = {
        "attention": attention,
        "feed-forward": dense,
        "experts and router": experts,
        "embedding": model.embedding_parameters,
        "output head": model.head_parameters,
    }
    rest = model.parameters - sum(named.values())
    return [{"part": name, "parameters": n} for name, n in {**named, "norms and rest": rest}.items() if n > 0]


def workload_rows(model: Model, seq_len: int, batch: int) -> list[dict[str, str]]:
    tokens = seq_len * batch
    flops = 3 * model.forward_flops_per_token(seq_len)
    states = 16 * model.parameters
    rows = [
        ("Sequence", f"{seq_len:,} tokens"),
        ("Global batch", f"{batch:,} sequences"),
        ("Tokens a step", f"{tokens:,}"),
        ("Model FLOPs a token", f"{flops / 1e9:,.1f} GFLOP"),
        ("Model FLOPs a step", f"{flops * tokens / 1e15:,.1f} PFLOP"),
        (
            "Attention's share",
            f"{model.attention_flops_per_token(seq_len) / model.forward_flops_per_token(seq_len):.0%}",
        ),
        ("States at 16 B a parameter", f"{states / 2**30:,.0f} GiB"),
    ]
    return [{"what": what, "value": value} for what, value in rows]


# --- runs --------------------------------------------------------------------------------------------------------------

SOURCES = {
    "korthikanti22.json": "Megatron-LM, A100 (Korthikanti 2022)",
    "korthikanti22_mem.json": "Megatron-LM memory, A100 (Korthikanti 2022)",
    "llama3_paper.json": "Llama 3 paper, 8k to 16k H100",
    "llm_foundry.json": "llm-foundry FSDP, A100 and H100",
    "megatron_sc21.json": "Megatron-LM, A100 (SC21)",
    "simumax_b200.json": "Megatron-LM, B200 (SimuMax)",
    "torchtitan.json": "torchtitan, H100",
    "torchtitan_h200x4.json": "torchtitan, 4 x H200",
    "vtrain_multi.json": "Megatron-DeepSpeed, A100 (vTrain, many nodes)",
    "vtrain_single.json": "Megatron-DeepSpeed, A100 (vTrain, one node)",
}


def run_row(run: RunSummary) -> dict[str, Any]:
    """Return a kept run as a row; what was not measured stays empty."""

    def gib(nbytes: float | None) -> str:
        return f"{nbytes / GIB:.1f} GiB" if nbytes else ""

    return {
        "when": run.taken_at[:16].replace("T", " "),
        "model": run.model,
        "plan": run.plan,
        "device": f"{run.gpus} x {run.device}",
        "ended": run.status if run.complete else f"{run.status}, incomplete",
        "predicted step": seconds(run.predicted_step_s) if run.predicted_step_s else "",
        "measured step": seconds(run.measured_step_s) if run.measured_step_s else "",
        "step": run.step_error,
        "predicted memory": gib(run.predicted_peak_bytes),
        "measured memory": gib(run.measured_peak_bytes),
        "memory": run.memory_error,
    }


def compared_rows(compared: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return predicted and measured step times (s) and memory (GiB) of `planner validate --json`, one row each."""
    found = []
    for row in compared:
        source = SOURCES.get(row.get("file", ""), row.get("file", "this file"))
        predicted, error, within = row["predicted"], row["error"], row["within"]
        step, peak = predicted["step_s"], predicted["peak_memory_bytes"] / GIB
        for what, value in (("step time", step), ("memory", peak)):
            key = "step" if what == "step time" else "memory"
            if error[key] is None or error[key] <= -1:
                continue
            inside = within[key]
            found.append(
                {
                    "id": row["id"],
                    "source": source,
                    "what": what,
                    "predicted": value,
                    "measured": value / (1 + error[key]),
                    "error": error[key],
                    "held": "no range" if inside is None else "inside the 80 % range" if inside else "outside",
                }
            )
    return found
