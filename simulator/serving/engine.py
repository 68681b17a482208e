"""Defaults of serving engines: scheduler, host and kernels. Read from engines.toml."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

from topology.codec import convert
from topology.errors import BadInput
from topology.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowerKernels:
    """What kernels of an engine take beyond those that are listed, on one generation of GPUs; meanings in
    engines.toml.
    """

    experts_s: float = 0.0
    experts_passed: float = 0.0
    latent_s: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One engine's scheduling, and the costs of its steps besides the model's kernels; meanings in engines.toml."""

    name: str
    title: str
    max_num_seqs: int
    max_num_batched_tokens: int
    large_batched_tokens: int
    mixes: bool
    chunks: bool
    reserves_output: bool
    memory_fraction: float
    fraction_of_free: bool
    block_tokens: int
    graph_batch: int
    read_graphs: tuple[tuple[int, int], ...]
    all_reduce: tuple[str, ...]
    experts: str
    shared_beside: int
    attention: str
    slower: dict[str, SlowerKernels]
    norm_in_all_reduce: bool
    host_step_s: float
    host_sequence_s: float
    host_ranks_s: float
    runs_ahead: bool
    overlaps_host: bool
    hybrid_waits: bool
    compiled: bool
    host_exposed_s: float
    host_exposed_sequence_s: float
    host_request_s: float
    host_token_s: float
    first_burst_s: float
    first_burst_always: bool
    host_launch_s: float
    host_eager_launch_s: float
    spread_ttft: float
    spread_tpot: float
    spread_throughput: float
    sources: dict[str, str]

    @property
    def may_be_eager(self) -> bool:
        """Whether its decode steps can run without captured graphs."""
        return self.host_eager_launch_s > 0

    @property
    def program(self) -> str:
        """The engine's program: `vllm` for any of its releases."""
        return RELEASES.get(self.name, self.name)

    def batched_tokens(self, memory_bytes: float) -> int:
        """Return the limit of tokens in one step on a GPU with this memory."""
        return self.large_batched_tokens if memory_bytes >= LARGE_BYTES else self.max_num_batched_tokens

    def captured_tokens(self, tokens: float, prompts: int, *, resumes: bool = False) -> int:
        """Return the tokens of the smallest captured step that holds one with so many tokens and prompts; 0 if none
        does, without prompts, or if it `resumes` a prompt of which some is cached.
        """
        fitting = (step * math.ceil(tokens / step) for most, step in self.read_graphs if tokens <= most)
        return next(fitting, 0) if 0 < prompts <= READ_GRAPH_PROMPTS and not resumes else 0

    def outside_s(self, prompt: float) -> float:
        """Return the seconds for which a request with so many tokens is on the host before a scheduler sees it."""
        return self.host_request_s + self.host_token_s * prompt

    def first_wait_s(self, *, latent: bool) -> float:
        """Return the seconds by which the first requests to a server wait; depends on whether the model has latent
        attention.
        """
        return self.first_burst_s if latent or self.first_burst_always else 0.0

    def inputs_s(self, prompt_tokens: float) -> float:
        """Return the seconds for which a step that reads waits for the host to write its inputs."""
        return READ_INPUTS_S if prompt_tokens and self.read_graphs else 0.0

    def step_s(self, device_s: float, sequences: float) -> float:
        """Return the seconds of a step whose kernels take `device_s`, for this number of answers."""
        host = self.host_step_s + self.host_sequence_s * sequences
        if self.overlaps_host:
            return max(device_s, host) + self.host_exposed_s + self.host_exposed_sequence_s * sequences
        return device_s + host


LARGE_BYTES = 160 * GIB
READ_GRAPH_PROMPTS = 8  # prompts of a captured step that reads
# What the host takes to write and send the inputs of a step of our executor that reads, for which the GPU waits: 0.3 to
# 0.4 ms on one host of H200s, 0.6 to 1.0 on two others (steps replayed from graphs, which nothing else delays;
# examples/validation/serving_2xH200.md). Other engines' hosts have it among what a step takes.
READ_INPUTS_S = 7e-4
COMPARED = ("vllm", "sglang", "trtllm")  # engines compared if a question names none
OVERLAPS_BATCHES = {"sglang": "--enable-two-batch-overlap", "vllm": "--enable-dbo"}  # engines with two batches per step
RECEIVES = {"sglang": "--scheduler-recv-interval"}  # engines that can look for requests less often
# Engines that are described separately for older releases, and other names, with the program of each.
RELEASES = {
    "vllm07": "vllm",
    "vllm013": "vllm",
    "vllm016": "vllm",
    "sglang059": "sglang",
    "trtllm11": "trtllm",
    "trtllm12": "trtllm",
    "tensorrt": "trtllm",
}


@cache
def engines() -> dict[str, Engine]:
    """Return all engines by name."""
    where = "engines.toml"
    tables = tomllib.loads((resources.files("simulator") / "serving" / where).read_text("utf-8"))
    found: dict[str, Engine] = {}
    for name, table in tables.items():
        tables[name] = tables.get(table.pop("like", ""), {}) | table
        found[name] = convert({"name": name, **tables[name]}, Engine, where=f"{where} [{name}]")
    return found


def engine_of(name: str) -> Engine:
    """Return an engine by name. Raises BadInput for an unknown one."""
    known = engines()
    if name not in known:
        raise BadInput(f"no serving engine {name!r}", remedy=f"use one of: {', '.join(known)}")
    return known[name]


def as_started(name: str, *, eager: bool, hybrid: bool, alone: bool = True) -> Engine:
    """Return the engine for a model; `hybrid` models have linear attention. An eager engine replays no graphs and
    launches each kernel from Python; one that is `alone` has one GPU.
    """
    engine = engine_of(name)
    if not alone:
        engine = replace(engine, host_step_s=engine.host_step_s + engine.host_ranks_s)
    if (
        hybrid and engine.program == "sglang"
    ):  # FlashInfer's sums are not taken for them, see all_reduce in engines.toml
        kernels = tuple(kernel for kernel in engine.all_reduce if kernel not in {"flashinfer", "mnnvl", "trtllm"})
        engine = replace(engine, all_reduce=kernels, norm_in_all_reduce=False)
    if hybrid and engine.hybrid_waits:
        engine = replace(engine, overlaps_host=False, host_exposed_s=0.0, runs_ahead=False)
    if not eager:
        return engine
    return replace(engine, graph_batch=0, compiled=False, host_launch_s=engine.host_eager_launch_s)
