"""Deployments as text: flags, and the notation of engines in a pool (`2xtp4`, `1xdp8-ep8`)."""

from __future__ import annotations

import re
from dataclasses import replace

from planner.serving.candidates import exceeds_memory, no_format, on_nodes, out_of_reach, refusal
from planner.serving.question.from_flags import ServingFlags
from planner.serving.question.question import ServingQuestion
from planner.serving.question.releases import too_old
from simulator.serving.deployment import Deployment, Pool, made_even
from topology.errors import BadPlan

MOST = 1 << 20
_DEGREES = {"tp": "tp", "pp": "pp", "ep": "ep", "dp": "dp_attention"}
_POOL = re.compile(r"(?:([0-9]{1,7})x)?((?:tp|pp|ep|dp)[0-9]{1,7}(?:-(?:tp|pp|ep|dp)[0-9]{1,7})*)?")


def read_pool(text: str, flag: str) -> Pool:
    """Return the engines that a word describes: `2xtp4` are two with tensor parallel 4. Raises BadPlan."""
    found = _POOL.fullmatch(text.strip().lower()) if text.strip() else None
    names = [] if found is None else [part[:2] for part in (found[2] or "").split("-") if part]
    if found is None or len(set(names)) != len(names):
        raise BadPlan(
            f"{flag} {text[:40]!r} does not describe engines",
            remedy="write how many and their degrees: 2xtp4, 1xtp4-pp2, 1xdp8-ep8",
        )
    degrees = {_DEGREES[part[:2]]: int(part[2:]) for part in (found[2] or "").split("-") if part}
    pool = Pool(engines=int(found[1] or 1), **degrees)
    require_pool(pool, flag)
    return pool


def pool_word(pool: Pool) -> str:
    """Return a pool as `read_pool` reads it."""
    named = (("tp", pool.tp), ("pp", pool.pp), ("ep", pool.ep), ("dp", pool.dp_attention))
    degrees = "-".join(f"{name}{degree}" for name, degree in named if degree > 1)
    return f"{pool.engines}x{degrees or 'tp1'}"


def require_pool(pool: Pool, where: str) -> None:
    """Raise BadPlan for degrees that no engine can have."""
    sizes = {"engines": pool.engines, "tp": pool.tp, "pp": pool.pp, "ep": pool.ep, "dp_attention": pool.dp_attention}
    for name, value in sizes.items():
        if not 1 <= value <= MOST:
            raise BadPlan(f"{where}: {name} is {value}", remedy=f"a number from 1 to {MOST}")
    if pool.engines * pool.gpus > MOST:
        raise BadPlan(f"{where}: the degrees take {pool.engines * pool.gpus} GPUs", remedy=f"at most {MOST}")
    if pool.ranks % pool.ep:
        raise BadPlan(
            f"{where}: ep {pool.ep} does not divide the {pool.ranks} GPUs of a stage",
            why="experts are spread over the ranks of tensor parallelism and of attention with requests of its own",
            remedy="choose ep among the divisors",
        )


def stated_deployment(question: ServingQuestion, flags: ServingFlags) -> tuple[Deployment, tuple[str, ...]]:
    """Return the deployment of a command's flags, and the assumptions: unstated replicas fill the GPUs.

    Raises BadPlan for degrees that contradict each other.
    """
    assumed: list[str] = []
    prefill = None if flags.prefill is None else read_pool(flags.prefill, "--prefill")
    dp, tp = flags.dp_attention or 1, flags.tp or 1
    ep = flags.ep or 1
    if flags.ep is None and dp > 1 and question.model.moe:
        ep = tp * dp
        assumed.append(f"ep {ep}: experts are spread over all ranks where attention has its own requests")
    one = Pool(tp=tp, pp=flags.pp or 1, ep=ep, dp_attention=dp)
    require_pool(one, "--tp, --ep, --dp-attention")
    left = question.gpu_count - (prefill.engines * prefill.gpus if prefill else 0)
    engines = flags.replicas or max(1, left // one.gpus if prefill else question.most_engines(one))
    pool = replace(one, engines=engines)
    if question.model.moe:
        experts = question.model.moe.experts
        pool, prefill = made_even(pool, experts), prefill and made_even(prefill, experts)
        twice = {(each.redundant_experts, each.ep) for each in (pool, prefill) if each and each.redundant_experts}
        assumed += [f"{count} experts of a layer are held twice, as many on each of {ep} GPUs" for count, ep in twice]
    if flags.replicas is None:
        assumed.append(f"{engines} replica{'s' if engines > 1 else ''}: as many as the GPUs hold")
    deployment = question.deployment(pool, prefill)
    idle = question.gpu_count - deployment.gpus
    if idle > 0:
        assumed.append(f"{idle} of {question.gpu_count} GPUs are idle")
    return deployment, tuple(assumed)


def unused_settings(deployment: Deployment) -> tuple[str, ...]:
    """Return, as assumptions, the stated settings that change nothing in a deployment."""
    pools = (deployment.pool, *([deployment.prefill] if deployment.prefill else []))
    unused = {
        "two-batch overlap changes nothing: no tokens travel to experts on other GPUs (ep 1)": deployment.two_batches
        and all(pool.ep == 1 for pool in pools),
        "an engine without its own all-reduce is the same: nothing is summed over ranks (tp 1)": (
            not deployment.custom_all_reduce and all(pool.tp == 1 for pool in pools)
        ),
    }
    return tuple(line for line, holds in unused.items() if holds)


def problems_of(question: ServingQuestion, deployment: Deployment) -> tuple[str, ...]:
    """Return why an engine cannot run a deployment on the question's GPUs; empty if it can."""
    cluster = question.cluster
    pools = (deployment.pool, *([deployment.prefill] if deployment.prefill else []))
    found = [lacking] if (lacking := no_format(question)) else []
    if deployment.gpus > question.gpu_count:
        has = f"{question.gpus} are asked for" if question.gpus else f"{cluster.name} has {cluster.gpu_count}"
        found.append(f"the degrees take {deployment.gpus} GPUs, {has}")
    elif question.gpus and not on_nodes(question, pools):
        node = cluster.gpus_per_node
        found.append(f"an engine's GPUs are not on one node: of nodes of {node}, the last has {question.gpus % node}")
    elif apart := out_of_reach(question, deployment):
        found.append(apart)
    for pool in pools:
        reason = refusal(question.model, pool, question.engine) or exceeds_memory(question, pool)
        found += [reason] if reason else []
    return tuple(dict.fromkeys([*found, *too_old(question.model, deployment, question.release)]))
