"""Runs drawn at random from what a machine can run: models, lengths, batches, plans and runtimes that nobody chose.

Every choice below is a range and a weight, the same for every date. What is drawn is kept if the rules say that the
runtime can run it, if it is predicted from datasheets to fit, and if its step is predicted to take at most
LONGEST_STEP_S, so that several fit into a few seconds. Nothing measured decides what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from executor.launch import legal as executor_rules
from planner.question.prediction import predict as predicted
from planner.question.question import Question, question_of
from simulator.config.estimate import Estimate
from simulator.config.model import LatentAttention, MixtureOfExperts, Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.savers import ACTIVATION_OFFLOAD, CHUNKED_LOSS, OPTIMIZER_IN_BACKWARD, TITLES
from simulator.config.workload import Workload
from simulator.fitting.calibrations import UNMEASURED, Calibrations
from simulator.legality.rule import Grade
from topology import codec
from topology.catalog.platform import take_gpus
from topology.cluster import Cluster
from topology.errors import PlannerError

LONGEST_STEP_S = 1.5  # predicted
TORCHTITAN = "0.2.2"
LAST_DRAWS = {
    "0.1": ("2026-11-30", 26),
    "0.2": ("2026-11-30", 27),
    "0.3": ("2026-12-01", 30),
}  # by version of our executor
TRIES = 20000
VOCABULARIES = (16384, 163840)  # torchtitan's test tokenizer has fewer words than the least
LENGTHS = (512, 32768)
WIDTHS = (1024, 8192)
LAYERS = (2, 48)
# family: weight. Ours runs all of them, torchtitan's own models are Llama and Qwen 3.
FAMILIES = {
    "torchtitan": {"llama": 7.0, "qwen3": 1.5, "qwen3-experts": 1.5},
    "meshwright": {"llama": 4.0, "qwen2": 1.0, "qwen3": 1.0, "windowed": 1.0, "qwen3-experts": 1.0, "mixtral": 1.0, "latent": 1.0},
}  # fmt: skip
TYPES = {"mixed": 6.0, "bfloat16": 2.5, "float32": 1.5}
# Of our executor's tensor parallelism with sequence parallelism.
OVERLAPS = {"none": 2.0, "fused": 2.0, "copy_engine": 2.0, "chunked": 1.0}
COMPILED = 0.15
SAVERS = (
    (CHUNKED_LOSS,),
    (OPTIMIZER_IN_BACKWARD,),
    (CHUNKED_LOSS, OPTIMIZER_IN_BACKWARD),
    (ACTIVATION_OFFLOAD,),
)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One run: what is asked of which runtime on how many of the machine's GPUs."""

    model: Model
    plan: Plan
    workload: Workload
    runtime: Runtime

    @property
    def types(self) -> str:
        """Return how it computes: `mixed`, or the one type that everything is in."""
        same = self.runtime.param_dtype == self.runtime.compute_dtype
        return self.runtime.param_dtype if same else "mixed"


def draw(
    seed: str,
    cluster: Cluster,
    count: int,
    runtimes: Sequence[str] = tuple(FAMILIES),
    overlapped: int = 0,
    cut: int = 0,
    least: float = 0.0,
    savers: float = 0.0,
) -> list[tuple[Drawn, Estimate]]:
    """Return `count` runs of `runtimes` with their predictions from datasheets. The same arguments draw the same runs.

    The first `overlapped` of them overlap tensor parallelism, which few of all runs do, and the next `cut` have tensor
    parallelism, stages or experts; models have `least` parameters or more, and a share of `savers` is drawn with memory
    savers. Raises RuntimeError where the machine can run next to nothing of what is drawn.
    """
    random, found = Random(seed), []
    saving = Random(f"{seed} savers")  # of its own, so that a draw without savers is what it was before there were any
    for _ in range(TRIES):
        drawn = _one(random, cluster.gpu_count, runtimes)
        if drawn is not None and saving.random() < savers:
            drawn = replace(drawn, runtime=replace(drawn.runtime, savers=saving.choice(SAVERS)))
        if drawn is not None and drawn.model.parameters < least:
            continue
        if drawn is not None and overlapped <= len(found) < overlapped + cut and not _is_cut(drawn):
            continue
        if drawn is not None and len(found) < overlapped and drawn.plan.tp_overlap == "none":
            continue
        estimate = predicted_if_runnable(drawn, cluster) if drawn is not None else None
        if drawn is not None and estimate is not None:
            found.append((drawn, estimate))
        if len(found) == count:
            return found
    raise RuntimeError(f"{len(found)} of {count} runs found in {TRIES} tries on {cluster.name}")


