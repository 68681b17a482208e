"""Make the executor's request for a serving question, with the prediction made before the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from planner.serving.question.question import ServingQuestion
from simulator.serving.deployment import Deployment, Pool
from simulator.serving.engine import engine_of
from simulator.serving.forward_pass import ForwardPass
from simulator.serving.latency import Latency, latency
from simulator.serving.server import serve
from simulator.serving.traffic import Traffic
from topology import codec
from topology.codec import JsonObject
from topology.errors import BadPlan

ENGINE = "meshwright"  # the executor's name in engines.toml
DECODED, CONTEXTS = (1, 4, 16, 64), (512, 2048, 4096, 16384)
PROMPTS = (512, 2048, 8192, 16384)
DECODE, PREFILL = "decode", "prefill"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step to time: `batch` answers in progress with `context` tokens each, or as many prompts of that length."""

    phase: str
    batch: int
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedRun:
    """One run of the executor. `step_s` has the predicted time of each of `steps`, `seen` what clients of each load
    would see.
    """

    question: ServingQuestion
    deployment: Deployment
    steps: tuple[Step, ...]
    loads: dict[str, Traffic]
    step_s: tuple[float, ...]
    seen: dict[str, Latency]
    notes: tuple[str, ...]

    def request(self, *, device: str = "cuda", gpus: tuple[int, ...] = ()) -> JsonObject:
        """Return the executor's request."""
        engine = engine_of(ENGINE)
        longest = max((one.longest for one in self._of_each_load()), default=0)
        return {
            "model": codec.to_builtins(self.question.model),
            "tp": self.deployment.pool.tp,
            "device": device,
            "gpus": list(gpus),
            "max_num_seqs": self.deployment.max_num_seqs or engine.max_num_seqs,
            "max_num_batched_tokens": self.deployment.max_num_batched_tokens or engine.max_num_batched_tokens,
            "max_model_len": max(longest, *(step.context + 32 for step in self.steps), 64),
            "steps": [codec.to_builtins(step) for step in self.steps],
            "loads": [{"name": name, "traffic": codec.to_builtins(traffic)} for name, traffic in self.loads.items()],
            "predicted": {
                "steps": list(self.step_s),
                "loads": {name: codec.to_builtins(seen) for name, seen in self.seen.items()},
            },
        }

    def _of_each_load(self) -> Iterable[ServingQuestion]:
        return (replace(self.question, traffic=traffic) for traffic in self.loads.values())


def all_steps() -> tuple[Step, ...]:
    """Return the steps that describe an engine: batches by contexts, and prompts alone."""
    decoded = [Step(phase=DECODE, batch=batch, context=context) for batch in DECODED for context in CONTEXTS]
    return (*decoded, *(Step(phase=PREFILL, batch=1, context=tokens) for tokens in PROMPTS))


def asked_run(
    question: ServingQuestion,
    pool: Pool,
    *,
    steps: tuple[Step, ...] = (),
    loads: Mapping[str, Traffic] | None = None,
    prefill: Pool | None = None,
) -> AskedRun:
    """Return the run of one engine under the executor, predicted. Raises BadPlan for deployments that the executor
    cannot serve.
    """
    notes = []
    if question.engine != ENGINE:
        notes.append(
            f"served by {engine_of(ENGINE).title}, not {engine_of(question.engine).title}, and predicted for it"
        )
    refused = {
        "separate pools": prefill is not None,
        f"{pool.engines} engines": pool.engines > 1,
        "pipeline stages": pool.pp > 1,
        "experts or attention spread over ranks": pool.ep > 1 or pool.dp_attention > 1,
        f"weights in {question.weights}": question.weights != "bfloat16",
        f"a cache in {question.kv_cache}": question.kv_cache != "bfloat16",
        "prompts that a prefix cache holds": question.traffic.cached_prompt > 0,
    }
    missing = [what for what, there in refused.items() if there]
    if missing:
        raise BadPlan(
            f"the executor does not serve {', '.join(missing)}",
            why="it runs one engine with tensor parallelism in bfloat16",
            remedy="apply such a plan: planner suggest --task serve --engine meshwright --gpus N --out plan.json",
        )
    question = replace(question, engine=ENGINE)
    deployment = question.deployment(pool)
    loads = dict(loads or {"as asked": question.traffic})
    return AskedRun(
        question=question,
        deployment=deployment,
        steps=steps,
        loads=loads,
        step_s=_predicted_steps(question, deployment, steps),
        seen={name: _seen(question, deployment, traffic) for name, traffic in loads.items()},
        notes=tuple(notes),
    )


def _predicted_steps(question: ServingQuestion, deployment: Deployment, steps: tuple[Step, ...]) -> tuple[float, ...]:
    costs = ForwardPass(question.model, question.cluster, deployment, deployment.pool)
    found = []
    for step in steps:
        tokens, batch = step.context, step.batch
        if step.phase == DECODE:
            found.append(costs.seconds(prompt_tokens=0, pairs=0.0, sequences=batch, keys=float(batch * tokens)))
        else:
            pairs = batch * tokens * (tokens + 1) / 2
            found.append(costs.seconds(prompt_tokens=batch * tokens, pairs=pairs, sequences=0, keys=0.0, readers=batch))
    return tuple(found)


def _seen(question: ServingQuestion, deployment: Deployment, traffic: Traffic) -> Latency:
    served = serve(question.model, question.cluster, deployment, traffic)
    return latency(served, ttft_s=question.ttft_s, tpot_s=question.tpot_s)
