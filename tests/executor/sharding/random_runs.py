"""Random modules run on ranks: many in one group of processes, forked from one that has drawn and captured them."""

from __future__ import annotations

import json
import random
import re
import tempfile
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.multiprocessing import start_processes

from executor.sharding import api, capture, shard
from executor.sharding.capture import Captured
from planner.sharding.frontends.captured import graph_statements
from tests.executor.forked_ranks import meet_at, meeting_point
from tests.executor.sharding.random_modules import draw_module, outcome, tokens, weighted
from tests.executor.sharding.ranks import planned_here
from topology.errors import PlannerError

Verdict = dict[str, str]  # name, stratum, mesh, ending
MESHES = {"2": {"d": 2}, "3": {"d": 3}, "2x2": {"d": 2, "m": 2}}
CLOSE, SHORT = {"rtol": 1e-8, "atol": 1e-9}, {"rtol": 1e-4, "atol": 1e-5}  # SHORT where something has 24 bits or fewer
LIMIT_S = 240.0


class Run:
    """A module with its arguments, its graph, and what is asked of its placements."""

    def __init__(self, stratum: str, seed: int, mesh: str = "") -> None:
        self.name, self.stratum, draw = f"{stratum} {seed}", stratum, random.Random(seed)
        self.module, self.args = draw_module(seed, stratum)
        self.mesh = mesh or draw.choice(["2", "2", "2", "3", "2x2"])
        self.refused, self.captured, self.asked = "", None, dict[str, Any]()
        try:
            self.captured = capture(self.module, self.args)
        except PlannerError as error:
            self.refused = _reason(error)
        else:
            self.asked = _constraints(draw, self.captured, MESHES[self.mesh])

    def verdict(self, ending: str) -> Verdict:
        return {"name": self.name, "stratum": self.stratum, "mesh": self.mesh, "ending": ending}


def _constraints(draw: random.Random, captured: Captured, mesh: dict[str, int]) -> dict[str, Any]:
    used = {line.result for line in graph_statements(captured.graph)}
    made = [(one.name, one.shape) for one in captured.graph.nodes if one.name in used]
    some = [*((one.name, one.shape) for one in captured.graph.inputs), *draw.sample(made, min(3, len(made)))]
    placements = {name: tokens(draw, shape, mesh) for name, shape in some if draw.random() < 0.6}
    how = draw.choice(["bytes", "bytes", "weights", "time"])
    if how == "time":
        return {"placements": placements, "choose": [], "policy": "min_time", "cluster": "h200x4"}
    return {"placements": placements, "policy": "follow_weights" if how == "weights" else None}


def _reason(error: PlannerError) -> str:
    """Return why something is refused, without names and numbers."""
    why = f" ({' '.join(error.why.split())})" if error.why else ""
    return re.sub(r"\d+", "N", f"refused: {error.what}{why}")[:160]


def verdicts(wanted: Sequence[tuple[str, int]]) -> Iterator[Verdict]:
    """Yield how each module ended: equal, refused with its reason, or wrong."""
    made = [Run(*one) for one in wanted]
    for run in made:
        if run.refused:
            yield run.verdict(run.refused)
    for mesh, sizes in MESHES.items():
        left = [run for run in made if run.mesh == mesh and not run.refused]
        while left:
            endings, why = _endings(left, sizes)
            yield from (run.verdict(ending) for run, ending in zip(left, endings, strict=False))
            left = left[len(endings) :]
            if left:
                yield left[0].verdict(f"wrong: {why}")
                left = left[1:]


def _endings(runs: list[Run], mesh: dict[str, int]) -> tuple[list[str], str]:
    """Return how runs ended until one of them ended badly, and how that one did."""
    ranks = prod(mesh.values())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "endings.jsonl")
        file.touch()
        store = meeting_point()
        running = start_processes(
            _worker, (ranks, store.port, runs, mesh, str(file)), nprocs=ranks, join=False, start_method="fork"
        )
        end, why = monotonic() + LIMIT_S, ""
        try:
            while not running.join(timeout=max(0.0, end - monotonic())):
                if monotonic() > end:
                    why = "not ended"
                    break
        except Exception as error:  # noqa: BLE001 - whatever a rank raised ends its run, and the next one starts
            why = " ".join(str(error).split())[-400:]
        finally:
            for process in running.processes:
                process.kill()
        return [json.loads(line) for line in file.read_text().splitlines()], why


def _worker(rank: int, ranks: int, port: int, runs: list[Run], mesh: dict[str, int], file: str) -> None:
    torch.set_num_threads(1)
    meet_at(port)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    api.plan = planned_here
    for run in runs:
        ending = "equal"
        try:
            check(run.module, run.args, mesh, run.asked, captured=run.captured)
        except PlannerError as error:
            ending = _reason(error)
        except AssertionError as error:
            ending = f"wrong: {' '.join(str(error).split())[:300]}"
        every: list[Any] = [None] * ranks
        dist.all_gather_object(every, ending)
        if rank == 0:
            with Path(file).open("a") as out:
                worst = sorted(every, key=lambda one: ("wrong", "refused", "equal").index(one.split(":")[0]))
                out.write(json.dumps(worst[0]) + "\n")
        dist.barrier()
    dist.destroy_process_group()


def check(
    module: torch.nn.Module,
    args: tuple[torch.Tensor, ...],
    mesh: dict[str, int],
    asked: dict[str, Any],
    captured: Captured | None = None,
) -> None:
    """Hold a module on ranks against one process. Raises AssertionError where anything differs."""
    expected = outcome(module, args)
    api.capture = capture if captured is None else lambda *_: captured
    sharded = shard(module, args, mesh=mesh, **asked)
    given = tuple(one.detach().clone().requires_grad_(one.requires_grad) for one in args)
    results = sharded(*given)
    results = list(results.values()) if isinstance(results, dict) else list(results)
    wholes = [_whole(one) for one in results]
    total = weighted(wholes)
    if total.requires_grad:
        total.backward()
    own = dict(sharded.named_parameters())
    leaves = [own[name] for name, one in module.named_parameters() if one.requires_grad]
    leaves += [one for one in given if one.requires_grad]
    buffers = dict(sharded.named_buffers())
    found = [one.detach() for one in wholes]
    found += [None if one.grad is None else _whole(one.grad) for one in leaves]
    found += [_whole(buffers[name]) for name, _ in module.named_buffers()]
    found += [one.detach() for one in given]
    assert all(one.grad is None for one in own.values() if not one.requires_grad), "a frozen parameter has a gradient"
    assert len(found) == len(expected), f"{len(found)} tensors for {len(expected)}"
    close = SHORT if {"f32", "bf16", "c64"} & {one.dtype for one in sharded.captured.graph.nodes} else CLOSE
    for number, (mine, one) in enumerate(zip(found, expected, strict=True)):
        assert one is not None or mine is None, f"tensor {number}: {mine} for None"
        assert mine is not None or one is None or not one.any(), f"tensor {number}: None for {one}"  # all overwritten
        if one is not None and mine is not None:
            assert mine.dtype == one.dtype, f"tensor {number}: {mine.dtype} for {one.dtype}"
            torch.testing.assert_close(
                mine, one, **close, msg=lambda m, n=number: f"tensor {n} of {len(expected)}: {m}"
            )


def _whole(one: torch.Tensor) -> torch.Tensor:
    return one.full_tensor() if isinstance(one, DTensor) else one
