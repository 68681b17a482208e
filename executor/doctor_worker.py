"""The first measurement of a machine, in pieces that cannot spoil each other: flows, compute, collectives.

Started by `planner doctor --measure` as a process of its own. Each piece is another process with its share of the
budget; a piece that fails or runs out of time is listed under `missing`, and what it had recorded is kept. The whole is
written as one `topology.measured.Measured` document.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from executor.gpu_state import occupants, run_text
from executor.launch import Launched, launch
from executor.records import Deadline, Recorder, read_records
from topology.codec import to_json, write_text
from topology.errors import PlannerError, ProbeError
from topology.measured import measured_from_records

PIECES = ("flows", "compute", "collectives")
# Shares of the budget. Collectives have the most points; compute needs seconds to get hot.
SHARE = {"flows": 0.25, "compute": 0.25, "collectives": 0.5}
ENDING_S = 4.0  # to free memory, leave the process group and exit: taken from what a piece may measure
GRACE_S = 3.0
CPU_BYTES = 2**16
CPU_LARGEST = 2**14


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the document. Returns 0 when anything was measured, 1 when nothing was, 130 on Ctrl-C."""
    parser = argparse.ArgumentParser(prog="executor.doctor_worker")
    parser.add_argument("--out", required=True, help="where the document goes")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for everything")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--indices", default="", help="nvidia-smi's indices, in CUDA's order; default: all")
    parser.add_argument("--pieces", default=",".join(PIECES))
    parser.add_argument("--allow-busy", action="store_true", help="measure though others use the GPUs")
    parser.add_argument("--machine", default="this machine")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _interrupt)  # whoever stops us by SIGTERM wants our children gone, too
    try:
        return run(options)
    except KeyboardInterrupt:
        return 130
    except PlannerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def run(options: argparse.Namespace) -> int:
    """Run the pieces in turn. Raises ProbeError when there is nothing to measure, or others are at work on the GPUs."""
    deadline = Deadline(options.budget)
    pieces = [piece for piece in options.pieces.split(",") if piece in PIECES]
    devices = find_devices(options)
    if options.device == "cuda":
        refuse_busy(devices, allow=options.allow_busy)
    indices = [device["index"] for device in devices]
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
                recorder.missing(f"{piece}: out of time")
                continue
            if piece == "collectives" and len(indices) < 2:
                continue
            print(f"measuring {piece} (at most {share:.0f} s)", file=sys.stderr, flush=True)
            done = _piece(piece, options, indices, share, records, Path(folder) / piece)
            said = complaint(piece, done)
            if said:
                recorder.missing(said)
                print(said, file=sys.stderr, flush=True)
            if done.outcome == "interrupted":
                interrupted = True
                break
        recorder.write("header", seconds=options.budget - deadline.left_s)
        recorder.close()
        measured = measured_from_records(read_records(records))
    write_text(options.out, to_json(measured) + "\n")
    if interrupted:
        return 130
    return 0 if measured.flows or measured.compute or measured.groups else 1


def _piece(
    piece: str, options: argparse.Namespace, indices: Sequence[int], share_s: float, records: Path, folder: Path
) -> Launched:
    """Run one piece. It is told to stop measuring a little before its time is up."""
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
    # CUDA counts by speed unless told otherwise; nvidia-smi counts by bus. One host needs no network to find itself.
    environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if Path("/sys/class/net/lo").exists():
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    together = piece == "collectives"
    return launch(
        f"executor.probe_{piece}",
        arguments,
        ranks=len(indices) if together else 1,
        elastic=together,
        budget_s=share_s,
        grace_s=GRACE_S,
        environment=environment,
        directory=folder,
    )


def complaint(piece: str, done: Launched) -> str:
    """One line on a piece that did not end well, or nothing."""
    survivors = f"; processes {', '.join(map(str, done.survivors))} could not be ended" if done.survivors else ""
    if done.outcome == "failed" and done.failure is not None:
        who = f"rank {done.failure.rank}" if done.failure.rank is not None else "the launcher"
        how = done.failure.signal or f"exit code {done.failure.exit_code}"
        return f"{piece}: {who} failed first ({how}): {done.failure.message.strip()[:400]}{survivors}"
    if done.outcome == "timeout":
        return f"{piece}: stopped after {done.seconds:.0f} s, its share of the budget{survivors}"
    if done.outcome == "interrupted":
        return f"{piece}: interrupted{survivors}"
    return f"{piece}{survivors}" if survivors else ""


def find_devices(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return index, uuid and name of the devices to measure."""
    wanted = [int(index) for index in options.indices.split(",") if index.strip().isdigit()]
    if options.device == "cpu":
        return [{"index": index, "uuid": "", "name": "CPU"} for index in (wanted or [0, 1])]
    text = run_text(("nvidia-smi", "--query-gpu=index,uuid,name", "--format=csv,noheader"))
    rows = [[cell.strip() for cell in line.split(",", 2)] for line in text.splitlines()]
    known = {int(row[0]): row for row in rows if len(row) == 3 and row[0].isdigit()}
    order = wanted or sorted(known)
    if not order:
        raise ProbeError(
            "there is no GPU to measure",
            why="nvidia-smi lists none, or does not answer",
            remedy="run this on a machine with an NVIDIA GPU and driver",
        )
    if importlib.util.find_spec("torch") is None:
        raise ProbeError(
            "torch is not installed, so nothing can be measured",
            why="the measurements run under torchrun with NCCL",
            remedy='pip install "meshwright[exec]"',
        )
    return [
        {"index": index, "uuid": known[index][1] if index in known else "", "name": known.get(index, ["", "", ""])[2]}
        for index in order
    ]


def refuse_busy(devices: Sequence[dict[str, Any]], *, allow: bool) -> None:
    ours = {device["uuid"] for device in devices}
    busy = [occupant for occupant in occupants() if occupant.gpu_uuid in ours]
    if not busy or allow:
        return
    index_of = {device["uuid"]: device["index"] for device in devices}
    said = "; ".join(
        f"GPU {index_of[who.gpu_uuid]}: pid {who.pid} of {who.owner or 'an unknown user'}"
        + (f", {who.memory_bytes / 2**30:.1f} GiB" if who.memory_bytes is not None else "")
        for who in busy[:8]
    )
    raise ProbeError(
        "the GPUs are in use by other processes",
        why=said,
        remedy="wait for them, choose other GPUs with CUDA_VISIBLE_DEVICES, or pass --allow-busy",
    )


def _header(options: argparse.Namespace, devices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    driver = run_text(("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")) if _cuda(options) else ""
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
        "command": shlex.join([Path(sys.executable).name, "-m", "executor.doctor_worker", *_shown(options)]),
        "driver": driver.splitlines()[0].strip() if driver else "",
        "versions": versions,
        "gpus": [device["name"] for device in devices],
        "uuids": [device["uuid"] for device in devices],
    }


def _shown(options: argparse.Namespace) -> list[str]:
    shown = [f"--budget={options.budget:g}", f"--device={options.device}", f"--pieces={options.pieces}"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [*shown, f"(CUDA_VISIBLE_DEVICES={visible})"] if visible else shown


def _cuda(options: argparse.Namespace) -> bool:
    return bool(options.device == "cuda")


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    raise SystemExit(main())
