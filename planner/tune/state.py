"""The state of a tuning: one file of JSON lines that is only appended to, and that any machine can continue.

The first line is the request, then comes a line for each candidate with its prediction, then a line for each trial that
began and for each that ended. Every line is on the disk (fsync) before the next trial begins. An incomplete line at the
end, left by a killed process, is not read, and the next writer removes it. A trial that began and did not end is read
from its directory if its report is there: see `cut_short`.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import filelock

from planner.io.version import version
from planner.question.plan_file import refuse_overwrite
from planner.question.question import Question, question_of
from planner.tune.candidates import Candidate, Candidates
from planner.tune.trials import Status, Trial
from simulator.config.model import Model
from simulator.config.runtime import Runtime
from simulator.config.verify import verify_estimate, verify_model, verify_plan, verify_runtime, verify_workload
from simulator.config.workload import Workload
from simulator.legality.frameworks import framework_named
from topology import codec
from topology.catalog.verify import require_possible
from topology.cluster import Cluster
from topology.codec import JsonObject
from topology.errors import BadInput, PlannerError

SCHEMA_VERSION = 1
MOST_LINES = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningRequest:
    """The complete request of a tuning, so that it can be continued without its flags. Seconds and relative numbers.

    `how` names what runs the trials: `executor`, `command`, `jobs` or `recorded`, with its `settings`. `profile` is the
    fingerprint of the profile used for predictions.
    """

    model: Model
    cluster: Cluster
    workload: Workload
    runtime: Runtime
    framework: str
    gpus: int
    budget_s: float
    within: float
    most_trials: int | None = None
    how: str = "executor"
    device: str = "cuda"
    steps: int = 10
    settings: dict[str, str] = field(default_factory=dict)
    legal: int = 0
    profile: str | None = None

    @property
    def unknown_machine(self) -> bool:
        """Whether steps are measured on another device than the predicted one: a processor."""
        return self.device == "cpu" and self.how in {"executor", "jobs"}

    def question(self) -> Question:
        """Return the question, without a calibration: predictions are in the file."""
        return question_of(
            self.model, self.cluster, self.workload, framework=self.framework, runtime=self.runtime, gpus=self.gpus
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStart:
    """A trial that began: on which machine, and where its report will be."""

    key: str
    directory: str
    machine: str
    at: str  # ISO 8601, UTC
    predicted_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    why: str = ""

    @classmethod
    def now(cls, trial: Trial) -> Self:
        """Return the beginning of a trial in this moment."""
        return cls(
            key=trial.key,
            directory=trial.directory,
            machine=trial.machine,
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            predicted_s=trial.predicted_s,
            why=trial.why,
        )

    def failed(self, cause: str = "") -> Trial:
        """Return the trial as failed."""
        return Trial(
            key=self.key,
            status=Status.FAILED,
            cause=cause,
            predicted_s=self.predicted_s,
            why=self.why,
            directory=self.directory,
            machine=self.machine or platform.node(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The content of a state file. `cut_short` are trials that began and have no recorded end."""

    request: TuningRequest
    candidates: Candidates
    trials: tuple[Trial, ...]
    cut_short: tuple[TrialStart, ...]

    @property
    def spent_s(self) -> float:
        return sum(trial.seconds for trial in self.trials)


