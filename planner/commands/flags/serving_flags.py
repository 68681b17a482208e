"""The flags of `--task serve`, shared by the commands that can be asked about serving."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import wraps
from typing import Annotated, Any

import typer

from topology.errors import UserError

PANEL = "Serving"  # of --help
MOST_CLIENTS, MOST_TOKENS = 1 << 16, 1 << 24


class Task(StrEnum):
    TRAIN = "train"
    SERVE = "serve"


TaskOption = Annotated[Task, typer.Option("--task", help="train: a step; serve: answers to requests.")]


def _flag(flag: str, what: str, *, least: float | None = None, most: float | None = None) -> Any:
    return typer.Option(flag, help=what, rich_help_panel=PANEL, min=least, max=most)


# By the parameter that carries them; None and False are not said.
QUESTION_FLAGS: dict[str, Any] = {
    "isl": Annotated[int | None, _flag("--isl", "Tokens of a prompt.", least=1, most=MOST_TOKENS)],
    "osl": Annotated[int | None, _flag("--osl", "Tokens of an answer.", least=1, most=MOST_TOKENS)],
    "vary": Annotated[float | None, _flag("--vary", "Share by which lengths vary; default 0.2.", least=0, most=1)],
    "concurrency": Annotated[
        int | None, _flag("--concurrency", "Clients that ask again at once.", least=1, most=MOST_CLIENTS)
    ],
    "request_rate": Annotated[
        float | None, _flag("--request-rate", "Requests a second, Poisson.", least=1e-6, most=1e6)
    ],
    "arrivals": Annotated[
        str | None, _flag("--arrivals", "At --request-rate: constant, poisson, or gamma:CV for bursts.")
    ],
    "requests": Annotated[
        str | None, _flag("--requests", "File of requests, JSON lines or CSV: arrival_s, prompt, output.")
    ],
    "cached_prompt": Annotated[
        float | None, _flag("--cached-prompt", "Share of prompts that the prefix cache holds.", least=0, most=1)
    ],
    "ttft": Annotated[float | None, _flag("--ttft", "Target: seconds to the first token.", least=0)],
    "tpot": Annotated[float | None, _flag("--tpot", "Target: seconds a token after it.", least=0)],
    "engine": Annotated[
        str | None,
        _flag("--engine", "vllm, sglang, trtllm, or meshwright, which planner apply runs; vllm==0.8.3 for a release."),
    ],
    "weights": Annotated[str | None, _flag("--weights", "bfloat16, float8, float4, int4, or mxfp4 (experts).")],
    "kv_cache": Annotated[str | None, _flag("--kv-cache", "bfloat16 or float8.")],
    "max_num_seqs": Annotated[
        int | None, _flag("--max-num-seqs", "Answers that go on at once; default: the engine's.", least=1, most=1 << 16)
    ],
    "max_num_batched_tokens": Annotated[
        int | None, _flag("--max-num-batched-tokens", "Tokens of a step.", least=16, most=1 << 20)
    ],
    "gpu_memory_utilization": Annotated[
        float | None, _flag("--gpu-memory-utilization", "Share of a GPU's memory to use.", least=0.01, most=1)
    ],
}
QUESTION_FLAGS |= {
    "eager": Annotated[bool | None, _flag("--eager", "The engine captures no CUDA graph and compiles nothing.")],
    "no_custom_all_reduce": Annotated[bool | None, _flag("--no-custom-all-reduce", "Sums over GPUs are NCCL's.")],
}
SEPARATE = Annotated[bool, _flag("--separate", "Read prompts and write answers on GPUs of their own, too.")]
DEPLOYMENT_FLAGS: dict[str, Any] = {
    "replicas": Annotated[int | None, _flag("--replicas", "Engines; default: as many as the GPUs hold.", least=1)],
    "dp_attention": Annotated[
        int | None, _flag("--dp-attention", "Ranks whose attention has requests of its own.", least=1)
    ],
    "prefill": Annotated[
        str | None, _flag("--prefill", "Engines that only read prompts, such as 2xtp4; the others write.")
    ],
}
# What a deployment shares with a training plan.
DEGREES = frozenset({"tp", "pp", "ep"})


def typed(context: typer.Context, parameter: str) -> bool:
    """Return whether the command line has a parameter's option, be it with the value that is the default."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def takes_serving_flags(
    *tables: Mapping[str, Any],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator: the command, whose parameter `serving` is a dictionary, gets an option for each of `tables`."""
    flags = {name: kind for table in tables for name, kind in table.items()}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            stated = {name: given.pop(name) for name in flags}
            command(**given, serving=stated)

        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "serving"]
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [parameter.replace(kind=keyword) for parameter in own]
        parameters += [
            inspect.Parameter(name, keyword, default=False if kind is SEPARATE else None, annotation=kind)
            for name, kind in flags.items()
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what inspect reads
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def stated(given: Mapping[str, Any]) -> list[str]:
    """Return the names of what was said, in order."""
    return [name for name, value in given.items() if value not in (None, False)]


def refuse(names: list[str], task: Task, flag_names: Mapping[str, str] | None = None) -> None:
    """Raise UserError where options were given that mean nothing for `task`."""
    if names:
        flags = ", ".join((flag_names or {}).get(name, "--" + name.replace("_", "-")) for name in names)
        whose, other = ("training", Task.TRAIN) if task is Task.SERVE else ("serving", Task.SERVE)
        raise UserError(
            f"{flags}: an option of {whose}",
            why=f"the task is {task}",
            remedy=f"leave it out, or use --task {other}",
        )
