"""A serving search for people: the sentence that answers, a table of 80 columns, memory, what it rests on."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from planner.io.output import console, printable
from planner.serving.break_even import break_even
from planner.serving.crossings import LoadRow
from planner.serving.question import ServingQuestion
from planner.serving.search import ServingPlan, ServingResult
from simulator.config.estimate import Interval
from simulator.serving.deployment import Deployment, Pool
from simulator.serving.engine import engine_of

GIB = float(2**30)


def print_serving(result: ServingResult, load: Sequence[LoadRow], *, top: int, start: str) -> None:
    """Print the answer; times have as many digits as their range leaves. `start` starts one engine."""
    screen = console()
    question, best = result.question, result.plans[0]
    screen.print(printable(_sentence(question, best)))
    screen.print()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("deployment", overflow="fold")
    for heading in ("1st token ms", "a token ms", "tok/s/GPU", "KV tokens"):
        table.add_column(heading, justify="right", no_wrap=True)
    for plan in result.plans[:top]:
        mark = " =" if plan.tied else ""
        table.add_row(deployment_text(plan.deployment) + mark, *_cells(plan))
    screen.print(table)
    if any(plan.tied for plan in result.plans[:top]):
        screen.print("= as good as the first within the error of the prediction; the first uses fewer mechanisms.")
    screen.print()
    for plan in result.plans[1:top]:
        if plan.lost_because:
            screen.print(printable(f"{deployment_text(plan.deployment)}: {plan.lost_because}"))
    _print_memory(result, best)
    _print_break_even(question, best)
    _print_load(load)
    screen.print(printable(f"Start each engine by: {start}"))
    for line in _notes(result):
        screen.print(printable(line))


def deployment_text(deployment: Deployment) -> str:
    """Return a deployment in a few words: `4 x TP 2`, `2 x TP 4 reading, 6 x TP 4 writing`."""
    if deployment.prefill is not None:
        return f"{pool_text(deployment.prefill)} reading, {pool_text(deployment.pool)} writing"
    return pool_text(deployment.pool)


def pool_text(pool: Pool) -> str:
    parts = [f"{what} {degree}" for what, degree in (("TP", pool.tp), ("PP", pool.pp)) if degree > 1]
    if pool.dp_attention > 1:
        parts.append(f"attention DP {pool.dp_attention}")
    if pool.ep > 1:
        parts.append(f"EP {pool.ep}")
    return f"{pool.engines} x {' '.join(parts) or '1 GPU'}"


def _sentence(question: ServingQuestion, best: ServingPlan) -> str:
    estimate, traffic = best.estimate, question.traffic
    load = f"{traffic.concurrency} clients" if traffic.concurrency else f"{traffic.request_rate:g} requests/s"
    seen = (
        f"first token after {_ms(estimate.ttft_s)} ms, then one every {_ms(estimate.tpot_s)} ms, "
        f"{_number(estimate.output_tokens_per_s_per_gpu)} output tokens/s a GPU"
    )
    price = ""
    if question.gpu_price_per_hour:
        per_million = question.gpu_price_per_hour / 3600 / estimate.output_tokens_per_s_per_gpu.value * 1e6
        price = f", {per_million:.2g} a million output tokens"
    short = "" if best.meets else " No deployment meets the targets; this one comes nearest."
    engine = engine_of(question.engine).title
    words = (
        f"Serve {question.model.name} as {deployment_text(best.deployment)} with {engine}: at {load}, {seen}{price}."
    )
    return words + short


def _cells(plan: ServingPlan) -> list[str]:
    estimate = plan.estimate
    return [
        _ms(estimate.ttft_s),
        _ms(estimate.tpot_s),
        _number(estimate.output_tokens_per_s_per_gpu),
        f"{estimate.room.tokens:,}",
    ]


def _print_memory(result: ServingResult, best: ServingPlan) -> None:
    room, traffic = best.estimate.room, result.question.traffic
    longest = traffic.prompt.mean + traffic.output.mean
    parts = ", ".join(f"{name.replace('_', ' ')} {nbytes / GIB:.1f}" for name, nbytes in room.by_category.items())
    console().print(f"\nMemory of a GPU, GiB of {room.capacity_bytes / GIB:.1f}: {parts}.")
    console().print(
        f"GPU KV cache size: {room.tokens:,} tokens. Maximum concurrency for {longest:,} tokens per request: "
        f"{room.tokens / longest:.2f}x"
    )


def _print_break_even(question: ServingQuestion, best: ServingPlan) -> None:
    tp = best.deployment.pool.tp
    if tp == 1 or best.deployment.pool.dp_attention > 1:
        return
    found = break_even(question, tp, tp // 2)
    console().print(
        f"For one answer alone, TP {tp} is {'faster' if found.pays else 'no faster'} than TP {tp // 2}: "
        f"{_digits(found.token_s * 1e3)} and {_digits(found.fewer_token_s * 1e3)} ms a token. It is while an all-reduce takes "
        f"under {_digits(max(found.limit_s, 0.0) * 1e6)} us; {_digits(found.all_reduce_s * 1e6)} us are predicted."
    )


def _print_load(load: Sequence[LoadRow]) -> None:
    if not load:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("clients", justify="right")
    table.add_column("best of those followed", overflow="fold")
    for heading in ("1st token ms", "a token ms", "tok/s/GPU"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in load:
        estimate = row.estimate
        cells = [_number(estimate.ttft_s, 1e3), _number(estimate.tpot_s, 1e3)]
        cells.append(_number(estimate.output_tokens_per_s_per_gpu))
        table.add_row(str(row.clients), deployment_text(row.deployment), *cells)
    console().print()
    console().print(table)
    console().print()


def _notes(result: ServingResult) -> list[str]:
    """Return what the answer rests on, each once."""
    lines = [f"{len(result.plans)} deployments simulated, all that are legal; {result.seconds:.1f} s."]
    if result.rejected:
        reasons = "; ".join(f"{reason} ({count})" for reason, count in result.rejected.most_common(4))
        lines.append(f"Not possible: {reasons}.")
    if result.question.assumed:
        lines.append(f"Assumed: {'; '.join(result.question.assumed)}.")
    lines.append("Times are from datasheets and published kernel rates; ranges hold four of five published points.")
    return lines


def _ms(value: Interval) -> str:
    return f"{_number(value, 1e3)} ({_digits(value.low * 1e3)}-{_digits(value.high * 1e3)})"


def _number(value: Interval, scale: float = 1.0) -> str:
    return _digits(value.value * scale)


def _digits(value: float) -> str:
    """Return two digits: predictions of serving are not better than that."""
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"
