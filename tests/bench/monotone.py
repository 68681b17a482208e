"""Count how often more takes less: `python -m tests.bench.monotone 2500 250`, draws of collectives and of serving.

Every question that is broken is a line of its own, with what is not the same in its two answers: what NCCL's formulas
choose, or which requests share a step. One whose answers are of the same choice, or the same steps, is a defect.

Steps of engines are asked by `tests/simulator/serving/test_monotone.py`, training by
`tests/test_answers_metamorphic.py`.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from unittest.mock import patch

import numpy as np

from simulator.collectives import nccl_model
from simulator.collectives.cost import OPS, CollectiveModel
from simulator.config.hf_config import load_model
from simulator.config.model import Model
from simulator.serving.batch import Batch, Step
from simulator.serving.deployment import Deployment, Pool
from simulator.serving.estimate import estimate_serving
from simulator.serving.traffic import Lengths, Traffic, steady_requests, with_clients
from topology.catalog.clusters import catalog_names, cluster
from topology.cluster import Cluster
from topology.errors import PlannerError
from topology.rates.groups import GroupShape, group_shape
from topology.rates.scaling import scale_flops, scale_network, scale_nvlink

LINKS: dict[str, Callable[[Cluster, float], Cluster]] = {"network": scale_network, "NVLink": scale_nvlink}
RATES = [2 ** (step / 2) for step in range(-4, 7)]  # times as fast as the catalogue has them
SHOWN = 5e-4  # less is no digit of the table; of several engines, other requests count where two arrive at once
SIZES = np.unique(np.round(np.geomspace(1, 2**34, 60)))


@dataclass(frozen=True, slots=True)
class Question:
    """`by`: how much more what should take no more takes (0 or less: nothing); `apart`: what is not the same in the two
    answers, nothing where all that decides is.
    """

    relation: str
    where: str
    by: float
    apart: str = ""


@cache
def collectives(name: str, gpus: int, links: str = "", rate: float = 1.0) -> CollectiveModel:
    machine = cluster(name, gpus)
    return CollectiveModel(LINKS[links](machine, rate) if links else machine)


def of_collectives(draws: int) -> Iterator[Question]:
    chance = random.Random("collectives")
    for _ in range(draws):
        name, op = chance.choice([name for name in catalog_names() if name != "h200x4"]), chance.choice(sorted(OPS))
        node = cluster(name).gpus_per_node
        gpus = chance.choice([n for n in (2, 3, 4, 6, 8, 16, 32, 64, 72, 144) if n <= node or n % node == 0])
        size = 2 if op == "send_recv" else gpus
        shape = group_shape(size=size, stride=1, gpus_per_node=node, world=gpus)
        sizes = np.unique(np.round(SIZES * 2 ** chance.uniform(-0.4, 0.4)))
        now = collectives(name, gpus).time_s(op, sizes, shape)
        yield Question(f"{op}: more bytes", name, float(np.max(now[:-1] / now[1:] - 1)))
        for links in LINKS:
            slow, fast = sorted(chance.sample(RATES, 2))
            for what, rate in (("than there are", 1.0), ("of two that are not there", slow)):
                models = [collectives(name, gpus, links, one) for one in (rate, max(rate, fast))]
                before, after = (one.time_s(op, sizes, shape) for one in models)
                with np.errstate(invalid="ignore"):
                    more = after / before - 1
                worst = int(np.nanargmax(more))
                choices = [_choice(one, op, shape, sizes[worst]) for one in models]
                yield Question(
                    f"{op}: faster {links} {what}",
                    f"{name}, {gpus} GPUs, {sizes[worst]:,.0f} B, {links} x {rate:.3g} and {max(rate, fast):.3g}",
                    float(more[worst]),
                    " and ".join(choices) if choices[0] != choices[1] else "",
                )


def _choice(model: CollectiveModel, op: str, shape: GroupShape, size: float) -> str:
    """Return what NCCL's formulas choose, and by how many channels."""
    machine = model.communicator(shape).nccl
    _, pick, lines = nccl_model.choose(machine, op, [size], allow_nvls=shape.nodes == 1)
    channels = nccl_model.ring_graph(machine).channels
    return f"{lines[pick[0]].algorithm} {lines[pick[0]].protocol} of {channels} channels" if lines else ""


