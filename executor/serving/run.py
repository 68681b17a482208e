"""Serve on real devices and write a report: `python -m executor.serving.run --request FILE --out DIR --budget S`.

Starts one rank a GPU through `executor.launch.local_ranks` and writes `serve.json` from the records of rank 0, however
the ranks ended. Never imports torch.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from executor.launch.local_ranks import launch
from executor.launch.process_exit import exit_code_of
from executor.launch.records import read_records
from executor.serving.request import ServeRequest, require_served
from topology import codec
from topology.codec import JsonObject

MODULE = "executor.serving.worker"
ENDING_S = 8.0  # seconds of the budget for ending ranks and writing the report
KINDS = {"checked": "checks", "step": "steps", "sum": "sums", "load": "loads", "missing": "missing"}


def main(argv: Sequence[str] | None = None) -> int:
    """Serve. Returns 0 if everything requested was measured, 1 if not, 2 for a request that cannot be served, 130 on
    Ctrl-C.
    """
    parser = argparse.ArgumentParser(prog="executor.serving.run")
    parser.add_argument("--request", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--budget", type=float, default=120.0, help="seconds for everything")
    return exit_code_of(_serve, parser.parse_args(argv))


def _serve(options: argparse.Namespace) -> int:
    request = codec.convert(codec.read_json(options.request), ServeRequest, where=options.request)
    require_served(request)
    document = run(request, options.request, options.out, options.budget)
    return 0 if document["status"] == "finished" else 1


def run(request: ServeRequest, path: str, out: Path, budget_s: float) -> JsonObject:
    """Launch the ranks, write `serve.json` into `out` and return it."""
    records = out / "records"
    records.mkdir(parents=True, exist_ok=True)
    for stale in records.glob("rank*"):
        stale.unlink()
    ending = min(ENDING_S, 0.3 * budget_s)
    done = launch(
        MODULE,
        [f"--request={path}", f"--out={records}", f"--until={time.time() + budget_s - 2 * ending:.3f}"],
        ranks=request.tp,
        budget_s=max(1.0, budget_s - ending),
        grace_s=0.4 * ending,
        directory=out / "logs",
    )
    found: JsonObject = {name: [] for name in KINDS.values()}
    complete = False
    for line in read_records(records / "rank0.jsonl"):
        kind = line.pop("kind")
        complete |= kind == "done"
        if kind in KINDS:
            found[KINDS[kind]].append(line)
        else:
            found.setdefault("notes", []).append({"kind": kind, **line})
    status = done.outcome if complete or done.outcome != "finished" else "failed"
    if any(not verdict["ok"] for verdict in found["checks"]):
        status = "wrong numbers"
    document = {
        "schema_version": request.schema_version,
        "status": status,
        "seconds": done.seconds,
        "failure": asdict(done.failure) if done.failure else None,
        "request": codec.to_builtins(request),
        **found,
    }
    codec.write_text(out / "serve.json", codec.to_json(document) + "\n")
    return document


if __name__ == "__main__":
    sys.exit(main())
