"""Fetch a model's config.json from the Hugging Face Hub, only with `--online`: that file alone, no code."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from topology.errors import UserError

MOST_BYTES = 1 << 20  # largest config.json; the largest real ones have a few hundred KB, because of lists of layers
_NAME = re.compile(r"(?P<repository>[\w.-]{1,60}/[\w.-]{1,96})(?:@(?P<revision>[\w.-]{1,64}))?", re.ASCII)


def with_fetched_model(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags without `online`; if it was set, `model` becomes the path of a fetched config.json, unless the
    model is known without a network.

    Raises UserError where it cannot be fetched.
    """
    values = {name: value for name, value in flags.items() if name != "online"}
    if not flags.get("online"):
        return values
    model = values.get("model")
    if model is None:
        raise UserError("--online fetches the config.json of a model, and no --model is named")
    if not _is_known(str(model)):
        values["model"] = str(fetch_config(str(model)))
    return values


def fetch_config(name: str) -> Path:
    """Return the config.json of `ORGANISATION/NAME` or `ORGANISATION/NAME@REVISION`, in the cache of huggingface_hub.

    Raises UserError for a name of another form, without huggingface_hub, for a file of more than 1 MiB, and where the
    Hub does not give it.
    """
    match = _NAME.fullmatch(name.strip())
    if match is None:
        raise UserError(
            f"{name[:100]!r} is no name on the Hub", remedy="ORGANISATION/NAME, or ORGANISATION/NAME@REVISION"
        )
    repository, revision = match["repository"], match["revision"]
    try:
        hub: Any = import_module("huggingface_hub")
    except ImportError as error:
        raise UserError("--online needs huggingface_hub", remedy="pip install huggingface_hub") from error
    about = _ask(name, hub.get_hf_file_metadata, hub.hf_hub_url(repository, "config.json", revision=revision))
    if about.size is None or about.size > MOST_BYTES:
        raise UserError(f"the config.json of {repository} has {about.size} bytes", why=f"at most {MOST_BYTES} are read")
    commit = about.commit_hash or revision
    return Path(_ask(name, hub.hf_hub_download, repository, "config.json", revision=commit))


def _ask(name: str, call: Callable[..., Any], *about: Any, **more: Any) -> Any:
    try:
        return call(*about, **more)
    except Exception as error:  # errors of its HTTP library, which differ by release: no such model, gated, no network
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"the Hub does not give the config.json of {name[:100]}",
            why=lines[0][:200],
            remedy="check the name and the network; for a gated model, hf auth login",
        ) from error


def _is_known(name: str) -> bool:
    """Return whether a name is that of a file, or of a model whose shape is known without a network."""
    config: Any = import_module("simulator.config.hf_config")
    try:
        if Path(name).exists():
            return True
    except (OSError, ValueError):
        return False
    return bool(config.is_known(name))
