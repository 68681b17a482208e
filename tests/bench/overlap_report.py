"""From the records of `overlap_table.py`: a Markdown table, what the cost model makes of them, and what it would
choose.

Run as `python3 tests/bench/overlap_report.py OUT_STEM --title TEXT --note TEXT RECORDS.jsonl...`; writes OUT_STEM.json
with the records and OUT_STEM.md. The rates are fitted to all shapes, and again without each of them, to be tried on
that.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from executor.launch.records import read_records  # noqa: E402 - the path comes first
from simulator.collectives.cost import CollectiveModel  # noqa: E402
from simulator.fitting.overlap_fit import TimedMode, fit_rates, mean_error  # noqa: E402
from simulator.fitting.overlap_samples import rates_as_numbers, timed_modes  # noqa: E402
from simulator.kernels.roofline import Roofline  # noqa: E402
from simulator.overlap.modes import EXECUTED, GATHER, OverlapRates, choose  # noqa: E402
from topology.catalog.clusters import cluster  # noqa: E402
from topology.profile.samples import OverlapSample  # noqa: E402

Machine = tuple[Roofline, CollectiveModel]
RIVAL = "torch_symm_mem"  # PyTorch's operators
SHOWN = (*EXECUTED, RIVAL)
BOUND_ROWS = 8192
Shapes = list[tuple[OverlapSample, list[TimedMode]]]


SUMS = {
    "nccl": "NCCL",
    "torch": "PyTorch, any tensor",
    "torch_one_shot": "PyTorch one-shot, symmetric",
    "torch_two_shot": "PyTorch two-shot, symmetric",
    "own": "own, any tensor",
    "own in place": "own in place, any tensor",
}


def timed(samples: tuple[OverlapSample, ...], machine: Machine) -> Shapes:
    """Every shape with its modes."""
    pairs = timed_modes(samples, *machine)
    return [(sample, [mode for of, mode in pairs if of is sample]) for sample in samples]


def chosen(shape: tuple[OverlapSample, list[TimedMode]], rates: OverlapRates) -> str:
    """The mode that the model alone would take, of those that were measured."""
    sample, modes = shape
    predicted = dict(choose(sample.operation, modes[0].parts, rates).seconds)
    return min(predicted, key=lambda mode: predicted[mode])


def shape_lines(shapes: list[dict[str, Any]], choices: dict[tuple[Any, ...], str]) -> list[str]:
    """One line a shape: µs of everything, the best mode, and the mode the model would choose from the parts."""
    lines = [
        "| operation | layer | rows x columns x depth | cuBLAS | Triton | NCCL | "
        + " | ".join(SHOWN)
        + " | best, efficiency | chosen by the model, loss |",
        "|---|---|---|" + "---:|" * (3 + len(SHOWN)) + "---|---|",
    ]
    for r in shapes:
        s, choice = r["seconds"], choices[r["operation"], r["rows"], (r["columns"],), r["depth"]]
        best = min(EXECUTED, key=lambda mode: s[mode])
        alone = min(s["cublas"], s["triton"])
        numbers = [s["cublas"], s["triton"], s["collective"], *(s[mode] for mode in SHOWN)]
        lines.append(
            f"| {'gather' if r['operation'] == GATHER else 'scatter'} | {r['name']} "
            f"| {r['rows']:,} x {r['columns']:,} x {r['depth']:,} | "
            + " | ".join(f"{1e6 * number:,.0f}" for number in numbers)
            + f" | {best} {alone / s[best]:.3f} | {choice} {100 * (s[choice] / s[best] - 1):.0f} % |"
        )
    return lines


def bound_lines(found: list[dict[str, Any]], machine: Machine) -> list[str]:
    """How near modes come to the larger of what products and traffic take alone, from `BOUND_ROWS` on;
    forward with the gain over NCCL and then the product, measured and predicted from the default rates.
    """
    lines = [
        "| pass | operation | layer | rows x columns x depth | products | traffic | "
        + " | ".join(SHOWN)
        + " | best of ours, share of the bound | gain over nccl, predicted |",
        "|---|---|---|---|" + "---:|" * (2 + len(SHOWN)) + "---|---|",
    ]
    samples = {
        (s.operation, s.rows, s.columns, s.depth): one for s, *one in timed(samples_of(found, runs_of(found)), machine)
    }
    for r in found:
        if r["kind"] not in {"shape", "backward"} or r["rows"] < BOUND_ROWS:
            continue
        s, forward = r["seconds"], r["kind"] == "shape"
        alone = min(s["cublas"], s.get("triton", s["cublas"]))
        best = min(EXECUTED, key=lambda mode: s[mode])
        gain = f"{100 * (1 - s[best] / s['nccl']):.0f} %"
        if forward:
            modes = samples[r["operation"], r["rows"], (r["columns"],), r["depth"]][0]
            predicted = dict(choose(r["operation"], modes[0].parts, OverlapRates()).seconds)
            gain += f", {100 * (1 - predicted[best] / predicted['nccl']):.0f} %"
        numbers = [alone, s["collective"], *(s[mode] for mode in SHOWN)]
        lines.append(
            f"| {'forward' if forward else 'backward'} | {'gather' if r['operation'] == GATHER else 'scatter'} | {r['name']} "
            f"| {r['rows']:,} x {r['columns']:,} x {r['depth']:,} | "
            + " | ".join(f"{1e6 * number:,.0f}" for number in numbers)
            + f" | {best} {max(alone, s['collective']) / s[best]:.3f} | {gain} |"
        )
    return lines


def samples_of(records: list[dict[str, Any]], runs: list[str]) -> tuple[OverlapSample, ...]:
    """Return one sample a shape from records of `overlap_table.py`; of a shape in several runs that of the last."""
    found = {}
    for r in records:
        if r["kind"] == "shape" and r["run"] in runs:
            key = {"operation": r["operation"], "ranks": r["world"], "rows": r["rows"], "depth": r["depth"]}
            s = r["seconds"]
            found[*key.values(), r["columns"]] = OverlapSample(
                **key,
                columns=(r["columns"],),
                dtype="bfloat16",
                run="",
                product_s=s["cublas"],
                collective_s=s["collective"],
                seconds={mode: s[mode] for mode in EXECUTED},
            )
    return tuple(found.values())


def table_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a report's JSON, or of one run's JSON lines, which are then of a run of the file's name."""
    if path.suffix == ".json":
        return list(json.loads(path.read_text()))
    return [{"run": path.stem, **record} for record in read_records(path)]


