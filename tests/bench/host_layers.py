"""Host time of a layer under each kind of plan on GPUs, all kinds in turn, and what its host does.

    torchrun --nproc-per-node 2 tests/bench/host_layers.py OUT [--seconds 118] [--device cpu]

Hosts differ, and one host differs from minute to minute, by more than kinds of layers do. So all models are built
first, and every round takes one step of each: kinds are compared within rounds. Layers are narrow, so that a GPU waits
for its host; a layer's time is that of a deep model less that of a shallow one, of the slower rank. Then one step of
each deep model is profiled: launches, operators and GPU time. With `--rows` runs of the ledger are repeated, and a step
of each is profiled. OUT/host.json has everything, written again after each part.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
BEGAN = time.monotonic()

import torch  # noqa: E402 - the path comes first
import torch.distributed as dist  # noqa: E402

from executor.gpu.device import synchronize  # noqa: E402
from executor.launch.local_ranks import loopback_environment  # noqa: E402
from executor.parallel.meshes import Meshes, meshes_for  # noqa: E402
from executor.parallel.parallelize import Setup  # noqa: E402
from executor.parallel.train_step import Trainer  # noqa: E402
from simulator.config.model import MixtureOfExperts, Model  # noqa: E402
from simulator.config.plan import MESH_AXES, Plan  # noqa: E402
from simulator.config.runtime import Runtime  # noqa: E402
from simulator.config.workload import Workload  # noqa: E402
from tests.bench.fresh_worker import covered  # noqa: E402
from topology import codec  # noqa: E402

SHALLOW, DEEP, TOKENS = 2, 8, 256
WARM = 3
# Shares of the seconds by which building, rounds and profiles of narrow layers have ended.
BUILT_UNTIL, ROUNDS_UNTIL, PROFILES_UNTIL = 0.42, 0.56, 0.75
DENSE: dict[str, Any] = {
    "name": "narrow", "family": "x", "hidden": 512, "heads": 8, "kv_heads": 8, "head_dim": 64, "ffn": 1024,
    "vocab": 1024,
}  # fmt: skip
SPARSE = {**DENSE, "moe": MixtureOfExperts(experts=8, experts_per_token=2, ffn=256)}
NORMED = {**DENSE, "family": "qwen3", "qk_norm": True}
SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
OURS = Runtime(name="meshwright", param_dtype="float32", compute_dtype="bfloat16", reduce_dtype="float32")
HALF = replace(OURS, param_dtype="bfloat16")
Case = tuple[dict[str, Any], Plan, Runtime]


def _cases() -> dict[str, Case]:
    """Return the kinds of layers by name, the plain one first."""
    dense = {
        "one": Plan(),
        "one-full": Plan(recompute="full"),
        "one-selop": Plan(recompute="selective-op"),
        "ddp": Plan(dp_replicate=2),
        "fsdp": Plan(dp_shard=2),
        "fsdp-stays": Plan(dp_shard=2, reshard_after_forward=False),
        "fsdp-full": Plan(dp_shard=2, recompute="full"),
        "fsdp-selop": Plan(dp_shard=2, recompute="selective-op"),
        "tp": Plan(**SP),
        "tp-full": Plan(**SP, recompute="full"),
        "tp-selop": Plan(**SP, recompute="selective-op"),
        **{f"tp-{mode}": Plan(**SP, tp_overlap=mode) for mode in ("chunked", "copy_engine")},
        "tp-copy_engine-full": Plan(**SP, tp_overlap="copy_engine", recompute="full"),
        **{f"cp-{how}": Plan(cp=2, cp_method=how) for how in ("ring", "all_gather", "all_to_all")},
        "cp-ring-full": Plan(cp=2, cp_method="ring", recompute="full"),
    }
    sparse = {
        "moe": Plan(),
        "moe-fsdp": Plan(dp_shard=2),
        "moe-ep": Plan(dp_shard=2, ep=2),
        "moe-ep-stays": Plan(dp_shard=2, ep=2, reshard_after_forward=False),
        "moe-ep-selop": Plan(dp_shard=2, ep=2, recompute="selective-op"),
        "moe-tp": Plan(**SP),
        "moe-tp-ep": Plan(**SP, ep=2),
        "moe-tp-ep-copy_engine": Plan(**SP, ep=2, tp_overlap="copy_engine"),
        "moe-cp-ep": Plan(cp=2, ep=2, cp_method="all_gather"),
    }
    return {
        **{name: (DENSE, plan, OURS) for name, plan in dense.items()},
        "one-half": (DENSE, Plan(), HALF),
        "one-normed": (NORMED, Plan(), OURS),
        "tp-normed": (NORMED, Plan(**SP), OURS),
        **{name: (SPARSE, plan, OURS) for name, plan in sparse.items()},
        # Last, as Triton compiles for them.
        "tp-fused": (DENSE, Plan(**SP, tp_overlap="fused"), OURS),
        "moe-tp-fused": (SPARSE, Plan(**SP, tp_overlap="fused"), OURS),
    }


CASES = _cases()


def apart(device: torch.device) -> Meshes:
    """Return the meshes of a plan of one rank, for each rank by itself."""
    root = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("world",))

    def alone(*axes: str) -> Any:
        return root._unflatten(0, (dist.get_world_size(), *(1 for _ in axes)), ("apart", *axes))[axes]

    return Meshes(grid=alone(*MESH_AXES), dense=alone("pp", "dp_replicate", "fsdp", "tp"), sparse=None)


def trainer(
    model: Model, plan: Plan, workload: Workload, runtime: Runtime, device: torch.device, alone: Meshes | None = None
) -> Trainer:
    meshes = alone if alone is not None and plan.gpus == 1 else meshes_for(plan, device.type)
    return Trainer(Setup(plan=plan, model=model, workload=workload, runtime=runtime, meshes=meshes, device=device))


def step(some: Trainer, index: int, device: torch.device) -> tuple[float, float, float]:
    """Return seconds of a step, until its backward pass was issued, and of the processor until then."""
    dist.barrier()
    synchronize(device)
    began, worked = time.perf_counter(), time.process_time()
    loss = some.backward(index)
    issued, work = time.perf_counter() - began, time.process_time() - worked
    some.update()
    some.total_loss(loss)
    synchronize(device)
    return time.perf_counter() - began, issued, work


def largest(values: list[float]) -> list[float]:
    box = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return [float(value) for value in box]


def in_time(until: float) -> bool:
    return largest([time.monotonic() - BEGAN])[0] < until


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"{time.monotonic() - BEGAN:6.1f} s  {text}", file=sys.stderr, flush=True)


def built(device: torch.device, only: list[str], until: float) -> Iterator[tuple[str, int, Trainer]]:
    alone, tokens, small = apart(device), TOKENS, {}
    if device.type == "cpu":  # a rehearsal
        tokens, small = 16, {"hidden": 64, "heads": 4, "kv_heads": 4, "head_dim": 16, "ffn": 64, "vocab": 64}
    for name, (shapes, plan, runtime) in CASES.items():
        if (only and name not in only) or not in_time(until):
            continue
        say(name)
        workload = Workload(seq_len=tokens * plan.cp, global_batch_size=plan.data_parallel)
        try:
            some = [
                trainer(Model(**{**shapes, **small}, layers=layers), plan, workload, runtime, device, alone)
                for layers in (SHALLOW, DEEP)
            ]
            for one in some:
                for index in range(WARM):
                    one.step(index)
            yield from ((name, layers, one) for layers, one in zip((SHALLOW, DEEP), some, strict=True))
        except Exception as error:  # noqa: BLE001 - all ranks fail alike, and the others are worth measuring
            say(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")


def profiled(some: Trainer, device: torch.device) -> dict[str, Any]:
    """Return what one step's host and GPU do: counts and own seconds of operators and calls, and the GPU's time."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    dist.barrier()
    synchronize(device)
    with profile(activities=activities) as profiler:
        began = time.perf_counter()
        some.step(0)
        synchronize(device)
        wall = time.perf_counter() - began
    raw = profiler.profiler.kineto_results.events()
    on_gpu = [one for one in raw if one.device_type() == torch.autograd.DeviceType.CUDA]
    spans = [(one.start_ns() * 1e-9, (one.start_ns() + one.duration_ns()) * 1e-9, one.name()) for one in on_gpu]
    moving = [span for span in spans if "nccl" in span[2].lower()]
    counts = Counter(one.name() for one in raw if one.device_type() != torch.autograd.DeviceType.CUDA)
    seconds: Counter[str] = Counter()
    for one in raw:
        if one.device_type() != torch.autograd.DeviceType.CUDA:
            seconds[one.name()] += one.duration_ns() * 1e-9
    named = sorted(counts, key=lambda name: -seconds[name])[:150]
    return {
        "wall_s": wall,
        "gpu_s": covered(spans),
        "nccl_s": covered(moving),
        "kernels": len(spans),
        "operators": sum(count for name, count in counts.items() if name.startswith(("aten::", "c10d::", "fsdp::"))),
        "host": {name[:90]: [counts[name], round(seconds[name], 6)] for name in named},
    }


