"""From the options of `suggest --task serve` to a question, with what was left unsaid."""

from __future__ import annotations

from planner.serving.question import OBJECTIVES, ServingQuestion
from simulator.config.hf_config import load_model
from simulator.serving.deployment import CACHE_BYTES, WEIGHT_BYTES
from simulator.serving.engine import engine_of
from simulator.serving.traffic import Lengths, Traffic
from topology.catalog.cluster_file import load_cluster
from topology.errors import BadInput, UserError

PROMPT, ANSWER, CLIENTS_PER_GPU = 1024, 256, 8
VARY = 0.2  # requests of one length would begin and end together, as no real ones do


def serving_question(
    *,
    model: str,
    cluster: str,
    gpus: int | None,
    engine: str,
    objective: str,
    isl: int | None,
    osl: int | None,
    concurrency: int | None,
    request_rate: float | None,
    ttft: float | None,
    tpot: float | None,
    weights: str | None,
    kv_cache: str | None,
    gpu_price: float | None,
    separate: bool,
) -> ServingQuestion:
    """Return the question of a command's options. Raises UserError for what cannot be, naming the option."""
    machine = load_cluster(cluster, gpus)
    assumed: list[str] = []
    if concurrency is not None and request_rate is not None:
        raise UserError(
            "--concurrency and --request-rate exclude each other",
            why="one is a closed loop of clients, the other an open one of arrivals",
            remedy="give one of them",
        )
    if concurrency is None and request_rate is None:
        concurrency = CLIENTS_PER_GPU * machine.gpu_count
        assumed.append(f"{concurrency} clients that ask again at once ({CLIENTS_PER_GPU} a GPU)")
    prompt, answer = _length(isl, PROMPT, "a prompt", assumed), _length(osl, ANSWER, "an answer", assumed)
    assumed.append(f"lengths vary by {VARY:.0%} around those")
    if request_rate:
        assumed.append("arrivals: Poisson")
    return ServingQuestion(
        model=load_model(model),
        cluster=machine,
        traffic=Traffic(
            prompt=prompt,
            output=answer,
            concurrency=concurrency or 0,
            request_rate=request_rate or 0.0,
            requests=_enough(concurrency),
        ),
        engine=engine_of(engine).name,
        weights=_format(weights, "--weights", tuple(WEIGHT_BYTES), assumed),
        kv_cache=_format(kv_cache, "--kv-cache", tuple(CACHE_BYTES), assumed),
        objective=_objective(objective, gpu_price, assumed),
        ttft_s=ttft or 0.0,
        tpot_s=tpot or 0.0,
        gpu_price_per_hour=gpu_price or 0.0,
        separate=separate,
        assumed=tuple(assumed),
    )


def _enough(concurrency: int | None) -> int:
    """Return how many requests give steady figures: several rounds of all clients."""
    return max(200, 4 * (concurrency or 0))


def _length(given: int | None, default: int, what: str, assumed: list[str]) -> Lengths:
    if given is None:
        assumed.append(f"{default} tokens {what}")
    return Lengths(mean=given or default, low=1 - VARY, high=1 + VARY)


def _format(given: str | None, flag: str, known: tuple[str, ...], assumed: list[str]) -> str:
    if given is None:
        assumed.append(f"{flag.strip('-').replace('-', ' ')} in bfloat16")
        return "bfloat16"
    if given not in known:
        raise BadInput(f"{flag} {given!r} is not a format that is covered", remedy=f"use one of: {', '.join(known)}")
    return given


def _objective(given: str, gpu_price: float | None, assumed: list[str]) -> str:
    if given in OBJECTIVES:
        if given == "cost" and not gpu_price:
            raise UserError("--objective cost needs a price", remedy="give --gpu-price, for a GPU and hour")
        return given
    if given == "time":  # the default of training
        assumed.append("objective: output tokens a second and GPU")
        return "throughput"
    raise UserError(f"--objective {given} is not one of serving's", remedy=f"use one of: {', '.join(OBJECTIVES)}")
