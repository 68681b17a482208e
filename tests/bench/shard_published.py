"""Modules of other packages as they are, at small sizes: captured, placed by time and at random, run on ranks of gloo.

    python -m tests.bench.shard_published --out examples/validation/sharded_modules.md

The result and all gradients are compared with one process (`tests.executor.sharding.ranks.check`). Packages are no
dependencies: modules of those that are not installed are left out. What is refused has its reason.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from time import monotonic, process_time
from typing import Any

import torch
from torch import distributed as dist
from torch.multiprocessing import start_processes

from executor.sharding import api, capture
from executor.sharding.capture import Captured
from planner.sharding.frontends.captured import graph_statements
from tests.bench.published_modules import MODULES, Made
from tests.executor.forked_ranks import meet_at, meeting_point
from tests.executor.sharding.ranks import Case, check, planned_here
from topology.errors import PlannerError

BY_TIME: dict[str, Any] = {"choose": ["*"], "policy": "min_time", "cluster": "h200x4"}
MESHES = ({"d": 2}, {"d": 2, "m": 2})
DRAWS = 3
PACKAGES = ("torch", "transformers", "diffusers", "torchvision", "timm", "torch-rechub", "neuraloperator", "nflows")
PACKAGES += ("mambapy", "x-transformers", "vit-pytorch")
EQUAL = "equal"
LIMIT_S = 240.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--kept", type=Path, help="rows that are there already are not made again")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    done = {} if asked.kept is None or not asked.kept.exists() else dict(map(json.loads, asked.kept.open()))
    for name in MODULES:
        if re.search(asked.only, name) and name not in done:
            found = row(name, asked.draws)
            if found is not None:
                done[name] = found
                print(found[0], flush=True)
                if asked.kept is not None:
                    with asked.kept.open("a") as out:
                        out.write(json.dumps([name, found]) + "\n")
    rows, endings = [done[name][0] for name in MODULES if name in done], Counter[str]()
    for name in MODULES:
        endings.update(done[name][1] if name in done else {})
    print(dict(endings))
    if asked.out is not None:
        missing = [name for name in MODULES if name not in done]
        asked.out.write_text(text(rows, endings, missing), encoding="utf-8")


def row(name: str, draws: int) -> tuple[str, Counter[str]] | None:
    """Return a module's row and how many runs ended how, or None where its package is not installed."""
    torch.manual_seed(0)
    try:
        module, args, kwargs = MODULES[name]()
    except ImportError as error:
        print(f"{name}: {error}", flush=True)
        return None
    started = process_time()
    try:
        captured = capture(module, args, kwargs)
    except PlannerError as error:
        return f"| {name} | | | | | refused: {error.what} |", Counter(refused=1)
    lines = graph_statements(captured.graph)
    opaque = sum(not one.known for one in lines)
    attention = sum("attention" in one.op for one in lines)
    seconds = process_time() - started
    endings = [
        ending
        for mesh in MESHES
        for ending in run((module, args, kwargs), captured, mesh, constraints(name, captured, mesh, draws))
    ]
    counted = Counter(endings)
    said = "; ".join(f"{n} {ending}" if n > 1 or ending == EQUAL else ending for ending, n in counted.items())
    verdicts = Counter(ending.split(":")[0] for ending in endings)
    cells = (name, len(captured.graph.nodes), opaque, attention, f"{seconds:.1f}", said)
    return f"| {' | '.join(map(str, cells))} |", verdicts


def constraints(name: str, captured: Captured, mesh: dict[str, int], draws: int) -> list[dict[str, Any]]:
    """Return what is asked of a module: all chosen by time, and so many random placements of inputs and results."""
    draw = random.Random(f"{name} {mesh}")
    found = [BY_TIME]
    for _ in range(draws):
        placements = {}
        shapes = {one.name: one.shape for one in captured.graph.inputs}
        used = {line.result for line in graph_statements(captured.graph)}
        nodes = [one for one in captured.graph.nodes if one.name in used]
        results = draw.sample(nodes, min(3, len(nodes)))
        for tensor, shape in (*shapes.items(), *((one.name, one.shape) for one in results)):
            if draw.random() < 0.6:
                placements[tensor] = tokens(draw, shape, mesh)
        found.append({"placements": placements})
    return found


