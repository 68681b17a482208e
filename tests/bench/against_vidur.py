"""Compare predictions of serving with vidur's, aiconfigurator's and others' on the runs of vLLM on which a third party
compared them: a table by model.

    git clone https://github.com/inference-sim/sim-to-real-accuracy-validation theirs
    git clone https://github.com/inference-sim/inference-sim loads
    python tests/bench/against_vidur.py ERRORS RUNS --out against_vidur.md

ERRORS is results_trainval/error_records.csv of the first, RUNS testdata/roofline_goldendataset.json of the second. The
first file has what was measured with vLLM 0.15.1 on H100 and what each tool predicted, a row each; the second has
the requests of these runs. A point is one stage: a rate of requests for ten or twenty minutes. Prompts have the stated
lengths and arrive at a constant rate. Of each the system prompt is cached, which is what others were given ("ours"); or
all but its last block, because the load has 23 to 50 prompts that it sends over and over ("prompts cached";
kubernetes-sigs/inference-perf, shared_prefix_datagen.py). Predicted are up to `MOST` requests of a stage.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

from planner.serving import vllm_of
from planner.validate.serving_row import cluster_of, model_of
from simulator.serving.deployment import Deployment, Pool
from simulator.serving.estimate import estimate_serving
from simulator.serving.traffic import Lengths, Traffic

GPU, RELEASE = "H100 SXM 80GB", "0.15.1"
CONTEXT = 4096  # the longest that these runs allow (their max_model_len)
MOST = 800
BLOCK = 16  # tokens of vLLM's cache blocks: the last of a prompt is read again
TOOLS = {"vidur": "vidur", "aiconfigurator-estimate": "aiconfigurator", "llm-optimizer-estimate": "llm-optimizer"}
OURS = {"ours": False, "prompts cached": True}  # whether each prompt is cached, or the system prompt alone
QUANTITIES = {"ttft_mean": "first token", "itl_mean": "a token"}
Errors = dict[str, dict[str, float]]  # by tool, by quantity: predicted/measured - 1


def read_stages(path: Path) -> dict[tuple[str, int], Errors]:
    """Return the errors of others by run and stage. A run without a number has its folder's date instead."""
    found: dict[tuple[str, int], Errors] = {}
    with path.open() as lines:
        for row in csv.DictReader(lines):
            folder, stage = row["experiment_folder"].rsplit("/", 1)[-1], int(row["stage_index"])
            if stage < 0 or row["metric_name"] not in QUANTITIES:
                continue
            named = row["exp_id"] if folder.startswith(f"{row['exp_id']}-") and len(row["exp_id"]) < 8 else folder[:15]
            errors = found.setdefault((named, stage), {"measured": {}})
            errors["measured"][row["metric_name"]] = float(row["actual"]) / 1e3
            if row["simulator"] in TOOLS and row["predicted"]:
                error = float(row["predicted"]) / float(row["actual"]) - 1
                errors.setdefault(TOOLS[row["simulator"]], {})[row["metric_name"]] = error
    return found


def predicted(run: Mapping[str, Any], stage: int, *, repeated: bool) -> dict[str, float]:
    """Return our times in seconds for one stage of a run, with the system prompt cached or (`repeated`) each prompt."""
    load = run["workload"]["inference_perf"]
    asked, rate = load["shared_prefix"], load["stages"][stage]
    prompt = asked["question_len"] + asked["system_prompt_len"]
    traffic = Traffic(
        prompt=Lengths(mean=prompt),
        output=Lengths(mean=asked["output_len"]),
        request_rate=rate["rate"],
        shape=0.0,
        requests=min(MOST, round(rate["rate"] * rate["duration"])),
        cached_prompt=1 - BLOCK / prompt if repeated else asked["system_prompt_len"] / prompt,
    )
    deployment = Deployment(
        engine=vllm_of(RELEASE),
        pool=Pool(tp=run["tp"]),
        weights="float8" if "FP8" in run["model"] else "bfloat16",
        max_num_seqs=run["max_num_seqs"],
        max_num_batched_tokens=run["max_num_batched_tokens"],
        max_model_len=CONTEXT,
    )
    seen = estimate_serving(model_of(run["model"]), cluster_of(GPU, run["tp"]), deployment, traffic)
    return {"ttft_mean": seen.ttft_s.value, "itl_mean": seen.tpot_s.value}


def table(points: Iterable[tuple[str, Errors]]) -> str:
    """Return the table of (model, errors by tool)."""
    tools = (*OURS, *TOOLS.values())
    groups: dict[str, list[Errors]] = {}
    for model, errors in points:
        groups.setdefault(model, []).append(errors)
        groups.setdefault("**all**", []).append(errors)
        for tool in TOOLS.values():
            if tool in errors:
                groups.setdefault(f"**those that {tool} answers**", []).append(errors)
    lines = [f"| model | points | {' | '.join(f'{said}, {tool}' for said in QUANTITIES.values() for tool in tools)} |"]
    lines.append("|---|" + "--:|" * (1 + len(QUANTITIES) * len(tools)))
    for name in sorted(groups, key=lambda name: (name.startswith("**"), name)):
        cells = [_cell(groups[name], tool, quantity) for quantity in QUANTITIES for tool in tools]
        lines.append(f"| {name} | {len(groups[name])} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(points: Iterable[Errors], tool: str, quantity: str) -> str:
    errors = [abs(point[tool][quantity]) for point in points if tool in point]
    return f"{median(errors):.0%} ({fmean(errors):.0%})" if errors else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("errors", type=Path)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    runs = {run["id"]: run for run in json.loads(options.runs.read_text())["experiments"]}
    points = []
    for (named, stage), errors in sorted(read_stages(options.errors).items()):
        measured = errors.pop("measured")
        for name, repeated in OURS.items():
            mine = predicted(runs[named], stage, repeated=repeated)
            errors[name] = {quantity: mine[quantity] / measured[quantity] - 1 for quantity in QUANTITIES}
        points.append((runs[named]["model"].rsplit("/", 1)[-1], errors))
    found = table(points)
    print(found)
    if options.out:
        options.out.write_text(found)


if __name__ == "__main__":
    main()
