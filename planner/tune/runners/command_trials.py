"""Trials by any training command: `{config}` is replaced by the plan's export, and steps are read from its output.

The command is a list of words, without a shell. It and all its processes are ended after enough steps or when its time
is over. The cause of a failure is read from its output.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import IO, Any

import psutil

from planner.export.job import ExportJob
from planner.export.targets.registry import export, find_target
from planner.io.child import ROOT
from planner.learn.logs import COLOR, STEP_LINES
from planner.question.question import Question
from planner.tune.candidates import Candidate
from planner.tune.runners.started_trials import StartedTrials, failed
from planner.tune.state import TrialStart
from planner.tune.trials import Chosen, Status, Trial
from topology import codec
from topology.errors import PlannerError, UserError
from topology.processes import end_tree, kill
from topology.units import GIB, MIB

QUANTITIES = ("step_s", "step_ms", "tokens_per_s", "tokens_per_s_per_gpu")
JSONL = "jsonl"
MOST_CHARACTERS = 4096  # characters of a line that are read
OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|CUDA out of memory|out of memory|can't allocate memory", re.IGNORECASE)
GRACE_S = 8.0
POLL_S = 0.2
MOST_LOG_BYTES = 8 * MIB
MARK = "MESHWRIGHT_TRIAL"  # in the environment of all processes of a trial: its folder
PLACES = ("{config}", "{folder}", "{gpus}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A step as printed. `memory_bytes` is None if the line does not contain it."""

    step_s: float
    memory_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """The format of steps in lines: a regular expression, or None for JSON lines.

    Its groups are named after their content: `step_s`, `step_ms`, `tokens_per_s`, `tokens_per_s_per_gpu`, and
    `memory_gib` alongside one of them; an unnamed group holds seconds. JSON lines have keys of the same names;
    `jsonl:KEY` says which other key holds the seconds of a step.
    """

    pattern: re.Pattern[str] | None
    tokens_per_step: float
    gpus: int
    key: str = ""  # for JSON lines: a key with the seconds, in addition to the known names

    def samples(self, lines: Iterable[str]) -> list[Sample]:
        """Return the steps reported by the lines, in order; other lines are skipped."""
        return [one for line in lines if (one := self._sample(line[:MOST_CHARACTERS])) is not None]

    def _sample(self, line: str) -> Sample | None:
        said = self._json(line) if self.pattern is None else self._matched(self.pattern, line)
        step_s = next((self._seconds(name, said[name]) for name in QUANTITIES if name in said), None)
        if step_s is None or not 0 < step_s < math.inf:
            return None
        memory = said.get("memory_gib")
        return Sample(step_s=step_s, memory_bytes=memory * GIB if memory and 0 < memory < 1e6 else None)

    def _seconds(self, name: str, value: float) -> float | None:
        if value <= 0:
            return None
        if name in {"step_s", "step_ms"}:
            return value * (1.0 if name == "step_s" else 1e-3)
        return self.tokens_per_step / value / (self.gpus if name == "tokens_per_s_per_gpu" else 1)

    def _json(self, line: str) -> dict[str, float]:
        try:
            found: Any = json.loads(line)
        except (ValueError, RecursionError):
            return {}
        if not isinstance(found, dict):
            return {}
        return {
            "step_s" if name == self.key else name: float(value)
            for name, value in found.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
        }

    @staticmethod
    def _matched(pattern: re.Pattern[str], line: str) -> dict[str, float]:
        match = pattern.search(COLOR.sub("", line))
        if match is None:
            return {}
        texts = match.groupdict() or {"step_s": match[1]}
        found = {}
        for name, text in texts.items():
            try:
                found[name] = float((text or "").replace(",", ""))
            except ValueError:
                continue
        return found


