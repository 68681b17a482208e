"""The rows of tables and charts, as pure functions of results: field names become words, and bytes GiB.

Nothing is computed here that the command line does not print as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import log2
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from planner.explain.answer_text import fits_text
from planner.explain.tables import flip_text, share_text
from planner.io.figures import gib_text, last_digit_s, rate_text, seconds_text
from planner.io.plan_words import plan_chips, plan_name, plan_settings
from planner.pictures.node_layout import LINK_WORDS
from planner.search.result import places
from simulator.config.estimate import Fit
from simulator.config.plan import PLAN_FIELDS, SIZES
from topology.cluster import LinkKind, Severity
from topology.rates.reach import plannable
from topology.rates.scaling import network_bytes_per_s, nvlink_bytes_per_s
from topology.units import GIB, in_gb_per_s, in_gib, in_seconds
from ui.charts.look import rate_range
from ui.charts.row_types import ComparedRow, PartRow, PlanRow

if TYPE_CHECKING:
    from planner.pictures.node_layout import Cable, NodeView
    from planner.runs.runs_store import RunSummary
    from planner.search.result import RankedPlan, SearchResult
    from simulator.config.estimate import Estimate, Interval, MemoryEstimate
    from simulator.config.model import Model
    from simulator.config.plan import Plan
    from topology.cluster import Cluster
    from topology.health.diagnose import Health

# --- plans ------------------------------------------------------------------------------------------------------------


def plan_rows(result: SearchResult) -> list[PlanRow]:
    """Return the listed plans as table rows, with the figures of `planner suggest`, to as many digits as are known.

    Values ending in `_s` and `_gib` are whole, for charts; the others are what a person reads.
    """
    last_s = known_to_s(result)
    return [
        {
            "rank": ranked.rank,
            "place": place,
            "plan": plan_name(ranked.plan),
            "chips": plan_chips(ranked.plan),
            "label": f"{ranked.rank}  {plan_chips(ranked.plan)}",
            "policy": plan_settings(ranked.plan),
            "step_s": ranked.estimate.step_s.value,
            "low_s": ranked.estimate.step_s.low,
            "high_s": ranked.estimate.step_s.high,
            "step": seconds_text(ranked.estimate.step_s.value, last_s),
            "range": range_text(ranked.estimate.step_s),
            "tokens": rate_text(ranked.estimate),
            "mfu": f"{ranked.estimate.mfu:.0%}",
            "peak_gib": ranked.estimate.memory.reserved_bytes / GIB,
            "memory": f"{gib_text(ranked.estimate.memory.reserved_bytes)} GiB",
            "fits": fits_text(ranked.estimate),
            "sure": ranked.estimate.memory.fit is Fit.YES,
            "exposed": share_text(
                ranked.estimate.breakdown_s.get("exposed_communication", 0.0), ranked.estimate.step_s.value
            ),
            "bubble": share_text(ranked.estimate.breakdown_s.get("bubble", 0.0), ranked.estimate.step_s.value),
            "why": _why(ranked),
        }
        for ranked, place in zip(result.plans, places(result.plans), strict=True)
    ]


def ranges_finding(table: Sequence[PlanRow]) -> str:
    """Return a description of the ranges of the listed plans, for users who cannot see them."""
    if not table:
        return "No plan"
    first = table[0]
    overlap = sum(row["low_s"] <= first["high_s"] for row in table[1:])
    overlapping = f"; the ranges of {overlap} of the other {len(table) - 1} overlap it" if len(table) > 1 else ""
    return (
        f"Step times with ranges: the first takes {first['step']}, 80 % of steps within {first['range']}{overlapping}"
    )


def known_to_s(result: SearchResult) -> float:
    """Return the place value of the last significant digit of the listed steps, in seconds."""
    return min(last_digit_s(ranked.estimate.step_s) for ranked in result.plans)


def range_text(step: Interval) -> str:
    """Return the range of a step with its unit: `6.3 to 9.0 s`."""
    last_s = last_digit_s(step)
    low, high = seconds_text(step.low, last_s), seconds_text(step.high, last_s)
    return f"{low.split()[0]} to {high}"


def step_figure(estimate: Estimate) -> tuple[str, str]:
    """Return a step rounded to its significant digits, and its range."""
    step = estimate.step_s
    return seconds_text(step.value, last_digit_s(step)), range_text(step)


def memory_figure(memory: MemoryEstimate) -> tuple[str, str]:
    """Return the memory of the worst rank, and whether it fits."""
    return f"{gib_text(memory.reserved_bytes)} of {gib_text(memory.capacity_bytes)} GiB", memory.verdict


def _why(ranked: RankedPlan) -> str:
    if ranked.rank == 1:
        return "the first"
    return "; ".join([ranked.lost_because or "", *(flip_text(flip) for flip in ranked.flips)]).strip("; ")


def memory_costs_time(slowest: Estimate, fastest: Estimate) -> str | None:
    """Return a sentence on how much longer the plan of least memory takes than the fastest; None if not much."""
    times = slowest.step_s.value / fastest.step_s.value if fastest.step_s.value else 1.0
    if times < 1.2:
        return None
    (step, _), (best, _) = step_figure(slowest), step_figure(fastest)
    return (
        f"Least memory costs time: this plan takes {step} a step, {times:.1f} times the {best} of the fastest plan,"
        f" which needs {memory_figure(fastest.memory)[0]}."
    )


FILLED = "dp_shard"  # by the GPUs that the other degrees leave


def degrees_of(plan: Plan) -> dict[str, int]:
    """Return the degrees and sizes that identify a plan; with a ZeRO stage, dp_replicate follows from the others."""
    follows = {FILLED} if plan.zero_stage is None else {FILLED, "dp_replicate"}
    return {name: int(getattr(plan, name)) for name in SIZES if name not in follows}


def changed_flags(plan: Plan, degrees: Mapping[str, int], recompute: str) -> dict[str, object]:
    """Return a plan with changed `degrees` as flags of `planner estimate`; unchanged ones give the same plan.

    Fields that depend on a changed degree (schedule, placement) are left to the framework's defaults.
    """
    stated = {**degrees, "recompute": recompute}
    changed = {name for name, value in stated.items() if getattr(plan, name) != value}
    kept = {
        known.name: getattr(plan, known.name)
        for known in PLAN_FIELDS.values()
        if not known.is_degree
        and not changed & set(known.follows)
        and not (known.needs and 1 in {stated[known.needs], getattr(plan, known.needs)})
        and getattr(plan, known.name) is not None
    }
    return {**kept, **stated}


def merged_flips(result: SearchResult) -> list[tuple[str, list[str]]]:
    """Return the flip points of all listed plans, nearest first, each with the plans that would win there, best
    first.
    """
    found: dict[str, tuple[float, list[str]]] = {}
    for runner in result.plans[1:]:
        for flip in runner.flips:
            _, names = found.setdefault(flip_text(flip), (abs(log2(flip.at / flip.now)), []))
            names.append(f"#{runner.rank} {plan_chips(runner.plan)}")
    return [(text, names) for text, (_, names) in sorted(found.items(), key=lambda item: item[1][0])]


# --- the machine, the model
# --------------------------------------------------------------------------------------------


def machine_figures(cluster: Cluster, health: Health) -> list[tuple[str, str, str]]:
    """Return the figures of a machine: label, value with unit, and where it comes from. Unknown values are shown as
    unknown, not as zero.
    """
    known = plannable(cluster)
    kind = cluster.slowest_kind if known else None
    dtype = next((n for n in ("bfloat16", "float16", "float32") if kind and kind.peak_flops.get(n)), "bfloat16")
    memory = in_gib(cluster.gpu_memory_bytes) if known else "unknown"
    return [
        (
            "GPUs",
            f"{cluster.node_count} x {cluster.gpus_per_node}" if cluster.node_count > 1 else str(cluster.gpu_count),
            "nodes x GPUs of a node",
        ),
        ("GPU memory", memory, "As the driver reports it; datasheet." if known else "The file names no GPU model."),
        (
            f"Dense {dtype}",
            f"{kind.peak_flops[dtype] / 1e12:.0f} TFLOP/s" if kind else "unknown",
            "Per GPU, without sparsity; datasheet." if kind else "The file names no GPU model.",
        ),
        ("NVLink", *_nvlink(cluster)),
        ("Network", *_network(cluster)),
        ("Health", *_health(cluster, health)),
    ]


def is_switched(cluster: Cluster) -> bool:
    """Return whether the GPUs of a node are joined by NVSwitches."""
    return any(link.kind is LinkKind.NVSWITCH for link in cluster.groups[0].node.links)


def _nvlink(cluster: Cluster) -> tuple[str, str]:
    node = cluster.groups[0].node
    links = [link for link in node.links if link.kind in {LinkKind.NVLINK, LinkKind.NVSWITCH}]
    if not links:
        return "none", "No link between GPUs is NVLink."
    nominal = nvlink_bytes_per_s(cluster) if plannable(cluster) else 0.0
    stated = f"nominal {in_gb_per_s(nominal)} per GPU and direction (datasheet)" if nominal else "nominal rate unknown"
    measured = [link.measured_bytes_per_s for link in links if link.measured_bytes_per_s]
    if measured:
        copied = "a GPU's copies to the others" if is_switched(cluster) else "copies over one link"
        return rate_range(measured), f"Measured on this machine: {copied}, per direction; {stated}."
    if nominal:
        return in_gb_per_s(nominal), "Per GPU and direction; datasheet."
    labels = " and ".join(sorted({link.label for link in links if link.label}))
    return (
        "rate unknown",
        f"{labels or 'NVLink'} is there; its rate follows from the GPU model, which the file does not name.",
    )


def _network(cluster: Cluster) -> tuple[str, str]:
    nics = cluster.groups[0].node.nics
    up = [nic for nic in nics if nic.up]
    if not nics:
        return "none", "No network port was read or is listed."
    if not up:
        return "down", f"{len(nics)} ports, none of them up."
    unknown = sum(nic.bytes_per_s is None for nic in up)
    if unknown:
        return "rate unknown", f"{len(up)} ports are up; the rate of {unknown} is not known."
    return in_gb_per_s(network_bytes_per_s(cluster)), f"Per GPU and direction: its share of {len(up)} ports; datasheet."


def _health(cluster: Cluster, health: Health) -> tuple[str, str]:
    bad = [item for item in health.items if item.severity is not Severity.INFO]
    if not health.healthy:
        return f"{len(bad)} finding" + ("s" if len(bad) != 1 else ""), "From planner doctor, listed below."
    if any(link.measured_bytes_per_s for group in cluster.groups for link in group.node.links):
        return "healthy", "From planner doctor, with measured links."
    return (
        "not measured",
        "Nothing that was read is missing or contradictory. planner doctor --measure times the links.",
    )


def link_rows(view: NodeView) -> list[dict[str, str | float | None]]:
    """Return one row per class of equal links: their number, nominal and measured rate, state and source."""
    classes: dict[tuple[str, str, int, float | None, str, str], list[Cable]] = {}
    for cable in view.cables:
        classes.setdefault((cable.kind, cable.label, cable.count, cable.nominal, cable.state, cable.source), []).append(
            cable
        )
    rows: list[dict[str, str | float | None]] = []
    for (kind, label, count, nominal, link_state, source), cables in classes.items():
        measured = [cable.measured for cable in cables if cable.measured]
        rows.append(
            {
                "link": LINK_WORDS[kind],
                "class": label or "-",
                "count": len(cables),
                "links": count,
                "nominal": in_gb_per_s(nominal),
                "measured": rate_range(measured) if measured else "not measured",
                "share": min(measured) / nominal if measured and nominal else None,
                "state": link_state,
                "source": source,
                "between": _between(cables),
            }
        )
    return rows


def _between(cables: list[Cable]) -> str:
    shown = ", ".join(f"{cable.a} - {cable.b}" for cable in cables[:4])
    return shown + (f" and {len(cables) - 4} more" if len(cables) > 4 else "")


def part_rows(model: Model) -> list[PartRow]:
    """Return the parameters of each part of the model; they add up to `model.parameters`."""
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


def largest_part(model: Model) -> str:
    """Return the part of a model with the most parameters, and its share."""
    most = max(part_rows(model), key=lambda row: row["parameters"])
    return f"{most['part']}, {most['parameters'] / model.parameters:.0%}"


def pairs_finding(pairs: Iterable[Mapping[str, object]]) -> str:
    """Return how many pairs of GPUs have which class of link, the most first."""
    counted = Counter(str(row["class"]) for row in pairs if row["class"] != "self")
    return ", ".join(f"{count // 2} pairs {name}" for name, count in counted.most_common()) or "one GPU"


def workload_rows(model: Model, seq_len: int, batch: int) -> list[dict[str, str]]:
    tokens = seq_len * batch
    flops = model.training_flops_per_token(seq_len, causal=True)
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
        ("States at 16 B a parameter", f"{states / GIB:,.0f} GiB"),
    ]
    return [{"what": what, "value": value} for what, value in rows]


# --- runs
# --------------------------------------------------------------------------------------------------------------


def run_row(run: RunSummary) -> dict[str, str | float | None]:
    """Return a saved run as a row; values that were not measured stay empty."""

    def gib(nbytes: float | None) -> str:
        return in_gib(nbytes) if nbytes else ""

    return {
        "when": run.taken_at[:16].replace("T", " "),
        "model": run.model,
        "plan": run.plan,
        "device": f"{run.gpus} x {run.device}",
        "ended": run.status.replace("_", " ") if run.complete else f"{run.status.replace('_', ' ')}, incomplete",
        "predicted step": in_seconds(run.predicted_step_s) if run.predicted_step_s else "",
        "measured step": in_seconds(run.measured_step_s) if run.measured_step_s else "",
        "step": run.step_error,
        "predicted memory": gib(run.predicted_peak_bytes),
        "measured memory": gib(run.measured_peak_bytes),
        "memory": run.memory_error,
    }


def run_names(runs: Sequence[RunSummary]) -> list[str]:
    """Return what tells saved runs from each other; their ids, too, where nothing else does."""
    parts = [[run.plan, run.model, f"{run.gpus} x {run.device}", run.taken_at[:16].replace("T", " ")] for run in runs]
    differs = [len(set(column)) > 1 for column in zip(*parts, strict=True)]
    names = [", ".join(word for word, tells in zip(words, differs, strict=True) if tells) for words in parts]
    alike = len(set(names)) < len(names) or not all(names)
    return [f"{name} ({run.id[:6]})".strip() if alike else name for run, name in zip(runs, names, strict=True)]


def group_row(name: str, runs: Sequence[RunSummary]) -> dict[str, str | float | None]:
    """Return saved runs of a group as a row: how many, their steps, and how far off their predictions are."""
    measured = [run.measured_step_s for run in runs if run.measured_step_s]
    errors = [run.step_error for run in runs if run.step_error is not None]
    return {
        "group": name,
        "runs": len(runs),
        "median step": in_seconds(median(measured)) if measured else "",
        "step, mean absolute error": f"{mean(map(abs, errors)):.1%}" if errors else "",
        "step, median error": f"{median(errors):+.1%}" if errors else "",
    }


def compared_rows(compared: Iterable[Mapping[str, Any]]) -> list[ComparedRow]:
    """Return predicted and measured step times (s) and memory (GiB) of `planner validate --json`, one row each."""
    found: list[ComparedRow] = []
    for row in compared:
        source = row.get("file", "this file").removesuffix(".json").replace("_", " ")
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
                    "interval": "no range" if inside is None else "inside the 80 % range" if inside else "outside",
                }
            )
    return found
