"""A serving search as text: a sentence with the answer, a table of 80 columns, memory, and what it is based on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from planner.io.grids import console, grid
from planner.io.printable import printable
from planner.serving.crossings import BreakEven, Row, break_even
from planner.serving.question.question import ServingQuestion
from planner.serving.reports.documents import price_per_million
from planner.serving.search import ServingPlan, ServingResult
from planner.serving.targets.ways import NOTHING, WayOut
from simulator.config.estimate import Interval
from simulator.serving.deployment import Deployment, Pool
from simulator.serving.engine import engine_of
from simulator.serving.estimate import ServingEstimate
from simulator.serving.traffic import Traffic
from topology.units import GIB, two_digits


def print_serving(result: ServingResult, load: Sequence[Row], *, top: int, start: str, out: WayOut = NOTHING) -> None:
    """Print the answer; times have as many digits as their range allows. `start` starts one engine."""
    screen = console()
    question, best = result.question, result.plans[0]
    sentence = answer_sentence(question, best.deployment, best.estimate, meets=True)
    short = "" if best.meets else " No deployment meets the targets; this one comes closest."
    screen.print(printable(sentence + short))
    for line in way_out_lines(out, meets=best.meets):
        screen.print(printable(line))
    screen.print()
    rows = [
        (deployment_text(plan.deployment) + (" =" if plan.tied else ""), *_cells(plan)) for plan in result.plans[:top]
    ]
    screen.print(grid(("deployment", "1st token ms", "a token ms", "tok/s/GPU", "KV tokens"), rows, gap=2))
    if any(plan.tied for plan in result.plans[:top]):
        screen.print("= as good as the first, within the error of the prediction; the first is simpler.")
    if len(result.plans[:top]) > 1:
        screen.print()
    for plan in result.plans[1:top]:
        if plan.lost_because:
            screen.print(printable(f"{deployment_text(plan.deployment)}: {plan.lost_because}"))
    print_memory(question, best.estimate)
    _print_break_even(question, best)
    _print_load(load)
    screen.print(printable(f"Start each engine with: {start}"))
    for line in _notes(result):
        screen.print(printable(line))


def way_out_lines(out: WayOut, *, meets: bool) -> list[str]:
    """Return the most load within the targets and, if they do not hold, each change that meets them."""
    lines = []
    most = out.most
    if most is not None and meets:
        more = ", and more was not tried" if most.more else ""
        lines.append(
            f"Most load within the targets: {load_text(most.question.traffic)}{more}, {_seen_text(most.plan)}."
        )
    if not meets:
        lines += [f"With {way.flags} they hold: {_seen_text(way.plan)}." for way in out.ways]
    if not (meets or out.ways):
        tried = "Less load, more GPUs, narrower weights and caches, other engines, shorter prompts and answers"
        lines.append(f"{tried} were tried, too: none is enough, alone or with less load.")
    return lines if out.whole else [*lines, "The time limit ended before all changes were tried."]


def _seen_text(plan: ServingPlan) -> str:
    first, token = ms_text(plan.estimate.ttft_s), ms_text(plan.estimate.tpot_s)
    return f"{deployment_text(plan.deployment)}, first token {first} ms, {token} ms a token"


def deployment_text(deployment: Deployment) -> str:
    """Return a deployment in a few words: `4 x TP 2`, `2 x TP 4 prefill, 6 x TP 4 decode`."""
    if deployment.prefill is not None:
        return f"{pool_text(deployment.prefill)} prefill, {pool_text(deployment.pool)} decode"
    return pool_text(deployment.pool)


def pool_text(pool: Pool) -> str:
    parts = [f"{what} {degree}" for what, degree in (("TP", pool.tp), ("PP", pool.pp)) if degree > 1]
    if pool.dp_attention > 1:
        parts.append(f"attention DP {pool.dp_attention}")
    if pool.ep > 1:
        parts.append(f"EP {pool.ep}")
    return f"{pool.engines} x {' '.join(parts) or '1 GPU'}"


def answer_sentence(
    question: ServingQuestion, deployment: Deployment, estimate: ServingEstimate, *, meets: bool
) -> str:
    """Return a deployment and what clients see of it in one or two sentences."""
    further = bool(question.traffic.trace) or question.traffic.output.longest > 1
    after = f"{'first' if further else 'the only'} token after {ms_text(estimate.ttft_s)} ms, "
    every = f"then one every {ms_text(estimate.tpot_s)} ms, " if further else ""
    seen = f"{after}{every}{_number(estimate.output_tokens_per_s_per_gpu)} output tokens/s per GPU"
    per_million = price_per_million(question, estimate)
    price = "" if per_million is None else f", {per_million:.2g} per million output tokens"
    engine = engine_of(question.engine).title
    within = "" if meets else " The targets do not hold."
    name = question.model.name
    return (
        f"Serve {name} as {deployment_text(deployment)} with {engine}: at {load_text(question.traffic)}, {seen}{price}."
        + within
        + ("" if estimate.latency.keeps_up else _behind_text(question.traffic, estimate.latency.output_tokens_per_s))
    )


def _behind_text(traffic: Traffic, answered: float) -> str:
    """Return that requests come faster than they are answered, at `answered` tokens a second."""
    asked = traffic.request_rate * traffic.output.mean
    return (
        f" Requests come faster than they are answered: they ask for {two_digits(asked)} output tokens/s, of which"
        f" {two_digits(answered)} are written; the longer this lasts, the longer they wait."
    )


def load_text(traffic: Traffic) -> str:
    """Return the traffic of clients in a few words."""
    if traffic.trace:
        return f"{len(traffic.trace)} requests of a file"
    clients = "1 client" if traffic.concurrency == 1 else f"{traffic.concurrency} clients"
    return clients if traffic.concurrency else f"{traffic.request_rate:g} requests/s"


def _cells(plan: ServingPlan) -> list[str]:
    estimate = plan.estimate
    return [
        ms_text(estimate.ttft_s),
        ms_text(estimate.tpot_s),
        _number(estimate.output_tokens_per_s_per_gpu),
        f"{estimate.room.tokens:,}",
    ]


def print_memory(question: ServingQuestion, estimate: ServingEstimate) -> None:
    """Print the memory of a GPU, and the cache in the words of vLLM's log, for comparison."""
    room, traffic = estimate.room, question.traffic
    longest = traffic.prompt.mean + traffic.output.mean
    parts = ", ".join(f"{name.replace('_', ' ')} {nbytes / GIB:.1f}" for name, nbytes in room.by_category.items())
    console().print(f"\nMemory of a GPU, GiB of {room.capacity_bytes / GIB:.1f}: {parts}.")
    console().print(
        f"GPU KV cache size: {room.tokens:,} tokens. Maximum concurrency for {longest:,} tokens per request: "
        f"{room.tokens / longest:.2f}x"
    )