def runs_of(found: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(r["run"] for r in found))


def model_lines(shapes: Shapes) -> tuple[list[str], OverlapRates]:
    samples = [mode for _, modes in shapes for mode in modes]
    rates = fit_rates(samples)
    modes = [mode for mode in EXECUTED if any(one.mode == mode for one in samples)]
    left_out, elsewhere = [], []
    for index, shape in enumerate(shapes):
        others = [mode for n, (_, modes) in enumerate(shapes) for mode in modes if n != index]
        refitted = fit_rates(others, rates)
        left_out += [mean_error([mode], refitted) for mode in shape[1]]
        elsewhere.append(chosen(shape, refitted))
    lines = [
        (
            f"Predicted from the parts alone: mean error {100 * mean_error(samples, rates):.1f} % over {len(samples)} times "
            f"({100 * sum(left_out) / len(left_out):.1f} % for a shape whose times are left out of the fit, each in turn; "
            f"{100 * mean_error(samples, OverlapRates()):.1f} % with the default rates). By mode:"
        ),
        "",
        "| mode | " + " | ".join(modes) + " |",
        "|---|" + "---:|" * len(modes),
        "| mean error | "
        + " | ".join(f"{100 * mean_error([x for x in samples if x.mode == mode], rates):.1f} %" for mode in modes)
        + " |",
        "",
        (
            f"Mode chosen by the model alone: {_choices(shapes, [chosen(shape, rates) for shape in shapes])}; with the "
            f"shape's own times left out of the fit: {_choices(shapes, elsewhere)}. Where the shape itself was measured, "
            "`choose` takes the measured best."
        ),
        "",
        "Rates: " + ", ".join(f"{name} {value:.3g}" for name, value in rates_as_numbers(rates).items()) + ".",
    ]
    return lines, rates


