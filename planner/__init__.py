"""Which plan, and why: what the commands answer, for Python.

>>> from planner import estimate, suggest
>>> found = suggest(model="llama3.2-1b", cluster="h200x4", seq_len=4096, global_batch=32, pp=1, tp="1-2", top=1)
>>> found.best.plan.gpus
4
>>> found.to_dict()["plans"][0]["rank"]
1
>>> answer = estimate(model="llama3.2-1b", cluster="h200x4", seq_len=4096, global_batch=32, tp=2, micro_batch=1)
>>> answer.legal, answer.plan.tp, answer.plan.dp_shard
(True, 2, 2)

Keyword arguments are the flags of the commands with underscores (`planner suggest --help` says what each means),
results are typed values whose `to_dict()` is the JSON of the command, and errors are those of `planner.errors`:

>>> from planner.errors import UserError
>>> try:
...     estimate(model="llama3-8b", tensor_parallel=2)
... except UserError as error:
...     print(error.what)
tensor_parallel is no flag of planner estimate
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner import errors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from planner.answers.check import CheckedFile
    from planner.answers.estimate import Estimated, Unreadable
    from planner.answers.serve.estimate import EstimatedDeployment
    from planner.answers.serve.suggest import SuggestedDeployments
    from planner.answers.shard import Sharded
    from planner.answers.suggest import Suggested
    from planner.question.plan_file import load_plan
    from simulator.config.plan import Plan

__all__ = ["Plan", "check", "errors", "estimate", "load_plan", "shard", "suggest"]

_ELSEWHERE = {"Plan": "simulator.config.plan", "load_plan": "planner.question.plan_file"}


def suggest(**flags: Any) -> Suggested | SuggestedDeployments:
    """Return the best plans of a question, as `planner suggest`; with `task="serve"` deployments.

    Degrees may be a number, several or a range: `tp=8`, `tp=[1, 2, 4]`, `tp="2-8"`. Raises UserError for what cannot be
    asked, Infeasible where no plan is legal or fits.
    """
    return _answer("suggest", flags)  # type: ignore[no-any-return]


def estimate(**flags: Any) -> Estimated | EstimatedDeployment | Iterator[Estimated | Unreadable]:
    """Return the step and the memory of one plan, as `planner estimate`: of flags, a saved `plan`, or a `case`.

    A plan that is not legal is an answer, too: see `legal` and `problems`. A file with a list of cases gives an
    iterator. Raises UserError for what cannot be asked.
    """
    return _answer("estimate", flags)  # type: ignore[no-any-return]


def check(file: str | Path, **flags: Any) -> CheckedFile:
    """Return what is wrong with a configuration of another tool, and what would be better, as `planner check`.

    Raises BadInput for a file that cannot be read, UserError for what is stated and means nothing for it.
    """
    return _answer("check", {"file": file, **flags})  # type: ignore[no-any-return]


def shard(file: str | Path | None = None, **flags: Any) -> Sharded:
    """Return placements of the tensors of a graph and the collectives between them, as `planner shard`.

    Raises BadInput for a file that cannot be read, UserError for what cannot be asked.
    """
    return _answer("shard", {"file": file, **flags})  # type: ignore[no-any-return]


def _answer(command: str, flags: dict[str, Any]) -> Any:
    """Answer a request. What answers is loaded here: every command imports this package, and few need all of it."""
    return import_module("planner.answers.keywords").answer(command, flags)


def __getattr__(name: str) -> Any:
    if name not in _ELSEWHERE:
        raise AttributeError(f"module 'planner' has no attribute {name!r}")
    return getattr(import_module(_ELSEWHERE[name]), name)
