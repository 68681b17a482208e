"""What every measurement of a machine begins and ends with: its options, the GPUs it may have, what went wrong.

A measurement is a process of its own that runs its pieces in further processes (`executor.launch`). Imports no torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from executor.gpu_state import occupants, run_text
from executor.launch import Launched
from executor.records import Recorder
from topology.errors import ProbeError


def measuring_parser(program: str) -> argparse.ArgumentParser:
    """Return a parser of the options that all measurements have."""
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for everything")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--indices", default="", help="nvidia-smi's indices, in CUDA's order; default: all")
    parser.add_argument("--allow-busy", action="store_true", help="measure though others use the GPUs")
    parser.add_argument("--machine", default="this machine")
    return parser


def piece_parser(program: str) -> argparse.ArgumentParser:
    """Return a parser of the options that every piece of a measurement has."""
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("--out", required=True, help="JSON lines; what is there already is kept")
    parser.add_argument("--seconds", type=float, required=True, help="for everything, the start included")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser


def ended_as_rank(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Run a piece under torchrun's agent, which is told of an error with its trace."""
    from torch.distributed.elastic.multiprocessing.errors import record  # noqa: PLC0415 - only workers have torch

    return int(record(run)(options))


def devices_to_measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return index, uuid and name of the devices to measure. Raises ProbeError where there are none, or others at work."""
    devices = _find_devices(options)
    if options.device == "cuda":
        _refuse_busy(devices, allow=options.allow_busy)
    return devices


def _find_devices(options: argparse.Namespace) -> list[dict[str, Any]]:
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


def _refuse_busy(devices: Sequence[dict[str, Any]], *, allow: bool) -> None:
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


def driver_version() -> str:
    """Return the version of the GPUs' driver, nothing where it does not say."""
    text = run_text(("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"))
    return text.splitlines()[0].strip() if text else ""


def on_one_host() -> dict[str, str]:
    """Return what ranks of one host need to find each other: no network, just the loopback."""
    if not Path("/sys/class/net/lo").exists():
        return {}
    return {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def noted(piece: str, done: Launched, recorder: Recorder) -> None:
    """Record and say what kept a piece from ending well, if anything did."""
    said = complaint(piece, done)
    if said:
        recorder.missing(said)
        print(said, file=sys.stderr, flush=True)


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
