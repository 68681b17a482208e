"""Compare predictions of serving with aiconfigurator's on the same published points: a table by group.

    python -m venv /tmp/v && /tmp/v/bin/pip install aiconfigurator==0.12.0
    python tests/bench/against_aiconfigurator.py POINTS.jsonl.gz --python /tmp/v/bin/python --out against.md

Points of engines that read and write together, closed loops and no speculative decoding; up to `--each` of a group, by
chance. aiconfigurator answers from its newest table of the engine on that GPU, with the formats that a point states.
Only points that both answer are counted.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

SYSTEMS = {"H100 SXM": "h100_sxm", "H200 SXM": "h200_sxm", "B200 SXM": "b200_sxm", "B300 SXM": "b300_sxm"}
ENGINES = {"trt": "trtllm", "vllm": "vllm", "sglang": "sglang"}
SEED = 41


def question(point: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what aiconfigurator is asked, or None for a point that it is not asked about."""
    system = next((name for words, name in SYSTEMS.items() if point["hardware"].startswith(words)), None)
    engine = next(
        (name for word, name in ENGINES.items() if (point.get("backend") or "").lower().startswith(word)), None
    )
    said = [point.get(name) for name in ("isl", "osl", "concurrency", "tp")]
    if system is None or engine is None or point.get("disagg") or None in said:
        return None
    if point.get("spec_decode") not in {None, "", "none"} or "static" in point["metric_kind"]:
        return None
    dp = point.get("dp_attention") or 1
    tp, dp = (1, point["tp"]) if dp is True else (point["tp"], int(dp))
    ep = point.get("ep") or 1
    precision = point.get("precision") or ""
    asked = {
        "model_path": point["model"], "system_name": system, "backend_name": engine, "isl": int(point["isl"]),
        "osl": int(point["osl"]), "batch_size": max(1, point["concurrency"] // dp), "tp_size": tp,
        "pp_size": point.get("pp") or 1, "attention_dp_size": dp,
    }  # fmt: skip
    if point.get("moe_tp") or ep > 1:
        asked |= {"moe_ep_size": ep, "moe_tp_size": max(1, tp * dp // ep)}
    if "fp4" in precision and "mxfp4" not in precision and "gpt-oss" not in point["model"]:
        asked |= {"gemm_quant_mode": "nvfp4", "moe_quant_mode": "nvfp4", "kvcache_quant_mode": "fp8"}
    return asked


def answer(asked: Iterable[Mapping[str, Any]]) -> list[dict[str, float] | None]:
    """Return aiconfigurator's times in seconds, inside an environment that has it; None where it has no answer."""
    import aiconfigurator.cli.api as theirs

    found: list[dict[str, float] | None] = []
    for one in asked:
        try:
            seen = theirs.cli_estimate(**one)
            found.append({"ttft": seen.ttft / 1e3, "tpot": seen.tpot / 1e3})
        except Exception as problem:  # noqa: BLE001 - whatever a tool of others raises is no answer
            print(type(problem).__name__, str(problem)[:200], file=sys.stderr)
            found.append(None)
    return found


def drawn(points: Iterable[Mapping[str, Any]], each: int) -> list[tuple[str, Mapping[str, Any], dict[str, Any]]]:
    """Return up to `each` points of a source, GPU, model and engine, by chance, with what is asked about them."""
    groups: dict[str, list[tuple[str, Mapping[str, Any], dict[str, Any]]]] = {}
    for point in points:
        if (asked := question(point)) is not None:
            name = f"{point['hardware']}, {point['model'].rsplit('/', 1)[-1]}, {asked['backend_name']}"
            groups.setdefault(name, []).append((name, point, asked))
    chance = random.Random(SEED)
    return [one for name in sorted(groups) for one in chance.sample(groups[name], min(each, len(groups[name])))]


def table(rows: Iterable[tuple[str, Mapping[str, Any], Mapping[str, Any]]]) -> str:
    """Return the table of (group, errors of ours, errors of theirs)."""
    groups: dict[str, list[tuple[Mapping[str, Any], Mapping[str, Any]]]] = {}
    for name, mine, other in rows:
        groups.setdefault(name, []).append((mine, other))
        groups.setdefault("**all**", []).append((mine, other))
    lines = ["| GPU, model, engine | points | first token, ours | aiconfigurator | a token, ours | aiconfigurator |"]
    lines.append("|---|--:|--:|--:|--:|--:|")
    for name in sorted(groups, key=lambda name: (name == "**all**", -len(groups[name]))):
        cells = []
        for quantity in ("ttft", "tpot"):
            for place in (0, 1):
                errors = [abs(pair[place][quantity]) for pair in groups[name]]
                cells.append(f"{median(errors):.0%} ({fmean(errors):.0%})")
        lines.append(f"| {name} | {len(groups[name])} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", nargs="*")
    parser.add_argument("--python")
    parser.add_argument("--each", type=int, default=12)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--answer", action="store_true", help="read questions from stdin, inside their environment")
    options = parser.parse_args()
    if options.answer:
        asked = json.load(sys.stdin)
        with contextlib.redirect_stdout(io.StringIO()):
            found = answer(asked)
        print(json.dumps(found))
        return
    from planner.validate.serving_points import validate_point
    from planner.validate.serving_report import read_points

    picked = drawn([point for name in options.points for point in read_points(name)], options.each)
    command = [options.python, "-W", "ignore", __file__, "--answer"]
    text = json.dumps([asked for _, _, asked in picked])
    run = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    rows = []
    for (name, point, _), theirs in zip(picked, json.loads(run.stdout.splitlines()[-1]), strict=True):
        mine = validate_point(point)
        if theirs is None or mine["skipped"] or None in (mine["error"]["ttft"], mine["error"]["tpot"]):
            continue
        seen = mine["measured"]
        other = {key: theirs[key] / seen[f"{key}_s"] - 1 for key in ("ttft", "tpot")}
        rows.append((name, mine["error"], other))
    found = table(rows)
    print(found, run.stderr[-500:] if not rows else "")
    if options.out:
        options.out.write_text(found)


if __name__ == "__main__":
    main()
