"""What commands about runs are asked: made, recorded, compared with predictions, learned from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from planner.requests import common
from planner.requests.flag import Request, argument, option, required, required_argument


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply(Request):
    """Run a plan on this machine, and compare measured with predicted.

    A serving plan is served by the executor, and what its clients see is compared with the prediction.

    Before anything starts, the machine is compared with the plan's; before anything is timed, the results are checked
    against one process. Every run is kept: planner runs lists them, planner report explains one. The exit code is 1 if
    the plan is stale or the run failed, and 4 if memory ran out or the step is outside --tolerance (default: its
    predicted range).

    With --wait, a submitted job is followed and reported like a run on this machine; Ctrl-C cancels it. The same
    command with the same --out follows the job that it submitted before, and submits none.
    """

    plan: Path | None = argument(None, help="Plan file from planner suggest --out; default: a tiny model on CPU ranks.")
    dry_run: bool = option(False, "--dry-run", help="Show what would be started, without starting it.")
    budget: str = option("120s", "--budget", help="Time for the whole command, such as 60s or 2m.")
    device: str | None = option(None, "--device", help="cuda, or cpu to check results only.")
    steps: int | None = option(None, "--steps", least=1, most=1000, help="Steps to measure after warm-up; default: 10.")
    out: Path | None = option(None, "--out", help="Directory for the run; default: a new one here.")
    force: bool = option(False, "--force", help="Use --out even if it is not empty.")
    allow_busy: bool = option(False, "--allow-busy", help="Run even if others use the GPUs.")
    own_table: bool = option(
        False, "--own-table", help="Order the passes of a pipeline as the simulator does, not as torch's schedule."
    )
    tolerance: float | None = common.tolerance()
    launcher: str = option(
        "local", "--launcher", help="local; or torchrun, slurm, ray, kubernetes, jobset, trainjob: a job instead."
    )
    nodes: int | None = option(
        None, "--nodes", least=1, help="Number of nodes of a job; default: the plan's, 2 without a plan."
    )
    endpoint: str | None = option(None, "--endpoint", help="HOST:PORT where torchrun's agents meet.")
    job_name: str = option("meshwright", "--job-name", help="Name of the job.")
    image: str | None = option(None, "--image", help="Container image, for kubernetes, jobset and trainjob.")
    volume: str | None = option(
        None, "--volume", help="CLAIM:/mount/path that all pods mount, for kubernetes and jobset; --out is below it."
    )
    submit: bool = option(False, "--submit", help="Submit the job with sbatch, kubectl or Ray's job API.")
    wait: str = option("0h", "--wait", help="How long to follow a submitted job, such as 12h, before it is reported.")
    learn: Path | None = option(
        None, "--learn", help="For a serving plan: also time its steps, and add them to this profile."
    )
    json: bool = common.json_flag()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tune(Request):
    """Run the most promising plans, and let each trial correct the predictions of the others.

    It ends when an untried plan is better by more than --within with less than 5 % probability, or when the budget is
    spent. A trial that fails, hangs or runs out of memory is recorded with its cause. --resume continues from a state
    file, on any machine of the same kind.
    """

    model: str | None = option(None, "--model", "--config", help="Shipped model, config.json or its directory.")
    cluster: str = option("local", "--cluster", help="What this machine is: local, a catalogue name or a cluster file.")
    gpus: int | None = option(None, "--gpus", least=1, most=1 << 20, help="How many of its GPUs to use.")
    seq_len: int | None = common.seq_len()
    global_batch: int | None = common.global_batch()
    framework: str = option(
        "meshwright",
        "--framework",
        help="Framework whose plans compete: meshwright (the project's executor), torchtitan, megatron-lm.",
    )
    objective: str = option("time", "--objective", help="time, throughput or cost, which order plans alike here.")
    compile_model: bool | None = common.compiled()
    param_dtype: str | None = common.param_dtype()
    compute_dtype: str | None = common.compute_dtype()
    budget: str | None = option(None, "--budget", help="Time for all trials (90s, 10m, 2h); default: 10m.")
    trials: int | None = option(None, "--trials", least=1, most=1000, help="Most trials to run.")
    within: float | None = option(
        None, "--within", metavar="PERCENT", percent=True, help="Improvement that is worth another trial; default: 1%."
    )
    profile: Path | None = common.profile()
    strict: bool = common.strict()
    device: str = option("cuda", "--device", help="cuda, or cpu, where times mean little.")
    steps: int = option(10, "--steps", least=2, most=1000, help="Steps to measure in each trial.")
    trial_limit: str = option("2m", "--trial-limit", help="Time for one trial, including its start.")
    allow_busy: bool = option(False, "--allow-busy", help="Run even if others use the GPUs.")
    command: str | None = option(
        None,
        "--command",
        program=True,
        help="Command that runs a trial, with {config}, {folder} and {gpus} filled in: 'torchrun ... {config}'.",
    )
    metric: str | None = option(
        None,
        "--metric",
        help="How to read step times from its output: jsonl, or a regular expression with (?P<step_s>...).",
    )
    recorded: Path | None = option(
        None, "--recorded", help="Look trials up in these recorded runs (cases), without running anything."
    )
    case_id: str | None = option(None, "--id", help="Which recorded run states the question, if there are several.")
    state: Path | None = option(None, "--state", help="State file; default: in a new folder here.")
    resume: Path | None = option(None, "--resume", help="Continue from this state file.")
    launcher: str = option(
        "local", "--launcher", help="local; or slurm, ray, kubernetes, jobset, trainjob: all trials in one job."
    )
    each: bool = option(False, "--each", help="With --launcher: submit one job per trial.")
    job_name: str = option("meshwright-tune", "--job-name", help="Name of the job.")
    image: str | None = option(None, "--image", help="Container image, for kubernetes, jobset and trainjob.")
    volume: str | None = option(
        None, "--volume", help="CLAIM:/mount/path that all pods mount, for kubernetes and jobset; --state is below it."
    )
    submit: bool = option(False, "--submit", help="Submit the job with sbatch, kubectl or Ray's job API.")
    show: bool = option(False, "--show", help="With --resume: answer from the state file, without a trial.")
    learn: Path | None = option(None, "--learn", help="Add the trials' operator times to this profile.")
    html: Path | None = option(None, "--html", help="Write a report with pictures to this file.")
    out: Path | None = option(None, "--out", help="Save the best measured plan to this file.")
    force: bool = option(False, "--force", help="Let --out and --state overwrite files.")
    json: bool = common.json_flag()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Request):
    """Compare every predicted quantity of a run with the measured one, and explain the difference.

    The exit code is 4 if the step is outside --tolerance (default: its predicted range), and 1 if --tolerance is given
    for a run that failed.
    """

    run: str = required_argument(help="Directory of a run, or its id from planner runs.")
    tolerance: float | None = common.tolerance()
    html: Path | None = option(None, "--html", help="Write the report as one self-contained page.")
    picture: Path | None = option(None, "--picture", help="Write both timelines as an SVG picture.")
    trace: Path | None = option(None, "--trace", help="Write both timelines for Perfetto.")
    learn: Path | None = option(None, "--learn", help="Add the run's operator times to this profile.")
    profile: Path | None = common.profile()
    strict: bool = common.strict()
    force: bool = option(False, "--force", help="Let output overwrite files.")
    redact: bool = common.redact()
    json: bool = common.json_flag()


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs(Request):
    """List the runs that planner apply made, with measured against predicted. planner report ID explains one."""

    add: list[Path] | None = option(
        None, "--add", help="Add the run in this directory: one of several nodes, or made elsewhere."
    )
    remove: list[str] | None = option(
        None, "--remove", help="Remove the run with this id from the list; its directory stays."
    )
    limit: int = option(20, "--limit", least=1, most=100000, help="How many runs to list, newest first.")
    redact: bool = common.redact()
    json: bool = common.json_flag()


RUN = """\
{"id": "my-run-1", "model": "llama3-8b", "cluster": "8xH100", "framework": "torchtitan", "seq_len": 8192, \
"global_batch": 16, "micro_batch": 1, "dp_shard": 8, "recompute": "full", "step_s": 2.5, "peak_memory_gib": 47.0}
"""


def _example() -> bool:
    printed = option(
        False, "--example", help="Print an example of a row, as a line of a .jsonl file, and exit.", prints=RUN.rstrip()
    )
    return cast("bool", printed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Validate(Request):
    """Compare predictions with measured runs, row by row, and sum up each file.

    Files hold training runs, as cases or as rows with the names of command-line options (--example prints one), or
    serving points, one a line (.jsonl, .jsonl.gz); one call takes one kind. A row that cannot be predicted is listed as
    skipped, with the reason; the exit code is 3 if every row is skipped. --tolerance applies to mean absolute errors.
    """

    files: list[str] = required_argument(help="Measured runs (.json, .jsonl or .csv), or serving points.")
    example: bool = _example()
    profile: Path | None = common.profile()
    runtime: Path | None = common.learned_runtime()
    strict: bool = common.strict()
    tolerance: float | None = common.tolerance()
    json: bool = common.json_flag()


@dataclass(frozen=True, slots=True, kw_only=True)
class Learn(Request):
    """Fit a runtime's own costs to measured runs, and say which runs would teach most.

    Pass the file that it writes as --runtime to validate, estimate and suggest. Cases without a measured time or memory
    are candidates for the next runs. With fewer than three measured cases nothing is fitted, and the answer says what
    to run first. Measurements can also be read from the log of a run (torchtitan, Megatron-LM or DeepSpeed), if
    `measured.log` of its case names it.
    """

    file: str = required_argument(help="Measured runs: .json, .jsonl or .csv.")
    example: bool = _example()
    runtime: str = required("--runtime", help="Name of the runtime; it may be a new one.")
    out: Path = required("--out", help="Write the learned runtime to this file.")
    like: str | None = option(
        None,
        "--like",
        help="Runtime to start from; default: the one of that name, or else the one that the cases name.",
    )
    profile: Path | None = common.profile()
    force: bool = option(False, "--force", help="Let --out overwrite a file.")
    json: bool = common.json_flag()
