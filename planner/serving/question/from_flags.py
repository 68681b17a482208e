"""Make a serving question of the flags of `--task serve`, with a list of assumptions."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.io.inputs import measurements, read_cluster, refuse_empty
from planner.requests.flag import values_of
from planner.requests.serving import Deployment as DeploymentFlags
from planner.requests.serving import Engine, Load
from planner.requests.training import Suggest
from planner.serving.question.question import OBJECTIVES, ServingQuestion
from planner.serving.question.releases import split_engine
from planner.serving.question.trace_file import read_trace
from simulator.config.hf_config import load_model
from simulator.config.model import Model
from simulator.config.stored_weights import stored_weights
from simulator.fitting.calibrations import same_gpu
from simulator.kernels.low_precision import has_no_bfloat16
from simulator.serving.crowd import MOST
from simulator.serving.deployment import CACHE_BYTES, WEIGHT_BYTES, Speculation
from simulator.serving.engine import OVERLAPS_BATCHES, RECEIVES, engine_of
from simulator.serving.fit_steps import fit_serving
from simulator.serving.measured import MeasuredServing
from simulator.serving.traffic import Lengths, Request, Traffic, steady_requests
from topology.catalog.platform import take_gpus
from topology.cluster import Cluster
from topology.errors import BadInput, UserError
from topology.profile.store import current_samples
from topology.rates.reach import cluster_caveats

MODEL, CLUSTER = "llama3-8b", "dgx-h100"
PROMPT, ANSWER, CLIENTS_PER_GPU = 1024, 256, 8
VARY = 0.2  # requests of equal length would begin and end together, unlike real ones
FROM_CHECKPOINT = ("float4", "int4", "mxfp4")  # formats to which engines cannot convert 16-bit weights while loading
CONVERTS = ("vllm", "sglang")  # programs that make 16-bit weights float8 while loading (their --quantization fp8)
FEWEST = "min"  # of --gpus: the fewest that serve the load as asked
ARRIVALS = {"constant": 0.0, "poisson": 1.0}
_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
# Plain numbers from which milliseconds may be meant: nobody waits so many seconds for a token on purpose.
UNLIKELY = {"--ttft": 100.0, "--tpot": 2.0}
_SAID = re.compile(r"([0-9]{1,15}(?:\.[0-9]{0,18})?(?:e[+-]?[0-9]{1,2})?|\.[0-9]{1,18}) ?(us|ms|s)?")


@dataclass(frozen=True, kw_only=True)
class ServingFlags(Load, Engine, DeploymentFlags):
    """What a command states of a serving question and of one deployment; None means not stated. Commands that choose a
    deployment take no part of one.
    """

    model: str | None = None
    cluster: str | None = None
    gpu: str | None = None
    gpus: int | None = None
    objective: str | None = None
    gpu_price: float | None = None
    separate: bool = False
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    profile: Path | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        """Raise UserError for a model or cluster that is stated and empty."""
        refuse_empty(model=self.model, cluster=self.cluster)


def flags_of_search(asked: Suggest) -> ServingFlags:
    """Return the flags of a search for deployments. Raises UserError for an invalid number of GPUs."""
    counts = None if asked.gpus == FEWEST else asked.gpus
    if counts is not None and not (counts.strip().isdigit() and 0 < int(counts.strip()[:12]) <= 1 << 20):
        raise UserError(
            f"--gpus {counts!r} is not a number", remedy=f"give one number of GPUs with --task serve, or {FEWEST}"
        )
    return ServingFlags(
        model=asked.model,
        cluster=asked.cluster,
        gpu=asked.gpu,
        gpus=None if counts is None else int(counts),
        objective=asked.objective.value if "objective" in asked.said else None,
        gpu_price=asked.gpu_price,
        separate=asked.separate,
        profile=asked.profile,
        strict=asked.strict,
        **values_of(asked.load, asked.engine),
    )


def serving_question(flags: ServingFlags) -> ServingQuestion:
    """Return the question of a command's flags. Raises UserError, naming the flag, for impossible values."""
    whole = read_cluster(flags.cluster or CLUSTER, flags.gpus, gpu=flags.gpu)
    machine = _cut(whole, flags.gpus)
    defaults = (("model", flags.model, MODEL), ("cluster", flags.cluster, CLUSTER))
    assumed = [f"{name} {default}" for name, said, default in defaults if said is None]
    partly = flags.gpus is not None and machine.gpu_count > flags.gpus
    if partly:
        assumed.append(f"{flags.gpus} GPUs of nodes of {machine.gpus_per_node}: the last is used in part")
    elif machine is not whole:
        assumed.append(f"the first {flags.gpus} GPUs of the node")
    assumed += cluster_caveats(machine)
    model = load_model(flags.model or MODEL)
    traffic = _traffic(flags, flags.gpus or machine.gpu_count, model.max_positions, assumed)
    _refuse_beyond(model, traffic)
    engine, release = split_engine(flags.engine or "vllm")
    measured = measured_serving(flags, machine, engine, assumed)
    stored = stored_weights(flags.model or MODEL)
    wide = "float16" if has_no_bfloat16(machine.slowest_kind) else "bfloat16"
    assumed += _formats_unsaid(flags, engine_of(engine).program, stored, wide)
    question = ServingQuestion(
        model=model,
        cluster=machine,
        traffic=traffic,
        gpus=flags.gpus if partly and flags.gpus else 0,
        engine=engine,
        release=release,
        objective=_objective(flags, assumed),
        gpu_price_per_hour=flags.gpu_price or 0.0,
        separate=flags.separate,
        measured=measured,
        assumed=tuple(assumed),
        **{"weights": stored or wide, "kv_cache": wide, **settings_of(flags, model)},
    )
    refuse_unknown_to(question)
    return question


