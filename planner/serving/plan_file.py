"""Saved serving plans: the complete question, the chosen deployment, and fingerprints of both.

The same question writes the same bytes. An edited file is refused, since its answer may not belong to its question.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from planner.io.version import version
from planner.requests.serving import is_serving_content
from planner.serving.question.question import OBJECTIVES, ServingQuestion
from planner.serving.question.releases import split_engine
from planner.serving.question.trace_file import MAX_REQUESTS, read_request
from planner.serving.stated import require_pool
from simulator.config.verify import verify_model
from simulator.serving.deployment import CACHE_BYTES, WEIGHT_BYTES, Deployment
from simulator.serving.fit_steps import BOUNDS, LATEST_S
from simulator.serving.traffic import Traffic
from topology import codec
from topology.catalog.verify import require_possible
from topology.errors import BadPlan
from topology.profile.profile import FASTEST_S
from topology.ranges import Range, out_of_range

SCHEMA_VERSION = 1
TASK = "serve"
LEAST_RATE = 1e-6  # requests a second
_COUNTS = ("mean", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "seed")
_RANGES: dict[str, Range] = {
    **dict.fromkeys(_COUNTS, (0, 1 << 31)),
    **dict.fromkeys(("concurrency", "requests"), (0, 4 * MAX_REQUESTS)),
    **dict.fromkeys(("receive_every", "balance_every", "redundant_experts"), (0, 1 << 16)),
    **dict.fromkeys(("low", "high", "shape"), (0, 100)),
    **dict.fromkeys(("request_rate", "gpu_price_per_hour"), (0, 1e9)),
    **dict.fromkeys(("cached_prompt", "memory_fraction"), (0, 1)),
    **dict.fromkeys(("ratio", "cached_ratio", "pair_ratio"), BOUNDS),
    **dict.fromkeys(("tokens", "ranks", "nodes", "tp"), (1, 1 << 31)),
    "late_s": (-LATEST_S, LATEST_S),
    "time_s": (FASTEST_S, 1e6),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingFile:
    """The content of a file."""

    schema_version: int
    task: str
    tool_version: str
    fingerprints: dict[str, str]
    question: ServingQuestion
    deployment: Deployment


def serving_file(question: ServingQuestion, deployment: Deployment) -> ServingFile:
    """Return the content for a chosen deployment."""
    return ServingFile(
        schema_version=SCHEMA_VERSION,
        task=TASK,
        tool_version=version(),
        fingerprints={"question": codec.fingerprint(question), "deployment": codec.fingerprint(deployment)},
        question=question,
        deployment=deployment,
    )


def load_serving(path: str | Path) -> ServingFile:
    """Return a file's content, verified. Raises BadInput or BadPlan."""
    data = codec.read_json(path)
    if not is_serving_content(data):
        raise BadPlan(
            f"{path} is not a serving plan", remedy="make one with planner suggest --task serve --out plan.json"
        )
    content = codec.convert(data, ServingFile, where=str(path))
    if content.schema_version != SCHEMA_VERSION:
        raise BadPlan(f"{path} has schema {content.schema_version}", why=f"this is {version()}, which reads 1")
    question, deployment = content.question, content.deployment
    # Computed from the file's own text, so that a release with more fields can read it.
    now = {name: codec.fingerprint(data.get(name)) for name in ("question", "deployment")}
    if now != content.fingerprints:
        raise BadPlan(
            f"{path} was edited: its contents do not match their fingerprints",
            remedy="make it again with planner suggest --task serve --out",
        )
    verify_model(question.model, where=str(path))
    require_possible(question.cluster, where=str(path))
    if not 0 <= question.gpus <= question.cluster.gpu_count:
        raise BadPlan(f"{path}: {question.gpus} GPUs of a cluster with {question.cluster.gpu_count}")
    require_pool(deployment.pool, str(path))
    if deployment.prefill is not None:
        require_pool(deployment.prefill, str(path))
    for part in (question.traffic, deployment):
        for problem in out_of_range(part, _RANGES, path="plan"):
            raise BadPlan(f"{path}: {problem}")
    _require_known(question, str(path))
    if deployment != question.deployment(deployment.pool, deployment.prefill):
        raise BadPlan(f"{path}: the deployment has another engine, other formats or limits than its question")
    _require_traffic(question.traffic, str(path))
    return content


def _require_traffic(traffic: Traffic, where: str) -> None:
    for name, lengths in (("prompt", traffic.prompt), ("output", traffic.output)):
        if lengths.low > lengths.high:
            raise BadPlan(f"{where}: traffic.{name}.low is above its high")
    if 0 < traffic.request_rate < LEAST_RATE:
        raise BadPlan(
            f"{where}: traffic.request_rate is {traffic.request_rate:g}", why=f"at least {LEAST_RATE:g}, or 0"
        )
    if len(traffic.trace) > MAX_REQUESTS:
        raise BadPlan(f"{where} has more than {MAX_REQUESTS} requests")
    for number, one in enumerate(traffic.trace):
        read_request(one._asdict(), f"{where}: traffic.trace[{number}]")


def _require_known(question: ServingQuestion, where: str) -> None:
    split_engine(question.engine + (f"=={question.release}" if question.release else ""))
    words = ((question.weights, WEIGHT_BYTES), (question.kv_cache, CACHE_BYTES), (question.objective, OBJECTIVES))
    for word, known in words:
        if word not in known:
            raise BadPlan(f"{where}: {word[:40]!r} is not known", remedy=f"one of: {', '.join(known)}")