def _is_cut(drawn: Drawn) -> bool:
    return drawn.plan.tp > 1 or drawn.plan.pp > 1 or drawn.model.moe is not None


def predicted_if_runnable(drawn: Drawn, cluster: Cluster) -> Estimate | None:
    """Return the prediction from datasheets of a run that is legal, fits and is short enough; None of another."""
    machine = take_gpus(cluster, drawn.plan.gpus)
    if not _legal(drawn, machine):
        return None
    try:
        question = _question(drawn, cluster, UNMEASURED)
        if not _runnable(question.estimate([drawn.plan]).estimate(0)):  # sums, which most of what is drawn fails
            return None
        estimate = predicted(question, drawn.plan).estimate
    except PlannerError:
        return None
    return estimate if _runnable(estimate) else None


def _runnable(estimate: Estimate) -> bool:
    return estimate.memory.fits and estimate.step_s.value <= LONGEST_STEP_S


def predict(drawn: Drawn, cluster: Cluster, measured: Calibrations) -> Estimate:
    """Return what a run is predicted to cost on its share of the machine, as `planner estimate` does.

    Raises PlannerError where that is not known.
    """
    return predicted(_question(drawn, cluster, measured), drawn.plan).estimate


def _question(drawn: Drawn, cluster: Cluster, measured: Calibrations) -> Question:
    machine = take_gpus(cluster, drawn.plan.gpus)
    return question_of(
        drawn.model,
        machine,
        drawn.workload,
        framework=drawn.runtime.name,
        runtime=drawn.runtime,
        calibration=measured.on(machine),
    )


def _legal(drawn: Drawn, machine: Cluster) -> bool:
    """Return whether the runtime can run it, by the rules that the planner and the executor go by."""
    ours = drawn.runtime.name == "meshwright"
    question = question_of(drawn.model, machine, drawn.workload, framework=drawn.runtime.name, runtime=drawn.runtime)
    problems = question.problems(drawn.plan)
    # The planner searches fewer ways of recomputation than the executor has.
    if any(one.grade is Grade.ILLEGAL and not (ours and one.rule == "recompute") for one in problems):
        return False
    if not ours:
        # torchtitan 0.2.2, models/qwen3: `pipelining_fn=None`.
        return drawn.plan.pp == 1 or not drawn.model.qk_norm
    try:
        executor_rules.check(drawn.plan, drawn.model, drawn.workload, drawn.runtime)
    except PlannerError:
        return False
    return True


# --- one run, not yet known to be runnable --------------------------------------------------------------------------


def _one(random: Random, gpus: int, runtimes: Sequence[str]) -> Drawn | None:
    name = random.choice(runtimes)
    counts = [2**power for power in range(gpus.bit_length()) if 2**power <= gpus]
    ranks = random.choices(counts, weights=counts)[0]
    model = _model(random, _weighted(random, FAMILIES[name]), name)
    plan = _plan(random, ranks, model, name)
    runtime = _runtime(random, plan, name)
    rounds = plan.data_parallel * plan.micro_batch_size * random.choice((1, 1, 2, 4)) * plan.pp
    workload = Workload(seq_len=_between(random, LENGTHS, 256), global_batch_size=rounds)
    return Drawn(model=model, plan=plan, workload=workload, runtime=runtime) if runtime is not None else None