def settings_of(flags: ServingFlags, model: Model) -> dict[str, Any]:
    """Return the stated settings of the engine and targets, as fields of a question. Raises UserError and BadInput for
    impossible ones.
    """
    nccl = flags.no_custom_all_reduce
    found = {
        "weights": _number_format(flags.weights, "--weights", WEIGHT_BYTES),
        "kv_cache": _number_format(flags.kv_cache, "--kv-cache", CACHE_BYTES),
        "max_num_seqs": flags.max_num_seqs,
        "max_num_batched_tokens": flags.max_num_batched_tokens,
        "memory_fraction": flags.gpu_memory_utilization,
        "eager": flags.eager,
        "custom_all_reduce": None if nccl is None else not nccl,
        "two_batches": flags.two_batch_overlap,
        "receive_every": flags.receive_every,
        "speculation": _speculation(flags.draft_tokens, flags.accepted_tokens, model),
        "ttft_s": target_s(flags.ttft, "--ttft"),
        "tpot_s": target_s(flags.tpot, "--tpot"),
    }
    return {name: value for name, value in found.items() if value is not None}


def machine_of(flags: ServingFlags, gpus: int) -> Cluster:
    """Return this number of GPUs of the machine in a command's flags. Raises UserError if it does not exist in that
    size.
    """
    return _cut(read_cluster(flags.cluster or CLUSTER, gpus, gpu=flags.gpu), gpus)


def _cut(machine: Cluster, gpus: int | None) -> Cluster:
    """Return the first GPUs of a machine that has more: a node with irregular links comes whole."""
    return machine if gpus is None or gpus >= machine.gpu_count else take_gpus(machine, gpus)


def refuse_unknown_to(question: ServingQuestion) -> None:
    """Raise UserError for a setting that the question's engine does not have."""
    engine = engine_of(question.engine)
    if question.eager and not engine.may_be_eager:
        raise UserError(
            f"--eager: {engine.title} does not run so", remedy="leave it out, or use --engine vllm or sglang"
        )
    asked = (
        ("--two-batch-overlap", question.two_batches, OVERLAPS_BATCHES),
        ("--receive-every", question.receive_every > 1, RECEIVES),
    )
    for name, said, engines in asked:
        if said and engine.program not in engines:
            raise UserError(
                f"{name}: {engine.title} has no such setting",
                remedy=f"leave it out, or use --engine {' or '.join(engines)}",
            )


def _speculation(draft: int | None, accepted: float | None, model: Model) -> Speculation | None:
    """Return the stated speculative decoding. Raises UserError if only half of it is stated, or if it is impossible."""
    if draft is None and accepted is None:
        return None
    if draft is None or accepted is None or accepted > draft:
        raise UserError(
            f"--draft-tokens {draft or 'not stated'}, --accepted-tokens {accepted or 'not stated'}",
            why="how much drafted tokens bring depends on how many are right, which no configuration says",
            remedy="state both, the accepted ones at most the drafted, as the engine's log reports them",
        )
    if not model.multi_token_layers:
        raise UserError(
            f"--draft-tokens: {model.name} has no prediction layer",
            why="draft models of their own are not described",
            remedy="leave it out",
        )
    return Speculation(draft=draft, accepted=accepted)


