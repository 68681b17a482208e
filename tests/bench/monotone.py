"""Count how often more takes less: `python -m tests.bench.monotone 2500 250`, draws of collectives and of serving.

Steps of engines are asked by `tests/simulator/serving/test_monotone.py`, training by
`tests/test_answers_metamorphic.py`.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import numpy as np

from simulator.collectives.cost import OPS, CollectiveModel
from simulator.config.hf_config import load_model
from simulator.serving.deployment import Deployment, Pool
from simulator.serving.estimate import estimate_serving
from simulator.serving.traffic import Lengths, Traffic
from topology.catalog.clusters import catalog_names, cluster
from topology.cluster import Cluster
from topology.errors import PlannerError
from topology.rates.groups import group_shape
from topology.rates.scaling import scale_flops, scale_network, scale_nvlink

LINKS: dict[str, Callable[[Cluster, float], Cluster]] = {"network": scale_network, "NVLink": scale_nvlink}
RATES = [2 ** (step / 2) for step in range(-4, 7)]  # times as fast as the catalogue has them
SIZES = np.unique(np.round(np.geomspace(1, 2**34, 60)))
Question = tuple[str, str, float]  # relation, where, by how much more takes less (0 or less: it does not)


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
        yield f"{op}: more bytes", name, float(np.max(now[:-1] / now[1:] - 1))
        for links in LINKS:
            slow, fast = sorted(chance.sample(RATES, 2))
            for what, rate in (("than there are", 1.0), ("of two that are not there", slow)):
                other = max(rate, fast)
                before, after = (collectives(name, gpus, links, one).time_s(op, sizes, shape) for one in (rate, other))
                with np.errstate(invalid="ignore"):
                    yield f"{op}: faster {links} {what}", name, float(np.nanmax(after / before - 1))


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
        )
        more: dict[str, tuple[Cluster, Deployment, Traffic]] = {
            "twice the clients": (machine, deployment, replace(traffic, concurrency=2 * clients)),
            "eager": (machine, replace(deployment, eager=True), traffic),
            "prompts twice as long": (machine, deployment, replace(traffic, prompt=_twice(traffic.prompt))),
            "answers twice as long": (machine, deployment, replace(traffic, output=_twice(traffic.output))),
            "slower arithmetic": (scale_flops(machine, 1 / 1.5), deployment, traffic),
            "slower NVLink": (scale_nvlink(machine, 1 / 1.5), deployment, traffic),
        }
        try:
            now = estimate_serving(model, machine, deployment, traffic).e2e_s.value
            found = {what: estimate_serving(model, *asked).e2e_s.value for what, asked in more.items()}
        except PlannerError:  # it does not fit
            continue
        draws -= 1
        yield from ((f"serving: {what}", model.name, now / then - 1) for what, then in found.items())


def _twice(lengths: Lengths) -> Lengths:
    return replace(lengths, mean=2 * lengths.mean)


def main(draws: int, served: int) -> None:
    asked, broken, worst = Counter[str](), Counter[str](), dict[str, tuple[float, str]]()
    for source in (of_collectives(draws), of_serving(served)):
        for relation, where, by in source:
            asked[relation] += 1
            if by > 1e-6:
                broken[relation] += 1
                worst[relation] = max(worst.get(relation, (0.0, "")), (by, where))
    print("| relation | questions | broken | by at most | where |\n|---|---:|---:|---:|---|")
    for relation in sorted(asked):
        by, where = worst.get(relation, (0.0, ""))
        print(f"| {relation} | {asked[relation]} | {broken[relation]} | {by:.1%} | {where} |")
    print(f"\n{sum(asked.values())} questions, {sum(broken.values())} broken")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("draws", type=int, help="of collectives")
    parser.add_argument("served", type=int, help="draws of serving")
    asked_for = parser.parse_args()
    main(asked_for.draws, asked_for.served)
