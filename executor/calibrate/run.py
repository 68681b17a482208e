"""Calibrate a machine in independent pieces: operators, contention, overlap, collectives, layers.

Started by `planner calibrate` in its own process, with a request that lists the samples in order of importance. Each
piece is another process with its share of the budget. Every sample is written to `--records` at once, so a run that is
stopped, killed or out of time leaves a valid profile with fewer samples. Never imports torch.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from executor.launch.local_ranks import launch
from executor.launch.process_exit import exit_code_of
from executor.launch.records import Deadline, Recorder
from executor.measure.measurement import (
    devices_to_measure,
    driver_version,
    loopback_environment,
    measurement_parser,
    record_problem,
)
from topology.codec import read_json

ENDING_S = 3.0  # for a piece to leave its process group and exit
GRACE_S = 3.0
MIN_PIECE_S = 6.0  # a piece with less than this would only import torch
CPU_LARGEST = 2**14


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One process, or one per rank: its module, number of ranks, weight in the budget, and arguments."""

    name: str
    module: str
    ranks: int
    weight: float
    arguments: tuple[str, ...] = ()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure. Returns 0 when all pieces ran, 1 when there is nothing to measure with, 130 on Ctrl-C."""
    parser = measurement_parser("executor.calibrate.run")
    parser.add_argument("--request", required=True)
    parser.add_argument("--records", required=True, help="JSON lines; what is there already is kept")
    parser.add_argument("--gpu-name", default="", help="catalogue name of the GPU")
    parser.add_argument("--command", default="", help="what the user typed, for the record")
    parser.add_argument("--text", default="")
    return exit_code_of(run, parser.parse_args(argv))


def run(options: argparse.Namespace) -> int:
    """Run the pieces in turn. Raises ProbeError when there is no device, or other processes use the GPUs."""
    deadline = Deadline(options.budget)
    devices = devices_to_measure(options)
    indices = [device["index"] for device in devices]
    recorder = Recorder(options.records)
    recorder.write("header", **header(options, len(indices)))
    pieces = pieces_for(read_json(options.request), len(indices))
    interrupted = False
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        for number, piece in enumerate(pieces):
            left = sum(later.weight for later in pieces[number:])
            share = deadline.left_s * piece.weight / left
            if share < MIN_PIECE_S:
                recorder.missing(f"{piece.name}: out of time")
                continue
            print(f"measuring {piece.name} (at most {share:.0f} s)", file=sys.stderr, flush=True)
            done = launch(
                piece.module,
                [
                    f"--out={options.records}",
                    f"--seconds={share - min(ENDING_S, 0.2 * share):.3f}",
                    f"--device={options.device}",
                    *(_collective_arguments(options, indices) if piece.name == "collectives" else ()),
                    *((f"--request={options.request}", f"--gpu={indices[0]}") if piece.name != "collectives" else ()),
                    *piece.arguments,
                    *((f"--text={options.text}",) if options.text and "torchtitan" in piece.name else ()),
                ],
                ranks=piece.ranks,
                elastic=piece.module != "executor.calibrate.operators",
                budget_s=share,
                grace_s=GRACE_S,
                environment=environment(options.device),
                directory=Path(folder) / piece.name.replace(" ", "_"),
            )
            record_problem(piece.name, done, recorder)
            if done.outcome == "interrupted":
                interrupted = True
                break
    recorder.write("header", seconds=options.budget - deadline.left_s)
    recorder.close()
    return 130 if interrupted else 0


def pieces_for(request: dict[str, Any], gpus: int) -> list[Piece]:
    """Return the pieces to run for a request on `gpus` GPUs, the cheapest first."""
    found: list[Piece] = []
    if request.get("operators"):
        found.append(Piece(name="operators", module="executor.calibrate.operators", ranks=1, weight=4.0))
    if request.get("contention") and gpus > 1:
        found.append(Piece(name="contention", module="executor.calibrate.contention", ranks=gpus, weight=3.0))
    found += [
        Piece(name=f"overlap on {ranks} GPUs", module="executor.calibrate.overlap", ranks=ranks, weight=3.0)
        for ranks in sorted({one["ranks"] for one in request.get("overlap", ()) if one["ranks"] <= gpus})
    ]
    if request.get("collectives") and gpus > 1:
        found.append(Piece(name="collectives", module="executor.measure.probe_collectives", ranks=gpus, weight=3.0))
    layers = request.get("layers", [])
    for runtime in ("torchtitan", "own"):
        ours = [one for one in layers if (one["runtime"]["name"] == "torchtitan") == (runtime == "torchtitan")]
        for ranks in sorted({one["ranks"] for one in ours if one["ranks"] <= gpus}):
            mine = [one for one in ours if one["ranks"] == ranks]
            heavy = sum(4.0 if one["runtime"].get("compile") else 1.0 for one in mine)
            found.append(
                Piece(
                    name=f"layers of {runtime} on {ranks} GPUs",
                    module="executor.calibrate.layers",
                    ranks=ranks,
                    weight=2.0 + heavy,
                    arguments=(f"--runtime={runtime}",),
                )
            )
    return found


def header(options: argparse.Namespace, gpus: int) -> dict[str, Any]:
    """Return the fields of a `topology.profile.samples.Provenance`; the workers add the versions of their libraries."""
    cuda = options.device == "cuda"
    return {
        "machine": options.machine,
        "gpu": options.gpu_name if cuda else "cpu",
        "device": options.device,
        "gpus": gpus,
        "driver": driver_version() if cuda else "",
        "versions": {"python": sys.version.split()[0]},
        "taken_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": options.command,
    }


def environment(device: str) -> dict[str, str]:
    """Return the ranks' environment: GPUs numbered as by nvidia-smi, loopback on one host, torchtitan's allocator."""
    added = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
    }
    if device == "cpu":
        added |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    else:
        added |= {"OMP_NUM_THREADS": "4"}
    return added | loopback_environment()


def _collective_arguments(options: argparse.Namespace, indices: Sequence[int]) -> tuple[str, ...]:
    some = (f"--indices={','.join(map(str, indices))}",)
    return (*some, f"--largest={CPU_LARGEST}") if options.device == "cpu" else some


if __name__ == "__main__":
    raise SystemExit(main())
