"""Plans that are predicted and then run by `tests/bench/apply_plans.py`, by the machine they are for.

`h200x2` and `h200x4` go over the axes: one GPU, DDP, FSDP, HSDP, tensor, pipeline (1F1B, interleaved, zero bubble),
context (ring, all-gather, by heads) and expert parallelism and their combinations, eager and compiled, with and without
recomputation, on Llama shapes of 1B to 13B. `h200x2-fresh` goes over them once more with models, lengths and batches
that nothing had been adjusted on when it ran; `h200x2-next` once more with others (two of its pipelines cannot be run:
their models tie embedding and head); `h200x1-fresh` is of one GPU, where host, kernels, recomputation and memory are
all there is, and so is `h200x1-next`, which has not been run;
`h200x1-savers` are memory savers and LoRA at 1B to 8B. `regret1`, `regret2`, `regret2-later` and `regret4` are
three questions, each answered by the planner: its first choice and the plans that it lists next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from planner.calibrate.measurements import shallow
from planner.question.question import question_of
from planner.search.search import SearchOptions, suggest
from simulator.config.adapter import Adapter
from simulator.config.hf_config import load_model
from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.savers import ACTIVATION_OFFLOAD, CHUNKED_LOSS, OPTIMIZER_IN_BACKWARD
from simulator.config.workload import Workload
from simulator.fitting.calibration_fit import calibrated
from topology.cluster import Cluster
from topology.profile.profile import Profile


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A plan to be run. `layers`: as many of the model's as fit; `traced`: one step more under the profiler."""

    model: str
    seq_len: int
    batch: int
    plan: Plan
    compiled: bool = False
    layers: int | None = None
    traced: bool = True
    savers: tuple[str, ...] = ()
    adapter: Adapter | None = None

    @property
    def runtime(self) -> Runtime:
        return Runtime(name="meshwright", compile=self.compiled, savers=self.savers, adapter=self.adapter)

    @property
    def network(self) -> Model:
        return shortened(self.model, self.layers)

    @property
    def workload(self) -> Workload:
        return Workload(seq_len=self.seq_len, global_batch_size=self.batch)


# Smaller ones of a family that is shipped: what differs, from their config.json on huggingface.co.
RELATED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-1.5b": (
        "qwen2.5-7b",
        {"hidden": 1536, "heads": 12, "kv_heads": 2, "ffn": 8960, "vocab": 151936, "tied_embeddings": True},
    ),
    "qwen2.5-3b": (
        "qwen2.5-7b",
        {"layers": 36, "hidden": 2048, "heads": 16, "kv_heads": 2, "ffn": 11008, "vocab": 151936, "tied_embeddings": True},
    ),
}  # fmt: skip


def shortened(name: str, layers: int | None) -> Model:
    """Return a model, at its widths, with fewer layers where that is asked for."""
    shipped, changes = RELATED.get(name, (name, {}))
    model = replace(load_model(shipped), name=name, **changes)
    return model if layers is None else replace(shallow(model, layers), name=f"{model.name}-{layers}-layers")


def llama1(plan: Plan, batch: int, *, compiled: bool = False) -> Asked:
    return Asked(model="llama3.2-1b", seq_len=4096, batch=batch, plan=plan, compiled=compiled)


def llama3(plan: Plan, batch: int = 2, *, seq_len: int = 8192, compiled: bool = False) -> Asked:
    return Asked(model="llama3.2-3b", seq_len=seq_len, batch=batch, plan=plan, compiled=compiled)


def llama8(plan: Plan, batch: int, *, seq_len: int = 4096, compiled: bool = False) -> Asked:
    return Asked(model="llama3-8b", seq_len=seq_len, batch=batch, plan=plan, compiled=compiled)


def llama13(plan: Plan, batch: int) -> Asked:
    return Asked(model="llama2-13b", seq_len=4096, batch=batch, plan=plan)


def experts(plan: Plan, batch: int, *, layers: int = 8) -> Asked:
    return Asked(model="qwen3-30b-a3b", layers=layers, seq_len=4096, batch=batch, plan=plan)


def fresh(
    model: str, plan: Plan, *, batch: int, seq_len: int = 4096, layers: int | None = None, compiled: bool = False
) -> Asked:
    return Asked(model=model, layers=layers, seq_len=seq_len, batch=batch, plan=plan, compiled=compiled, traced=False)


