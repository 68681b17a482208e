"""Common parts of all measurements: command-line options, the devices to measure, times of calls, and reports of
failed parts.

A measurement is a process that starts a process for each of its parts (`executor.launch.local_ranks`). Never imports
torch.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from executor.gpu.state import gpu_processes, run_text
from executor.launch.local_ranks import LaunchResult
from executor.launch.records import Recorder
from topology.errors import ProbeError
from topology.units import in_gib


def load_torch() -> Any:
    """Return torch, imported late: measurements on CPUs do not need it, and tests replace it by a stand-in."""
    return importlib.import_module("torch")


def timed_calls(call: Callable[[], object], count: int, *, cuda: bool) -> list[float]:
    """Return the seconds of each of `count` calls issued back to back: of the current device, or of this process."""
    if not cuda:
        seconds = []
        for _ in range(count):
            started = time.perf_counter()
            call()
            seconds.append(max(time.perf_counter() - started, 1e-9))
        return seconds
    events = record_events(call, count)
    load_torch().cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]


def record_events(call: Callable[[], object], count: int) -> list[Any]:
    """Return events of the current stream before, between and after `count` calls."""
    event = load_torch().cuda.Event
    events = [event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for one in events[1:]:
        call()
        one.record()
    return events


def measurement_parser(program: str) -> argparse.ArgumentParser:
    """Return a parser with the options of a whole measurement."""
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for everything")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--indices", default="", help="nvidia-smi's indices, in CUDA's order; default: all")
    parser.add_argument("--allow-busy", action="store_true", help="measure though others use the GPUs")
    parser.add_argument("--machine", default="this machine")
    return parser


def piece_parser(program: str) -> argparse.ArgumentParser:
    """Return a parser with the options of one part of a measurement."""
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("--out", required=True, help="JSON lines; what is there already is kept")
    parser.add_argument("--seconds", type=float, required=True, help="for everything, the start included")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser


@dataclass(frozen=True, slots=True)
class Device:
    """A device to measure: nvidia-smi's index, uuid and name."""

    index: int
    uuid: str
    name: str


def devices_to_measure(options: argparse.Namespace) -> list[Device]:
    """Return the devices to measure. Raises ProbeError if there are none or they are in use."""
    devices = _find_devices(options)
    if options.device == "cuda":
        _refuse_gpus_in_use(devices, allow=options.allow_busy)
    return devices


def _find_devices(options: argparse.Namespace) -> list[Device]:
    wanted = [int(index) for index in options.indices.split(",") if index.strip().isdigit()]
    if options.device == "cpu":
        return [Device(index, "", "CPU") for index in (wanted or [0, 1])]
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
    return [Device(index, *known.get(index, ["", "", ""])[1:]) for index in order]


def _refuse_gpus_in_use(devices: Sequence[Device], *, allow: bool) -> None:
    ours = {device.uuid for device in devices}
    busy = [occupant for occupant in gpu_processes() if occupant.gpu_uuid in ours]
    if not busy or allow:
        return
    index_of = {device.uuid: device.index for device in devices}
    listed = "; ".join(
        f"GPU {index_of[who.gpu_uuid]}: pid {who.pid} of {who.owner or 'an unknown user'}"
        + (f", {in_gib(who.memory_bytes)}" if who.memory_bytes is not None else "")
        for who in busy[:8]
    )
    raise ProbeError(
        "the GPUs are in use by other processes",
        why=listed,
        remedy="wait for them, choose other GPUs with CUDA_VISIBLE_DEVICES, or pass --allow-busy",
    )


def record_problem(piece: str, done: LaunchResult, recorder: Recorder) -> None:
    """Record and print the cause if a part of the measurement failed."""
    listed = describe_problem(piece, done)
    if listed:
        recorder.missing(listed)
        print(listed, file=sys.stderr, flush=True)


def describe_problem(piece: str, done: LaunchResult) -> str:
    """Return a line about a part that did not end well, or an empty string."""
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
