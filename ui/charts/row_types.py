"""Types of the rows of tables and charts, and of the documents of jobs."""

from __future__ import annotations

from typing import TypedDict


class PlanRow(TypedDict):
    """A listed plan with the figures of `planner suggest`: numbers, `_s` and `_gib`, for charts, and text."""

    rank: int
    place: str
    plan: str
    chips: str
    label: str
    policy: str
    step_s: float
    low_s: float
    high_s: float
    step: str
    range: str
    tokens: str
    mfu: str
    peak_gib: float
    memory: str
    fits: str
    sure: bool
    exposed: str
    bubble: str
    why: str


class PlanOnMachine(TypedDict):
    """A listed plan before and after its machine was changed."""

    rank: int
    plan: str
    before_s: float
    after_s: float
    reserved_gib: float
    fits: bool


class SizeRow(TypedDict):
    """A plan with one sequence length and one micro batch: the drawn value and its words."""

    length: str
    micro_batch: str
    tokens_per_s: float | None
    rate: str
    upper: str
    lower: str
    state: str
    here: bool


class RunRow(TypedDict):
    """A whole run on one number of GPUs: its days and its cost (GPU hours without a price), with 80 % ranges."""

    label: str
    days: float
    days_low: float
    days_high: float
    days_text: str
    cost: float
    cost_low: float
    cost_high: float
    cost_text: str
    here: bool


class SavingRow(TypedDict):
    """A change of one setting of a plan that frees memory."""

    change: str
    from_gib: float
    to_gib: float
    quicker: bool
    text: str


class RatePoint(TypedDict):
    """The step of a plan at a link rate in bytes/s."""

    rate: float
    plan: str
    step_s: float


class PartRow(TypedDict):
    """A part of a model and its parameters."""

    part: str
    parameters: int


class TermRow(TypedDict):
    """The difference of two plans in a term."""

    name: str
    delta: float
    text: str


class ComparedRow(TypedDict):
    """A quantity of a published run: s for steps, GiB for memory; `error` is predicted / measured - 1."""

    id: str
    source: str
    what: str
    predicted: float
    measured: float
    error: float
    interval: str


class StepPoint(TypedDict):
    """A quantity of a step of a run."""

    run: str
    step: int
    quantity: str
    value: float


class Artifact(TypedDict):
    """A file that a job wrote."""

    name: str
    bytes: int
    sha256: str
    url: str


class JobError(TypedDict, total=False):
    message: str
    why: str
    remedy: str


class JobDocument(TypedDict):
    """What `GET /v1/jobs/{job}` answers. In a list of jobs, only the keys up to `finished_at` are there."""

    job: str
    command: str
    state: str
    progress: str
    created_at: str
    started_at: str | None
    finished_at: str | None
    result: object
    error: JobError | None
    artifacts: list[Artifact]
