"""Throughput per user and per GPU as text, as CSV and as JSON, with the same points in each."""

from __future__ import annotations

import csv
import io

from planner.io.grids import console, grid
from planner.io.output import SCHEMA_VERSION
from planner.io.printable import printable
from planner.serving.pareto import Pareto, ParetoPoint
from planner.serving.plan_file import TASK
from planner.serving.reports.documents import interval, plan_document, price_per_million
from planner.serving.reports.text import deployment_text, load_text, ms_text, reasons_text
from simulator.serving.engine import engine_of
from topology.codec import JsonObject
from topology.units import two_digits

USER, GPU = "tokens/s a user", "tokens/s a GPU"
PRICE, ENERGY = "price of a million tokens", "joules a token"


def values_of(point: ParetoPoint) -> dict[str, float]:
    """Return a point by the axes that are known of it."""
    known: dict[str, float] = {USER: point.user_tokens_per_s, GPU: point.gpu_tokens_per_s}
    price = price_per_million(point.question, point.plan.estimate)
    if price is not None:
        known[PRICE] = price
    if point.token_j is not None:
        known[ENERGY] = point.token_j.value
    return known


def about(point: ParetoPoint) -> str:
    """Return a point as text."""
    seen = point.plan.estimate
    load = load_text(point.question.traffic)
    where = f"{deployment_text(point.plan.deployment)}, {engine_of(point.engine).title}, {load}"
    rates = ", ".join(f"{two_digits(value)} {name}" for name, value in values_of(point).items())
    return f"{where}: {rates}, first token {ms_text(seen.ttft_s)} ms"


def pareto_document(found: Pareto) -> JsonObject:
    """Return the document of `suggest --task serve --objective pareto --json`."""
    return {
        "schema_version": SCHEMA_VERSION,
        "task": TASK,
        "objective": "pareto",
        "assumed": list(found.question.assumed),
        "search": {"simulated": len(found.points), "seconds": found.seconds, "whole": found.whole},
        "points": [_point(point) for point in found.points],
        "rejected": dict(found.rejected),
    }


def _point(point: ParetoPoint) -> JsonObject:
    seen = point.plan.estimate
    return {
        "engine": point.engine,
        "clients": point.clients,
        "plan": plan_document(point.plan.deployment),
        "user_tokens_per_s": point.user_tokens_per_s,
        "gpu_tokens_per_s": point.gpu_tokens_per_s,
        "ttft_s": interval(seen.ttft_s),
        "tpot_s": interval(seen.tpot_s),
        "price_per_million_tokens": price_per_million(point.question, seen),
        "token_energy_j": None if point.token_j is None else interval(point.token_j),
        "meets_targets": point.plan.meets,
        "best": point.best,
        "best_of_engine": point.best_of_engine,
    }


def pareto_csv(found: Pareto) -> str:
    """Return one line a point."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    names = ("user_tokens_per_s", "gpu_tokens_per_s", "price_per_million_tokens", "token_energy_j")
    table.writerow(("engine", "deployment", "clients", *names, "ttft_s", "tpot_s", "meets_targets", "best"))
    for point in found.points:
        known, seen = values_of(point), point.plan.estimate
        numbers = [known.get(name, "") for name in (USER, GPU, PRICE, ENERGY)]
        late = (seen.ttft_s.value, seen.tpot_s.value, point.plan.meets, point.best)
        table.writerow((point.engine, deployment_text(point.plan.deployment), point.clients, *numbers, *late))
    return text.getvalue()


def title(found: Pareto) -> str:
    """Return the question's model and machine as text."""
    machine = found.question.cluster
    return f"{found.question.model.name} on {found.question.gpu_count} x {machine.slowest_kind.title}"


def print_pareto(found: Pareto) -> None:
    """Print the Pareto-optimal points, the fastest users first."""
    screen = console()
    engines = ", ".join(dict.fromkeys(engine_of(point.engine).title for point in found.points))
    screen.print(
        printable(
            f"{title(found)}: of {len(found.points)} combinations of deployment, engine ({engines}) and clients,"
            f" {len(found.best)} are beaten by none in both rates."
        )
    )
    screen.print()
    further = [name for name in (PRICE, ENERGY) if any(name in values_of(point) for point in found.best)]
    headings = ("deployment", "engine", "clients", "tok/s/user", "tok/s/GPU", "1st ms")
    short = {PRICE: "per 1M", ENERGY: "J/token"}
    rows = []
    for point in found.best:
        known = values_of(point)
        rows.append(
            (
                deployment_text(point.plan.deployment),
                point.engine,
                f"{point.clients:,}",
                two_digits(known[USER]),
                two_digits(known[GPU]),
                two_digits(1e3 * point.plan.estimate.ttft_s.value),
                *(two_digits(known[name]) if name in known else "-" for name in further),
            )
        )
    screen.print(grid((*headings, *(short[name] for name in further)), rows, text=headings[:2], gap=2))
    screen.print()
    if found.rejected:
        screen.print(printable(f"Not possible: {reasons_text(found.rejected)}."))
    if found.question.assumed:
        screen.print(printable(f"Assumed: {'; '.join(found.question.assumed)}."))
    if ENERGY in further:
        screen.print("Energy is that of the GPUs at the share of their power limit that published servers draw.")
    if not found.whole:
        screen.print("The time limit ended before all were simulated.")