def write_new(path: Path, request: TuningRequest, candidates: Candidates, *, force: bool = False) -> None:
    """Begin a state file. Raises BadInput if it exists and `force` is not given."""
    refuse_overwrite(path, force=force)
    head: JsonObject = {
        "kind": "tuning",
        "schema_version": SCHEMA_VERSION,
        "tool_version": version(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "asked": codec.to_builtins(request),
    }
    lines = [head, *({"kind": "candidate", **codec.to_builtins(_brief(one))} for one in candidates.plans)]
    codec.write_text(path, "".join(codec.to_json(line, indent=None) + "\n" for line in lines))


def _brief(one: Candidate) -> Candidate:
    """Return a candidate without parts that are not needed to continue: memory by stage, and assumptions."""
    memory = replace(one.estimate.memory, by_stage=(), reserved_by_stage=())
    return replace(one, estimate=replace(one.estimate, memory=memory, assumed=()))


def read_state(path: str | Path) -> State:
    """Return the content of a state file. Raises BadInput (exit 2), with the line, for an invalid one."""
    return parse_state(codec.read_text(path), where=str(path))


def parse_state(text: str, *, where: str) -> State:
    """Return the content of a state file's text; `where` names it in errors. Raises as `read_state`."""
    complete = text[: text.rfind("\n") + 1].splitlines()[:MOST_LINES]
    if not complete:
        raise BadInput(f"{where} is not the state of a tuning", remedy="planner tune --state FILE begins one")
    lines = [codec.parse_json(line, where=f"{where}:{number}") for number, line in enumerate(complete, start=1)]
    request = _request(lines[0], where)
    plans: list[Candidate] = []
    trials: list[Trial] = []
    began: list[TrialStart] = []
    keys: dict[str, str] = {}  # the key as written (an earlier version's plans may have fewer fields) and as it is here
    for number, line in enumerate(lines[1:], start=2):
        line_of = f"{where}:{number}"
        kind = line.pop("kind", None) if isinstance(line, dict) else None
        if kind == "candidate":
            plans.append(_candidate(line, line_of))
            keys[codec.fingerprint((line.get("plan"), line.get("runtime")))] = plans[-1].key
        elif kind == "began":
            start = codec.convert(line, TrialStart, where=line_of)
            began.append(replace(start, key=keys.get(start.key, start.key)))
        elif kind == "trial":
            trial = codec.convert(line, Trial, where=line_of)
            trial = replace(trial, key=keys.get(trial.key, trial.key))
            began = [one for one in began if one.key != trial.key]
            trials.append(trial)
        else:
            raise BadInput(f"{line_of} is neither a candidate nor a trial")
    if not plans:
        raise BadInput(f"{where} has no candidates", remedy="begin anew: planner tune --state another")
    known = Candidates(plans=tuple(plans), legal=request.legal)
    strange = [trial.key for trial in trials if known.row(trial.key) is None]
    if strange:
        raise BadInput(f"{where} has trials of plans that are no candidates", why=", ".join(strange[:4]))
    return State(request=request, candidates=known, trials=tuple(trials), cut_short=tuple(began))


def _request(head: Any, where: str) -> TuningRequest:
    if not isinstance(head, dict) or head.get("kind") != "tuning":
        raise BadInput(f"{where} is not the state of a tuning", remedy="planner tune --state FILE begins one")
    codec.require_schema(head, SCHEMA_VERSION, where=where)
    request = codec.convert(head.get("asked"), TuningRequest, where=f"{where}: asked")
    require_possible(request.cluster, where=where)
    verify_model(request.model, where=where)
    verify_workload(request.workload, where=where)
    verify_runtime(request.runtime, where=where)
    framework_named(request.framework)
    return request


def _candidate(line: JsonObject, where: str) -> Candidate:
    one = codec.convert(line, Candidate, where=where)
    verify_plan(one.plan, where=where)
    verify_runtime(one.runtime, where=where)
    verify_estimate(one.estimate, where=where)
    if one.estimate.step_s.value <= 0:
        raise BadInput(f"{where}: a step of {one.estimate.step_s.value} s")
    return one


class Journal:
    """Appends to a state file; used while `writing` holds it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _remove_torn_line(path)

    def began(self, one: TrialStart) -> None:
        self._append({"kind": "began", **codec.to_builtins(one)})

    def ended(self, trial: Trial) -> None:
        self._append({"kind": "trial", **codec.to_builtins(trial)})

    def _append(self, line: JsonObject) -> None:
        encoded = (codec.to_json(line, indent=None) + "\n").encode()
        try:
            with self.path.open("ab") as file:
                file.write(encoded)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise PlannerError(
                f"cannot write {self.path}", why=error.strerror or str(error), remedy="free the disk, then --resume it"
            ) from error


@contextmanager
def writing(path: Path) -> Iterator[Journal]:
    """Hold a state file for one tuning. Raises PlannerError if another process tunes with it."""
    lock = filelock.FileLock(path.with_name(f".{path.name}.lock"), timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout as error:
        raise PlannerError(f"another process is tuning with {path}", remedy="wait for it, or end it first") from error
    except OSError as error:
        raise PlannerError(f"cannot write in {path.parent}", why=error.strerror or str(error)) from error
    try:
        yield Journal(path)
    finally:
        lock.release()


def _remove_torn_line(path: Path) -> None:
    """Remove what a killed writer left after the last complete line."""
    content = path.read_bytes()
    complete = content.rfind(b"\n") + 1
    if complete < len(content):
        with path.open("r+b") as file:
            file.truncate(complete)
            os.fsync(file.fileno())
