"""Steps of an engine that do more, or run on less, never take less time.

What requests see follows from the order of steps, too, which more work can improve: a step that takes longer lets
another prompt join the next one (`examples/validation/monotone.md`). So the laws are exact of steps and of requests
whose steps are the same, and near of others.
`MESHWRIGHT_QUESTIONS=5000 pytest tests/simulator/serving/test_monotone.py` asks so many of each.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace

from simulator.config.hf_config import load_model
from simulator.serving.deployment import Deployment, Pool
from simulator.serving.engine import COMPARED, engine_of, engines
from simulator.serving.forward_pass import ForwardPass
from simulator.serving.traffic import Lengths, Traffic, with_clients
from tests.bench.monotone import seconds_and_steps, slower_memory
from topology.catalog.clusters import cluster
from topology.cluster import Cluster
from topology.errors import PlannerError
from topology.rates.scaling import scale_flops, scale_network, scale_nvlink

QUESTIONS = int(os.environ.get("MESHWRIGHT_QUESTIONS", "100"))
STEPS = 25  # of a deployment: it is priced once
MODELS = ("llama3.2-1b", "llama3-8b", "qwen3-30b-a3b", "gemma2-9b", "deepseek-v2-lite", "gpt-oss-20b", "gpt2")
MACHINES = (("dgx-h100", 8), ("dgx-h100", 16), ("dgx-a100", 8), ("l40s-x8", 8), ("dgx-b200", 8), ("mi300x-x8", 8),
            ("a100-pcie-x4", 4))  # fmt: skip
ROUNDING = 1 + 1e-9
ORDER = 1.1  # what other steps may change in a request's mean time: examples/validation/monotone.md has up to 7 %


def later_network(machine: Cluster) -> Cluster:
    fabric = machine.fabric
    return machine if fabric is None else replace(machine, fabric=replace(fabric, latency_s=3 * fabric.latency_s))


SLOWER = {
    "slower memory": slower_memory,
    "slower arithmetic": lambda machine: scale_flops(machine, 1 / 1.5),
    "slower NVLink": lambda machine: scale_nvlink(machine, 1 / 1.5),
    "slower network": lambda machine: scale_network(machine, 1 / 1.5),
    "longer latency": later_network,
}


def deployments() -> Iterator[tuple[str, ForwardPass, dict[str, ForwardPass]]]:
    """Yield deployments drawn by chance, each in words and with what is slower in one way."""
    chance = random.Random("steps")
    while True:
        machine, model = cluster(*chance.choice(MACHINES)), load_model(chance.choice(MODELS))
        tp, ranks = chance.choice((1, 1, 2, 4, machine.gpu_count)), chance.choice((1, 1, 1, 2))
        ep = chance.choice((1, tp * ranks)) if model.moe else 1
        deployment = Deployment(
            engine=chance.choice([name for name in engines() if name != "meshwright"]),
            pool=Pool(tp=tp, pp=chance.choice((1, 1, 2)), ep=ep, dp_attention=ranks),
            weights=chance.choice(("bfloat16", "float8")),
            kv_cache=chance.choice(("bfloat16", "float8")),
        )
        pool = deployment.pool
        if pool.gpus > machine.gpu_count:
            continue
        try:
            here = ForwardPass(model, machine, deployment, pool)
            slower = {name: ForwardPass(model, change(machine), deployment, pool) for name, change in SLOWER.items()}
            if engine_of(deployment.engine).may_be_eager:
                slower["eager"] = ForwardPass(model, machine, replace(deployment, eager=True), pool)
        except PlannerError:
            continue
        yield f"{model.name} on {machine.name}, {deployment}", here, slower


def laws(
    here: ForwardPass, slower: dict[str, ForwardPass], chance: random.Random
) -> Iterator[tuple[str, float, float]]:
    """Yield (what is more, a step's seconds, those of the step with more)."""
    answers = chance.choice((0, 1, 2, 7, 8, 9, 64, 100, 256))
    prompt = chance.choice((1, 5, 100, 777, 2048, 8192) if not answers else (0, 0, 1, 100, 1000, 2047, 2048, 8192))
    readers, context = chance.choice((1, 2, 3)) if prompt else 1, chance.choice((1, 100, 3000, 30000))
    pairs = prompt * (prompt + 1) / 2 / readers
    step = {"prompt_tokens": prompt, "pairs": pairs, "sequences": answers, "keys": answers * context}

    def seconds(costs: ForwardPass = here, **changed: float) -> float:
        return costs.seconds(**{**step, **changed}, readers=readers)

    now, more = seconds(), chance.choice((1, 8, 100, 1000))
    yield "tokens of prompts", now, seconds(prompt_tokens=prompt + more, pairs=pairs + more * (prompt + 1))
    yield "answers", now, seconds(sequences=answers + more, keys=(answers + more) * context)
    yield "keys", now, seconds(keys=1.5 * answers * context)
    for name, costs in slower.items():
        yield name, now, seconds(costs)


def test_steps_with_more_to_do_or_slower_hardware_take_no_less():
    chance, asked = random.Random("laws"), deployments()
    for _ in range(-(-QUESTIONS // STEPS)):
        words, here, slower = next(asked)
        for _ in range(STEPS):
            for name, less, more in laws(here, slower, chance):
                assert less <= more * ROUNDING, f"{name}: {less} against {more}, {words}"


def slower_everywhere(machine: Cluster) -> Cluster:
    for change in SLOWER.values():
        machine = change(machine)
    return machine


def test_faster_gpus_serve_no_slower():
    """All rates at once or one of them, engines that read and write together and separated ones."""
    chance, left = random.Random("served"), max(60, QUESTIONS // 4)
    changes = [slower_everywhere, *SLOWER.values()]
    while left:
        machine = cluster(chance.choice(("dgx-h100", "dgx-a100", "dgx-b200")))
        model = load_model(chance.choice(("llama3.2-1b", "llama3-8b", "qwen3-30b-a3b", "gpt-oss-20b")))
        pool = Pool(tp=chance.choice((1, 2, 4)), engines=chance.choice((1, 2)))
        deployment = Deployment(
            engine=chance.choice(COMPARED), pool=pool, prefill=Pool(tp=pool.tp) if chance.random() < 0.4 else None
        )
        clients = chance.choice((1, 4, 33, 64))
        prompt, output = (Lengths(mean=chance.choice(means), low=0.8, high=1.2) for means in ((1, 128, 1024), (16, 64)))
        traffic = with_clients(Traffic(prompt=prompt, output=output, steady=True), clients)
        now, steps = seconds_and_steps(model, machine, deployment, traffic)
        then, others = seconds_and_steps(model, chance.choice(changes)(machine), deployment, traffic)
        words = f"{model.name} on {machine.name}, {deployment}, {clients} clients, {prompt.mean} + {output.mean} tokens"
        alike = steps == others and deployment.prefill is None and pool.engines == 1  # the same requests count
        assert now <= then * (ROUNDING if alike else ORDER), words
        left -= 1
