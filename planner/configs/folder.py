"""Judge all configurations below a folder, one row per file, as JSON or as SARIF for a pull request."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.configs.answer import Checked, check_document, check_text
from planner.configs.formats.configuration import CheckFlags, NotAConfiguration, did_you_mean
from planner.configs.serving_start import serving_engine
from planner.io.output import SCHEMA_VERSION
from planner.io.version import version
from planner.search.deadline import deadline_of, left_s, over
from simulator.config.estimate import SURE
from simulator.fitting.calibrations import UNMEASURED, Calibrations
from simulator.legality.rule import Grade
from topology.errors import PlannerError, Unproved, UserError
from topology.time_limit import limited

KINDS = frozenset({".toml", ".yaml", ".yml", ".json", ".sh", ".bash", ".slurm", ".sbatch"})
PASSED_OVER = frozenset({"node_modules", "site-packages", "__pycache__", "venv"})  # and hidden ones
MOST_FILES = 5000  # most files of a folder that are looked at
MOST_BYTES = 1 << 18  # largest file in bytes: configurations are shorter, data is longer
SARIF = "https://json.schemastore.org/sarif-2.1.0.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderRow:
    """A file of a folder: the result, or why it could not be judged."""

    file: str
    checked: Checked | None = None
    problem: str = ""

    @property
    def legal(self) -> bool | None:
        return None if self.checked is None else self.checked.legal

    def to_dict(self) -> dict[str, Any]:
        """Return the document of `planner check` for the file, with its name."""
        if self.checked is None:
            return {"file": self.file, "legal": None, "error": self.problem}
        return {"file": self.file, **check_document(self.checked)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedFolder:
    """Every configuration of a folder, in the order of its files; `looked_at` counts all files with these suffixes."""

    folder: str
    rows: tuple[FolderRow, ...]
    looked_at: int
    stopped: str = ""

    @property
    def legal(self) -> bool | None:
        """False if some configuration is illegal, None if none can be judged."""
        said = {row.legal for row in self.rows}
        return False if False in said else True if True in said else None

    def to_dict(self) -> dict[str, Any]:
        rows = [row.to_dict() for row in self.rows]
        counts = {name: sum(row.legal is value for row in self.rows) for name, value in _VERDICTS.items()}
        summary = {"files": self.looked_at, "configurations": len(rows), **counts}
        return {
            "schema_version": SCHEMA_VERSION,
            "folder": self.folder,
            "rows": rows,
            "summary": summary,
            "stopped": self.stopped,
        }

    def to_sarif(self) -> dict[str, Any]:
        """Return the results as SARIF 2.1.0 (OASIS), one for each problem, question, unknown field or change."""
        results = [result for row in self.rows for result in _results(Path(self.folder), row)]
        rules = [{"id": name} for name in sorted({result["ruleId"] for result in results})]
        driver = {"name": "meshwright", "version": version(), "rules": rules}
        return {"$schema": SARIF, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}


_VERDICTS = {"legal": True, "illegal": False, "open": None}


def check_folder(
    folder: Path,
    flags: CheckFlags,
    *,
    measured: Calibrations = UNMEASURED,
    time_limit_s: float | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> CheckedFolder:
    """Judge every configuration of training below `folder`, with the single changes that gain.

    `flags` state what files do not, such as the cluster. Raises UserError if the folder has no configurations.
    """
    deadline = deadline_of(time_limit_s)
    rows: list[FolderRow] = []
    looked_at, stopped = 0, ""
    for path in _files(folder):
        if looked_at >= MOST_FILES or over(deadline):
            stopped = f"after {looked_at} files" if looked_at >= MOST_FILES else "the time is over"
            break
        looked_at += 1
        where = str(path.relative_to(folder))
        progress(where)
        text = path.read_text("utf-8", errors="replace")
        if serving_engine(text):
            continue
        try:
            with limited(time_limit_s):
                found = check_text(text, where, flags, measured=measured, search=False, time_limit_s=left_s(deadline))
        except Unproved:
            stopped = "the time is over"
            break
        except NotAConfiguration:
            continue
        except PlannerError as error:
            if _reads_as_one(text):
                rows.append(FolderRow(file=where, problem=str(error)))
            continue
        rows.append(FolderRow(file=where, checked=found))
    if not rows:
        raise UserError(
            f"{folder} has no configuration of a kind that is known",
            why=f"{looked_at} files with the endings {', '.join(sorted(KINDS))} were looked at",
            remedy="planner check FILE says of one why not",
        )
    return CheckedFolder(folder=str(folder), rows=tuple(rows), looked_at=looked_at, stopped=stopped)


def _files(folder: Path) -> Iterator[Path]:
    for at, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name[0] != "." and name not in PASSED_OVER)
        for name in sorted(names):
            path = Path(at, name)
            if path.suffix in KINDS and path.is_file() and not path.is_symlink() and path.stat().st_size <= MOST_BYTES:
                yield path


def _reads_as_one(text: str) -> bool:
    """Return whether an unreadable text was meant as a configuration; other damaged files are ignored."""
    return re.search(r"parallel|zero_optimization|train_batch|micro_?batch", text) is not None


def _results(folder: Path, row: FolderRow) -> Iterator[dict[str, Any]]:
    def result(rule: str, level: str, message: str, line: int = 1) -> dict[str, Any]:
        place = {"artifactLocation": {"uri": Path(row.file).as_posix()}, "region": {"startLine": line}}
        return {
            "ruleId": rule,
            "level": level,
            "message": {"text": message},
            "locations": [{"physicalLocation": place}],
        }

    if row.checked is None:
        yield result("unreadable", "warning", row.problem)
        return
    checked = row.checked
    levels = {Grade.ILLEGAL: "error", Grade.SLOW: "warning", Grade.LEGAL: "note"}
    for problem in checked.problems:
        yield result(problem.rule, levels[problem.grade], problem.message)
    for question in checked.questions:
        yield result("question", "note", f"{question.what}: {question.remedy}")
    near = did_you_mean(checked.configuration)
    text = (folder / row.file).read_text("utf-8", errors="replace") if checked.configuration.unknown else ""
    for key in checked.configuration.unknown:
        meant = f": did you mean {near[key]}?" if key in near else ""
        yield result("unknown-field", "warning", f"{key} is not understood{meant}", _line_of(text, key))
    estimate = checked.found.estimate if checked.found is not None else None
    if estimate is not None and estimate.memory.fit_probability < SURE:
        yield result("memory", "warning", f"fits with a chance of {estimate.memory.fit_probability:.0%}")
    for change in checked.changes[:1]:
        yield result("change", "note", f"{change.what}: {change.step_s:.3g} s a step\n{change.diff}")


def _line_of(text: str, key: str) -> int:
    """Return the first line that has the last part of a key, or 1."""
    word = key.rpartition(".")[2]
    return next((number for number, line in enumerate(text.splitlines(), start=1) if word in line), 1)
