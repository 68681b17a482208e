"""Write other plans into the text of a configuration, and check each result by reading it back."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from planner.configs.formats.configuration import CheckFlags, Configuration
from planner.configs.formats.kinds import read_configuration
from planner.export.mapping import PLAN_FACTS, Facts, Settings, facts_of, read, write
from planner.question.cases import Case
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from topology.errors import PlannerError, Unproved

# Facts of a model that some keys depend on.
OF_THE_MODEL = ("moe", "max_positions")
# Facts that choose between two ways to write the same setting.
OF_THE_FILE = ("fsdp_version", "hosts")
FILLS = -1
# Facts that belong to one way of sharding and stay with it.
OF_THE_SHARDING = ("hpz", "instances")


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """Writes plans into a configuration. `asked` is the plan that the file states, `facts` are its facts, and `given`
    the inputs of its reader.
    """

    configuration: Configuration
    asked: Case
    facts: Facts
    given: Facts
    where: str
    flags: CheckFlags

    def diff(self, plan: Plan, runtime: Runtime | None = None) -> str:
        """Return the unified diff with which the file states `plan`; empty if its keys cannot."""
        runtime = runtime or self.asked.question.runtime
        for attempt in self._attempts(plan, runtime):
            try:
                edited = self.configuration.edit(attempt) if attempt else self.configuration.document.text
                again = read_configuration(edited, self.where, self.flags)
                back = read(again.table, again.settings, {**self.given, **again.given, "gpus": self.facts["gpus"]})
            except Unproved:  # the time is over
                raise
            except PlannerError:
                continue
            if self._says(back, plan, runtime):
                return unified(self.configuration.document.text, edited, self.where)
        return ""

    def _attempts(self, plan: Plan, runtime: Runtime) -> Iterator[Settings]:
        """Yield changes of settings that may state `plan`, the fewest first; None removes a key."""
        before, after = self._settings(self.asked.plan, self.asked.question.runtime), self._settings(plan, runtime)
        changes = {key: after.get(key) for key in {**before, **after} if before.get(key) != after.get(key)}
        said = self.configuration.settings
        for entry in self.configuration.table:
            if changes.keys() & {*entry.keys}:
                changes |= {key: None for key in entry.exclusive if key in said and key not in after}
        # A degree that takes all remaining ranks usually fits the new plan too.
        fewer = {key: value for key, value in changes.items() if said.get(key) != FILLS}
        # A batch that is left out follows from the degrees, so it must be stated to stay the same.
        batch = {key: value for key, value in after.items() if "batch" in key and said.get(key) != value}
        seen: list[Settings] = []
        # Last, state everything, for files of older kinds with other defaults.
        for attempt in (fewer, changes, {**fewer, **batch}, {**changes, **batch}, {**changes, **after}):
            if attempt not in seen:
                seen.append(attempt)
                yield attempt

    def _settings(self, plan: Plan, runtime: Runtime) -> Settings:
        question, now = self.asked.question, self.asked.plan
        known = facts_of(plan, question.workload, runtime, question.model.layers)
        kept = (*OF_THE_MODEL, *OF_THE_FILE, *(OF_THE_SHARDING if plan.data_parallel == now.data_parallel else ()))
        extra = {name: self.facts[name] for name in kept if name in self.facts}
        return write(self.configuration.table, {**extra, **known})

    def _says(self, back: Facts, plan: Plan, runtime: Runtime) -> bool:
        """Return whether a text that was read back means `plan`; fields that it cannot state must be unchanged."""
        now = self.asked.plan
        for name in PLAN_FACTS - {"placement"}:
            wanted = getattr(plan, name)
            if name in {"cp_method", "reshard_after_forward"} and (
                wanted is None or (wanted == getattr(now, name) and back.get(name) is None)
            ):
                continue  # the runtime's own mode, under any of its names, or that of its recipes
            if name == "sequence_parallel" and (plan.tp == 1 or name not in back):
                continue
            if back.get(name, getattr(now, name)) != wanted:
                return False
        question = self.asked.question
        stated = {"global_batch_size": None, "compile": question.runtime.compile, **back}
        same_batch = stated["global_batch_size"] in {None, question.workload.global_batch_size}
        return same_batch and stated["compile"] == runtime.compile


def unified(before: str, after: str, where: str) -> str:
    """Return a unified diff of a file, as git and patch read it."""
    name = Path(where).name
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{name}", f"b/{name}"
    )
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