def metric_of(text: str, *, tokens_per_step: float, gpus: int) -> Metric:
    """Return the metric given by `--metric`: `jsonl`, `jsonl:KEY`, a framework's name, or a regular expression. Raises
    UserError.
    """
    if text == JSONL or text.startswith(f"{JSONL}:"):
        return Metric(pattern=None, tokens_per_step=tokens_per_step, gpus=gpus, key=text[len(JSONL) + 1 :])
    if text in STEP_LINES:
        return Metric(pattern=STEP_LINES[text], tokens_per_step=tokens_per_step, gpus=gpus)
    try:
        pattern = re.compile(text[:1000])
    except re.error as error:
        raise UserError(f"--metric {text[:60]!r} is no regular expression", why=str(error)) from error
    strange = set(pattern.groupindex) - {*QUANTITIES, "memory_gib"}
    if strange or not pattern.groups or (pattern.groupindex and not set(pattern.groupindex) & set(QUANTITIES)):
        raise UserError(
            f"--metric {text[:60]!r} does not name the quantity it matches",
            why=f"groups are named {', '.join(QUANTITIES)} and memory_gib; one without a name holds seconds",
            remedy=r"--metric 'step time: (?P<step_ms>[\d.]+)'",
        )
    return Metric(pattern=pattern, tokens_per_step=tokens_per_step, gpus=gpus)