def repeat_row(row: dict[str, Any], device: torch.device, until: float) -> dict[str, Any] | None:
    """Run a row of the ledger again; return its steps and what one of them does."""
    kinds = (("model", Model), ("plan", Plan), ("workload", Workload), ("runtime", Runtime))
    model, plan, workload, runtime = (codec.convert(row[name], kind, where=name) for name, kind in kinds)
    if plan.gpus != dist.get_world_size():
        return None
    some = trainer(model, plan, workload, runtime, device)
    found = []
    for index in range(13):
        taken = largest(list(step(some, index, device)))
        found += [taken] if index >= WARM else []
        if not in_time(until):
            return {"steps": found}
    return {"steps": found, "profile": profiled(some, device)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=118.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="", help="kinds of layers, by comma")
    parser.add_argument("--rows", default="", help="runs of the ledger, by comma")
    options = parser.parse_args()
    os.environ |= loopback_environment()
    torch.set_num_threads(1)
    device = torch.device(options.device, int(os.environ["LOCAL_RANK"])) if options.device == "cuda" else torch.device("cpu")  # fmt: skip
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=options.seconds)
    )
    options.out.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {
        "shallow": SHALLOW, "deep": DEEP, "tokens": TOKENS, "torch": str(torch.__version__), "rounds": [],
        "profiles": {}, "rows": {},
    }  # fmt: skip

    def write() -> None:
        if dist.get_rank() == 0:
            (options.out / "host.json").write_text(json.dumps(document), encoding="utf-8")

    say("joined")
    ready = list(built(device, [name for name in options.only.split(",") if name], BUILT_UNTIL * options.seconds))
    document["kinds"] = [[name, layers] for name, layers, _ in ready]
    say(f"{len(ready)} models built")
    gc.collect()
    gc.disable()
    turn = WARM
    while in_time(ROUNDS_UNTIL * options.seconds) or not document["rounds"]:
        mine = [value for _, _, some in ready for value in step(some, turn, device)]
        document["rounds"].append([round(value, 7) for value in largest(mine)])
        turn += 1
    say(f"{len(document['rounds'])} rounds")
    write()
    for name, layers, some in ready:
        if layers == DEEP and in_time(PROFILES_UNTIL * options.seconds):
            document["profiles"][name] = profiled(some, device)
    say(f"{len(document['profiles'])} profiles")
    write()
    del ready, some
    gc.collect()
    ledger = ROOT / "examples" / "validation" / "fresh.jsonl"
    rows = {one["id"]: one for one in map(json.loads, ledger.read_text(encoding="utf-8").splitlines())}
    for name in filter(None, options.rows.split(",")):
        if in_time(options.seconds - 12.0):
            with suppress(torch.cuda.OutOfMemoryError):
                document["rows"][name] = repeat_row(rows[name], device, options.seconds - 6.0)
            say(f"run {name}")
            write()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    say("done")
    os._exit(0)  # groups and symmetric memory need not be taken down one by one


if __name__ == "__main__":
    main()
