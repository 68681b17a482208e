"""Measure a machine in independent parts: flows (copies), compute, collectives.

Started by `planner doctor --measure` in its own process. Each part runs in another process with its share of the
budget; a part that fails or runs out of time is listed under `missing`, and its records so far are kept. The result is
one `topology.profile.measurement.Measurement` document.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from executor.launch.local_ranks import LaunchResult, launch, loopback_environment
from executor.launch.process_exit import exit_code_of
from executor.launch.records import Deadline, Recorder, read_records
from executor.measure.measurement import (
    Device,
    devices_to_measure,
    measurement_parser,
    record_problem,
)
from topology.codec import to_json, write_text
from topology.profile.measurement import measurement_from_records
from topology.versions import driver_version

PIECES = ("flows", "compute", "collectives")
# Shares of the budget. Collectives have the most data points; compute needs seconds to reach sustained clocks.
SHARE = {"flows": 0.25, "compute": 0.25, "collectives": 0.5}
ENDING_S = 4.0  # to free memory, leave the process group and exit: not part of the time for measuring
GRACE_S = 3.0
CPU_BYTES = 2**16
CPU_LARGEST = 2**14


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the document. Returns 0 when anything was measured, 1 when nothing was, 130 on Ctrl-C."""
    parser = measurement_parser("executor.measure.doctor_worker")
    parser.add_argument("--out", required=True, help="where the document goes")
    parser.add_argument("--pieces", default=",".join(PIECES))
    return exit_code_of(run, parser.parse_args(argv))


def run(options: argparse.Namespace) -> int:
    """Run the parts in turn. Raises ProbeError when there is no device, or other processes use the GPUs."""
    deadline = Deadline(options.budget)
    pieces = [piece for piece in options.pieces.split(",") if piece in PIECES]
    devices = devices_to_measure(options)
    indices = [device.index for device in devices]
    interrupted = False
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        records = Path(folder) / "records.jsonl"
        recorder = Recorder(records)
        recorder.write("header", **_header(options, devices))
        total = sum(SHARE[piece] for piece in pieces)
        for number, piece in enumerate(pieces):
            left = sum(SHARE[later] for later in pieces[number:])
            share = deadline.left_s * SHARE[piece] / left if total else 0.0
            if share < 1:
                recorder.missing(f"{piece}: out of time", late=True)
                continue
            if piece == "collectives" and len(indices) < 2:
                continue
            print(f"measuring {piece} (at most {share:.0f} s)", file=sys.stderr, flush=True)
            done = _piece(piece, options, indices, share, records, Path(folder) / piece)
            record_problem(piece, done, recorder)
            if done.outcome == "interrupted":
                interrupted = True
                break
        recorder.write("header", seconds=options.budget - deadline.left_s)
        recorder.close()
        measured = measurement_from_records(read_records(records))
    write_text(options.out, to_json(measured) + "\n")
    if interrupted:
        return 130
    return 0 if measured.flows or measured.compute or measured.groups else 1


def _piece(
    piece: str, options: argparse.Namespace, indices: Sequence[int], share_s: float, records: Path, folder: Path
) -> LaunchResult:
    """Run one part; it stops measuring a little before its share of the budget ends."""
    ending = min(ENDING_S, 0.2 * share_s)
    arguments = [
        f"--out={records}",
        f"--seconds={share_s - ending:.3f}",
        f"--device={options.device}",
        f"--indices={','.join(map(str, indices))}",
    ]
    cpu = options.device == "cpu"
    if piece == "flows":
        arguments += [f"--nbytes={CPU_BYTES}"] if cpu else []
    if piece == "collectives":
        arguments += [f"--largest={CPU_LARGEST}"] if cpu else []
    # By default CUDA numbers devices by speed, and nvidia-smi by bus. A single host needs no network for its
    # rendezvous.
    environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **loopback_environment()}
    together = piece == "collectives"
    return launch(
        f"executor.measure.probe_{piece}",
        arguments,
        ranks=len(indices) if together else 1,
        elastic=together,
        budget_s=share_s,
        grace_s=GRACE_S,
        environment=environment,
        directory=folder,
    )


def _header(options: argparse.Namespace, devices: Sequence[Device]) -> dict[str, object]:
    versions = {"python": sys.version.split()[0]}
    for package in ("torch", "triton"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "machine": options.machine,
        "device": options.device,
        "taken_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, "-m", "executor.measure.doctor_worker", *_shown(options)]),
        "driver": (options.device == "cuda" and driver_version()) or "",
        "versions": versions,
        "gpus": [device.name for device in devices],
        "uuids": [device.uuid for device in devices],
    }


def _shown(options: argparse.Namespace) -> list[str]:
    shown = [f"--budget={options.budget:g}", f"--device={options.device}", f"--pieces={options.pieces}"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [*shown, f"(CUDA_VISIBLE_DEVICES={visible})"] if visible else shown


if __name__ == "__main__":
    raise SystemExit(main())