def _choices(shapes: Shapes, modes: list[str]) -> str:
    losses = [
        sample.seconds[mode] / min(sample.seconds.values()) - 1 for (sample, _), mode in zip(shapes, modes, strict=True)
    ]
    slower = sum(sample.seconds[mode] > sample.seconds["nccl"] for (sample, _), mode in zip(shapes, modes, strict=True))
    return (
        f"within 3 % of the best at {sum(loss <= 0.03 for loss in losses)} of {len(losses)} shapes, mean loss "
        f"{100 * sum(losses) / len(losses):.1f} %, largest {100 * max(losses):.0f} %, slower than NCCL then cuBLAS "
        f"at {slower}"
    )


def other_lines(found: list[dict[str, Any]]) -> list[str]:
    """All-reduce by size, norms, the host's time, signals, copies."""
    lines = []
    sums = [r for r in found if r["kind"] == "all_reduce"]
    for how in ("graph", "eager"):
        rows = [r for r in sums if r["how"] == how]
        if rows:
            names = [name for name in SUMS if name in rows[0]["seconds"]]
            lines += [
                "",
                f"All-reduce, µs, {'from a captured graph' if how == 'graph' else 'launched one by one'}:",
                "",
                "| bytes | " + " | ".join(SUMS[name] for name in names) + " | best own variant |",
                "|---:|" + "---:|" * (len(names) + 1),
            ]
        for r in rows:
            s = r["seconds"]
            numbers = [*(s[name] for name in names), min(s[name] for name in s if name.startswith("own"))]
            lines.append(f"| {r['bytes']:,} | " + " | ".join(f"{1e6 * number:.1f}" for number in numbers) + " |")
    norms = [r for r in found if r["kind"] == "norm"]
    if norms:
        lines += [
            "",
            "All-reduce, residual and RMSNorm, µs, from a captured graph:",
            "",
            "| rows x columns | one kernel | own, then norm | NCCL, then norm |",
            "|---|---:|---:|---:|",
        ]
        lines += [
            f"| {r['rows']} x {r['columns']:,} | "
            + " | ".join(f"{1e6 * r['seconds'][k]:.1f}" for k in ("one_kernel", "own_then_norm", "nccl_then_norm"))
            + " |"
            for r in norms
        ]
    for r in found:
        if r["kind"] == "host":
            lines += ["", f"Host time of a call on tiny tensors after an idle moment, µs: {_listed(r['seconds'])}."]
    signals = {r["what"]: r["seconds"] for r in found if r["kind"] == "signal"}
    if signals:
        lines += ["", f"Signals and small operations, one after the other, µs each: {_listed(signals)}."]
    copies = [f"{r['bytes']:,} bytes {r['bytes'] / r['seconds'] / 1e9:,.0f}" for r in found if r["kind"] == "copy"]
    if copies:
        lines += ["", f"Copy engine to a peer, GB/s: {', '.join(copies)}."]
    return lines


