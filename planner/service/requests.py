"""Typed requests, generated from the commands' flags, and their command lines.

A flag that names a file takes the file itself: `{"name": "topo.txt", "content": "..."}`, or any other JSON object or
list as the content of a JSON file. Names of known models and clusters stay strings.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, create_model

from planner.requests.flag import Flag, command_line, flags_of
from planner.requests.known import ALWAYS_WRITTEN, CONTINUED, SERVED, request_of
from topology import codec
from topology.codec import JsonObject
from topology.errors import BadInput

PLAIN_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}"
INPUTS = "inputs"  # the folder of a job's inputs, in the folder that it works in
MAX_STRING = 4096
MOST_VALUES = 64  # of a flag that may be repeated
FIELD = "_flag"  # behind a flag's name in Python, where some names are taken
FOLLOWED = "168h"  # a job of a scheduler, by default


class File(BaseModel):
    """A file that a flag names. `content` is its text, or the JSON that it holds."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(pattern=f"^{PLAIN_NAME}$")
    content: str | JsonObject | list[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """The content of a request: values by flag, and the texts of files by flag."""

    command: str
    values: JsonObject
    files: dict[str, tuple[str, str]]  # flag -> (name, text)


def served() -> dict[str, Mapping[str, Flag]]:
    """Return the flags of the commands that are served, by command and name."""
    return {name: flags_of(request_of(name)) for name in SERVED}


def request_type(command: str, flags: Mapping[str, Flag]) -> type[BaseModel]:
    """Return the type of a command's request: one field a flag, none of them with a default but `null`."""
    fields: JsonObject = {f"{name}{FIELD}": _field(name, flag) for name, flag in flags.items()}
    about = (request_of(command).__doc__ or "").split("\n", 1)[0]
    config = ConfigDict(extra="forbid", title=f"{command.title()}Request")
    return create_model(f"{command.title()}Request", __config__=config, __doc__=about, **fields)


def job_request(
    command: str, flags: Mapping[str, Flag], request: BaseModel, *, may_read: bool, programs: Collection[str] = ()
) -> JobRequest:
    """Return the content of a request. `may_read` allows files of this machine by absolute path; `programs` are those
    that it may start. Raises BadInput.
    """
    values: JsonObject = {}
    files: dict[str, tuple[str, str]] = {}
    for name, flag in flags.items():  # in this order, so that equal requests are equal texts in every process
        value = getattr(request, f"{name}{FIELD}") if f"{name}{FIELD}" in request.model_fields_set else None
        if value is None:
            continue
        if name == "online" and value:
            raise BadInput("online: the service fetches nothing", remedy="send the config.json as model")
        if flag.reads and not isinstance(value, str):
            files[name] = _file(name, value)
            continue
        if flag.reads:
            _refuse_path(name, value, may_read=may_read)
        if flag.program:
            _refuse_program(name, value, programs)
        values[name] = value
    return JobRequest(command=command, values=values, files=files)


def arguments(flags: Mapping[str, Flag], asked: JobRequest) -> list[str]:
    """Return the arguments of `planner` for a request; its files are in the folder `INPUTS` of the job."""
    said = dict(asked.values)
    text = said.pop("json", True) is False
    for name, (file, _) in asked.files.items():
        said[name] = f"{INPUTS}/{name}/{file}"
    if asked.command in ALWAYS_WRITTEN and CONTINUED not in said:
        flag, name = ALWAYS_WRITTEN[asked.command]
        said.setdefault(flag, name)
    if is_scheduled(asked.command, said):
        said.setdefault("wait", FOLLOWED)
    if not text:
        said["json"] = True
    return command_line(asked.command, flags, said)


def is_scheduled(command: str, values: Mapping[str, Any]) -> bool:
    """Return whether a request is for a run that a scheduler makes elsewhere and that is only followed here."""
    submits = values.get("submit") is True and not values.get("dry_run")
    return command == "apply" and submits and values.get("launcher", "local") != "local"


def write_inputs(asked: JobRequest, folder: Path) -> None:
    """Write the files that were sent into the folder that a job works in."""
    for name, (file, text) in asked.files.items():
        codec.write_text(folder / INPUTS / name / file, text)


def _field(name: str, flag: Flag) -> tuple[Any, Any]:
    spellings = dict.fromkeys([name, name.replace("_", "-"), *flag.others])
    default: Any = ... if flag.required and not flag.writes else None
    described = Field(
        default, validation_alias=AliasChoices(*spellings), serialization_alias=name, description=flag.help
    )
    return _type(flag), described


def _type(flag: Flag) -> Any:
    if flag.choices:
        return Literal[flag.choices] | None
    if flag.writes:
        return Annotated[str, Field(pattern=f"^{PLAIN_NAME}$")] | None
    if flag.kind in {int, float}:
        return Annotated[flag.kind, Field(ge=flag.least, le=flag.most)] | None
    if flag.kind is bool:
        return bool | None
    text = Annotated[str, Field(max_length=MAX_STRING)]
    if flag.many and not flag.reads:
        return text | Annotated[list[text], Field(max_length=MOST_VALUES)] | None
    if flag.reads:
        return text | File | JsonObject | list[Any] | None
    return text | int | float | None  # a number is text on a command line


def _file(flag: str, value: File | JsonObject | list[Any]) -> tuple[str, str]:
    """Return the name and the text of a file that was sent. Raises BadInput."""
    if isinstance(value, dict) and set(value) == set(File.model_fields):
        raise BadInput(
            f"{flag}: {value['name']!r} cannot be a file's name", why="letters, digits, dots, dashes, no folder"
        )
    name, content = (value.name, value.content) if isinstance(value, File) else (f"{flag}.json", value)
    return name, content if isinstance(content, str) else codec.to_json(content)


def _refuse_program(flag: str, value: object, programs: Collection[str]) -> None:
    """Refuse to start a program that is not in the service's settings. Raises BadInput."""
    try:
        program = next(iter(shlex.split(str(value))), "")
    except ValueError as error:
        raise BadInput(f"{flag} is no command line", why=str(error)) from error
    if program not in programs:
        raise BadInput(
            f"{flag} may not start {program[:80]!r} here",
            why="it would run as the user of the service, which allows "
            + (f"only {', '.join(programs)}" if programs else "no program"),
            remedy="planner tune --command in a terminal, or planner service --allow-program",
        )


def _refuse_path(flag: str, value: str, *, may_read: bool) -> None:
    """Refuse values that would make the service read a file that was not sent. Raises BadInput."""
    if value == "-":
        raise BadInput(f"{flag} is -", why="a service has no standard input", remedy="send the file itself")
    path = Path(value)
    outside = path.is_absolute() or ".." in path.parts or value.startswith("~") or re.search(r"[\x00-\x1f]", value)
    if outside and not (may_read and path.is_absolute()):
        raise BadInput(
            f"{flag} names a file of the service's machine",
            why="a service reads what it is sent, no other files",
            remedy=f'send the file itself: "{flag}": {{"name": "file.json", "content": ...}}',
        )