def of_serving(draws: int) -> Iterator[Question]:
    chance = random.Random("serving")
    while draws:
        machine = cluster(chance.choice(("dgx-h100", "dgx-a100", "l40s-x8", "dgx-b200")))
        model = load_model(chance.choice(("llama3.2-1b", "llama3-8b", "qwen3-30b-a3b", "gemma2-9b", "gpt-oss-20b")))
        tp = chance.choice((1, 1, 2, 4))
        deployment = Deployment(
            engine=chance.choice(("vllm", "sglang", "trtllm")),
            pool=Pool(tp=tp, engines=chance.choice((1, 2))),
            prefill=Pool(tp=tp) if chance.random() < 0.2 else None,
        )
        clients, prompt, output = (
            chance.choice(some) for some in ((1, 2, 4, 8, 33, 64, 200), (1, 16, 128, 1024, 8192), (1, 2, 16, 64, 300))
        )
        traffic = Traffic(
            prompt=Lengths(mean=prompt, low=0.8, high=1.2),
            output=Lengths(mean=output, low=0.8, high=1.2),
            concurrency=clients,
            requests=steady_requests(clients),
            steady=True,
        )
        more: dict[str, tuple[Cluster, Deployment, Traffic]] = {
            "twice the clients": (machine, deployment, with_clients(traffic, 2 * clients)),
            "eager": (machine, replace(deployment, eager=True), traffic),
            "prompts twice as long": (machine, deployment, replace(traffic, prompt=_twice(traffic.prompt))),
            "answers twice as long": (machine, deployment, replace(traffic, output=_twice(traffic.output))),
            "slower arithmetic": (scale_flops(machine, 1 / 1.5), deployment, traffic),
            "slower NVLink": (scale_nvlink(machine, 1 / 1.5), deployment, traffic),
            "slower memory": (slower_memory(machine), deployment, traffic),
            "slower GPUs, all rates": (
                slower_memory(scale_nvlink(scale_flops(machine, 1 / 1.5), 1 / 1.5)), deployment, traffic,
            ),
        }  # fmt: skip
        try:
            now, steps = seconds_and_steps(model, machine, deployment, traffic)
            found = {what: seconds_and_steps(model, *asked) for what, asked in more.items()}
        except PlannerError:  # it does not fit
            continue
        draws -= 1
        where = (
            f"{model.name} on {machine.name}, {deployment.engine}, TP {tp}, {deployment.pool.engines} engines"
            f"{', prompts apart' if deployment.prefill else ''}, {clients} clients, {prompt} + {output} tokens"
        )
        for what, (then, others) in found.items():
            apart = f"{len(steps)} and {len(others)} steps" if steps != others else ""
            yield Question(f"serving: {what}", where, now / then - 1, apart)


def seconds_and_steps(
    model: Model, machine: Cluster, deployment: Deployment, traffic: Traffic
) -> tuple[float, list[tuple[int, int, int]]]:
    """Return the mean seconds of a request, and of every step its prompts, their tokens and the answers that go on."""
    steps: list[tuple[int, int, int]] = []
    following = Batch.next_step

    def noted(batch: Batch) -> Step:
        step = following(batch)
        steps.append((len(step.readers), step.prompt_tokens, batch.writing))
        return step

    with patch.object(Batch, "next_step", noted):
        return estimate_serving(model, machine, deployment, traffic).e2e_s.value, steps


def slower_memory(machine: Cluster) -> Cluster:
    kinds = (replace(kind, memory_bytes_per_s=kind.memory_bytes_per_s / 1.5) for kind in machine.gpu_kinds)
    return replace(machine, gpu_kinds=tuple(kinds))


def _twice(lengths: Lengths) -> Lengths:
    return replace(lengths, mean=2 * lengths.mean)


def main(draws: int, served: int) -> None:
    asked, broken, worst = Counter[str](), list[Question](), dict[str, float]()
    for source in (of_collectives(draws), of_serving(served)):
        for question in source:
            asked[question.relation] += 1
            if question.by > SHOWN:
                broken.append(question)
                worst[question.relation] = max(worst.get(question.relation, 0.0), question.by)
    counts = Counter(question.relation for question in broken)
    print("| relation | questions | broken | by at most |\n|---|---:|---:|---:|")
    for relation in sorted(asked):
        print(f"| {relation} | {asked[relation]} | {counts[relation]} | {worst.get(relation, 0.0):.1%} |")
    print(f"\n{sum(asked.values())} questions, {len(broken)} broken\n\n| broken | by | not the same |\n|---|---:|---|")
    for one in sorted(broken, key=lambda one: (one.relation, -one.by)):
        print(f"| {one.relation}: {one.where} | {one.by:.1%} | {one.apart or 'nothing: a defect'} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("draws", type=int, help="of collectives")
    parser.add_argument("served", type=int, help="draws of serving")
    asked_for = parser.parse_args()
    main(asked_for.draws, asked_for.served)
