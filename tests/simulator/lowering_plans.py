"""Plans to lower in tests: a seeded draw of legal ones over all axes, runtimes and machines, and how to run them."""

from __future__ import annotations

import random

from simulator.analytical.scenario import Scenario
from simulator.columns.plan_table import CP_METHODS
from simulator.config.hf_config import load_model
from simulator.config.overlap_sites import MODES
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.engine.simulate import simulate
from simulator.lowering.block_code import Detail
from simulator.lowering.training import lower_training
from topology.catalog.clusters import cluster

RECOMPUTE = {
    "torchtitan": ("none", "full", "selective", "selective-op"),
    "megatron-lm": ("none", "full", "selective"),
    "pytorch": ("none", "full"),
}
TWO_STAGES = ("Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS", "ZBVZeroBubble", "DualPipeV")
SCHEDULES = ("1F1B", "GPipe", "ZBH1", *TWO_STAGES)


def draw(count: int, seed: int = 0, *, most_gpus: int = 16, layers: int = 8):
    """Return `count` questions (model, cluster, workload, plan, runtime). Models are shortened to `layers`."""
    rng = random.Random(seed)
    found = []
    while len(found) < count:
        question = _draw_one(rng, most_gpus, layers)
        if question is not None:
            found.append(question)
    return found


def _draw_one(rng, most_gpus, layers):
    gpus = left = rng.choice([n for n in (1, 2, 4, 8, 16, 32) if n <= most_gpus])
    degrees = {}
    for axis in rng.sample(["tp", "pp", "cp", "dp_shard", "dp_replicate"], 5):
        degrees[axis] = rng.choice([n for n in (1, 2, 4, 8) if left % n == 0])
        left //= degrees[axis]
    degrees["dp_shard"] *= left
    name = rng.choice(tuple(RECOMPUTE))
    model_name = rng.choice(("llama3-8b", "llama2-7b", "llama3.2-1b", "qwen3-30b-a3b"))
    zero = None
    if name == "megatron-lm":
        degrees |= {"dp_replicate": degrees["dp_replicate"] * degrees["dp_shard"], "dp_shard": 1}
        zero = rng.choice((0, 1, 2, 3) if degrees["pp"] == 1 else (0, 1))
    sequence_parallel = degrees["tp"] > 1 and rng.random() < 0.7
    ep = 1
    if model_name.startswith("qwen3"):
        if degrees["tp"] > 4:
            return None
        inner = degrees["dp_shard"] * degrees["cp"] * (degrees["tp"] if sequence_parallel else 1)
        inner *= degrees["dp_replicate"] if zero is not None else 1
        ep = rng.choice([n for n in (1, 2, 4, 8) if inner % n == 0])
    schedule = rng.choice(SCHEDULES) if degrees["pp"] > 1 else None
    micro_batches = rng.choice((1, 2, 4))
    if schedule:
        micro_batches = degrees["pp"] * rng.choice((2, 4) if schedule in {"DualPipeV", "ZBVZeroBubble"} else (1, 2, 4))
    plan = Plan(
        **degrees,
        zero_stage=zero,
        ep=ep,
        sequence_parallel=sequence_parallel,
        tp_overlap=rng.choice(MODES) if sequence_parallel else "none",
        cp_method=rng.choice(CP_METHODS),
        schedule=schedule,
        virtual_stages=2 if schedule in TWO_STAGES else 1,
        recompute=rng.choice(RECOMPUTE[name]),
        micro_batch_size=rng.choice((1, 2)),
    )
    runtime = Runtime(name=name, param_dtype="bfloat16") if zero is not None else Runtime(name=name)
    workload = Workload(
        seq_len=rng.choice((2048, 8192)),
        global_batch_size=micro_batches * plan.micro_batch_size * plan.data_parallel,
        expert_imbalance=rng.choice((1.0, 1.3)),
    )
    machine = cluster(rng.choice(("dgx-h100", "dgx-a100", "dgx-h200")), gpus=gpus)
    return shortened(model_name, max(layers, 2 * plan.pp)), machine, workload, plan, runtime


def shortened(name: str, layers: int):
    """Return a shipped model with fewer layers: everything a plan meets, in less time."""
    from dataclasses import replace

    return replace(load_model(name), layers=layers)


def run(question, detail: Detail = Detail.LAYER, **options):
    model, machine, workload, plan, runtime = question
    scenario = Scenario(model=model, cluster=machine, workload=workload, runtime=runtime)
    lowered = lower_training(scenario, plan, detail=detail)
    return lowered, simulate(lowered.program, lowered.costs, **options)
