"""Page: what if: another machine, other numbers of GPUs, a whole run in days and money, the memory of all plans."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import streamlit as st

from planner.io import plan_words
from planner.io.figures import gib_text, last_digit_s, seconds_text
from planner.pictures.memory import stage_parts
from planner.question.goal import Goal
from planner.search.whole_run import runs_of_counts, whole_run
from topology.errors import PlannerError
from topology.units import two_digits
from ui import data, other_machines, panels, rows
from ui.changed_rows import run_rows, size_rows
from ui.charts import curves as charts
from ui.charts import detail as detail_charts
from ui.question import state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner.search.result import GpuCountRow, RankedPlan, SearchResult
    from planner.search.whole_run import WholeRun
    from simulator.config.estimate import Interval

FACTORS = (0.25, 0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0, 2.8, 4.0)
MAX_COUNTS = 5
SEARCHED_UNASKED = 64  # most GPUs searched without a request: for more, searches take minutes


def show(question: state.Inputs) -> None:
    result, chosen = data.answer()
    _machine(question, result)
    left, right = st.columns(2, gap="large")
    with left:
        _whole_run(result, chosen)
    with right:
        _memory(result)
    _sizes(question, result, chosen)
    _numbers(question, result)


@panels.part("machine")
def _machine(question: state.Inputs, result: SearchResult) -> None:
    panels.section(
        "Another machine",
        "The listed plans if links, memory or FLOP/s were several times what they are, by the analytical model.",
    )
    multi = result.question.cluster.node_count > 1
    names = [name for name, _ in other_machines.knobs(result)]
    shown = [
        ("network", multi),
        ("NVLink", any(n.startswith("NVLink") for n in names)),
        ("memory", True),
        ("FLOP/s", True),
    ]
    sliders = [name for name, there in shown if there]
    factors = {
        name: float(
            column.select_slider(
                f"{name}, times", FACTORS, 1.0, key=f"factor_{name}", format_func=lambda factor: f"{factor:g}"
            )
        )
        for name, column in zip(sliders, st.columns(len(sliders)), strict=True)
    }
    found = other_machines.changed_machine(question, result, factors)
    last_s = rows.known_to_s(result)
    drawn = [
        {
            **row,
            "label": f"{row['rank']}  {row['plan']}",
            "before": seconds_text(row["before_s"], last_s),
            "after": seconds_text(row["after_s"], last_s),
            "held": f"{row['reserved_gib']:.0f} GiB",
            "state": "as changed" if row["fits"] else "does not fit then",
        }
        for row in found
    ]
    fitting = [row for row in found if row["fits"]]
    if all(factor == 1 for factor in factors.values()):
        words = "The machine as it is; move a slider to change it"
    elif fitting:
        first = min(fitting, key=lambda row: row["after_s"])
        after, before = (seconds_text(step_s, last_s) for step_s in (first["after_s"], first["before_s"]))
        words = f"Fastest then: #{first['rank']} {first['plan']}, {after} a step ({before} as it is)"
    else:
        words = "None of the listed plans fits then"
    st.markdown(f"**{panels.plain(words)}.**")
    panels.chart(charts.before_and_after(drawn, dark=panels.dark()), key="machine", alt=words)


def _whole_run(result: SearchResult, chosen: RankedPlan) -> None:
    panels.section("A whole run", f"With plan #{chosen.rank}, and failures and checkpoints as in published runs.")
    left, right = st.columns(2)
    billions = left.number_input("Tokens, billions", 0.1, 1e6, 1000.0, key="tokens", bind="query-params")
    with right:
        price = state.price("Price of a GPU hour")
    state.write_link(price=price)
    run = whole_run(replace(result, plans=(chosen,)), Goal(tokens=billions * 1e9, gpu_price_per_hour=price or None))
    cells: list[panels.Figure] = []
    if run.days is not None and run.gpu_hours is not None:
        cells.append(("Days", two_digits(run.days.value), "With the range that holds 80 % of runs.", _ends(run.days)))
        cells.append(("GPU hours", two_digits(run.gpu_hours.value), "", f"{run.steps:,.0f} steps"))
    if run.cost is not None:
        about = f"In the currency of the price, {price:g} an hour, with the range that holds 80 % of runs."
        cells.append(("Cost", two_digits(run.cost.value), about, _ends(run.cost)))
    if run.energy_j is not None:
        megawatt_hours = two_digits(run.energy_j / 3.6e9)
        cells.append(("Energy", f"{megawatt_hours} MWh", "Of the GPUs at the limit of their datasheet.", "at most"))
    panels.figures(cells)


def _ends(interval: Interval) -> str:
    return f"{two_digits(interval.low)} to {two_digits(interval.high)}"


def _memory(result: SearchResult) -> None:
    panels.section("Memory side by side", "The stage that needs most, of each listed plan.")
    worst = [max(stage_parts(r.estimate.memory), key=lambda parts: sum(parts.values())) for r in result.plans]
    capacity = result.plans[0].estimate.memory.capacity_bytes
    names = [f"{r.rank}  {plan_words.plan_chips(r.plan)}" for r in result.plans]
    least = min(result.plans, key=lambda r: r.estimate.memory.reserved_bytes)
    about = f"Of {len(worst)} plans, #{least.rank} needs least: {gib_text(least.estimate.memory.reserved_bytes)} GiB"
    drawn = detail_charts.memory(worst, capacity, dark=panels.dark(), names=names)
    panels.chart(drawn, key="memories", alt=f"{about} of {gib_text(capacity)}")


def _sizes(question: state.Inputs, result: SearchResult, chosen: RankedPlan) -> None:
    panels.section(
        "Other lengths and micro batches",
        f"Plan #{chosen.rank} with the same number of micro batches a step, by the analytical model. A cell has"
        " the step and the memory, deeper for more tokens/s per GPU; an empty frame may not fit, or is not legal.",
    )
    found = data.sizes(question, result, chosen)
    if found is None:
        return
    drawn = size_rows(found, chosen, result.question.workload.seq_len)
    best = max((row for row in drawn if row["tokens_per_s"]), key=lambda row: row["tokens_per_s"] or 0.0, default=None)
    about = "Nothing that was tried fits"
    if best is not None:
        size = f"{best['micro_batch']} x {best['length']} tokens a micro batch"
        about = f"Highest throughput that surely fits: {size}, {best['rate']} per GPU"
    st.markdown(f"**{panels.plain(about)}.**")
    panels.chart(charts.size_map(drawn, dark=panels.dark()), key="sizes", alt=about)


def _numbers(question: state.Inputs, result: SearchResult) -> None:
    panels.section("Other numbers of GPUs", "The best plan on each, with the same batch.")
    here = result.plans[0].plan.gpus
    if not st.toggle("Search them", value=here <= SEARCHED_UNASKED, key="numbers", bind="query-params"):
        st.caption("A search for each number takes as long as the one above.")
        return
    wanted = (here // 4, here // 2, here, 2 * here, 4 * here)
    counts = tuple(n for n in wanted if n == here or (1 <= n <= state.MAX_GPUS and _there(question, n)))[:MAX_COUNTS]
    price = float(st.session_state.get("price") or 0.0) or None
    found = data.numbers(question, counts, price)
    if found is None:
        return
    known = [row for row in found.by_gpus if row.step_s is not None]
    step = found.plans[0].estimate.step_s
    base = max((row.tokens_per_s_per_gpu or 0.0 for row in known), default=1.0)
    drawn = [_count_row(row, last_digit_s(step.at(row.step_s or 0.0)), base) for row in known]
    if drawn:
        columns = st.columns(3 if price else 2, gap="large")
        quantities = [("step_s", "step time, s", "step"), ("share", "tokens/s a GPU, % of the best", "share_text")]
        quantities += [("cost", "cost of a million tokens", "cost_text")] if price else []
        for column, (name, title, text) in zip(columns, quantities, strict=True):
            with column:
                values = [{**row, "text": row[text]} for row in drawn]
                about = ", ".join(f"{row['gpus']} GPUs {row['text']}" for row in values)
                panels.chart(
                    charts.over_gpus(values, name, title, dark=panels.dark()),
                    key=f"over_{name}",
                    alt=f"{title}: {about}",
                )
    billions = float(st.session_state.get("tokens") or 0.0)
    if drawn and billions:
        runs = runs_of_counts(found, Goal(tokens=billions * 1e9, gpu_price_per_hour=price))
        _runs(runs, here, priced=price is not None)
    for row in found.by_gpus:
        if row.problem:
            st.caption(f"{row.gpus} GPUs: {panels.plain(row.problem)}")


def _runs(runs: Sequence[WholeRun], here: int, *, priced: bool) -> None:
    """Draw the whole run on each number of GPUs: its cost, or GPU hours without a price, against its days."""
    drawn = run_rows(runs, here)
    if not drawn:
        return
    unit = "cost, in the currency of the price" if priced else "GPU hours"
    panels.section(
        f"A whole run: {'cost' if priced else 'GPU hours'} against days",
        "One point for each number of GPUs, with the ranges that hold 80 % of runs; the question's is red.",
    )
    about = "; ".join(f"{row['label']}: {row['days_text']} days, {row['cost_text']}" for row in drawn)
    panels.chart(charts.cost_over_days(drawn, unit, dark=panels.dark()), key="run_curve", alt=f"{unit}: {about}")


def _there(question: state.Inputs, gpus: int) -> bool:
    """Return whether the cluster has so many GPUs, or grows to them."""
    try:
        data.cluster(question.cluster, gpus, question.gpu)
    except PlannerError:
        return False
    return True


def _count_row(row: GpuCountRow, last_s: float, best_rate: float) -> dict[str, str | float | None]:
    step_s, rate = row.step_s or 0.0, row.tokens_per_s_per_gpu or 0.0
    cost = row.cost_per_million_tokens
    return {
        "gpus": row.gpus,
        "plan": plan_words.plan_chips(row.plan) if row.plan else "",
        "step_s": step_s,
        "step": seconds_text(step_s, last_s),
        "share": 100 * rate / best_rate,
        "share_text": f"{rate / best_rate:.0%}",
        "cost": cost,
        "cost_text": "" if cost is None else f"{cost:#.2g}".rstrip("."),
    }


show(data.question())
