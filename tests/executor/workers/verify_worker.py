"""Verify a list of plans in one process group: `python -m tests.executor.workers.verify_worker CASES OUT [cuda|share]`.

`cuda` gives each rank a GPU of its own, `share` all of them the first one.
"""

import functools
import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from executor.model import vocabulary_loss
from executor.parallel.meshes import meshes_for
from executor.parallel.parallelize import Setup
from executor.verify import plans
from executor.verify.compute_types import TypesVerdict, verify_types
from executor.verify.plans import Verdict, verify
from simulator.config.model import LatentAttention, MixtureOfExperts, Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.runtimes.stated import resolve_adapter
from topology import codec

LLAMA = {
    "name": "tiny",
    "family": "llama",
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "ffn": 64,
    "vocab": 128,
}


def tiny(**changes: object) -> Model:
    return Model(**{**LLAMA, **changes})  # type: ignore[arg-type]


MODELS = {
    "llama": tiny(),
    "four": tiny(layers=4),
    "qk_norm": tiny(qk_norm=True, qkv_bias=True),
    "tied": tiny(tied_embeddings=True),
    "moe": tiny(moe=MixtureOfExperts(experts=4, experts_per_token=2, ffn=32)),
    "wide": tiny(heads=8, kv_heads=4, head_dim=4),
    "latent": tiny(
        kv_heads=4,
        latent=LatentAttention(q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8),
    ),
    "window": tiny(sliding_window=5, sliding_layers=1),
    "shared": tiny(
        moe=MixtureOfExperts(
            experts=4, experts_per_token=2, ffn=32, shared_ffn=16, shared_gate=True, router_bias=True, dense_layers=1
        )
    ),
    "odd": tiny(ffn=65, vocab=127),  # widths that two ranks cannot share evenly
    "odd_moe": tiny(vocab=127, moe=MixtureOfExperts(experts=4, experts_per_token=2, ffn=33, shared_ffn=17)),
    "half_moe": tiny(moe=MixtureOfExperts(experts=4, experts_per_token=2, ffn=32, dense_layers=1)),
}


def capture_only() -> None:
    """Compile as far as graphs of forward and backward, and run those as they are.

    What goes wrong between modules that communicate goes wrong there; generating code takes a minute a plan, and is
    checked where plans are timed.
    """
    compiled = nn.Module.compile
    nn.Module.compile = lambda module: compiled(module, backend="aot_eager")


def main() -> None:
    plans.run_one_process = functools.cache(plans.run_one_process)  # the same for many plans
    cases, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    torch.set_num_threads(1)
    vocabulary_loss.PIECE_LOGITS, vocabulary_loss.HEAD_LOGITS = 1024, 2048  # the loss goes through several pieces
    where = sys.argv[3] if len(sys.argv) > 3 else "cpu"
    if where == "share":
        from tests.executor import shared_gpu

        device = shared_gpu.join()
    elif where == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=timedelta(seconds=60))
    else:
        device = torch.device("cpu")
        capture_only()
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for case in cases:
        plan = codec.convert(case["plan"], Plan, where=case["id"])
        begin = time.perf_counter()
        try:
            verdict = judge(case, plan, device)
        except Exception:  # noqa: BLE001 - seen by the missing answer; the same on all ranks, or the budget ends it
            (out / f"{case['id']}.rank{dist.get_rank()}.txt").write_text(traceback.format_exc())
            continue
        if dist.get_rank() == 0:
            (out / f"{case['id']}.json").write_text(
                codec.to_json({"ok": verdict.ok, "seconds": time.perf_counter() - begin, "verdict": verdict})
            )
    dist.barrier()  # gloo aborts a rank whose neighbour leaves before its own last message has arrived
    dist.destroy_process_group()


def judge(case: dict, plan: Plan, device: torch.device) -> Verdict | TypesVerdict:
    """Compare a plan with one process: in one wide type, or with `types` in float32 stored and bfloat16 computed."""
    dtype = case.get("dtype", "float64")
    store, compute = ("float32", "bfloat16") if case.get("types") else (dtype, dtype)
    runtime = Runtime(
        name="meshwright",
        param_dtype=store,
        compute_dtype=compute,
        reduce_dtype=store,
        compile=case.get("compile", False),
        adapter=resolve_adapter(case.get("adapter", {}))[0],
        savers=tuple(case.get("savers", ())),
    )
    torch.compiler.reset()
    setup = Setup(
        plan=plan,
        model=MODELS[case.get("model", "llama")],
        workload=Workload(seq_len=case.get("seq_len", 16), global_batch_size=case.get("batch", 8)),
        runtime=runtime,
        meshes=meshes_for(plan, device.type),
        device=device,
        own_table=case.get("own_table", False),
    )
    return (verify_types if case.get("types") else verify)(setup, fault=float(case.get("fault", 0.0)))


if __name__ == "__main__":
    main()