def _listed(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {1e6 * value:.1f}" for name, value in seconds.items())


def step_lines(found: list[dict[str, Any]]) -> list[str]:
    """Training steps of `overlap_end_to_end.py`: the modes chosen, what they hide, and the ways by time."""
    steps = [r for r in found if r["kind"] == "step"]
    if not steps:
        return []
    lines = ["", "## Training steps", ""]
    for r in found:
        if r["kind"] == "chosen":
            lines.append(
                f"- {_by_site(r, 'modes')}"
                + (f" (by sites alone: {_by_site(r, 'of_single_sites')})" if "in_steps" in r else "")
            )
        if r["kind"] == "numbers":
            losses = ", ".join(f"{name} {loss:.4f}" for name, loss in r["first_losses"].items())
            lines.append(f"- {_built(r)}, loss of the first step: {losses}")
    lines += ["", "| model | way | ms | tokens/s | PyTorch's fused operators in a step |", "|---|---|---:|---:|---:|"]
    lines += [
        f"| {_built(r)} | {r['what']} | {1e3 * r['seconds']:.1f} | {r['tokens'] / r['seconds']:,.0f} | {r['fused']} |"
        for r in steps
    ]
    shares = [r for r in found if r["kind"] == "hidden"]
    if shares:
        lines += ["", "| model | share of exposed communication hidden, median | by round |", "|---|---:|---|"]
        lines += [
            f"| {_built(r)} | {median(r['by_round']):.0%} | {min(r['by_round']):.0%} to {max(r['by_round']):.0%} |"
            for r in shares
        ]
    return lines


def _built(r: dict[str, Any]) -> str:
    return f"{r['model']}{', compiled' if r.get('compiled') else ''} ({r['run']})"


def _by_site(r: dict[str, Any], key: str) -> str:
    return f"{r['model']}: " + ", ".join(f"{site} {mode}" for site, mode in r[key].items())


def exchange_lines(found: list[dict[str, Any]]) -> list[str]:
    """Steps and exchanges of `fsdp_exchanges.py`."""
    steps = [r for r in found if r["kind"] == "fsdp_step"]
    if not steps:
        return []
    lines = ["", "## FSDP2's exchanges by copy engines", ""]
    lines += [
        f"Of a block alone, ms: {', '.join(f'{name} {1e3 * s:.2f}' for name, s in r['seconds'].items())}."
        for r in found
        if r["kind"] == "alone"
    ]
    lines += [
        "",
        "| tokens a rank | exchanges | step, ms | by round | issued in, ms | exchanges, products, others in a profile, ms |",
        "|---:|---|---:|---|---:|---|",
    ]
    for r in sorted(steps, key=lambda r: r["tokens"]):
        rounds, kinds = r["by_round"], ("exchanges", "products", "others")
        profiled = ", ".join(f"{1e3 * r['busy'][kind]:.1f}" for kind in kinds if kind in r["busy"])
        lines.append(
            f"| {r['tokens']:,} | {r['what']} ({r['run']}) | {1e3 * r['seconds']:.1f} | {1e3 * min(rounds):.1f} to {1e3 * max(rounds):.1f} "
            f"| {1e3 * r['issued']:.1f} | {profiled} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("stem")
    parser.add_argument("--title", required=True)
    parser.add_argument("--note", action="append", default=[], help="a paragraph below the title")
    parser.add_argument("--cluster", default="h200x4")
    parser.add_argument("records", nargs="+")
    options = parser.parse_args()
    here = cluster(options.cluster)
    machine = (Roofline(gpu=here.slowest_kind), CollectiveModel(here))
    found = [r for path in options.records for r in table_records(Path(path))]
    lines = [f"# {options.title}"]
    for note in options.note:
        lines += ["", note]
    checks = [r for r in found if r["kind"] == "check"]
    if checks:
        lines += ["", f"{sum(r['ok'] for r in checks)} of {len(checks)} checks against float64 right."]
    for run in dict.fromkeys(r["run"] for r in found):
        shapes = [r for r in found if r["kind"] == "shape" and r["run"] == run]
        if shapes:
            known = timed(samples_of(found, [run]), machine)
            said, rates = model_lines(known)
            choices = {(s.operation, s.rows, s.columns, s.depth): chosen((s, modes), rates) for s, modes in known}
            lines += ["", f"## {run}", "", *shape_lines(shapes, choices), "", *said]
    if any(r["kind"] == "backward" for r in found):
        lines += ["", "## Share of the bound", "", *bound_lines(found, machine)]
    lines += [*step_lines(found), *exchange_lines(found)]
    lines += ["", "## Kernels", *other_lines(found)]
    Path(f"{options.stem}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    text = "[\n" + ",\n".join(json.dumps(r) for r in found) + "\n]\n"
    Path(f"{options.stem}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