def _print_break_even(question: ServingQuestion, best: ServingPlan) -> None:
    tp = best.deployment.pool.tp
    if tp > 1 and best.deployment.pool.dp_attention == 1:
        console().print(break_even_text(break_even(question, tp, tp // 2)))


def break_even_text(found: BreakEven) -> str:
    """Return whether tensor parallelism is faster for a single answer, and up to which all-reduce time."""
    return (
        f"For one answer alone, TP {found.tp} is {'faster' if found.pays else 'no faster'} than TP {found.fewer}:"
        f" {two_digits(found.token_s * 1e3)} and {two_digits(found.fewer_token_s * 1e3)} ms per token."
        f" It pays as long as an all-reduce takes less than {two_digits(max(found.limit_s, 0.0) * 1e6)} us;"
        f" {two_digits(found.all_reduce_s * 1e6)} us are predicted."
    )


def _print_load(load: Sequence[Row]) -> None:
    if not load:
        return
    best = "best deployment"
    table = grid(("clients", best, "1st token ms", "a token ms", "tok/s/GPU"), text=(best,), gap=2)
    for row in load:
        estimate = row.estimate
        cells = [_number(estimate.ttft_s, 1e3), _number(estimate.tpot_s, 1e3)]
        cells.append(_number(estimate.output_tokens_per_s_per_gpu))
        table.add_row(str(round(row.value)), deployment_text(row.deployment), *cells)
    console().print()
    console().print(table)
    console().print()


def _notes(result: ServingResult) -> list[str]:
    """Return what the answer is based on, each once."""
    many = len(result.plans)
    lines = [f"{many:,} deployment{'s' if many != 1 else ''} simulated, all that are legal; {result.seconds:.1f} s."]
    used, all_ = result.plans[0].deployment.gpus, result.question.gpu_count
    if used < all_:
        lines.append(f"{all_ - used} of {all_} GPUs are idle; tokens/s are those of a GPU in use.")
    if result.rejected:
        lines.append(f"Not possible: {reasons_text(result.rejected)}.")
    if result.question.assumed:
        lines.append(f"Assumed: {'; '.join(result.question.assumed)}.")
    lines.append("Times are from datasheets and published kernel rates; ranges hold four of five published points.")
    return lines


def reasons_text(rejected: Counter[str]) -> str:
    """Return why deployments are not possible, the commonest reasons first."""
    return "; ".join(f"{reason} ({count})" for reason, count in rejected.most_common(4))


def ms_text(value: Interval) -> str:
    """Return milliseconds with the range they are expected in."""
    return f"{_number(value, 1e3)} ({two_digits(value.low * 1e3)}-{two_digits(value.high * 1e3)})"


def _number(value: Interval, scale: float = 1.0) -> str:
    return two_digits(value.value * scale)
