"""Put the measured tables of overlap modes into a profile, as samples and as the rates fitted to them.

Run as `python3 tests/bench/overlap_profile.py PROFILE.json CLUSTER TABLE.json RUN[:MODE,MODE...]... --taken-at TIME
--command TEXT`. TABLE is what `overlap_report.py` writes, RUN one of its runs; with modes (`gather/fused`, `nccl`, ...)
only their times are taken. Later runs on the command line replace the same times of earlier ones. Shapes that the
profile has are replaced, others added. TIME and TEXT say when and by what the table was measured. Everything else in
the profile stays as it is, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from executor.launch.records import read_records  # noqa: E402 - the path comes first
from simulator.fitting.calibration_fit import rate_errors, with_rates  # noqa: E402
from simulator.overlap.modes import EXECUTED, GATHER  # noqa: E402 - the path comes first
from topology import codec  # noqa: E402
from topology.catalog.clusters import cluster  # noqa: E402
from topology.profile.profile import Profile, check_profile  # noqa: E402
from topology.profile.samples import OverlapSample, Provenance  # noqa: E402
from topology.profile.store import run_name  # noqa: E402


def samples_of(records: list[dict[str, Any]], runs: list[str], run: str = "") -> tuple[OverlapSample, ...]:
    """Return one sample a shape from records of `overlap_table.py`."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for asked in runs:
        name, _, listed = asked.partition(":")
        for r in records:
            if r["kind"] != "shape" or r["run"] != name:
                continue
            short = "gather" if r["operation"] == GATHER else "scatter"
            wanted = set(listed.split(",")) if listed else set(EXECUTED)
            modes = [mode for mode in EXECUTED if mode in wanted or f"{short}/{mode}" in wanted]
            key = r["operation"], r["world"], r["rows"], r["columns"], r["depth"]
            sample = found.setdefault(key, {"seconds": {}})
            sample |= {"product_s": r["seconds"]["cublas"], "collective_s": r["seconds"]["collective"]}
            sample["seconds"] |= {mode: r["seconds"][mode] for mode in modes}
    return tuple(
        OverlapSample(
            operation=operation,
            ranks=ranks,
            rows=rows,
            columns=(columns,),
            depth=depth,
            dtype="bfloat16",
            run=run,
            **what,
        )
        for (operation, ranks, rows, columns, depth), what in found.items()
    )


def table_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a report's JSON, or of one run's JSON lines, which are then of a run of the file's name."""
    if path.suffix == ".json":
        return list(json.loads(path.read_text()))
    return [{"run": path.stem, **record} for record in read_records(path)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("profile", type=Path)
    parser.add_argument("cluster")
    parser.add_argument("table", type=Path)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--taken-at", required=True, help="when the table was measured, ISO 8601")
    parser.add_argument("--machine", default="", help="what it was measured on; default: the profile's own machine")
    parser.add_argument("--command", required=True, help="what measured it")
    options = parser.parse_args()
    text, records = options.profile.read_text(), table_records(options.table)
    kept = codec.convert(json.loads(text), Profile, where=str(options.profile))
    run = Provenance(
        machine=options.machine or kept.machine,
        gpu=kept.gpu,
        gpus=max(r["world"] for r in records if r["kind"] == "shape"),
        driver=kept.driver,
        versions={name: kept.versions[name] for name in ("torch", "cuda", "nccl", "triton") if name in kept.versions},
        taken_at=options.taken_at,
        command=options.command,
    )
    name = run_name(run)
    found = {sample.key: sample for sample in (*kept.overlap, *samples_of(records, options.runs, name))}
    samples = tuple(found.values())
    machine = cluster(options.cluster)
    profile = with_rates(replace(kept, overlap=samples, runs={**kept.runs, name: run}), machine)
    check_profile(profile)
    codec.write_text(options.profile, with_overlap(text, profile, name))
    print(f"{options.profile}: {len(samples)} shapes; predicted against measured, mean of absolute values:")
    for what, (error, count) in rate_errors(profile, machine).items():
        print(f"{what:16} {count:4} times  {error:6.1%}")


def with_overlap(text: str, profile: Profile, run: str) -> str:
    """Return the text of a profile with the overlap samples, rates and run of `profile` in place of its own."""
    document = json.loads(text)
    if "overlap" in document:
        text = text[: text.index(',"overlap":[')] + text[text.index(',"missing":[') :]
    if run not in document["runs"]:
        end = text.index('},"operators":[')
        text = f"{text[:end]},{json.dumps(run)}:{_json(codec.to_builtins(profile.runs[run]))}{text[end:]}"
    samples = ",".join(_json(_short(sample)) for sample in profile.overlap)
    end = text.index(',"missing":[')
    return f'{text[:end]},"overlap":[{samples}],"overlap_rates":{_json(profile.overlap_rates)}{text[end:]}'


def _short(sample: OverlapSample) -> dict[str, Any]:
    """Return a sample without what was not measured."""
    return {k: v for k, v in codec.to_builtins(sample).items() if v}


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


if __name__ == "__main__":
    main()