def _formats_unsaid(flags: ServingFlags, program: str, stored: str, wide: str) -> list[str]:
    """Return the assumptions about formats, of 16 bits as the GPUs have them (`wide`), and the checkpoint that a format
    needs if the engine of a program does not convert to it.
    """
    from_checkpoint = FROM_CHECKPOINT if program in CONVERTS else WEIGHT_BYTES.keys() - {"bfloat16", "float16"}
    said = []
    if flags.weights is None:
        said.append(f"weights in {stored}, as the checkpoint has them" if stored else f"weights in {wide}")
    elif flags.weights in from_checkpoint and flags.weights != stored:
        said.append(f"a checkpoint with weights in {flags.weights}, whose name takes the place of the command's")
    return said + ([f"KV cache in {wide}"] if flags.kv_cache is None else [])


def measured_serving(flags: ServingFlags, cluster: Cluster, engine: str, notes: list[str]) -> MeasuredServing | None:
    """Return the engine's samples in the profile of `flags`, with notes on what is missing; None without a profile.

    Raises BadInput for a profile that cannot be, Stale for one in doubt where flags are strict.
    """
    if flags.profile is None:
        return None
    measured = measurements(flags.profile, strict=flags.strict)
    notes += [f"profile: {doubt}" for doubt in measured.check(cluster)]
    profile = measured.profile
    if profile is None or not same_gpu(profile, cluster.slowest_kind):
        return None
    current = current_samples(profile)
    found = fit_serving(current.serving, current.collectives, cluster, engine)
    if found is None or not found.steps:
        notes.append(f"the profile has no steps of {engine}: they are priced from the datasheet")
    return found


def _refuse_beyond(model: Model, traffic: Traffic) -> None:
    """Raise UserError for requests that are longer than the model has positions."""
    longest, positions = traffic.longest, model.max_positions
    if positions and longest > positions:
        shorter = int((positions - traffic.output.longest) / traffic.prompt.high)
        lengths = f"--isl {shorter}, or " if shorter > 0 and not traffic.trace else ""
        raise UserError(
            f"requests of {longest:,} tokens are longer than the {positions:,} positions of {model.name}",
            why="the model was made for no more, and vLLM and SGLang refuse to start with such a limit",
            remedy=f"{lengths}a config.json with the rope_scaling that you serve it with, as --model",
        )


def _traffic(flags: ServingFlags, gpus: int, positions: int, assumed: list[str]) -> Traffic:
    """Return the traffic for a model with this number of positions (0: unknown).

    Raises UserError for flags that exclude each other, BadInput for a file of requests.
    """
    cached = flags.cached_prompt or 0.0
    if flags.requests is not None:
        _refuse_beside(flags, "--requests", ("isl", "osl", "vary", "request_rate", "arrivals", "concurrency"))
        return _traced(read_trace(flags.requests), cached)
    if flags.concurrency is not None:
        _refuse_beside(flags, "--concurrency", ("request_rate", "arrivals"))
    if flags.arrivals is not None and flags.request_rate is None:
        raise UserError("--arrivals needs a rate", remedy="give --request-rate")
    concurrency = flags.concurrency
    if concurrency is None and flags.request_rate is None:
        concurrency = CLIENTS_PER_GPU * gpus
        assumed.append(f"{concurrency:,} clients ({CLIENTS_PER_GPU} per GPU), each asking again when it is answered")
    if (concurrency or 0) >= MOST:
        assumed.append(f"once all engines are full, each of {concurrency:,} clients waits for one more answer")
    vary = VARY if flags.vary is None else flags.vary
    short = min(1.0, 0.8 * positions / (PROMPT + ANSWER)) if positions else 1.0  # the longest are a fifth longer
    prompt, answer = (
        Lengths(mean=_said(given, int(short * default), what, assumed), low=1 - vary, high=1 + vary)
        for given, default, what in ((flags.isl, PROMPT, "a prompt"), (flags.osl, ANSWER, "an answer"))
    )
    if flags.vary is None:
        assumed.append(f"lengths of prompts and answers vary by {VARY:.0%}")
    if flags.request_rate and flags.arrivals is None:
        assumed.append("arrivals: Poisson")
    return Traffic(
        prompt=prompt,
        output=answer,
        concurrency=concurrency or 0,
        request_rate=flags.request_rate or 0.0,
        shape=arrival_shape(flags.arrivals),
        requests=steady_requests(concurrency or 0),
        cached_prompt=cached,
        steady=True,
    )


