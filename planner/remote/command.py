"""`planner --server URL COMMAND ...`: the command answered by a service, printed here as if it had run here."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from click.exceptions import Exit

from planner.io import output
from planner.io.printable import printable
from planner.remote.connect import connect, require_httpx
from planner.remote.errors import error_of
from planner.requests.flag import Flag, Request, flags_of, value_of
from planner.requests.known import ALWAYS_WRITTEN, CONTINUED, RUNS, SERVED
from topology import codec
from topology.codec import JsonObject
from topology.errors import BadInput, UserError

MODEL_FILE = "config.json"  # the config of a model that is given as its directory


def asks(server: str, name: str) -> Callable[[Request], None]:
    """Return the function that answers a command's request by the service at `server`. Raises UserError for a command
    that services do not answer.
    """
    if name not in SERVED:
        raise UserError(
            f"planner {name} is not answered by a service",
            why=f"these are: {', '.join(SERVED)}",
            remedy="leave --server out",
        )
    require_httpx()
    return partial(_answer, server, name)


def _answer(server: str, name: str, asked: Request) -> None:
    """Ask the service, print its answer, and fetch the job's files; raise Exit with its code."""
    if code := _run(server, name, flags_of(type(asked)), asked):
        raise Exit(code)


def _run(server: str, name: str, flags: Mapping[str, Flag], asked: Request) -> int:
    """Ask the service, print its answer, fetch the job's files, and return the exit code."""
    given = {flag.name: value_of(asked, flag) for flag in flags.values()}
    values = {flag.name: given[flag.name] for flag in flags.values() if given[flag.name] != flag.default}
    wanted = _wanted(name, flags, values)
    for flag, path in wanted.items():
        _refuse_overwrite(path, force=bool(values.get("force")))
        values[flag] = path.name
    values.pop("force", None)
    request = {key: _sent(flags[key], value) for key, value in values.items()}
    request["json"] = bool(values.get("json"))
    with connect(server) as service:
        job = service.submit(name, request)
        try:
            document = _follow(service, job)
        except KeyboardInterrupt:
            service.cancel(job)
            raise
        finally:
            output.end_progress()
        if document["state"] != "done" and document["result"] is None:
            raise error_of(document)
        sys.stderr.write(printable(document["warnings"]))
        if request["json"]:
            output.emit_json(document["result"])
        else:
            print(printable(document["result"]["text"]), end="")
        for artifact in document["artifacts"]:
            top, _, rest = artifact["name"].partition("/")
            for path in (path for path in wanted.values() if path.name == top):
                service.download(artifact, path / rest if rest else path)
            if artifact["name"].startswith(f"inputs/{CONTINUED}/"):
                service.download(artifact, Path(values[CONTINUED]))
    return int(document["exit_code"])


def _follow(service: Any, job: str) -> JsonObject:
    """Return a job's document when it has ended, showing its progress until then."""
    document: JsonObject
    while (document := service.job(job, wait_s=0.5))["state"] in {"queued", "running"}:
        output.progress(document["progress"] or document["state"])
    return document


def _wanted(name: str, flags: Mapping[str, Flag], values: JsonObject) -> dict[str, Path]:
    """Return the paths of the files that the command is to write here, by flag."""
    wanted = {key: Path(values[key]) for key, flag in flags.items() if flag.writes and values.get(key) is not None}
    if name in RUNS and CONTINUED not in values:
        flag, plain = ALWAYS_WRITTEN[name]
        wanted.setdefault(flag, Path(time.strftime(f"meshwright-{name}-%Y%m%d-%H%M%S")) / plain)
    return wanted


def _refuse_overwrite(path: Path, *, force: bool) -> None:
    if not force and (path.is_file() or (path.is_dir() and any(path.iterdir()))):
        raise BadInput(f"{path} exists", why="it would be overwritten", remedy="--force")


def _sent(flag: Flag, value: Any) -> Any:
    """Return a flag's value as it is sent: files with their content."""
    if not flag.reads:
        return getattr(value, "value", value)  # an enumeration's word
    if str(value) == "-":
        text, name = codec.read_path_or_stdin("-")[0], "stdin.json"
        return {"name": name, "content": text}
    if str(value).lstrip().startswith("{"):  # JSON as the argument itself
        return str(value)
    path = Path(value)
    if path.is_dir():
        path /= MODEL_FILE
    if path.is_file():
        return {"name": _plain(path.name), "content": codec.read_text(path)}
    return str(value)


def _plain(name: str) -> str:
    """Return a file's name with the characters that the service accepts."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in name)[-100:]
    return kept if kept[0].isalnum() or kept[0] == "_" else f"_{kept[1:]}"
