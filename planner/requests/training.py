"""What commands about one question of training or of serving are asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from planner.requests import common
from planner.requests.flag import (
    Request,
    argument,
    group,
    option,
    plan_flags,
    required,
    required_argument,
    search_flags,
)
from planner.requests.serving import Deployment, Drawn, Engine, Load, Task, separate
from simulator.config.optimizers import OPTIMIZERS
from simulator.config.runtime import EXPERT_PRODUCTS, MOE_DISPATCHERS
from simulator.config.savers import SAVERS
from simulator.config.workload import ROUTINGS


class Objective(StrEnum):
    TIME = "time"
    THROUGHPUT = "throughput"
    LATENCY = "latency"
    MEMORY = "memory"
    COST = "cost"
    PARETO = "pareto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What of the network is trained, where that is not everything, by which optimizer, and how kernels of it run."""

    lora: str | None = option(
        None, "--lora", metavar="RANK[:MODULES]", help="Train LoRA adapters: 16, 16:q_proj,v_proj or 16:all-linear."
    )
    qlora: str | None = option(
        None, "--qlora", metavar="RANK[:MODULES]", help="The same over frozen weights in NF4 (QLoRA)."
    )
    freeze: str | None = option(
        None, "--freeze", metavar="PATTERNS", help="Modules that are not trained: embed_tokens, mlp, self_attn.q_proj."
    )
    saver: str | None = option(
        None, "--saver", metavar="WORDS", help=f"What saves memory, comma-separated: {', '.join(SAVERS)}."
    )
    optimizer: str | None = option(None, "--optimizer", help=f"{', '.join(OPTIMIZERS)}; default: the runtime's.")
    moe_dispatcher: str | None = option(
        None, "--moe-dispatcher", help=f"How tokens reach experts: {', '.join(MOE_DISPATCHERS)}; default: the runtime's"
    )
    expert_products: str | None = option(
        None, "--expert-products", help=f"How experts multiply: {', '.join(EXPERT_PRODUCTS)}; default: the runtime's."
    )
    cuda_graph: str | None = option(
        None,
        "--cuda-graph",
        metavar="PARTS",
        help="Launch kernels by CUDA graphs: full, or parts of a layer, comma-separated: attn,moe_router.",
    )
    routing: str | None = option(
        None, "--routing", help=f"How tokens visit experts: {' (forced) or '.join(ROUTINGS)}; default: the runtime's."
    )
    document_len: int | None = option(
        None,
        "--document-len",
        least=1,
        most=1 << 31,
        help="Tokens in a document, of which sequences are packed; attention stays inside.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OnePlan:
    """A question with one plan, as flags state it. `plan` is by field of a plan; None is what nobody stated."""

    model: str | None = common.model(None)
    online: bool = common.online()
    cluster: str | None = option(
        None, "--cluster", help="GPUs (2x8xH100), machine type, catalogue name or cluster file."
    )
    gpu: str | None = common.gpu()
    gpus: int | None = option(None, "--gpus", least=1, most=1 << 20, help="How many of its GPUs to use.")
    seq_len: int | None = common.seq_len()
    global_batch: int | None = common.global_batch()
    plan: Mapping[str, Any] = plan_flags()
    runtime: str | None = option(
        None,
        "--runtime",
        "--framework",
        help="Software that runs the plan, with or without a version: torchtitan@0.2.2.",
    )
    compile_model: bool | None = common.compiled()
    param_dtype: str | None = common.param_dtype()
    compute_dtype: str | None = common.compute_dtype()
    trained: Trained = group(Trained)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggest(Request):
    """Rank the legal plans for one training step by predicted time, memory or cost.

    The search bounds every legal plan of the framework and costs those that could be best. The answer is therefore
    optimal within the cost model, unless --time-limit ended the search early; then the remaining gap is printed.
    Defaults that were used are listed as assumed: the framework is torchtitan, or one with float16 for GPUs without
    bfloat16. --framework any has the rules that all of them share, and the costs of pytorch.
    """

    model: str = common.model("llama3-8b")
    online: bool = common.online()
    cluster: str = common.cluster("dgx-h100")
    gpu: str | None = common.gpu()
    gpus: str | None = option(
        None,
        "--gpus",
        help="Number of GPUs; several (8,16,32) are compared; min finds the fewest that surely fit, or serve the load.",
    )
    task: Task = option(Task.TRAIN, "--task", help="train: a training step; serve: an inference server.")
    seq_len: int | None = common.seq_len()
    global_batch: int | None = common.global_batch()
    framework: str | None = option(
        None,
        "--framework",
        help="torchtitan, megatron-lm, deepspeed, megatron-deepspeed, llm-foundry, pytorch, any.",
    )
    objective: Objective = option(
        Objective.TIME,
        "--objective",
        help="time, memory, or pareto for both; throughput (per GPU) and cost (per token) differ from time only if"
        " --gpus compares several numbers. Serving: latency, throughput, cost, or pareto for rates of users and GPUs.",
    )
    gpu_price: float | None = option(
        None, "--gpu-price", least=0.0, most=1000000000.0, help="Price of a GPU-hour, in any currency: adds costs."
    )
    tokens: str | None = option(
        None, "--tokens", help="Tokens to train on (2T, 300B): adds days, energy and cost of the whole run."
    )
    deadline: str | None = option(
        None,
        "--deadline",
        help="Time allowed for the whole run (30d, 12h, 6w): finds the cheapest number of GPUs that meets it.",
    )
    budget: str | None = option(
        None, "--budget", help="Money for the whole run (1M): finds the number of GPUs that finishes soonest within it."
    )
    mtbf: str | None = option(
        None,
        "--mtbf",
        metavar="HOURS[:gpu|node]",
        help="Hours between failures of a GPU or node, for the whole run; default as Llama 3's.",
    )
    checkpoint_bandwidth: str | None = option(
        None,
        "--checkpoint-bandwidth",
        metavar="RATE",
        help="What storage takes of a checkpoint from all GPUs together: 100GB/s, 2TB/s, or bytes per second.",
    )
    restart: float | None = option(
        None, "--restart", least=0.0, most=1e7, metavar="SECONDS", help="From a failure to the next step; default 600."
    )
    async_checkpoint: bool = option(
        False, "--async-checkpoint/--sync-checkpoint", help="Write checkpoints from host memory, alongside steps."
    )
    spot: float | None = option(
        None,
        "--spot",
        least=1e-3,
        most=1e9,
        metavar="HOURS",
        help="Nodes are rented on the spot, and each is taken back after so many hours on average.",
    )
    repair: float | None = option(
        None,
        "--repair",
        least=0.0,
        most=1e6,
        metavar="HOURS",
        help="Until a node that failed or was taken back is there again; default: another takes its place at once.",
    )
    spares: int = option(0, "--spares", least=0, most=1 << 16, help="Spare nodes, which are paid for as well.")
    svg: Path | None = option(
        None,
        "--svg",
        help="Draw cost against days for the numbers of GPUs tried into this file; serving, --objective pareto: tokens"
        " of users and of GPUs.",
    )
    top: int = option(
        5, "--top", least=1, most=100, help="How many plans to list; the simplest of those that tie comes first."
    )
    all_variants: bool = option(False, "--all", help="List all variants of each grid, not only the best one.")
    compile_model: bool | None = common.compiled()
    param_dtype: str | None = common.param_dtype()
    compute_dtype: str | None = common.compute_dtype()
    trained: Trained = group(Trained)
    max_tp: int | None = option(
        None, "--max-tp", least=1, help="Largest tensor-parallel degree to try; default: the GPUs of a node."
    )
    fixed: Mapping[str, Any] = search_flags()
    time_limit: float | None = common.time_limit()
    simulate: bool = option(
        True, "--simulate/--no-simulate", help="Simulate plans that are close, and order them by the result."
    )
    profile: Path | None = common.profile()
    runtime: Path | None = common.learned_runtime()
    strict: bool = common.strict()
    out: Path | None = option(None, "--out", help="Save the best plan to this file.")
    pick: int | None = option(
        None, "--pick", least=1, most=100, help="Which listed plan --out saves; default: the first."
    )
    force: bool = option(False, "--force", help="Let --out overwrite a file.")
    json: bool = common.json_flag()
    load: Load = group(Load)
    engine: Engine = group(Engine)
    separate: bool = separate()
    drawn: Drawn = group(Drawn)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate(Request):
    """Predict step time and memory of one plan, or latency and throughput of a deployment, and say whether it is legal.

    The data-parallel degree defaults to what fills the GPUs. Flags given together with --plan or --case override the
    file, and the answer lists what they changed. With --plan, another --model or --cluster is refused as stale (exit
    code 1); --case takes a plan file, too, and predicts it for any. The exit code is 3 if no plan given is legal, and 0
    if a plan is legal but does not fit.
    """

    task: Task = option(Task.TRAIN, "--task", help="train: a training step; serve: an inference server.")
    case: str | None = option(None, "--case", help="Case file: one case or a list, or a plan file; - reads stdin.")
    plan: Path | None = option(None, "--plan", help="Plan file saved by planner suggest --out.")
    profile: Path | None = common.profile()
    strict: bool = common.strict()
    out: Path | None = option(None, "--out", help="Save the plan to this file.")
    force: bool = option(False, "--force", help="Let --out overwrite a file.")
    json: bool = common.json_flag()
    stated: OnePlan = group(OnePlan)
    load: Load = group(Load)
    engine: Engine = group(Engine)
    deployment: Deployment = group(Deployment)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explain(Request):
    """Explain a plan: from the peak of the GPU to the predicted step, memory by stage, runners-up, flip points.

    Without a file, it explains the plan that planner suggest would put first for the same flags. Flags given together
    with a file override the file, and the answer lists what they changed.
    """

    file: str | None = argument(None, help="Plan file from suggest --out, or a case; default: the best plan.")
    task: Task = option(Task.TRAIN, "--task", help="train: a training step; serve: an inference server.")
    case_id: str | None = option(None, "--id", help="Which case of a list, by its id.")
    model: str | None = common.model(None)
    online: bool = common.online()
    cluster: str | None = option(
        None, "--cluster", help="GPUs (2x8xH100), machine type, catalogue name or cluster file."
    )
    gpu: str | None = common.gpu()
    gpus: str | None = option(None, "--gpus", help="Number of GPUs to use.")
    seq_len: int | None = common.seq_len()
    global_batch: int | None = common.global_batch()
    framework: str | None = option(
        None, "--framework", help="Framework whose rules and kernels apply; default: torchtitan."
    )
    top: int = option(4, "--top", least=1, most=20, help="How many runners-up to show.")
    memory: bool = option(False, "--memory", help="Show only memory, stage by stage.")
    observed_peak: str | None = option(
        None, "--observed-peak", help="Peak that was measured (32GB, 29.8GiB), to compare with the prediction."
    )
    measured: str | None = option(
        None, "--measured", help="Step time that was measured (9.2s): says what could account for the difference."
    )
    flips: bool = option(
        False,
        "--flips/--no-flips",
        help="Also find flip points by searching again on changed machines; takes as long as dozens of answers.",
    )
    compile_model: bool | None = common.compiled()
    param_dtype: str | None = common.param_dtype()
    compute_dtype: str | None = common.compute_dtype()
    trained: Trained = group(Trained)
    time_limit: float | None = common.time_limit()
    profile: Path | None = common.profile()
    strict: bool = common.strict()
    svg: Path | None = option(None, "--svg", help="Draw step and memory into this file.")
    force: bool = option(False, "--force", help="Let --svg overwrite a file.")
    json: bool = common.json_flag()
    load: Load = group(Load)
    engine: Engine = group(Engine)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compare(Request):
    """Compare two plans term by term: seconds of the step, bytes of the worst rank, and what the plans set differently.

    The terms add up to the difference of the two steps. Of two serving plans, it compares the time to the first token
    and the time per token. It says so if the plans answer different questions.
    """

    first: str = required_argument(help="Plan file from suggest --out, or a case.")
    second: str = required_argument(help="Another plan, for the same question or a different one.")
    task: Task | None = option(
        None, "--task", show_default=False, help="train or serve; default: what the files are about."
    )
    profile: Path | None = common.profile()
    strict: bool = common.strict()
    json: bool = common.json_flag()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace(Request):
    """Simulate one step, and write a timeline of every rank and stream.

    Ranks that behave alike are drawn once. Open the file at https://ui.perfetto.dev or chrome://tracing. The exit code
    is 3 if the plan is not legal.
    """

    out: Path = required("--out", help="File to write the trace to.")
    plan: Path | None = option(None, "--plan", help="Plan file saved by planner suggest --out.")
    case: str | None = option(None, "--case", help="Case file; of a list, the first case or the one that --id names.")
    case_id: str | None = option(None, "--id", help="Which case of a list, by its id.")
    profile: Path | None = common.profile()
    strict: bool = common.strict()
    detail: str | None = option(None, "--detail", help="Level of detail: kernel or layer; default: layer.")
    force: bool = option(False, "--force", help="Let --out overwrite a file.")
    json: bool = common.json_flag()
    stated: OnePlan = group(OnePlan)