@dataclass(slots=True, kw_only=True)
class CommandTrials(StartedTrials):
    """Runs `words` for each plan of `question`, one after the other; `target` is the framework of the exports."""

    FIRST_START_S = 30.0
    LEAST_S = 10.0
    WARM_UP = 2

    words: tuple[str, ...]
    metric: Metric
    target: str
    limit_s: float = 120.0

    def shares_start(self, one: Candidate, other: Candidate) -> bool:
        del one, other
        return False

    def run(self, plans: Sequence[tuple[Candidate, Chosen]], left_s: float) -> Iterator[Trial]:
        until = time.monotonic() + left_s
        for candidate, chosen in plans:
            left = until - time.monotonic()
            if left < self.LEAST_S:
                return
            trial = self.new_trial(candidate, chosen)
            try:
                yield self._run_one(candidate, trial, Path(trial.directory), left)
            except PlannerError as error:
                yield failed(trial, error)

    def _run_one(self, candidate: Candidate, trial: Trial, folder: Path, left_s: float) -> Trial:
        """Return the result of `trial`, in `folder`, within `left_s`. Raises PlannerError if it cannot be started."""
        words = self._command(candidate, folder)
        self.began(TrialStart.now(trial))
        return self._run(trial, words, min(left_s, self.limit_s), cut=left_s < self.limit_s)

    def _command(self, candidate: Candidate, folder: Path) -> list[str]:
        """Write the export and return the command's words. Raises PlannerError if the target cannot express the
        plan.
        """
        question = replace(self.question, runtime=candidate.runtime)
        job = ExportJob(name=question.model.name, plan=candidate.plan, question=question)
        done = export(job, find_target(self.target, candidate.runtime.version))
        config = folder / done.file_name
        codec.write_text(config, done.text)
        for name, text in done.files.items():
            codec.write_text(folder / name, text)
        values = dict(zip(PLACES, (str(config), str(folder), str(candidate.plan.gpus)), strict=True))
        words = []
        for word in self.words:
            for place, value in values.items():
                word = word.replace(place, value)  # noqa: PLW2901 - one place after the other
            words.append(word)
        return words

    def _run(self, trial: Trial, words: Sequence[str], limit_s: float, *, cut: bool) -> Trial:
        log, began = Path(trial.directory) / "output.txt", time.monotonic()
        with log.open("wb") as output:
            process = _start(words, Path(trial.directory), output)
            ended = False
            try:
                while process.poll() is None and time.monotonic() - began < limit_s:
                    time.sleep(POLL_S)
                    found = self.metric.samples(_lines(log))
                    self.tell(f"{Path(trial.directory).name}: {len(found)} steps")
                    if len(found) >= self.steps():
                        ended = True
                        break
                over = process.poll() is None and not ended
            finally:
                _end(process, Path(trial.directory))
        return self._outcome(trial, log, process.returncode, time.monotonic() - began, ended=ended, over=over, cut=cut)

    def _outcome(
        self, trial: Trial, log: Path, code: int | None, seconds: float, *, ended: bool, over: bool, cut: bool
    ) -> Trial:
        lines = _lines(log)
        found = self.metric.samples(lines)
        # A command that ends by itself may print fewer lines, or only a mean.
        counted = found[self.WARM_UP :] or (found[-1:] if code == 0 else [])
        if counted and (ended or code == 0 or (over and len(counted) >= max(2, self.timed_steps // 2))):
            self.starts_s.append(max(1.0, seconds - sum(one.step_s for one in found)))
            return _measured(replace(trial, status=Status.FINISHED, seconds=seconds), counted)
        text = "\n".join(lines)
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        if OUT_OF_MEMORY.search(text):
            cause = next(line.strip() for line in lines if OUT_OF_MEMORY.search(line))
            return replace(trial, status=Status.OUT_OF_MEMORY, cause=cause[:400], seconds=seconds)
        if over:
            status = Status.OUT_OF_TIME if cut else Status.TIMEOUT
            return replace(
                trial, status=status, cause=f"{len(found)} steps until its time was over; {last}"[:400], seconds=seconds
            )
        how = f"ended with code {code}" if code is None or code >= 0 else f"killed by {_signal_name(-code)}"
        if code == 0:
            how = f"ended after {len(found)} steps that --metric could read"
        return replace(trial, cause=f"{how}: {_error_line(lines) or last}"[:400], seconds=seconds)


def _measured(trial: Trial, counted: Sequence[Sample]) -> Trial:
    steps = sorted(one.step_s for one in counted)
    middle = median(steps)
    tenth = len(steps) // 10
    spread = (steps[-1 - tenth] - steps[tenth]) / middle
    held = [one.memory_bytes for one in counted if one.memory_bytes]
    return replace(
        trial, step_s=middle, noise=spread / 2.56 / len(steps) ** 0.5, reserved_bytes=max(held, default=None)
    )


def command_words(text: str) -> tuple[str, ...]:
    """Return the words of `--command`. Raises UserError if they start nothing or do not contain the configuration."""
    try:
        words = tuple(shlex.split(text[:8192]))
    except ValueError as error:
        raise UserError(f"--command {text[:60]!r} cannot be split into words", why=str(error)) from error
    if not words or shutil.which(words[0]) is None:
        raise UserError(f"--command starts {words[0] if words else 'nothing'}, which is no program here")
    if not any("{config}" in word for word in words):
        raise UserError(
            "--command has no {config}",
            why="the plan's export takes its place; without it every trial would run the same",
            remedy="--command 'torchrun --nproc-per-node {gpus} -m torchtitan.train --job.config_file {config}'",
        )
    return words


def command_metric(text: str | None, question: Question) -> Metric:
    """Return the given metric, or the known one of the framework. Raises UserError if there is neither."""
    known = question.framework.tools.log
    if text is None and not known:
        raise UserError("--command needs --metric", remedy=r"--metric 'step time: (?P<step_ms>[\d.]+)', or jsonl")
    return metric_of(text or known, tokens_per_step=float(question.workload.tokens_per_step), gpus=question.count)


def _start(words: Sequence[str], folder: Path, output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start the command in its own session, under a guard that ends it when this process dies."""
    program = shutil.which(words[0]) or words[0]
    inherited = os.environ.get("PYTHONPATH", "")
    return subprocess.Popen(
        [sys.executable, str(ROOT / "executor" / "launch" / "guard.py"), str(os.getpid()), program, *words[1:]],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), inherited))),
            "PYTHONUNBUFFERED": "1",
            MARK: str(folder),
        },
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """End the command and all its processes: torchrun's workers lead their own sessions."""
    if process.poll() is None:
        end_tree(process, GRACE_S)
    end_left_over(folder)
    process.wait()


def end_left_over(folder: Path) -> None:
    """Kill processes that trials in `folder` left running on this machine, identified by an environment variable."""
    marked = str(folder)
    for one in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if one.environ().get(MARK, "").startswith(marked):
                kill([one])


def _lines(log: Path) -> list[str]:
    """Return the output; of a very long one only the end."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - MOST_LOG_BYTES))
        return file.read().decode("utf-8", errors="replace").splitlines()


def _error_line(lines: Sequence[str]) -> str:
    """Return the last line that names an exception or a signal."""
    named = [line.strip() for line in lines if "Error" in line or "SIG" in line or "Exception" in line]
    return named[-1] if named else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