def saved(asked: Asked, *savers: str) -> Asked:
    return replace(asked, savers=savers)


def lora(asked: Asked, rank: int) -> Asked:
    return replace(asked, adapter=Adapter(rank=rank, target_modules=("all-linear",)))


BOTH = (CHUNKED_LOSS, OPTIMIZER_IN_BACKWARD)
SP = {"sequence_parallel": True}
FOUR = {"micro_batch_size": 4}
TWO = {"micro_batch_size": 2}
VIRTUAL = {"virtual_stages": 2}
LONG = 32768


def context(plan: Plan) -> Asked:
    return llama3(replace(plan, recompute="full"), 1, seq_len=LONG)


AXES: dict[str, dict[str, Asked]] = {
    "h200x2": {
        "3b-fsdp2": llama3(Plan(dp_shard=2)),
        "1b-ddp2": llama1(Plan(dp_replicate=2, **FOUR), 8),
        "3b-fsdp2-selop": llama3(Plan(dp_shard=2, recompute="selective-op")),
        "8b-fsdp2": llama8(Plan(dp_shard=2), 2),
        "8b-fsdp2-accumulated-full": llama8(Plan(dp_shard=2, recompute="full"), 4),
        "3b-tp2": llama3(Plan(tp=2, **TWO, **SP)),
        "13b-tp2": llama13(Plan(tp=2, **SP), 1),
        "8b-pp2": llama8(Plan(pp=2, schedule="1F1B"), 4),
        "8b-pp2-interleaved": llama8(Plan(pp=2, schedule="Interleaved1F1B", **VIRTUAL), 4),
        "8b-pp2-zbv": llama8(Plan(pp=2, schedule="ZBVZeroBubble", **VIRTUAL), 4),
        "13b-fsdp2": llama13(Plan(dp_shard=2), 2),
        "moe-ep2": experts(Plan(dp_shard=2, ep=2, **TWO), 8),
        "moe-fsdp2": experts(Plan(dp_shard=2, **TWO), 8),
        "1b-fsdp2-compiled": llama1(Plan(dp_shard=2, **FOUR), 8, compiled=True),
        "3b-tp2-compiled": llama3(Plan(tp=2, **TWO, **SP), compiled=True),
        "3b-cp2-ring": context(Plan(cp=2, cp_method="ring")),
        "3b-cp2-gather": context(Plan(cp=2, cp_method="all_gather")),
        "3b-cp2-heads": context(Plan(cp=2, cp_method="all_to_all")),
        "1b-gpu1": llama1(Plan(**FOUR), 4),
        "1b-gpu1-compiled": llama1(Plan(**FOUR), 4, compiled=True),
        "3b-gpu1-selop": llama3(Plan(recompute="selective-op"), 1),
    },
    "h200x2-fresh": {
        "7b-tp2": fresh("llama2-7b", Plan(tp=2, **FOUR, **SP), batch=4, seq_len=2048),
        "qwen3b-fsdp2": fresh("qwen2.5-3b", Plan(dp_shard=2, **TWO), batch=4),
        "7b-pp2": fresh("llama2-7b", Plan(pp=2, schedule="1F1B"), batch=8),
        "mistral-fsdp2-selop": fresh("mistral-7b", Plan(dp_shard=2, recompute="selective-op", **TWO), batch=4),
        "moe-mixtral-ep2": fresh("mixtral-8x7b", Plan(dp_shard=2, ep=2), batch=2, layers=4),
        "mistral-tp2-selop": fresh("mistral-7b", Plan(tp=2, recompute="selective-op", **TWO, **SP), batch=4),
        "7b-fsdp2-kept-full": fresh(
            "llama2-7b", Plan(dp_shard=2, reshard_after_forward=False, recompute="full", **FOUR), batch=8, seq_len=2048
        ),
        "qwen1.5b-ddp2": fresh("qwen2.5-1.5b", Plan(dp_replicate=2, **FOUR), batch=8, seq_len=2048),
        "7b-pp2-zbv": fresh(
            "llama2-7b", Plan(pp=2, schedule="ZBVZeroBubble", **VIRTUAL), batch=8, seq_len=2048, layers=24
        ),
        "moe-qwen-fsdp2": fresh("qwen3-30b-a3b", Plan(dp_shard=2, **TWO), batch=4, layers=6),
        "13b-tp2-full": fresh("llama2-13b", Plan(tp=2, recompute="full", **TWO, **SP), batch=2, layers=30),
        "7b-pp2-interleaved": fresh(
            "llama2-7b", Plan(pp=2, schedule="Interleaved1F1B", **TWO, **VIRTUAL), batch=8, seq_len=2048
        ),
        "7b-fsdp2": fresh("llama2-7b", Plan(dp_shard=2, **TWO), batch=4, seq_len=2048),
        "qwen7b-tp2-selective": fresh("qwen2.5-7b", Plan(tp=2, recompute="selective", **SP), batch=2, seq_len=8192),
        "8b-tp2-whole": fresh("llama3-8b", Plan(tp=2, **TWO), batch=2, seq_len=2048),
        "moe-qwen-tp2-ep2": fresh("qwen3-30b-a3b", Plan(tp=2, ep=2, **TWO, **SP), batch=2, layers=6),
        "8b-cp2-ring": fresh("llama3-8b", Plan(cp=2, cp_method="ring"), batch=1, seq_len=16384, layers=16),
        "qwen7b-cp2-gather-full": fresh(
            "qwen2.5-7b", Plan(cp=2, cp_method="all_gather", recompute="full"), batch=1, seq_len=24576, layers=14
        ),
        "7b-cp2-heads": fresh("llama2-7b", Plan(cp=2, cp_method="all_to_all"), batch=1, seq_len=12288, layers=16),
        "qwen1.5b-gpu1": fresh("qwen2.5-1.5b", Plan(**TWO), batch=2),
        "7b-fsdp2-compiled": fresh("llama2-7b", Plan(dp_shard=2), batch=2, layers=20, compiled=True),
        "qwen3b-tp2-compiled": fresh("qwen2.5-3b", Plan(tp=2, **TWO, **SP), batch=2, compiled=True),
    },
    "h200x2-next": {
        "qwen8b-fsdp2": fresh("qwen3-8b", Plan(dp_shard=2), batch=2, seq_len=6144, layers=24),
        "3b-tp2": fresh("llama3.2-3b", Plan(tp=2, **SP), batch=2, seq_len=6144),
        "mistral-pp2": fresh("mistral-7b", Plan(pp=2, schedule="1F1B"), batch=6, seq_len=3072, layers=28),
        "qwen1.5b-gpu1": fresh("qwen2.5-1.5b", Plan(**TWO), batch=4, seq_len=3072),
        "moe-qwen-ep2": fresh("qwen3-30b-a3b", Plan(dp_shard=2, ep=2, **TWO), batch=4, seq_len=3072, layers=7),
        "qwen7b-fsdp2-selop": fresh(
            "qwen2.5-7b", Plan(dp_shard=2, recompute="selective-op", **TWO), batch=4, seq_len=3072, layers=20
        ),
        "13b-tp2-selop": fresh("llama2-13b", Plan(tp=2, recompute="selective-op", **TWO, **SP), batch=2, layers=26),
        "3b-ddp2": fresh("llama3.2-3b", Plan(dp_replicate=2), batch=2, seq_len=3072),
        "mistral-fsdp2-full": fresh("mistral-7b", Plan(dp_shard=2, recompute="full", **TWO), batch=4, seq_len=6144),
        "qwen8b-tp2-selective": fresh(
            "qwen3-8b", Plan(tp=2, recompute="selective", **TWO, **SP), batch=2, seq_len=3072
        ),
        "3b-pp2-interleaved": fresh(
            "llama3.2-3b", Plan(pp=2, schedule="Interleaved1F1B", **VIRTUAL), batch=8, seq_len=6144
        ),
        "qwen3b-pp2-zbv": fresh("qwen2.5-3b", Plan(pp=2, schedule="ZBVZeroBubble", **VIRTUAL), batch=8, seq_len=3072),
        "13b-fsdp2": fresh("llama2-13b", Plan(dp_shard=2), batch=2, seq_len=3072, layers=30),
        "mixtral-fsdp2": fresh("mixtral-8x7b", Plan(dp_shard=2), batch=2, seq_len=6144, layers=3),
        "7b-cp2-ring": fresh("llama2-7b", Plan(cp=2, cp_method="ring"), batch=1, seq_len=20480, layers=14),
        "3b-cp2-gather-selop": fresh(
            "llama3.2-3b", Plan(cp=2, cp_method="all_gather", recompute="selective-op"), batch=1, seq_len=20480
        ),
        "qwen8b-cp2-heads-full": fresh(
            "qwen3-8b", Plan(cp=2, cp_method="all_to_all", recompute="full"), batch=1, seq_len=28672, layers=18
        ),
        "3b-fsdp2-compiled": fresh("llama3.2-3b", Plan(dp_shard=2, **TWO), batch=4, seq_len=3072, compiled=True),
    },
    "h200x1-fresh": {
        "qwen1.5b-selop": fresh("qwen2.5-1.5b", Plan(recompute="selective-op", **TWO), batch=4, seq_len=6144),
        "13b-short": fresh("llama2-13b", Plan(), batch=2, seq_len=2560, layers=8),
        "moe-qwen": fresh("qwen3-30b-a3b", Plan(**TWO), batch=2, seq_len=3072, layers=5),
        "3b-micro4": fresh("llama3.2-3b", Plan(**FOUR), batch=4, seq_len=1536, layers=20),
        "mistral-full": fresh("mistral-7b", Plan(recompute="full", **TWO), batch=4, seq_len=5120, layers=18),
        "qwen8b-accumulated": fresh("qwen3-8b", Plan(), batch=4, seq_len=2048, layers=14),
        "1b-long-selop": fresh("llama3.2-1b", Plan(recompute="selective-op"), batch=1, seq_len=40960),
        "mixtral-full": fresh("mixtral-8x7b", Plan(recompute="full", **TWO), batch=2, seq_len=3072, layers=4),
        "qwen7b-selective": fresh("qwen2.5-7b", Plan(recompute="selective"), batch=2, seq_len=10240, layers=12),
        "7b-micro8": fresh("llama2-7b", Plan(recompute="full", micro_batch_size=8), batch=8, seq_len=1024, layers=24),
        "8b-micro4": fresh("llama3-8b", Plan(**FOUR), batch=8, seq_len=1024, layers=16),
        "moe-qwen-selop": fresh("qwen3-30b-a3b", Plan(recompute="selective-op"), batch=2, seq_len=5120, layers=6),
        "1b-one-sequence": fresh("llama3.2-1b", Plan(), batch=2, seq_len=1024),
        "3b-compiled": fresh("llama3.2-3b", Plan(**TWO), batch=2, seq_len=3072, layers=24, compiled=True),
        "mistral-compiled-selop": fresh(
            "mistral-7b", Plan(recompute="selective-op"), batch=2, seq_len=6144, layers=16, compiled=True
        ),
        "qwen1.5b-compiled": fresh("qwen2.5-1.5b", Plan(**FOUR), batch=4, seq_len=2048, compiled=True),
    },
    "h200x1-next": {
        "qwen8b-micro2": fresh("qwen3-8b", Plan(**TWO), batch=2, seq_len=5120, layers=10),
        "7b-accumulated": fresh("llama2-7b", Plan(), batch=4, seq_len=3072, layers=14),
        "moe-qwen": fresh("qwen3-30b-a3b", Plan(**TWO), batch=4, seq_len=4096, layers=5),
        "mistral-selop": fresh("mistral-7b", Plan(recompute="selective-op"), batch=2, seq_len=7168, layers=12),
        "3b-full": fresh("llama3.2-3b", Plan(recompute="full"), batch=2, seq_len=12288),
        "mixtral": fresh("mixtral-8x7b", Plan(**TWO), batch=2, seq_len=2048, layers=3),
        "qwen3b-micro4": fresh("qwen2.5-3b", Plan(**FOUR), batch=4, seq_len=2048, layers=24),
        "13b-selective": fresh("llama2-13b", Plan(recompute="selective", **TWO), batch=4, seq_len=4096, layers=9),
        "1b-micro8": fresh("llama3.2-1b", Plan(micro_batch_size=8), batch=16, seq_len=512),
        "moe-qwen-full": fresh("qwen3-30b-a3b", Plan(recompute="full", **FOUR), batch=4, seq_len=2048, layers=7),
        "1b-one-sequence": fresh("llama3.2-1b", Plan(), batch=2, seq_len=768),
        "qwen7b-long-full": fresh("qwen2.5-7b", Plan(recompute="full"), batch=1, seq_len=20480, layers=10),
        "mixtral-selop": fresh("mixtral-8x7b", Plan(recompute="selective-op"), batch=2, seq_len=4096, layers=3),
        "qwen1.5b-selop": fresh("qwen2.5-1.5b", Plan(recompute="selective-op"), batch=1, seq_len=16384),
        "qwen8b-compiled": fresh("qwen3-8b", Plan(**TWO), batch=2, seq_len=2048, layers=12, compiled=True),
        "3b-compiled-full": fresh("llama3.2-3b", Plan(recompute="full"), batch=1, seq_len=16384, compiled=True),
        "7b-compiled": fresh("llama2-7b", Plan(**FOUR), batch=4, seq_len=1024, layers=16, compiled=True),
    },
    "h200x1-savers": {
        "1b": saved(fresh("llama3.2-1b", Plan(**TWO), batch=2)),
        "1b-pieces": saved(fresh("llama3.2-1b", Plan(**TWO), batch=2), CHUNKED_LOSS),
        "1b-in-backward": saved(fresh("llama3.2-1b", Plan(**TWO), batch=2), OPTIMIZER_IN_BACKWARD),
        "1b-both": saved(fresh("llama3.2-1b", Plan(**TWO), batch=2), *BOTH),
        "1b-lora": lora(fresh("llama3.2-1b", Plan(**TWO), batch=2), 16),
        "1b-pieces-accumulated": saved(fresh("llama3.2-1b", Plan(**FOUR), batch=8, seq_len=2048), CHUNKED_LOSS),
        "3b-both": saved(fresh("llama3.2-3b", Plan(), batch=1, seq_len=8192), *BOTH),
        "3b-both-full": saved(fresh("llama3.2-3b", Plan(recompute="full", **FOUR), batch=4, seq_len=8192), *BOTH),
        "3b-offload": saved(fresh("llama3.2-3b", Plan(recompute="full", **FOUR), batch=4), ACTIVATION_OFFLOAD),
        "3b-lora": lora(fresh("llama3.2-3b", Plan(**TWO), batch=2), 64),
        "3b-pieces-compiled": saved(fresh("llama3.2-3b", Plan(**TWO), batch=2, compiled=True), CHUNKED_LOSS),
        "8b-both-full": saved(fresh("llama3-8b", Plan(recompute="full"), batch=1), *BOTH),
        "8b-offload": saved(
            fresh("llama3-8b", Plan(recompute="full"), batch=1, seq_len=8192), ACTIVATION_OFFLOAD, *BOTH
        ),
        "8b-lora-full": lora(fresh("llama3-8b", Plan(recompute="full", **TWO), batch=2), 16),
        "8b-lora-pieces": saved(lora(fresh("llama3-8b", Plan(), batch=1), 16), CHUNKED_LOSS),
    },
    "h200x4": {
        "8b-fsdp4": llama8(Plan(dp_shard=4), 4, seq_len=8192),
        "1b-fsdp4": llama1(Plan(dp_shard=4, **FOUR), 16),
        "1b-ddp4": llama1(Plan(dp_replicate=4, **FOUR), 16),
        "8b-hsdp": llama8(Plan(dp_replicate=2, dp_shard=2), 4),
        "8b-fsdp4-selop": llama8(Plan(dp_shard=4, recompute="selective-op"), 4, seq_len=8192),
        "8b-fsdp4-full": llama8(Plan(dp_shard=4, recompute="full"), 4, seq_len=8192),
        "8b-tp4": llama8(Plan(tp=4, **TWO, **SP), 2),
        "8b-tp2-fsdp2": llama8(Plan(tp=2, dp_shard=2, **SP), 2, seq_len=8192),
        "13b-tp2-fsdp2": llama13(Plan(tp=2, dp_shard=2, **SP), 4),
        "3b-tp2-ddp2": llama3(Plan(tp=2, dp_replicate=2, **SP)),
        "8b-pp2-fsdp2": llama8(Plan(pp=2, dp_shard=2, schedule="1F1B"), 8),
        "8b-pp2-fsdp2-interleaved": llama8(Plan(pp=2, dp_shard=2, schedule="Interleaved1F1B", **VIRTUAL), 8),
        "8b-pp4": llama8(Plan(pp=4, schedule="1F1B"), 8),
        "8b-pp2-tp2": llama8(Plan(pp=2, tp=2, schedule="1F1B", **SP), 4),
        "13b-fsdp4": llama13(Plan(dp_shard=4), 4),
        "moe-ep4": experts(Plan(dp_shard=4, ep=4, **TWO), 16),
        "moe-fsdp4-ep2": experts(Plan(dp_shard=4, ep=2, **TWO), 16),
        "8b-fsdp4-compiled": llama8(Plan(dp_shard=4), 4, seq_len=8192, compiled=True),
        "8b-tp2-fsdp2-compiled": llama8(Plan(tp=2, dp_shard=2, **SP), 2, seq_len=8192, compiled=True),
        "8b-cp4-ring": llama8(Plan(cp=4, cp_method="ring", recompute="full"), 1, seq_len=LONG),
        "8b-cp4-gather": llama8(Plan(cp=4, cp_method="all_gather", recompute="full"), 1, seq_len=LONG),
        "8b-cp2-fsdp2": llama8(Plan(cp=2, dp_shard=2, cp_method="ring", recompute="full"), 2, seq_len=LONG // 2),
    },
}


@dataclass(frozen=True, kw_only=True)
class Question:
    """What the planner is asked: the model, how long sequences are, how many a step."""

    model: str
    seq_len: int
    batch: int
    layers: int | None = None


QUESTIONS: dict[str, dict[str, Question]] = {
    "regret1": {
        "3b-long": Question(model="llama3.2-3b", seq_len=LONG // 2, batch=4),
        "7b-small-batch": Question(model="llama2-7b", seq_len=2048, batch=8, layers=20),
        "moe-5b": Question(model="qwen3-30b-a3b", layers=8, seq_len=4096, batch=8),
    },
    "regret2": {
        "8b-long": Question(model="llama3-8b", seq_len=LONG, batch=1),
        "13b-small-batch": Question(model="llama2-13b", seq_len=4096, batch=2),
        # Of 15B parameters, 24 layers, no plan fits two GPUs with room to spare: 16 layers, 10B, at the same widths.
        "moe-10b": Question(model="qwen3-30b-a3b", layers=16, seq_len=4096, batch=4),
    },
    "regret2-later": {
        "3b-long": Question(model="llama3.2-3b", seq_len=LONG, batch=4),
        "qwen-8b": Question(model="qwen3-8b", seq_len=4096, batch=8),
        "moe-7b": Question(model="qwen3-30b-a3b", layers=12, seq_len=2048, batch=16),
    },
    "regret4": {
        "8b-long": Question(model="llama3-8b", seq_len=LONG, batch=2),
        "13b-small-batch": Question(model="llama2-13b", seq_len=4096, batch=4),
        "moe-15b": Question(model="qwen3-30b-a3b", layers=24, seq_len=4096, batch=8),
    },
}
SETS = {
    name: int(name.removeprefix("h200x").removeprefix("regret")[0]) for name in (*AXES, *QUESTIONS)
}  # and their GPUs


def plans(name: str, cluster: Cluster, profile: Profile | None, top: int) -> Iterator[tuple[str, Asked]]:
    """Yield the plans of a set under their names, best first where the planner was asked."""
    if name in AXES:
        yield from AXES[name].items()
        return
    listed = {topic: _answers(question, cluster, profile, top) for topic, question in QUESTIONS[name].items()}
    # The first of each question, then the second of each: a run cut short has something of all.
    for rank in range(top):
        for topic, answers in listed.items():
            if rank < len(answers):
                yield f"{topic}-{rank + 1}", answers[rank]


def _answers(question: Question, cluster: Cluster, profile: Profile | None, top: int) -> list[Asked]:
    """Return what the planner lists: the best of each grid, then the variants that come next."""
    model = shortened(question.model, question.layers)
    workload = Workload(seq_len=question.seq_len, global_batch_size=question.batch)
    known = calibrated(profile, cluster)
    executor = Runtime(name="meshwright")  # torchtitan's plans, run by the executor here
    answers = [
        suggest(
            question_of(model, cluster, workload, runtime=executor, calibration=known, gpus=cluster.gpu_count), SearchOptions(top=top, all_variants=variants))
        for variants in (False, True)
    ]  # fmt: skip
    listed = dict.fromkeys(ranked.plan for answer in answers for ranked in answer.plans)
    return [
        Asked(
            model=question.model,
            layers=question.layers,
            seq_len=question.seq_len,
            batch=question.batch,
            plan=plan,
            traced=False,
        )
        for plan in list(listed)[:top]
    ]
