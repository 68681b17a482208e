"""What commands about other tools, the explorer and the service are asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from planner.requests import common
from planner.requests.flag import Request, argument, group, option, required_argument
from planner.requests.serving import Load


@dataclass(frozen=True, slots=True, kw_only=True)
class Export(Request):
    """Write a plan for the tool that shall run it.

    The file says in its header which plan it is, what of it the tool cannot express, and what has to be put next to it.
    Exit code 3 when the tool cannot run such a plan at all.
    """

    plan: Path = required_argument(help="Plan file of planner suggest --out, or a case file.")
    to: str | None = option(
        None,
        "--to",
        help="torchrun, torchtitan, megatron, deepspeed, accelerate, slurm, trainjob, skypilot;"
        " @VERSION where several are known, such as torchtitan@0.2.2."
        " Of a serving plan: script, compose, kubernetes, or its engine's name.",
    )
    every: bool = option(False, "--all", help="Write the folder --out: a file for every tool, and how to start each.")
    out: Path | None = option(None, "--out", help="File to write; default: standard output.")
    name: str | None = option(
        None, "--name", help="What to call the run, or where an engine finds the weights; default: the model's name."
    )
    case_id: str | None = option(None, "--id", help="Which case of a list.")
    force: bool = option(False, "--force", help="Let --out replace a file.")
    json: bool = common.json_flag()


@dataclass(frozen=True, slots=True, kw_only=True)
class Check(Request):
    """Check a configuration of another tool: legal, does it fit, how fast, and what to change.

    Changes and the best plan are diffs of the file itself, comments and order kept. Exit code 3 when the configuration
    is not legal, or one of a folder's; one that does not fit is an answer, and ends with 0. Where the file leaves open
    what a verdict needs, that is asked, with exit code 2.
    """

    file: str = required_argument(
        help="torchtitan TOML or command, Megatron-LM command line, script or functional test, Megatron-Bridge recipe"
        " or its dump, DeepSpeed JSON, accelerate YAML, TrainingArguments, verl or MaxText command or YAML, YAML of"
        " axolotl, LLaMA-Factory, torchtune, LitGPT, nanotron, GPT-NeoX, NeMo AutoModel, OLMo or Primus, vllm serve or"
        " SGLang command; - reads stdin."
        " Of a folder: all that train, one row each."
    )
    model: str | None = option(None, "--model", help="Shipped model or config.json, where the file names none.")
    cluster: str | None = option(
        None, "--cluster", help="Catalogue name, cluster file, capture, or local; default dgx-h100."
    )
    gpu: str | None = common.gpu()
    gpus: int | None = option(
        None, "--gpus", least=1, most=1 << 20, help="GPUs it runs on, where the file leaves it open."
    )
    seq_len: int | None = option(
        None, "--seq-len", "--seq", least=1, most=1 << 31, help="Tokens in a sequence, where the file does not say."
    )
    global_batch: int | None = option(
        None, "--global-batch", least=1, most=1 << 31, help="Sequences in a step, where the file does not say."
    )
    micro_batch: int | None = option(
        None, "--micro-batch", least=1, most=1 << 31, help="Sequences in a pass, where the file does not say."
    )
    variable: list[str] | None = option(
        None, "--set", metavar="NAME=VALUE", help="A variable of a script that it does not set; repeat it."
    )
    launch: str = option("", "--launch", help="The line that starts it: its GPUs and the program's arguments.")
    release: str = option(
        "", "--release", help="Release of vLLM or SGLang that runs, such as 0.8.3, where the file does not say."
    )
    measured: str | None = option(
        None,
        "--measured",
        metavar="TIME",
        help="What a step takes, such as 9.2s: compared with the prediction, and why.",
    )
    tokens_per_s: float | None = option(
        None, "--tokens-per-s", least=1e-6, help="The same as a rate: tokens a second of all GPUs together."
    )
    search: bool = option(True, "--search/--no-search", help="Look for the best plan too.")
    time_limit: float | None = common.time_limit()
    profile: Path | None = common.profile()
    strict: bool = common.strict()
    sarif: bool = option(False, "--sarif", help="Of a folder: print SARIF, for the annotations of a pull request.")
    json: bool = common.json_flag()
    load: Load = group(Load)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard(Request):
    """Choose placements for what is not pinned, and plan the collectives between them.

    A case is text, or a graph that the executor captured from a module (`executor.sharding`).

    A case that has no answer says why. Exit code 3 when that is so of every case.
    """

    file: str | None = argument(None, help="Cases: mesh, operators, placements; - for stdin.")
    model: str | None = option(
        None, "--model", help="Instead of FILE: layers of a shipped model or config.json, none placed."
    )
    layers: int | None = option(
        None, "--layers", least=1, help="How many of its layers; default: all, with embedding and loss."
    )
    mesh: str | None = option(None, "--mesh", help="With --model: axes and sizes, data=8,model=8.")
    seq_len: int | None = option(
        None, "--seq-len", "--seq", least=1, most=1 << 24, help="With --model: tokens; default 4096."
    )
    micro_batch: int | None = option(
        None, "--micro-batch", least=1, most=1 << 24, help="With --model: sequences in all; default: as many as ranks."
    )
    cluster: str | None = option(
        None, "--cluster", help="Choose by time there: catalogue name, cluster file or capture."
    )
    gpu: str | None = common.gpu()
    gpus: int | None = option(None, "--gpus", least=1, most=1 << 20, help="GPUs of the cluster to have.")
    profile: Path | None = common.profile()
    program: str | None = option(
        None, "--program", help="Write the program of a captured graph there, for the executor."
    )
    python: str | None = option(
        None, "--python", help="Write a Python file of DTensor placements there, which torch runs."
    )
    picture: str | None = option(
        None, "--picture", help="Write the plan as an SVG there: operators, placements, collectives."
    )
    listing: bool = option(
        False, "--listing", help="Print the program, a line a tensor: what of it a device has, and exchanges."
    )
    explain: bool = option(
        False, "--explain", help="Say why each collective is there, and what the plan without it takes."
    )
    time_limit: float | None = option(
        None, "--time-limit", least=0.1, help="Seconds to look for the cheapest; then the best so far, and its gap."
    )
    memory_limit: float | None = option(
        None, "--memory-limit", least=0.001, help="GiB of a rank for parameters, their state and what is saved."
    )
    strict: bool = common.strict()
    json: bool = common.json_flag()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ui(Request):
    """Look at clusters, plans and runs in a browser: http://127.0.0.1:8501.

    Serves on this machine only, needs no GPU, and sends nothing anywhere but to the service of --server. Ctrl-C ends
    it.
    """

    port: int = option(8501, "--port", least=1, most=65535, help="Port on 127.0.0.1.")
    server: str | None = option(
        None, "--server", metavar="URL", help="Search, run and tune on this service; its token is in MESHWRIGHT_TOKEN."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Service(Request):
    """Answer questions and make runs for others: http://127.0.0.1:8600, described at /openapi.json.

    Every accepted job ends with a result or a stated failure, also when processes are killed. Listens on this machine
    only by default. Ctrl-C ends it.
    """

    port: int = option(8600, "--port", least=1, most=65535, help="Port to listen on.")
    host: str = option("127.0.0.1", "--host", help="Address to listen on; others than loopback need --tokens.")
    database: str | None = option(
        None,
        "--database",
        environment="MESHWRIGHT_DATABASE",
        help="postgresql://user@host/name; default SQLite in --folder.",
    )
    workers: int | None = option(None, "--workers", least=1, most=1024, help="Jobs at a time; default the CPU cores.")
    folder: Path | None = option(None, "--folder", help="Where files of jobs are kept; default the user's data folder.")
    tokens: Path | None = option(
        None, "--tokens", help="File of users and tokens, `user:token` a line, for its owner only."
    )
    allowed_host: list[str] | None = option(
        None, "--allowed-host", help="Name by which the service may be asked; repeat it."
    )
    allow_program: list[str] | None = option(
        None, "--allow-program", help="Program that a tuning's command may start, as it names it; repeat it."
    )
    time_limit: float = option(600.0, "--time-limit", least=1, help="Seconds that a question may take.")
    memory: float = option(4.0, "--memory", least=0.5, help="GiB that a question may use.")
    rate: float = option(100.0, "--rate", least=0.1, help="Jobs that a user may submit a second.")
    keep_days: float = option(30.0, "--keep-days", least=0.01, help="Days that ended jobs are kept.")
