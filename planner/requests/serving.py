"""What is asked of serving: flags of `--task serve`, shared by commands that can be asked about it. None is not
said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from planner.requests.flag import Request, option
from topology import codec
from topology.errors import PlannerError, UserError

# Commands that accept a saved serving plan, with the fields that name it.
PLANS = {
    "estimate": ("plan",),
    "explain": ("file",),
    "compare": ("first", "second"),
    "apply": ("plan",),
    "export": ("plan",),
}


OF_POINTS = {"isl", "osl", "backend", "metric_kind", "ttft_ms", "tpot_ms", "output_tok_s", "output_tok_s_per_gpu"}


class Task(StrEnum):
    TRAIN = "train"
    SERVE = "serve"


def is_about_serving(command: str, asked: Request) -> bool:
    """Return whether a request is about serving: it says so, or names a saved serving plan or serving points."""
    if getattr(asked, "task", None) is Task.SERVE:
        return True
    if command == "validate":
        return any(map(is_points_file, getattr(asked, "files", ())))
    return any(is_serving_plan(getattr(asked, name)) for name in PLANS.get(command, ()))


def is_points_file(name: str) -> bool:
    """Return whether a file holds serving points: JSON lines whose first says what only they say, or packed ones."""
    return name.endswith(".jsonl.gz") or (name.endswith(".jsonl") and _holds_points(name))


def _holds_points(name: str) -> bool:
    """Return whether the first line of a file is a serving point; one that cannot be read is left to who reads it."""
    try:
        line = next((line for line in codec.read_text(name).splitlines() if line.strip()), "{}")
        first = codec.parse_json(line, where=name)
    except PlannerError:
        return False
    return isinstance(first, dict) and not OF_POINTS.isdisjoint(first)


def is_serving_plan(path: str | Path | None) -> bool:
    """Return whether a file is a saved serving plan; one that cannot be read is left to who reads it."""
    if path is None or str(path) == "-" or not codec.is_file(path):
        return False
    try:
        return is_serving_content(codec.read_json(path))
    except PlannerError:  # the reader of its own kind reports any error
        return False


def is_serving_content(data: Any) -> bool:
    """Return whether a file's JSON says that it is a serving plan."""
    return isinstance(data, dict) and data.get("task") == Task.SERVE and "deployment" in data


def stated(given: Mapping[str, Any]) -> list[str]:
    """Return the names of what was said, in order."""
    return [name for name, value in given.items() if value not in (None, False)]


def refuse(names: Iterable[str], task: Task, flag_names: Mapping[str, str] | None = None, *, instead: str = "") -> None:
    """Raise UserError where options were given that mean nothing for `task`. `instead` says where they do, if a command
    has no `--task`.
    """
    spelled = ((flag_names or {}).get(name, "--" + name.replace("_", "-")) for name in names)
    if flags := ", ".join(dict.fromkeys(spelled)):
        whose, other = ("training", Task.TRAIN) if task is Task.SERVE else ("serving", Task.SERVE)
        raise UserError(
            f"{flags}: an option of {whose}",
            why=f"the task is {task}",
            remedy=f"leave it out, or {instead or f'use --task {other}'}",
        )


def separate() -> Any:
    """Return the field of `--separate`."""
    return option(
        False,
        "--separate",
        help="Also try deployments that read prompts (prefill) and write answers (decode) on separate GPUs.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Files for a comparison of all deployments."""

    csv: Path | None = option(None, "--csv", help="Serving, --objective pareto: save all of its points as a table.")


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a server is asked, and what its clients want; None is what nobody stated."""

    isl: int | None = option(None, "--isl", least=1, most=1 << 24, help="Tokens in a prompt.")
    osl: int | None = option(None, "--osl", least=1, most=1 << 24, help="Tokens in an answer.")
    vary: float | None = option(
        None, "--vary", least=0, most=1, help="How much these lengths vary, as a share; default: 0.2."
    )
    concurrency: int | None = option(
        None,
        "--concurrency",
        least=1,
        most=1 << 16,
        help="Clients; each sends a request as soon as its last one is answered.",
    )
    request_rate: float | None = option(
        None, "--request-rate", least=1e-06, most=1000000.0, help="Requests per second; they arrive as --arrivals says."
    )
    arrivals: str | None = option(
        None, "--arrivals", help="How requests arrive: poisson (default), constant, or gamma:CV for bursts."
    )
    requests: str | None = option(
        None, "--requests", help="File of requests, as JSON lines or CSV with arrival_s, prompt, output."
    )
    cached_prompt: float | None = option(
        None, "--cached-prompt", least=0, most=1, help="Share of each prompt that the prefix cache holds."
    )
    ttft: str | None = option(None, "--ttft", help="Target: time to the first token of an answer (0.5, 0.5s or 500ms).")
    tpot: str | None = option(None, "--tpot", help="Target: time per token after the first (0.02, 0.02s or 20ms).")


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The engine that serves, and its settings."""

    engine: str | None = option(
        None,
        "--engine",
        help="vllm, sglang, trtllm, or meshwright, which planner apply runs; with a release: vllm==0.8.3.",
    )
    weights: str | None = option(
        None, "--weights", help="Data type of weights: bfloat16, float8, float4, int4, or mxfp4 (experts)."
    )
    kv_cache: str | None = option(None, "--kv-cache", help="Data type of the KV cache: bfloat16 or float8.")
    max_num_seqs: int | None = option(
        None,
        "--max-num-seqs",
        least=1,
        most=1 << 16,
        help="Most requests that an engine answers at a time; default: the engine's own.",
    )
    max_num_batched_tokens: int | None = option(
        None, "--max-num-batched-tokens", least=16, most=1 << 20, help="Most tokens in a step of an engine."
    )
    gpu_memory_utilization: float | None = option(
        None, "--gpu-memory-utilization", least=0.01, most=1, help="Share of a GPU's memory that an engine may use."
    )
    eager: bool | None = option(
        None, "--eager/--no-eager", help="Run the engine without CUDA graphs and without compilation."
    )
    no_custom_all_reduce: bool | None = option(
        None,
        "--no-custom-all-reduce/--custom-all-reduce",
        help="Let NCCL do all-reduces, instead of the engine's own kernel.",
    )
    two_batch_overlap: bool | None = option(
        None,
        "--two-batch-overlap/--one-batch",
        help="Compute one half of a step while tokens of the other are on their way to experts.",
    )
    receive_every: int | None = option(
        None, "--receive-every", least=1, most=1 << 16, help="Look for new requests after so many steps; default: 1."
    )
    draft_tokens: int | None = option(
        None, "--draft-tokens", least=1, most=16, help="Tokens that the model's prediction layer (MTP) drafts a step."
    )
    accepted_tokens: float | None = option(
        None, "--accepted-tokens", least=0, most=16, help="Of --draft-tokens, how many are right on average."
    )


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Parts of one deployment, which a search chooses."""

    replicas: int | None = option(
        None, "--replicas", least=1, help="Number of engines; default: as many as the GPUs hold."
    )
    dp_attention: int | None = option(
        None, "--dp-attention", least=1, help="Data-parallel degree of attention: ranks that each hold other requests."
    )
    prefill: str | None = option(
        None, "--prefill", help="Engines that only read prompts, such as 2xtp4; the others write answers."
    )
