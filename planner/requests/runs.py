"""What commands about runs are asked: made, recorded, compared with predictions, learned from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from planner.requests import common
from planner.requests.flag import Request, argument, option, required, required_argument


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply(Request):
    """Run a plan on this machine and report measured against predicted.

    A serving plan is served by the executor: its requests arrive, and what clients saw stands next to the prediction.

    Machine and plan are compared before anything starts. Numbers are checked against one process before anything is
    timed. Every run is kept: planner runs lists them, planner report explains one. Exit code 1 when the plan is stale
    or the run failed, 4 when memory was full or the step is outside --tolerance, without it outside its predicted
    interval.

    With --wait, the run of a scheduler is followed and reported like one here; Ctrl-C cancels it. Asked again with the
    same --out, a job that was submitted is followed, and not submitted again.
    """

    plan: Path | None = argument(None, help="Plan file of planner suggest --out; without one, a tiny built-in CPU run.")
    dry_run: bool = option(False, "--dry-run", help="Show what would be started, and start nothing.")
    budget: str = option("120s", "--budget", help="Time for everything, such as 60s or 2m.")
    device: str | None = option(None, "--device", help="cuda, or cpu to check numbers only.")
    steps: int | None = option(None, "--steps", least=1, most=1000, help="Steps to measure, after warm-up; default 10.")
    out: Path | None = option(None, "--out", help="Directory for the run; default: a new one here.")
    force: bool = option(False, "--force", help="Use --out though it is not empty.")
    allow_busy: bool = option(False, "--allow-busy", help="Run though others use the GPUs.")
    own_table: bool = option(False, "--own-table", help="Run the simulator's pipeline table.")
    tolerance: float | None = common.tolerance()
    launcher: str = option("local", "--launcher", help="local, or write a job for torchrun, slurm or trainjob.")
    nodes: int | None = option(None, "--nodes", least=1, help="Nodes of a job; default: as planned.")
    endpoint: str | None = option(None, "--endpoint", help="HOST:PORT where torchrun's agents meet.")
    job_name: str = option("meshwright", "--job-name", help="Name of a job.")
    image: str | None = option(None, "--image", help="Container image of a trainjob.")
    submit: bool = option(False, "--submit", help="Hand the job to sbatch or kubectl.")
    wait: str = option("0h", "--wait", help="Follow a submitted job for so long, such as 12h, and report its run.")
    learn: Path | None = option(
        None, "--learn", help="Of a serving plan: time steps, too, and add all to this profile."
    )
    json: bool = common.json_flag()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tune(Request):
    """Try plans for real, the most promising per second first, and let each trial correct what is predicted of all
    others.

    Ends when no untried plan is likely (5 %) to be better by more than --within, or with the budget. A trial that
    fails, hangs or runs out of memory is recorded with its cause. --resume continues a state file, on any such machine.
    """

    model: str | None = option(None, "--model", "--config", help="Shipped model, config.json or its directory.")
    cluster: str = option("local", "--cluster", help="local, or what this machine is: a name or file.")
    gpus: int | None = option(None, "--gpus", least=1, most=1 << 20, help="How many GPUs of it.")
    seq_len: int | None = common.seq_len()
    global_batch: int | None = common.global_batch()
    framework: str = option(
        "meshwright", "--framework", help="Whose plans: meshwright (our executor), torchtitan, megatron-lm."
    )
    objective: str = option("time", "--objective", help="time, throughput or cost: one order here.")
    compile_model: bool | None = common.compiled()
    param_dtype: str | None = common.param_dtype()
    compute_dtype: str | None = common.compute_dtype()
    budget: str | None = option(None, "--budget", help="Time for all trials: 90s, 10m, 2h; default 10m.")
    trials: int | None = option(None, "--trials", least=1, most=1000, help="No more than so many trials.")
    within: float | None = option(
        None, "--within", metavar="PERCENT", percent=True, help="By how much to be better; default 1%."
    )
    profile: Path | None = common.profile()
    strict: bool = common.strict()
    device: str = option("cuda", "--device", help="cuda, or cpu to try plans where times mean little.")
    steps: int = option(10, "--steps", least=2, most=1000, help="Steps to measure in a trial.")
    trial_limit: str = option("2m", "--trial-limit", help="Time for one trial, its start included.")
    allow_busy: bool = option(False, "--allow-busy", help="Run though others use the GPUs.")
    command: str | None = option(
        None, "--command", program=True, help="What runs a trial: 'torchrun ... {config}'; also {folder} and {gpus}."
    )
    metric: str | None = option(
        None, "--metric", help="How its output tells steps: jsonl, or a regular expression with (?P<step_s>...)."
    )
    recorded: Path | None = option(
        None, "--recorded", help="Look trials up in these recorded runs (cases), run nothing."
    )
    case_id: str | None = option(None, "--id", help="A recorded run of the question, where there are several.")
    state: Path | None = option(None, "--state", help="State file; default: in a new folder here.")
    resume: Path | None = option(None, "--resume", help="Continue the tuning of this state file.")
    launcher: str = option("local", "--launcher", help="local, or a job of slurm or trainjob for all trials.")
    each: bool = option(False, "--each", help="With --launcher: a job for each trial, submitted from here.")
    job_name: str = option("meshwright-tune", "--job-name", help="Name of a job.")
    image: str | None = option(None, "--image", help="Container image of a trainjob.")
    submit: bool = option(False, "--submit", help="Hand the job to sbatch or kubectl.")
    show: bool = option(False, "--show", help="With --resume: answer from the state file, and try nothing.")
    learn: Path | None = option(
        None, "--learn", help="Add what the trials' operators took to this profile of such GPUs."
    )
    html: Path | None = option(None, "--html", help="Write a report with pictures to this file.")
    out: Path | None = option(None, "--out", help="Save the best measured plan to this file.")
    force: bool = option(False, "--force", help="Let --out and --state replace a file.")
    json: bool = common.json_flag()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Request):
    """Show predicted and measured for every quantity of a run, with signed errors, and explain the difference.

    Exit code 4 when the step is outside --tolerance percent, without it outside its predicted interval; 1 when a run
    that failed is asked to be within a tolerance.
    """

    run: str = required_argument(help="Directory of a run, or its id in planner runs.")
    tolerance: float | None = common.tolerance()
    html: Path | None = option(None, "--html", help="Write the report as one self-contained page.")
    picture: Path | None = option(None, "--picture", help="Write both timelines as an SVG picture.")
    trace: Path | None = option(None, "--trace", help="Write both timelines for Perfetto.")
    learn: Path | None = option(None, "--learn", help="Add the run's operators by shape to this profile.")
    profile: Path | None = common.profile()
    strict: bool = common.strict()
    force: bool = option(False, "--force", help="Let output replace files.")
    redact: bool = common.redact()
    json: bool = common.json_flag()


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs(Request):
    """List the runs that planner apply made, with measured against predicted. planner report ID explains one."""

    add: list[Path] | None = option(
        None, "--add", help="Keep this run's directory too: one of several nodes, or made elsewhere."
    )
    remove: list[str] | None = option(
        None, "--remove", help="Remove this run from the list, by its id; its directory stays."
    )
    limit: int = option(20, "--limit", least=1, most=100000, help="How many, newest first.")
    redact: bool = common.redact()
    json: bool = common.json_flag()


RUN = """\
{"id": "my-run-1", "model": "llama3-8b", "cluster": "8xH100", "framework": "torchtitan", "seq_len": 8192, \
"global_batch": 16, "micro_batch": 1, "dp_shard": 8, "recompute": "full", "step_s": 2.5, "peak_memory_gib": 47.0}
"""


def _example() -> bool:
    printed = option(False, "--example", help="Print a run as a line of a .jsonl file, and end.", prints=RUN.rstrip())
    return cast("bool", printed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Validate(Request):
    """Compare predictions with measured runs, row by row, and sum up each file.

    Files are runs of training, each a case or a row of command-line words (--example prints one), or serving points,
    one a line (.jsonl, .jsonl.gz): of one kind in a call. A row that cannot be predicted is listed as skipped, with the
    reason; exit code 3 when every row is. --tolerance is for mean absolute errors.
    """

    files: list[str] = required_argument(help="Runs with measurements: .json, .jsonl or .csv; or serving points.")
    example: bool = _example()
    profile: Path | None = common.profile()
    runtime: Path | None = common.learned_runtime()
    strict: bool = common.strict()
    tolerance: float | None = common.tolerance()
    json: bool = common.json_flag()


@dataclass(frozen=True, slots=True, kw_only=True)
class Learn(Request):
    """Fit what a runtime's description leaves open to runs, and say which runs would teach most.

    The file can then be given as --runtime to validate, estimate and suggest. Cases without a measured time or memory
    are candidates for the next runs; with fewer than three measured ones nothing is fitted, and what to run first is
    said. What was measured may be left to the log of a run (torchtitan, Megatron-LM or DeepSpeed), which `measured.log`
    of its case names.
    """

    file: str = required_argument(help="Runs: .json, .jsonl or .csv; measured.log names a log.")
    example: bool = _example()
    runtime: str = required("--runtime", help="What the runtime is called, known here or not.")
    out: Path = required("--out", help="Write the learned runtime to this file.")
    like: str | None = option(
        None, "--like", help="The description to start from; default: the name, else the cases' own."
    )
    profile: Path | None = common.profile()
    force: bool = option(False, "--force", help="Let --out replace a file.")
    json: bool = common.json_flag()