def _model(random: Random, family: str, runtime: str) -> Model:
    """Return a network of a family at random widths."""
    hidden = _between(random, WIDTHS, 256)
    head_dim = 64 if hidden <= 3072 and random.random() < 0.5 else 128
    heads = hidden // head_dim
    model = Model(
        name=family,
        family="llama",
        layers=round(_log_uniform(random, LAYERS)),
        hidden=hidden,
        heads=heads,
        kv_heads=random.choice([heads // size for size in (1, 2, 4, 8) if heads % size == 0]),
        head_dim=head_dim,
        ffn=round(hidden * random.uniform(2.0, 4.0) / 256) * 256,
        vocab=_between(random, VOCABULARIES, 256),
        tied_embeddings=runtime == "meshwright" and random.random() < 0.25,
    )
    if family.startswith("qwen3"):
        model = replace(model, family="qwen3", qk_norm=True, tied_embeddings=random.random() < 0.25)
    if family == "qwen2":
        model = replace(model, family="qwen2", qkv_bias=True)
    if family == "windowed":
        model = replace(model, family="mistral", sliding_window=4096, sliding_layers=model.layers)
    if family == "latent":
        ranks = LatentAttention(
            q_lora_rank=random.choice((0, 1536)), kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
            v_head_dim=128,
        )  # fmt: skip
        model = replace(model, family="deepseek_v3", head_dim=192, kv_heads=heads, latent=ranks, tied_embeddings=False)
    if family in {"qwen3-experts", "mixtral"}:
        model = replace(model, moe=_experts(random, hidden, family))
    name = f"{family}-{model.parameters / 1e9:.2f}b"
    return replace(model, name=name)


def _experts(random: Random, hidden: int, family: str) -> MixtureOfExperts:
    """Return few wide experts (mixtral), or many narrow ones."""
    if family == "mixtral":
        return MixtureOfExperts(
            experts=8, experts_per_token=2, ffn=round(hidden * random.uniform(1.5, 3.5) / 256) * 256
        )
    return MixtureOfExperts(
        experts=random.choice((16, 32, 64, 128)),
        experts_per_token=random.choice((2, 4, 8)),
        ffn=round(hidden * random.uniform(0.25, 0.75) / 128) * 128,
    )


def _plan(random: Random, gpus: int, model: Model, runtime: str) -> Plan:
    """Return degrees whose product is `gpus`, and how each is run."""
    degrees = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp"), 1)
    for _ in range(gpus.bit_length() - 1):
        degrees[random.choices(list(degrees), weights=(1.0, 3.0, 1.0, 2.0, 1.0))[0]] *= 2
    schedule, virtual = None, 1
    if degrees["pp"] > 1:
        schedule = random.choice(("1F1B", "1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble"))
        virtual = 2 if schedule in {"Interleaved1F1B", "ZBVZeroBubble"} else 1
    folded = degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
    experts = [ep for ep in (1, 2, 4, 8) if folded % ep == 0] if model.moe else [1]
    sharded = degrees["dp_shard"] * degrees["cp"] > 1
    # torchtitan 0.2.2 rotates by all-gather whatever its configuration says: only its validation reads the setting.
    ways = ("all_gather",) if runtime == "torchtitan" else ("ring", "all_gather", "all_to_all")
    by_tokens = degrees["tp"] > 1 and (runtime == "torchtitan" or random.random() < 0.8)
    return Plan(
        **degrees,
        ep=random.choice(experts),
        schedule=schedule,
        virtual_stages=virtual,
        sequence_parallel=by_tokens,
        tp_overlap=_weighted(random, OVERLAPS) if by_tokens and runtime == "meshwright" else "none",
        micro_batch_size=random.choice((1, 1, 2, 4, 8)),
        recompute=random.choices(("none", "selective-op", "selective", "full"), weights=(3.0, 1.0, 1.0, 2.0))[0],
        reshard_after_forward=random.choice((None, None, True, False)) if sharded else None,
        cp_method=random.choice(ways) if degrees["cp"] > 1 else None,
    )


def runtime_of(row: dict[str, Any]) -> Runtime:
    """Return the runtime of a row of the ledger, with what its row does not say: runs of torchtitan log every step, and
    our executor had other versions (simulator/runtimes/meshwright.toml).
    """
    runtime = codec.convert(row["runtime"], Runtime, where="row")
    if runtime.name == "torchtitan":
        return replace(runtime, logs_each_step=True)
    date, _, number = row["draw"].partition(".")
    drawn = (date, int(number))
    version = next((version for version, last in LAST_DRAWS.items() if drawn <= last), None)
    return replace(runtime, version=version)


def _runtime(random: Random, plan: Plan, name: str) -> Runtime | None:
    """Return the runtime in drawn types; None for what no option of torchtitan says.

    Its mixed precision is FSDP's, or autocast where nothing is sharded and nothing cut: under tensor or pipeline
    parallelism alone it computes in the type that parameters are stored in.
    """
    types, compiled = _weighted(random, TYPES), random.random() < COMPILED
    if name == "torchtitan" and types == "mixed" and plan.dp_shard * plan.cp == 1 and plan.tp * plan.pp > 1:
        return None
    stored = "bfloat16" if types == "bfloat16" else "float32"
    return Runtime(
        name=name,
        version=TORCHTITAN if name == "torchtitan" else None,
        compile=compiled,
        param_dtype=stored,
        compute_dtype="float32" if types == "float32" else "bfloat16",
        logs_each_step=name == "torchtitan",  # executor/measure/torchtitan.py
    )


def _weighted(random: Random, weights: dict[str, float]) -> str:
    return random.choices(list(weights), weights=list(weights.values()))[0]


def _log_uniform(random: Random, ends: tuple[int, int]) -> float:
    return math.exp(random.uniform(math.log(ends[0]), math.log(ends[1])))


def _between(random: Random, ends: tuple[int, int], multiple: int) -> int:
    """Return a size between two, as likely in each octave, rounded to a multiple."""
    return max(multiple, round(_log_uniform(random, ends) / multiple) * multiple)


# --- in words -------------------------------------------------------------------------------------------------------

DEGREES = (("dp_replicate", "ddp"), ("dp_shard", "fsdp"), ("tp", "tp"), ("cp", "cp"), ("pp", "pp"), ("ep", "ep"))


def words(drawn: Drawn) -> str:
    """Return a run in a line of a table."""
    return ", ".join(_words(drawn))


def _words(drawn: Drawn) -> Iterator[str]:
    plan, workload = drawn.plan, drawn.workload
    yield f"{drawn.model.name} {drawn.model.layers}x{drawn.model.hidden}"
    yield f"{workload.global_batch_size} x {workload.seq_len}"
    yield (
        kind(drawn) + (f" {plan.schedule}" if plan.schedule else "") + (f" {plan.cp_method}" if plan.cp_method else "")
    )
    if plan.tp_overlap != "none":
        yield plan.tp_overlap
    yield f"mb {plan.micro_batch_size}"
    if plan.recompute != "none":
        yield plan.recompute
    if plan.reshard_after_forward is not None:
        yield "reshard" if plan.reshard_after_forward else "no reshard"
    yield drawn.types
    if drawn.runtime.compile:
        yield "compiled"
    yield from (TITLES[word] for word in drawn.runtime.savers)


def kind(drawn: Drawn) -> str:
    """Return the kind of parallelism: `fsdp4`, `tp2 pp2`, or `one GPU`."""
    found: Sequence[str] = [
        f"{word}{degree}" for axis, word in DEGREES if (degree := int(getattr(drawn.plan, axis))) > 1
    ]
    return " ".join(found) or "one GPU"
