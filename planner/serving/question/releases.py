"""Which releases of an engine have the features that a deployment needs: facts in releases.toml, each with its
source.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources

from simulator.config.model import Model
from simulator.serving.deployment import Deployment
from simulator.serving.engine import engine_of
from topology.codec import convert
from topology.errors import BadInput

# 1.2.0rc6.post2 is sorted as 1.2.0rc6.
_RELEASE = re.compile(
    r"v?([0-9]{1,4}(?:\.[0-9]{1,6}){0,3})(?:\.?(?:(rc)([0-9]{1,4})(?:\.post[0-9]{1,4})?|(post)([0-9]{1,4})))?"
)
_STAGES = {"rc": -1, None: 0, "post": 1}
OVERLAPS_FROM = "0.14.0"  # release notes: async scheduling is enabled by default (#27614)
REWRITTEN_FROM, REWRITTEN_SINCE = "0.8.0", "2025-03-18"  # release notes: the V1 engine is the default; PyPI
FUSES_FROM = "0.17.0"  # sums with norms by default (vllm-project/vllm pull request 34299, after 0.16 was cut)
HYBRIDS_FROM = "0.5.10"  # overlap of networks with linear attention, see hybrid_waits in engines.toml
HYBRIDS_SINCE = "2026-04-05"  # when it was packaged (the wheel on PyPI)
# First releases of TensorRT-LLM as engines.toml describes them apart: of 1.2 and of 1.3.
TRTLLM_12, TRTLLM_13 = "1.2.0rc0", "1.3.0rc0"
PYTORCH_SINCE = "2025-09-24"  # when 1.0 was packaged, whose default is the PyTorch backend (PyPI)
WORDS = {
    "pipeline_parallel": "pipeline parallelism",
    "expert_parallel": "experts spread over GPUs",
    "dp_attention": "attention with requests of its own on each rank, behind one server",
    "latent_attention": "latent attention with a compressed cache",
    "float8_weights": "8-bit weights",
    "float4_weights": "4-bit floating-point weights",
    "float8_cache": "a KV cache in fp8_e4m3",
    "separated": "reading and writing on GPUs of their own, connected by NIXL",
}

Release = tuple[tuple[int, ...], int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """`since` has it, `absent` lacks it; an empty `absent` is unknown."""

    since: str
    absent: str
    source: str


@cache
def facts() -> dict[str, dict[str, Fact]]:
    """Return the facts by engine and feature."""
    text = (resources.files("planner") / "serving" / "question" / "releases.toml").read_text("utf-8")
    return {
        engine: {name: convert(fact, Fact, where=f"releases.toml [{engine}.{name}]") for name, fact in table.items()}
        for engine, table in tomllib.loads(text).items()
    }


def parse_release(text: str) -> Release:
    """Return a key by which releases sort: 0.4.6rc1, 0.4.6, 0.4.6.post2, 0.4.10. Raises BadInput."""
    found = _RELEASE.fullmatch(text.strip())
    if found is None:
        raise BadInput(f"{text[:40]!r} is not a release", remedy="write it as PyPI does: 0.8.3, 0.4.6.post2")
    numbers = [int(part) for part in found[1].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers), _STAGES[found[2] or found[4]], int(found[3] or found[5] or 0)


def split_engine(text: str) -> tuple[str, str]:
    """Return the name and the release of `vllm==0.8.3`, the release empty for a name alone. Raises BadInput."""
    name, pinned, release = text.partition("==")
    engine = engine_of(name.strip()).name
    if not pinned:
        return engine, ""
    program = engine_of(engine).program
    if program not in facts():
        raise BadInput(f"releases of {engine} are not distinguished", remedy=f"of {', '.join(facts())} they are")
    parse_release(release)
    release = release.strip().removeprefix("v")
    described = {"vllm": vllm_of, "sglang": sglang_of, "trtllm": trtllm_of}.get(program, lambda _: engine)
    return described(release), release


def vllm_of(release: str, date: str = "") -> str:
    """Return our engine for a release of vLLM; that of the date if the release is not stated or not readable, and
    without one the last that schedules while the GPU waits.
    """
    try:
        found = parse_release(release)
    except BadInput:
        return "vllm07" if date and date < REWRITTEN_SINCE else "vllm013"
    if found < parse_release(REWRITTEN_FROM):
        return "vllm07"
    if found < parse_release(OVERLAPS_FROM):
        return "vllm013"
    return "vllm" if found >= parse_release(FUSES_FROM) else "vllm016"


def sglang_of(release: str, date: str = "") -> str:
    """Return the engine that describes a release of SGLang; by default that of the date, or else the present one; an
    older one if the release is not readable, such as a nightly build.
    """
    if not release:
        return "sglang059" if date and date < HYBRIDS_SINCE else "sglang"
    try:
        return "sglang" if parse_release(release) >= parse_release(HYBRIDS_FROM) else "sglang059"
    except BadInput:
        return "sglang059"


def trtllm_of(release: str, date: str = "") -> str:
    """Return our engine for a release of TensorRT-LLM; that of the date if the release is not stated or not readable,
    and without one 1.0.
    """
    try:
        found = parse_release(release)
    except BadInput:
        return "tensorrt" if date and date < PYTORCH_SINCE else "trtllm11"
    if found < parse_release("1.0.0rc0"):
        return "tensorrt"
    if found < parse_release(TRTLLM_12):
        return "trtllm11"
    return "trtllm12" if found < parse_release(TRTLLM_13) else "trtllm"


def needed(model: Model, deployment: Deployment) -> Iterator[str]:
    """Yield the features that a deployment of a model needs, as releases.toml names them."""
    pools = [deployment.pool, *([deployment.prefill] if deployment.prefill else [])]
    needs = {
        "pipeline_parallel": any(pool.pp > 1 for pool in pools),
        "expert_parallel": any(pool.ep > 1 for pool in pools),
        "dp_attention": any(pool.dp_attention > 1 for pool in pools),
        "latent_attention": model.latent is not None,
        "float8_weights": deployment.weights == "float8",
        "float4_weights": deployment.weights == "float4",
        "float8_cache": deployment.kv_cache == "float8",
        "separated": deployment.prefill is not None,
        f"model_{model.family}": True,
    }
    yield from (name for name, wanted in needs.items() if wanted)


def too_old(model: Model, deployment: Deployment, release: str) -> tuple[str, ...]:
    """Return the features that a release of the deployment's engine lacks, with the release that has them; empty if no
    release is stated.
    """
    if not release:
        return ()
    engine = engine_of(deployment.engine)
    title, known, found = engine_of(engine.program).title, facts().get(engine.program, {}), []
    for name in needed(model, deployment):
        fact = known.get(name)
        if fact is None or parse_release(release) >= parse_release(fact.since):
            continue
        what = WORDS.get(name) or f"models of the family {name.removeprefix('model_')}"
        surely = bool(fact.absent) and parse_release(release) <= parse_release(fact.absent)
        lacks = "does not have" if surely else "is not known to have"
        found.append(f"{title} {release} {lacks} {what}: {fact.since} has it ({fact.source})")
    return tuple(found)
