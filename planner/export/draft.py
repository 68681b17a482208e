"""What a target answers: the body of a file, the settings in it, and what it could not say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from planner.export.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """`body` is text, or a document for a target whose format has no comments.

    `settings` are what the target's own parser must read back, by its own spelling of the key. `unsaid` says in words
    what of the plan the target cannot express, `needed` what the user has to put beside the file.
    """

    body: str | dict[str, Any]
    settings: dict[str, Any]
    unsaid: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)  # variables set, each with its reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One version of a tool that plans are written for. `write` raises Infeasible for a plan it cannot express."""

    name: str
    version: str
    title: str
    file_name: str
    write: Callable[[Job], Draft]
    first_line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A finished file. `text` carries a header with the same facts as the other fields."""

    target: str
    version: str
    file_name: str
    plan_hash: str
    settings: dict[str, Any]
    unsaid: tuple[str, ...]
    needed: tuple[str, ...]
    notes: tuple[str, ...]
    environment: dict[str, str]
    text: str
