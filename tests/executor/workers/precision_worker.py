"""Take steps in two precisions: `python -m tests.executor.workers.precision_worker OUT`."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from executor.parallel.meshes import build_meshes
from executor.parallel.parallelize import Setup
from executor.parallel.train_step import Trainer
from executor.verify.kernels import check_experts, check_ring
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from tests.executor.workers.verify_worker import MODELS

PLANS = {
    "ddp": ("llama", Plan(dp_replicate=2, micro_batch_size=2)),
    "ddp-moe": ("moe", Plan(dp_replicate=2, micro_batch_size=2)),
    "fsdp": ("llama", Plan(dp_shard=2, micro_batch_size=2)),
    "ep": ("moe", Plan(dp_shard=2, ep=2, micro_batch_size=2)),
    "tp": ("qk_norm", Plan(tp=2, sequence_parallel=True, micro_batch_size=4)),
    "cp": ("llama", Plan(cp=2, micro_batch_size=4)),
    "pp": ("llama", Plan(pp=2, micro_batch_size=1)),
}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    losses = {}
    for name, (model, plan) in PLANS.items():
        for compute in ("float32", "bfloat16", "float64"):
            runtime, as_typed = Runtime(compute_dtype=compute), None
            if compute == "float64":
                runtime = Runtime(compute_dtype=compute, param_dtype=compute, reduce_dtype=compute)
                as_typed = Runtime(compute_dtype="bfloat16")
            trainer = Trainer(
                Setup(
                    plan=plan,
                    model=MODELS[model],
                    workload=Workload(seq_len=16, global_batch_size=4),
                    runtime=runtime,
                    meshes=build_meshes(plan, "cpu"),
                    device=torch.device("cpu"),
                    as_typed=as_typed,
                )
            )
            stored = {str(p.dtype) for p in trainer.parameters()}
            modules = [
                [place, type(m).__name__] for part in trainer.parallel.modules for place, m in part.named_modules()
            ]
            losses[f"{name}-{compute}"] = [[trainer.step(i).loss for i in range(2)], sorted(stored), modules]
    cpu = torch.device("cpu")
    for dtype in (torch.bfloat16, torch.float64):
        ring = check_ring(dist.group.WORLD, device=cpu, dtype=dtype)
        experts = check_experts(device=cpu, dtype=dtype)
        losses[f"kernels-{dtype}"] = [[ring.difference, ring.tolerance], [experts.difference, experts.tolerance]]
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
