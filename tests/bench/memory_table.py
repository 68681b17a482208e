"""Reserved memory of measured runs compared with sums and the allocator's replay, by draw and by kind of plan.

    python tests/bench/memory_table.py [CASES.json …] > examples/validation/memory.md

Every measured row of examples/validation/fresh.jsonl, and of case files whose memory is what torch reserved.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from planner.question.cases import load_case  # noqa: E402 - the path comes first
from planner.question.question import Question  # noqa: E402
from planner.validate.validation import GIB, compared_bytes  # noqa: E402
from simulator.config.plan import Plan  # noqa: E402
from simulator.memory.estimate import with_replay  # noqa: E402
from tests.bench.learn_intervals import fresh_runs  # noqa: E402

DEFAULT = (ROOT / "tests/data/cases/torchtitan_h200x4.json",)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A measured run: signed errors of reserved memory by sums and by replay."""

    group: str
    name: str
    question: Question
    plan: Plan
    sums: float
    replay: float


def main(files: Sequence[Path]) -> None:
    rows = [*ledger(), *cases(files)]
    print(HEAD.format(files=", ".join(path.name for path in files)))
    print(
        "| runs | number | sums: mean | bias | worst | replay: mean | bias | worst |\n|---|--:|--:|--:|--:|--:|--:|--:|"
    )
    for label in dict.fromkeys(row.group for row in rows):
        print(line(label, [row for row in rows if row.group == label]))
    for label, holds in KINDS:
        if some := [row for row in rows if holds(row)]:
            print(line(label, some))
    print("\n| furthest off by replay | sums | replay |\n|---|--:|--:|")
    for row in sorted(rows, key=lambda row: -abs(row.replay))[:8]:
        print(f"| {row.name} | {row.sums:+.1%} | {row.replay:+.1%} |")


HEAD = """# Reserved memory

The peak of torch's caching allocator, `max_memory_reserved`, is compared with two predictions: *sums*, by which
searches bound plans, and the *replay* of a step's allocations, which is used for listed plans and by `planner validate`
(`simulator/memory`). All runs had growing segments (`expandable_segments:True`). Errors are predicted / measured - 1.
All rows were known to the version that predicts them here; [fresh.md](fresh.md) has what was predicted before each run.

`python tests/bench/memory_table.py` over fresh.jsonl and {files}.
"""

KINDS: tuple[tuple[str, Callable[[Row], bool]], ...] = (
    ("one GPU", lambda row: row.plan.gpus == 1),
    ("DDP", lambda row: row.plan.dp_replicate > 1 and row.plan.dp_shard == 1),
    ("FSDP", lambda row: row.plan.dp_shard > 1 and row.plan.dp_replicate == 1),
    ("HSDP", lambda row: row.plan.dp_shard > 1 and row.plan.dp_replicate > 1),
    ("tensor parallelism, torchtitan, eager", lambda row: _tensor(row) and not row.question.runtime.compile),
    ("tensor parallelism, torchtitan, compiled", lambda row: _tensor(row) and row.question.runtime.compile),
    ("tensor parallelism, our executor", lambda row: row.plan.tp > 1 and row.question.runtime.name != "torchtitan"),
    ("context parallelism", lambda row: row.plan.cp > 1),
    ("pipelines", lambda row: row.plan.pp > 1),
    ("experts", lambda row: row.question.model.moe is not None),
    ("compiled", lambda row: row.question.runtime.compile),
    ("all in bfloat16", lambda row: row.question.runtime.param_dtype == "bfloat16"),
    ("recompute full", lambda row: row.plan.recompute == "full"),
    ("recompute selective", lambda row: row.plan.recompute.startswith("selective")),
    ("all", lambda _: True),
)  # fmt: skip


def _tensor(row: Row) -> bool:
    return row.plan.tp > 1 and row.question.runtime.name == "torchtitan"


def ledger() -> Iterator[Row]:
    for run, question, plan in fresh_runs():
        reserved = run["measured"]["reserved_bytes"]
        if reserved:
            name = f"{run['id']}: {run['words']}, {run['runtime']['name']}"
            yield _row(
                f"draw {run['draw']}", name, question, plan, lambda memory, of=reserved: memory.reserved_bytes / of
            )


def cases(files: list[Path]) -> Iterator[Row]:
    for file in files:
        for raw in json.loads(file.read_text("utf-8")):
            peak = raw["measured"].get("peak_memory_gib")
            if peak and "reserved" in str(raw["measured"].get("memory_is")):
                case = load_case(raw)

                def over(memory: object, case: object = case, peak: float = peak) -> float:
                    return compared_bytes(case, memory)[0] / (peak * GIB)  # type: ignore[arg-type]  # of this case

                yield _row(file.stem, case.id, case.question, case.plan, over)


def _row(group: str, name: str, question: Question, plan: Plan, over: Callable[..., float]) -> Row:
    estimate = question.estimate([plan]).estimate(0)
    sums, replay = over(estimate.memory) - 1, over(with_replay(question, plan, estimate).memory) - 1
    return Row(group=group, name=name, question=question, plan=plan, sums=sums, replay=replay)


def line(label: str, rows: list[Row]) -> str:
    cells = [label, str(len(rows))]
    for errors in ([row.sums for row in rows], [row.replay for row in rows]):
        cells += [
            f"{statistics.mean(map(abs, errors)):.1%}",
            f"{statistics.mean(errors):+.1%}",
            f"{max(errors, key=abs):+.1%}",
        ]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=DEFAULT)
    options = parser.parse_args()
    main(options.files)
