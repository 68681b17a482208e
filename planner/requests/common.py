"""Options that several commands have, each a function that returns a field of a request."""

from __future__ import annotations

from typing import Any

from planner.requests.flag import option


def model(default: str | None) -> Any:
    return option(
        default, "--model", "--config", help="Model by its name here or on the Hub, config.json or its directory."
    )


def online() -> Any:
    return option(
        False, "--online", help="Fetch the config.json of a model on the Hugging Face Hub whose name is not known here."
    )


def cluster(default: str) -> Any:
    return option(
        default,
        "--cluster",
        help="GPUs (2x8xH100), machine type (p5.48xlarge), catalogue name, file, captured text, or local.",
    )


def gpu() -> Any:
    return option(None, "--gpu", help="GPU model, such as h200-sxm, if a captured text does not name it.")


def seq_len() -> Any:
    return option(
        None,
        "--seq-len",
        "--seq",
        least=1,
        most=1 << 31,
        help="Tokens in a sequence; default: 8192, or the model's own limit if that is less.",
    )


def global_batch() -> Any:
    return option(
        None, "--global-batch", least=1, most=1 << 31, help="Sequences in a step; default: that of a published recipe."
    )


def profile() -> Any:
    return option(None, "--profile", help="Measured profile of the cluster.")


def strict() -> Any:
    return option(
        False, "--strict", help="Refuse a profile that is old, or was made with other GPUs or another driver."
    )


def redact() -> Any:
    return option(
        False, "--redact", help="Leave out UUIDs, addresses, folders, host and user names, so that it can be shared."
    )


def learned_runtime() -> Any:
    return option(
        None, "--runtime", help="Learned runtime (from planner learn), instead of the one that the cases name."
    )


def json_flag() -> Any:
    return option(False, "--json", help="Print one JSON document instead of text.")


def compiled() -> Any:
    return option(None, "--compile/--no-compile", help="Compile the model with torch.compile.")


def tolerance() -> Any:
    return option(
        None,
        "--tolerance",
        percent=True,
        metavar="PERCENT",
        help="Exit with 4 if an error is larger than this: 5 or 5%.",
    )


def param_dtype() -> Any:
    return option(None, "--param-dtype", help="Data type of stored parameters: float32, bfloat16 or float16.")


def compute_dtype() -> Any:
    return option(
        None,
        "--compute-dtype",
        help="Data type of matrix products: bfloat16, float16, float32, tf32, float8, float4; default: the runtime's.",
    )


def time_limit() -> Any:
    return option(
        None, "--time-limit", least=0.0, help="Stop searching after this many seconds and answer with the best so far."
    )
