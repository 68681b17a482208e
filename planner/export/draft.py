"""The output of a target: the body of a file, its settings, and what it cannot express."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from planner.export.job import ExportJob
from planner.export.mapping import Settings, Table
from simulator.config.plan import Plan
from simulator.runtimes.environment import Variable


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The content of an exported file before its header is added.

    `body` is text, or a document for a format without comments. `settings` are the values that the target's own parser
    must read back, by its keys. `not_expressed` lists parts of the plan that the target cannot express, `needed` what
    the user must provide, and `run` is the command that starts the file. `files` must be in the working directory when
    it starts: they are written next to the file, or by it if it is a script. `environment` has variables besides those
    that every plan assumes. `plan` is what the target runs, where that is not the plan itself.
    """

    body: str | Settings
    settings: Settings
    not_expressed: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    run: str = ""
    notes: tuple[str, ...] = ()
    environment: tuple[Variable, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    plan: Plan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One version of a tool that is a target of exports. `write` raises Infeasible for a plan that it cannot run."""

    name: str
    version: str
    title: str
    file_name: str
    write: Callable[[ExportJob], Draft]
    first_line: str = ""
    run: str = ""  # the command that starts the file, if it is the same for every plan
    table: Table = ()  # reads the file back


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """An exported file, and `files` that belong next to it. The header of `text` contains the other fields.

    `environment` is set for every rank, and `run` is the command that starts the file from its folder.
    """

    target: str
    version: str
    file_name: str
    plan_hash: str
    settings: Settings
    not_expressed: tuple[str, ...]
    needed: tuple[str, ...]
    notes: tuple[str, ...]
    environment: tuple[Variable, ...]
    run: str
    text: str
    files: dict[str, str] = field(default_factory=dict)