def tokens(draw: random.Random, shape: Sequence[int], mesh: dict[str, int]) -> list[str]:
    """Return a random placement that divides the shape."""
    left, found = list(shape), []
    for size in mesh.values():
        dims = [d for d, n in enumerate(left) if n % size == 0 and n > 1]
        dim = draw.choice([None, *dims])
        found.append("R" if dim is None else f"S({dim})")
        if dim is not None:
            left[dim] //= size
    return found


def forked(ranks: int, *args: Any) -> None:
    """Call `_worker(*args)` on every rank, forked from this process, which has the module and its packages."""
    store = meeting_point()
    meet_at(store.port)
    running = start_processes(_worker, (ranks, *args), nprocs=ranks, join=False, start_method="fork")
    end = monotonic() + LIMIT_S
    try:
        while not running.join(timeout=max(0.0, end - monotonic())):
            if monotonic() > end:
                raise TimeoutError(f"{ranks} ranks have not ended within {LIMIT_S:g} s")
    finally:
        for process in running.processes:
            process.kill()


def run(made: Made, captured: Captured, mesh: dict[str, int], asked: list[dict[str, Any]]) -> list[str]:
    """Return how each run ended: equal, refused with its reason, or wrong."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "endings.jsonl")
        endings: list[str] = []
        while len(endings) < len(asked):
            try:
                forked(prod(mesh.values()), made, captured, mesh, asked, len(endings), str(file))
                why = ""
            except Exception as error:  # noqa: BLE001 - whatever a rank raised ends its case, and the next one starts
                why = " ".join(str(error).split())[-300:]
            endings = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
            if len(endings) < len(asked):
                endings.append(f"wrong: {why}")
                with file.open("a") as out:
                    out.write(json.dumps(endings[-1]) + "\n")
    return endings


def _worker(
    rank: int,
    ranks: int,
    made: Made,
    captured: Captured,
    mesh: dict[str, int],
    asked: list[dict[str, Any]],
    first: int,
    file: str,
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    api.plan, api.capture = planned_here, lambda *_: captured
    module, args, kwargs = made
    # what is computed in float32, on many modules a part of it, is equal to its digits
    tolerance = 1e-5 if any(one.dtype == "f32" for one in captured.graph.nodes) else 1e-9
    for constraint in asked[first:]:
        case = Case("", module, args, mesh, constraint, kwargs, tolerance)
        try:
            check(case)
            ending = EQUAL
        except PlannerError as error:
            ending = f"refused: {error.what}" + (f" ({error.why})" if error.why else "")
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, ending)
        if dist.get_rank() == 0:
            with Path(file).open("a") as out:
                out.write(json.dumps(next((one for one in every if one != EQUAL), EQUAL)) + "\n")
        dist.barrier()
    dist.destroy_process_group()


def text(rows: list[str], endings: Counter[str], missing: list[str]) -> str:
    equal = sum(": " not in one.split("|")[-2] for one in rows)  # what is refused or wrong says why
    lines = [
        "# Modules of other packages on ranks",
        "",
        f"`python -m tests.bench.shard_published`: {versions()};",
        "code as published, at small sizes. Each module is captured, placed by time and by three random placements of inputs",
        "and results, and run on 2 and on 2x2 ranks of gloo; its result and all gradients are compared with one process.",
        "*Opaque* operators are computed whole on every rank.",
        "",
        f"{equal} of {len(rows)} modules are equal in all runs. Runs: "
        + ", ".join(f"{n} {ending}" for ending, n in endings.most_common())
        + "."
        + (f" Not run: {', '.join(missing)}." if missing else ""),
        "",
        "| module | operators | opaque | attention | capture s | runs |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
    return "\n".join(lines) + "\n"


def versions() -> str:
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


if __name__ == "__main__":
    main()