def _refuse_beside(flags: ServingFlags, flag: str, others: tuple[str, ...]) -> None:
    """Raise UserError if another flag for the same quantity was given too."""
    stated = [name for name in others if getattr(flags, name) is not None]
    if stated:
        names = ", ".join("--" + name.replace("_", "-") for name in stated)
        raise UserError(
            f"{flag} and {names} exclude each other",
            why="requests come from a closed loop of clients, at a rate, or from a file",
            remedy=f"leave out {names}, or {flag}",
        )


def _traced(requests: tuple[Request, ...], cached: float) -> Traffic:
    """Return the traffic of a file; its means are used where one length is needed."""
    prompt = round(sum(request.prompt for request in requests) / len(requests))
    output = round(sum(request.output for request in requests) / len(requests))
    return Traffic(
        prompt=Lengths(mean=max(1, prompt)), output=Lengths(mean=max(1, output)), trace=requests, cached_prompt=cached
    )


def arrival_shape(arrivals: str | None) -> float:
    """Return the coefficient of variation of the time between arrivals. Raises BadInput."""
    word = (arrivals or "poisson").lower()
    if word in ARRIVALS:
        return ARRIVALS[word]
    kind, _, number = word.partition(":")
    try:
        value = float(number) if kind == "gamma" else -1.0
    except ValueError:
        value = -1.0
    if 0 < value <= 100:
        return value
    raise BadInput(
        f"--arrivals {arrivals!r} is not a way of arriving",
        remedy="use constant, poisson, or gamma:CV with a coefficient of variation up to 100, such as gamma:2",
    )


def _said(given: int | None, default: int, what: str, assumed: list[str]) -> int:
    if given is None:
        assumed.append(f"{default} tokens {what}")
    return given or default


def _number_format(given: str | None, flag: str, known: Collection[str]) -> str | None:
    """Return the format that a flag names. Raises BadInput for one that is not covered."""
    if given is not None and given not in known:
        raise BadInput(f"{flag} {given!r} is not a format that is covered", remedy=f"use one of: {', '.join(known)}")
    return given or None


def _objective(flags: ServingFlags, assumed: list[str]) -> str:
    given = flags.objective
    if given is None and flags.request_rate:
        assumed.append("objective: seconds of an answer, since the requests say how many tokens are written")
        return "latency"
    if given is None:
        assumed.append("objective: output tokens per second and GPU")
        return "throughput"
    if given not in OBJECTIVES:
        raise UserError(
            f"--objective {given} is not one of serving's", remedy=f"use one of: {', '.join(OBJECTIVES)}, pareto"
        )
    if given == "cost" and not flags.gpu_price:
        raise UserError("--objective cost needs a price", remedy="give --gpu-price, for a GPU and hour")
    return given


def target_s(said: str | float | None, flag: str) -> float | None:
    """Return the seconds of a target that a flag of `UNLIKELY` states; None if it states none.

    A number without a unit is seconds. Raises UserError for anything that is no time, and for a plain number so large
    that it may be meant in milliseconds.
    """
    if said is None or isinstance(said, (int, float)):
        return said
    found = _SAID.fullmatch(said.strip().lower()[:40])
    if found is None:
        raise UserError(
            f"{flag} is {said[:40]!r}",
            why="it is a time of at least 0: a number of seconds, or one with s, ms or us",
            remedy=f"{flag} 0.5 or {flag} 500ms" if flag == "--ttft" else f"{flag} 0.02 or {flag} 20ms",
        )
    value = float(found[1]) * _UNITS_S[found[2] or "s"]
    if not found[2] and value >= UNLIKELY[flag]:
        raise UserError(
            f"{flag} {said.strip()} may be meant in seconds or in milliseconds",
            why="a number without a unit is seconds",
            remedy=f"{flag} {found[1]}ms, or {flag} {found[1]}s",
        )
    return value
