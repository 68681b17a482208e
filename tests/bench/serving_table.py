"""Write examples/validation/serving.md: predictions compared with published serving points, by source, and the ranges
of engines.

    python tests/bench/serving_table.py POINTS.jsonl.gz --out examples/validation/serving.md

An engine's spread is the error that four of five of its points stay within. The table says which share of the points of
a source, model and GPU a spread holds that was learned from all others.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from planner.validate.serving_points import QUANTITIES, engine_named, validate_point
from planner.validate.serving_report import by_group, read_points, summarise_points
from tests.bench.serving_ranking import ranking_lines

HELD = 0.8
TEXT = """# Serving: predictions compared with published points

Points of public sources, each predicted from datasheets by simulating its requests: aiconfigurator's accuracy sample
(ai-dynamo/aiconfigurator), InferenceX's DeepSeek-R1 runs (SemiAnalysisAI/InferenceX), TensorRT-LLM's performance tables,
LLM-Inference-Bench (argonne-lcf, static batches of 2024). They were **in view** while the model was made. Fitted to them are
times of hosts (`simulator/serving/engines.toml`): `host_step_s` and `host_sequence_s` by hand to time per token of three groups
(Llama 3.1 70B with vLLM and Llama 3.1 8B with TensorRT-LLM on H100, DeepSeek-R1 with SGLang on B200), what passes before the
first token to two (TensorRT-LLM's `host_request_s` to Llama 3.1 8B on H100, SGLang's `host_launch_s` to DeepSeek-R1 on H200), and
TensorRT-LLM's `host_launch_s` by hand to first tokens of Llama 3.1 8B and Qwen3 235B on H100; of DeepSeek-R1 on B200, which was
left out, it brings first tokens nearer too.
Kernels are priced from datasheets and from kernels measured by themselves, not from these points. The other groups are a test
of the rest of the model, not a prediction made before the fact.

What sources leave open decides most of what is off:

- **Time to the first token** depends on the first burst of all clients, which cold kernels and connections slow, and which is
  a tenth of the requests of InferenceX: DeepSeek-R1 with SGLang on H200, four clients, mean 158 ms, median 85, p99 811;
  predicted 112. With 64 clients SGLang 0.5.9 has a mean of 419 ms and a median of 178. Llama 3.1 8B with TensorRT-LLM 1.0 on
  H100 waits, with up to 32 clients and whatever the degree, about as long as an answer takes over the number of clients, as if
  one place fewer than clients were served; with 128 clients a quarter of an answer. Neither is stated. Exact lengths let all clients of a closed loop ask at once for ever, lengths that vary a little do not; most
  sources do not say which. Where arrivals are stated (TensorRT-LLM 0.14 online) see below.
- **Speculative decoding** is stated by InferenceX and skipped here. aiconfigurator's sample does not state it: the same
  configuration is listed with 6.8 and 11.1 ms a token, 8.6 and 12.8, 9.5 and 16.4.
- **Prefix caches**: 8-bit Llama 3.1 8B with vLLM on H200 is listed with prompts read at more than what 80 % of the GPU's peak
  would allow.
- **Releases**: engines of 2024 (LLM-Inference-Bench) are slower by a half than the same engines later.

"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("points", nargs="+")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    points = [data for name in options.points for data in read_points(name)]
    rows = [validate_point(data) | {"engine": engine_named(str(data.get("backend") or ""))} for data in points]
    known = [row for row in rows if not row["skipped"]]
    names = " ".join(Path(name).name for name in options.points)
    lines = [
        TEXT,
        f"{datetime.now(UTC):%Y-%m-%d}: `planner validate {names}`, {len(rows)} points, {len(known)} predicted.",
    ]
    lines += ["", "## By source, GPU, model and engine", "", HEADING, RULE]
    lines += [_line(name, part) for name, part in by_group(known)]
    lines += [
        _line("**all**", summarise_points(known)),
        "",
        "Median (mean) of absolute errors, predicted/measured - 1.",
        "",
    ]
    lines += [
        RANKING,
        *ranking_lines([(raw, row) for raw, row in zip(points, rows, strict=True) if not row["skipped"]]),
    ]
    lines += [
        "## Ranges",
        "",
        "| engine | quantity | points | spread | held, group left out |",
        "|---|---|--:|--:|--:|",
    ]
    lines += list(_spreads(known))
    lines += ["", "## Skipped", "", *_skipped(rows)]
    Path(options.out).write_text("\n".join(lines) + "\n")


RANKING = """## Ranking

Loads with several configurations: points that share source, GPU, model, engine with its release, precision, lengths and clients
(of a static batch: sequences) a GPU. The configuration predicted to be best, against the best measured; "any choice" is the mean
of all configurations.
"""
HEADING = "| source, GPU, model, engine | points | first token | a token | throughput |"
RULE = "|---|--:|--:|--:|--:|"


def _line(name: str, part: Mapping[str, Any]) -> str:
    cells = ["-" if part[q] is None else f"{part[q]['median_abs']:.0%} ({part[q]['mean_abs']:.0%})" for q in QUANTITIES]
    return f"| {name.replace(' | ', ', ')} | {part['rows']} | {' | '.join(cells)} |"


def _spreads(rows: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    for engine in sorted({row["engine"] for row in rows}):
        for quantity in QUANTITIES:
            of = [
                (row["group"], abs(math.log1p(row["error"][quantity])))
                for row in rows
                if row["engine"] == engine and row["error"][quantity] is not None
            ]
            if not of:
                continue
            held = 0
            for group in {name for name, _ in of}:
                others = [error for name, error in of if name != group]
                limit = _quantile(others) if others else math.inf
                held += sum(error <= limit for name, error in of if name == group)
            spread = math.expm1(_quantile([error for _, error in of]))
            yield f"| {engine} | {quantity} | {len(of)} | {spread:.2g} | {held / len(of):.0%} |"


def _quantile(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(HELD * len(values)))]


def _skipped(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    reasons: dict[str, int] = {}
    for row in rows:
        if row["skipped"]:
            reasons[row["skipped"]] = reasons.get(row["skipped"], 0) + 1
    return [f"- {count}: {reason}" for reason, count in sorted(reasons.items(), key=lambda item: -item[1])]


if __name__ == "__main__":
    main()
