"""From the records of `overlap_table.py`: a Markdown table, what the cost model makes of them, and what it would choose.

Run as `python3 tests/bench/overlap_report.py OUT_STEM --title TEXT --note TEXT RECORDS.jsonl...`; writes OUT_STEM.json
with the records and OUT_STEM.md. The rates are fitted twice: to all shapes, and to every other shape, to be tried on the
rest.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from executor.records import read_records  # noqa: E402 - the path comes first
from simulator.overlap_modes import (  # noqa: E402
    EXECUTED,
    GATHER,
    OverlapRates,
    OverlapSample,
    Parts,
    choose,
    fit_rates,
    mean_error,
)

COLLECTIVE_FLOOR_S = 30e-6  # what NCCL takes for next to nothing: the part of a collective that does not shrink
PRODUCT_FLOOR_S = 8e-6


def parts_of(record: dict[str, Any]) -> Parts:
    """The product by cuBLAS and the collective by NCCL, each alone; pieces in proportion, down to a floor."""
    seconds, ranks = record["seconds"], record["world"]
    width = record["depth"] if record["operation"] == GATHER else record["columns"]
    product, collective = seconds["cublas"], seconds["collective"]
    floor = min(COLLECTIVE_FLOOR_S, collective)
    return Parts(
        ranks=ranks,
        moved_bytes=record["rows"] / ranks * width * 2,
        product_s=lambda fraction: max(product * fraction, PRODUCT_FLOOR_S),
        collective_s=lambda fraction: floor + fraction * (collective - floor),
    )


def samples_of(shapes: list[dict[str, Any]]) -> list[OverlapSample]:
    return [
        OverlapSample(operation=r["operation"], mode=mode, parts=parts_of(r), seconds=r["seconds"][mode])
        for r in shapes
        for mode in EXECUTED
    ]


def shape_lines(shapes: list[dict[str, Any]], rates: OverlapRates) -> list[str]:
    """One line a shape: µs of everything, the best mode, and the mode the model would choose from the parts."""
    lines = [
        "| operation | layer | rows x columns x depth | cuBLAS | Triton | NCCL | "
        + " | ".join(EXECUTED)
        + " | best, efficiency | chosen by the model, loss |",
        "|---|---|---|" + "---:|" * (3 + len(EXECUTED)) + "---|---|",
    ]
    for r in shapes:
        s = r["seconds"]
        best = min(EXECUTED, key=lambda mode: s[mode])
        chosen = choose(r["operation"], parts_of(r), rates).mode
        alone = min(s["cublas"], s["triton"])
        numbers = [s["cublas"], s["triton"], s["collective"], *(s[mode] for mode in EXECUTED)]
        lines.append(
            f"| {'gather' if r['operation'] == GATHER else 'scatter'} | {r['name']} "
            f"| {r['rows']:,} x {r['columns']:,} x {r['depth']:,} | "
            + " | ".join(f"{1e6 * number:,.0f}" for number in numbers)
            + f" | {best} {alone / s[best]:.3f} | {chosen} {100 * (s[chosen] / s[best] - 1):.0f} % |"
        )
    return lines


def model_lines(shapes: list[dict[str, Any]]) -> tuple[list[str], OverlapRates]:
    samples = samples_of(shapes)
    rates = fit_rates(samples)
    halves = (shapes[::2], shapes[1::2])
    across = [mean_error(samples_of(halves[1 - n]), fit_rates(samples_of(halves[n]))) for n in (0, 1)]
    losses = []
    for r in shapes:
        s = r["seconds"]
        mode = choose(r["operation"], parts_of(r), rates).mode
        losses.append((s[mode] / min(s[m] for m in EXECUTED) - 1, s[mode] > min(s["nccl"], s["torch_symm_mem"])))
    lines = [
        (
            f"Predicted from the parts alone: mean error {100 * mean_error(samples, rates):.1f} % over {len(samples)} times "
            f"({100 * sum(across) / 2:.1f} % on shapes that the rates were not fitted to). By mode:"
        ),
        "",
        "| mode | " + " | ".join(EXECUTED) + " |",
        "|---|" + "---:|" * len(EXECUTED),
        "| mean error | "
        + " | ".join(f"{100 * mean_error([x for x in samples if x.mode == mode], rates):.1f} %" for mode in EXECUTED)
        + " |",
        "",
        (
            f"Mode chosen by the model alone: within 3 % of the best at {sum(loss <= 0.03 for loss, _ in losses)} of "
            f"{len(losses)} shapes, mean loss {100 * sum(loss for loss, _ in losses) / len(losses):.1f} %, largest "
            f"{100 * max(loss for loss, _ in losses):.0f} %; slower than NCCL then cuBLAS or than PyTorch's operators at "
            f"{sum(slower for _, slower in losses)}. Where the shape itself was measured, `choose` takes the measured best."
        ),
        "",
        "Rates: " + ", ".join(f"{name} {getattr(rates, name):.3g}" for name in OverlapRates.__dataclass_fields__) + ".",
    ]
    return lines, rates


def other_lines(found: list[dict[str, Any]]) -> list[str]:
    """Tiles, all-reduce by size, norms."""
    lines = []
    for r in found:
        if r["kind"] == "tiles":
            lines += [
                "",
                f"Kernel variants, {r['operation']}, {r['rows']:,} x {r['columns']:,} x {r['depth']:,} (µs): "
                + ", ".join(f"{name} {1e6 * s:,.0f}" for name, s in sorted(r["seconds"].items(), key=lambda i: i[1]))
                + ".",
            ]
    sums = [r for r in found if r["kind"] == "all_reduce"]
    for how in ("graph", "eager"):
        rows = [r for r in sums if r["how"] == how]
        if rows:
            names = ["nccl", "torch", "torch_one_shot", "torch_two_shot", "own"]
            best = ["best own variant"] if how == "graph" else []
            lines += [
                "",
                f"All-reduce, µs, {'from a captured graph' if how == 'graph' else 'launched one by one'}:",
                "",
                "| bytes | " + " | ".join(names + best) + " |",
                "|---:|" + "---:|" * len(names + best),
            ]
        for r in rows:
            s = r["seconds"]
            own = [s[name] for name in s if name.startswith("own")]
            numbers = [s[name] for name in names] + ([min(own)] if how == "graph" else [])
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
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("stem")
    parser.add_argument("--title", required=True)
    parser.add_argument("--note", action="append", default=[], help="a paragraph below the title")
    parser.add_argument("records", nargs="+")
    options = parser.parse_args()
    found = [{"run": Path(path).stem, **r} for path in options.records for r in read_records(path)]
    lines = [f"# {options.title}"]
    for note in options.note:
        lines += ["", note]
    checks = [r for r in found if r["kind"] == "check"]
    lines += ["", f"{sum(r['ok'] for r in checks)} of {len(checks)} checks against float64 right."]
    for run in dict.fromkeys(r["run"] for r in found):
        shapes = [r for r in found if r["kind"] == "shape" and r["run"] == run]
        if shapes:
            said, rates = model_lines(shapes)
            lines += ["", f"## {run}", "", *shape_lines(shapes, rates), "", *said]
    lines += ["", "## Kernels", *other_lines(found)]
    Path(f"{options.stem}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    text = "[\n" + ",\n".join(json.dumps(r) for r in found) + "\n]\n"
    Path(f"{options.stem}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
