"""Searches on the service of `planner ui --server`, with the same results as a search in this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from planner.io.output import SCHEMA_VERSION
from planner.question.flags import Flags
from planner.remote.errors import ENDED, ServiceError, error_of
from planner.search.answer import search_question
from planner.search.result import GpuCountRow, MayFit, OtherBatch, RankedPlan, SearchResult, SearchStats
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from topology import codec
from topology.codec import JsonObject
from topology.errors import PlannerError
from ui.question import uploads
from ui.question.state import Inputs

if TYPE_CHECKING:
    from planner.remote.client import Client


class RemoteJob:
    """A job of a service, with the interface of `planner.jobs.processes.Job`: `result` or `error` once it has ended."""

    def __init__(self, client: Client, command: str, said: JsonObject, read: Callable[[JsonObject], Any]) -> None:
        self.started = time.monotonic()
        self.line = ""
        self.result: Any = None
        self.early: Any = None  # a service has no preliminary answers
        self.error: PlannerError | None = None
        self._client, self._read = client, read
        self._ended = False
        self._job = client.submit(command, said)

    def ask(self, patience_s: float) -> bool:
        """Return whether the job has ended, after waiting for at most `patience_s`."""
        if self._ended:
            return True
        try:
            document = self._client.job(self._job, wait_s=min(patience_s, 30.0))
            if document["state"] not in ENDED:
                self.line = document["progress"] or document["state"]
                return False
            if document["state"] == "done":
                self.result = self._read(document["result"])
            else:
                self.error = error_of(document)
        except PlannerError as error:
            self.error = error
        self._ended = True
        return True

    def stop(self) -> None:
        """Cancel the job."""
        if not self._ended:
            self._client.cancel(self._job)


def search_request(question: Inputs, *, top: int, flags: Flags | None = None, price: float | None = None) -> JsonObject:
    """Return the flags of `planner suggest` for a question, with uploads as files. `flags` replace its own."""
    stated = flags or question.flags()
    said = {
        "model": uploads.sent(question.model),
        "cluster": uploads.sent(question.cluster),
        "gpu": question.gpu,
        "gpus": None if stated.gpus is None else ",".join(map(str, stated.gpus)),
        "seq_len": stated.seq_len,
        "global_batch": stated.global_batch,
        "framework": question.framework,
        "objective": question.objective,
        "gpu_price": price,
        "compile": question.compile or None,
        "param_dtype": question.param_dtype,
        "top": top,
    }
    return {key: value for key, value in said.items() if value is not None}


def read_search(document: JsonObject, flags: Flags, framework: str | None) -> SearchResult:
    """Return the result of a service's answer for `flags`. Raises BadInput, and ServiceError for an answer of another
    version.
    """
    if document.get("schema_version") != SCHEMA_VERSION:
        raise ServiceError(
            "the service answers in another form",
            why=f"its answers have schema {document.get('schema_version')}, this explorer reads {SCHEMA_VERSION}",
            remedy="install the same version on both",
        )
    about = document["question"]
    counts = flags.gpus if flags.gpus is None else (about["gpus"],)
    question, _ = search_question(replace(flags, gpus=counts), framework)
    question = replace(
        question,
        gpus=about["gpus"],
        workload=codec.convert(about["workload"], Workload, where="workload"),
        runtime=codec.convert(about["runtime"], Runtime, where="runtime"),
    )
    besides = {"traffic", "above_published"}
    plans = [{key: value for key, value in one.items() if key not in besides} for one in document["plans"]]
    other = document["other_batch"]
    return SearchResult(
        question=question,
        search=codec.convert(document["search"], SearchStats, where="search"),
        plans=tuple(codec.convert(one, RankedPlan, where="plans") for one in plans),
        rejected={str(name): int(count) for name, count in document["rejected"].items()},
        assumed=tuple(map(str, document["assumed"])),
        by_gpus=tuple(codec.convert(one, GpuCountRow, where="by_gpus") for one in document["by_gpus"]),
        likely=tuple(codec.convert(one, MayFit, where="likely") for one in document["likely"]),
        other_batch=codec.convert(other, OtherBatch, where="other_batch") if other else None,
    )
