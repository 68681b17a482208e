"""Predictions of a serving run next to the executor's measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.io.grids import console, grid
from planner.io.printable import printable
from planner.serving.measured.asked_run import DECODE
from simulator.serving.latency import Distribution, distribution

WAYS = {"own": "ours, with the norm", "nccl": "NCCL"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One figure, in seconds, or in tokens per second if `what` states so; `way` is the all-reduce with which it was
    measured.
    """

    what: str
    predicted: float
    measured: float
    way: str = ""
    predicted_for: bool = True  # whether the prediction is for this all-reduce

    @property
    def error(self) -> float:
        """Relative: 0.1 if the prediction is 10 % above the measurement."""
        return self.predicted / self.measured - 1


def step_rows(document: Mapping[str, Any]) -> list[Compared]:
    """Return the timed steps of an executor's report, in the order of the request; with several all-reduces the
    predicted one first.
    """
    request = document["request"]
    predicted = {
        (step["phase"], step["batch"], step["context"]): seconds
        for step, seconds in zip(request["steps"], request["predicted"]["steps"], strict=True)
    }
    first = _loads_way(document)
    rows = [
        Compared(
            what=_step_text(step),
            predicted=predicted[step["phase"], step["batch"], step["context"]],
            measured=step["seconds"],
            way=step["all_reduce"],
            predicted_for=step["all_reduce"] == first,
        )
        for step in document["steps"]
    ]
    return sorted(rows, key=lambda row: not row.predicted_for)


def load_rows(document: Mapping[str, Any]) -> dict[str, list[Compared]]:
    """Return what clients saw, by load; loads that were not completed are left out."""
    found = {}
    for load in document["loads"]:
        if not load["complete"] or not load["answers"]:
            continue
        seen = measured_latency(load["answers"])
        predicted = document["request"]["predicted"]["loads"][load["name"]]
        rows = [
            Compared(what=f"{title} {part}", predicted=predicted[name][part], measured=getattr(seen[name], part))
            for name, title in (("ttft_s", "first token"), ("tpot_s", "a token"), ("e2e_s", "whole answer"))
            for part in ("p50", "mean", "p95")
        ]
        tokens = sum(one["tokens"] for one in load["answers"])
        rows.append(
            Compared(
                what="output tokens/s", predicted=predicted["output_tokens_per_s"], measured=tokens / load["seconds"]
            )
        )
        found[load["name"]] = rows
    return found


def measured_latency(answers: Sequence[Mapping[str, float]]) -> dict[str, Distribution]:
    """Return the distributions of measured answers, as `simulator.serving.latency` makes them of simulated ones."""
    arrived, first, done, tokens = (
        np.array([one[name] for one in answers]) for name in ("arrival_s", "first_s", "done_s", "tokens")
    )
    return {
        "ttft_s": distribution(first - arrived),
        "tpot_s": distribution((done - first) / np.maximum(tokens - 1, 1)),
        "e2e_s": distribution(done - arrived),
    }


def print_run(document: Mapping[str, Any]) -> None:
    """Print a report: the check, steps and loads, and what is missing."""
    screen = console()
    for verdict in document["checks"]:
        right = "as the training decoder computes" if verdict["ok"] else "NOT what the training decoder computes"
        screen.print(
            printable(
                f"numbers  {verdict['name']}: {right}, within {verdict['difference']:.1e} of the largest score "
                f"(tolerance {verdict['tolerance']:.1e}, {verdict['dtype']})"
            )
        )
    steps = step_rows(document)
    if steps:
        _print_table("step", [(row.what, row) for row in steps])
    loads = load_rows(document)
    if loads:
        _print_table("load", [(f"{name}: {row.what}", row) for name, rows in loads.items() for row in rows])
    for load in document["loads"]:
        gaps = np.array(load["itl_s"])
        if gaps.size:
            p50, p95, p99 = np.percentile(gaps, (50, 95, 99)) * 1e3
            screen.print(f"{load['name']}: between tokens {p50:.3g} ms median, {p95:.3g} p95, {p99:.3g} p99, measured")
    for line in document["missing"]:
        screen.print(printable(f"missing  {line['what']}"))
    if document["failure"]:
        screen.print(printable(f"failed   {document['failure']['message'][:500]}"))


def _print_table(heading: str, rows: Sequence[tuple[str, Compared]]) -> None:
    headings = (heading, "predicted", "measured", "error", "all-reduce")
    table = grid(headings, text=(heading, "all-reduce"), gap=2)
    for what, row in rows:
        scale, unit = (1.0, "tokens/s") if what.endswith("tokens/s") else (1e3, "ms")
        cells = [f"{value * scale:.3g} {unit}" for value in (row.predicted, row.measured)]
        error = f"{row.error:+.1%}"
        if not row.predicted_for:
            cells[0], error = "", ""
        table.add_row(printable(what), *cells, error, WAYS.get(row.way, ""))
    console().print(table)


def _loads_way(document: Mapping[str, Any]) -> str:
    """Return the all-reduce of the prediction: the first that was requested and measured."""
    measured = {step["all_reduce"] for step in document["steps"]}
    return next((way for way in document["request"]["all_reduces"] if way in measured), "")


def _step_text(step: Mapping[str, Any]) -> str:
    if step["phase"] == DECODE:
        return f"{step['batch']} answers go on, {step['context']:,} tokens cached each"
    return f"{step['batch']} prompt{'s' if step['batch'] > 1 else ''} of {step['context']:,} tokens read"
