"""Of published points with one model, GPU, engine, release and load a GPU: is the configuration predicted to be best
the best?

For `serving_table.py`. A load is clients (or sequences of a static batch) a GPU with prompts and answers of one length,
so that engines of one GPU stand alongside engines of eight: more engines, or larger ones. Where a source states
latencies alone, throughput is that of a closed loop, clients over the time of an answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

OBJECTIVES = {"output tokens a second and GPU": "throughput", "time of an answer": "latency"}
LOAD = ("source_group", "hardware", "model", "backend", "precision", "isl", "osl")
DEGREES = ("n_gpus", "tp", "pp", "ep", "moe_tp", "dp_attention", "replicas", "disagg")
NEAR = 0.05


def ranking_lines(points: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[str]:
    """Return the tables for pairs of a raw point and its report that is not skipped."""
    lines = []
    for title, objective in OBJECTIVES.items():
        behind = _behind(points, objective)
        if not behind:
            continue
        lines += [
            f"By {title}:",
            "",
            f"| source, GPU, model | loads | first choice behind the best | any choice | within {NEAR:.0%} |",
            "|---|--:|--:|--:|--:|",
        ]
        for name, found in sorted(behind.items(), key=lambda item: -len(item[1])):
            lines.append(_line(", ".join(name), found))
        lines += [_line("**all**", [one for found in behind.values() for one in found]), ""]
    return lines


def _line(name: str, found: Sequence[tuple[float, float]]) -> str:
    chosen, any_choice = (fmean(part) for part in zip(*found, strict=True))
    near = fmean(first <= NEAR for first, _ in found)
    return f"| {name} | {len(found)} | {chosen:.1%} | {any_choice:.0%} | {near:.0%} |"


def _behind(
    points: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]], objective: str
) -> dict[tuple[str, ...], list[tuple[float, float]]]:
    """Return, of each load, how far the first choice and the mean choice are behind the best one that was measured."""
    loads: dict[tuple[Any, ...], dict[tuple[str, ...], list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for raw, report in points:
        gpus = raw.get("n_gpus") or (raw.get("tp") or 1) * (raw.get("pp") or 1)
        sent = raw.get("concurrency") or raw.get("batch_size")
        both = [_cost(raw, report["measured"], report[which], objective, gpus) for which in ("predicted", "measured")]
        if both[0] is None or both[1] is None:
            continue
        load = (*(raw.get(key) for key in LOAD), raw.get("request_rate_qps"), sent and sent / gpus)
        loads[load][tuple(str(raw.get(key)) for key in DEGREES)].append((both[0], both[1]))
    behind: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    for load, configurations in loads.items():
        if len(configurations) < 2:
            continue
        costs = [tuple(fmean(part) for part in zip(*rows, strict=True)) for rows in configurations.values()]
        best = min(measured for _, measured in costs)
        behind[tuple(str(word) for word in load[:3])].append(
            (min(costs)[1] / best - 1, fmean(measured for _, measured in costs) / best - 1)
        )
    return behind


def _cost(
    raw: Mapping[str, Any], known: Mapping[str, Any], values: Mapping[str, Any], objective: str, gpus: int
) -> float | None:
    """Return what is to be small: seconds of an answer, or GPU seconds of an output token; None where it is not
    known.
    """
    latencies = known["ttft_s"] and known["tpot_s"] and raw.get("osl")
    answer_s = values["ttft_s"] + values["tpot_s"] * (raw["osl"] - 1) if latencies else None
    if objective == "latency":
        return answer_s
    if known["output_tokens_per_s_per_gpu"]:
        return 1 / values["output_tokens_per_s_per_gpu"]
    return answer_s * gpus / (raw["concurrency"] * raw["osl"]) if answer_s and raw.get("concurrency") else None
