"""What commands about other tools, the explorer and the service are asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from planner.requests import common
from planner.requests.flag import Request, argument, group, option, required_argument
from planner.requests.serving import Load


@dataclass(frozen=True, slots=True, kw_only=True)
class Export(Request):
    """Write a plan as the configuration of the tool that will run it.

    The header of the file says which plan it is, what of it the tool cannot express, and which other files it needs.
    The exit code is 3 if the tool cannot run such a plan at all.
    """

    plan: Path = required_argument(help="Plan file from planner suggest --out, or a case file.")
    to: str | None = option(
        None,
        "--to",
        help="torchrun, torchtitan, megatron, deepspeed, accelerate, slurm, trainjob, skypilot;"
        " of tools that tune: torchtune, axolotl, llama-factory, automodel;"
        " with a version if several are known: torchtitan@0.2.2."
        " For a serving plan: script, compose, kubernetes, or its engine's name.",
    )
    every: bool = option(
        False, "--all", help="Write a folder (--out) with a file for every tool, and how to start each."
    )
    out: Path | None = option(None, "--out", help="File to write; default: standard output.")
    name: str | None = option(
        None, "--name", help="Name of the run, or of the weights that an engine loads; default: the model's name."
    )
    case_id: str | None = option(None, "--id", help="Which case of a list, by its id.")
    force: bool = option(False, "--force", help="Let --out overwrite a file.")
    json: bool = common.json_flag()


@dataclass(frozen=True, slots=True, kw_only=True)
class Check(Request):
    """Check a configuration of another tool: is it legal, does it fit, how fast is it, and what to change.

    Changes and the best plan are shown as diffs of the file, which keep its comments and order. The exit code is 3 if
    the configuration, or one in a folder, is not legal, and 0 if it is legal but does not fit. If the file leaves out
    what a verdict needs, the answer asks for it, with exit code 2.
    """

    file: str = required_argument(
        help="torchtitan TOML or command, Megatron-LM command line, script or functional test, Megatron-Bridge recipe"
        " or its dump, DeepSpeed JSON, accelerate YAML, TrainingArguments, verl or MaxText command or YAML, YAML of"
        " axolotl, LLaMA-Factory, torchtune, LitGPT, nanotron, GPT-NeoX, NeMo AutoModel, OLMo or Primus, vllm serve or"
        " SGLang command; - reads stdin."
        " For a folder: every training configuration in it, one row each."
    )
    model: str | None = option(None, "--model", help="Model name or config.json, if the file names none.")
    cluster: str | None = option(
        None,
        "--cluster",
        help="GPUs (2x8xH100), machine type, catalogue name, file, captured text, or local; default: dgx-h100.",
    )
    gpu: str | None = common.gpu()
    gpus: int | None = option(None, "--gpus", least=1, most=1 << 20, help="Number of GPUs, if the file does not say.")
    seq_len: int | None = option(
        None, "--seq-len", "--seq", least=1, most=1 << 31, help="Tokens in a sequence, if the file does not say."
    )
    global_batch: int | None = option(
        None, "--global-batch", least=1, most=1 << 31, help="Sequences in a step, if the file does not say."
    )
    micro_batch: int | None = option(
        None, "--micro-batch", least=1, most=1 << 31, help="Sequences in a micro batch, if the file does not say."
    )
    variable: list[str] | None = option(
        None, "--set", metavar="NAME=VALUE", help="Value of a variable that a script does not set; may be repeated."
    )
    launch: str = option(
        "", "--launch", help="Command line that starts it, with its number of GPUs and the program's arguments."
    )
    release: str = option("", "--release", help="Release of vLLM or SGLang, such as 0.8.3, if the file does not say.")
    measured: str | None = option(
        None,
        "--measured",
        metavar="TIME",
        help="Measured step time, such as 9.2s: compares it with the prediction and explains the difference.",
    )
    tokens_per_s: float | None = option(
        None, "--tokens-per-s", least=1e-6, help="The same as a rate: tokens per second of all GPUs together."
    )
    search: bool = option(True, "--search/--no-search", help="Also search for the best plan.")
    time_limit: float | None = common.time_limit()
    profile: Path | None = common.profile()
    strict: bool = common.strict()
    sarif: bool = option(False, "--sarif", help="For a folder: print SARIF, which annotates pull requests.")
    json: bool = common.json_flag()
    load: Load = group(Load)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard(Request):
    """Choose the sharding of tensors whose placement is open, and plan the collectives between them.

    A case is text, or a graph that the executor captured from a module (`executor.sharding`). The exit code is 3 if no
    case has an answer; each says why.
    """

    file: str | None = argument(None, help="Cases: mesh, operators, placements; - for stdin.")
    model: str | None = option(
        None, "--model", help="Instead of FILE: layers of a model (name or config.json), with every placement open."
    )
    layers: int | None = option(
        None, "--layers", least=1, help="How many of its layers; default: all, with embedding and loss."
    )
    mesh: str | None = option(None, "--mesh", help="With --model: axes of the mesh and their sizes, data=8,model=8.")
    seq_len: int | None = option(
        None, "--seq-len", "--seq", least=1, most=1 << 24, help="With --model: tokens in a sequence; default: 4096."
    )
    micro_batch: int | None = option(
        None,
        "--micro-batch",
        least=1,
        most=1 << 24,
        help="With --model: sequences over all ranks; default: one a rank.",
    )
    cluster: str | None = option(None, "--cluster", help="Choose by time on this cluster, instead of by bytes.")
    gpu: str | None = common.gpu()
    gpus: int | None = option(None, "--gpus", least=1, most=1 << 20, help="How many GPUs of the cluster to use.")
    profile: Path | None = common.profile()
    program: str | None = option(
        None, "--program", help="Write the program of a captured graph to this file, for the executor."
    )
    python: str | None = option(None, "--python", help="Write the placements as a Python file for torch's DTensor.")
    picture: str | None = option(
        None, "--picture", help="Draw operators, placements and collectives into this SVG file."
    )
    listing: bool = option(
        False,
        "--listing",
        help="Print the program, one line per tensor: which part a rank holds, and what it exchanges.",
    )
    explain: bool = option(
        False, "--explain", help="Say why each collective is there, and what a plan without it would cost."
    )
    time_limit: float | None = option(
        None,
        "--time-limit",
        least=0.1,
        help="Stop searching after this many seconds; answer with the best so far and its gap.",
    )
    memory_limit: float | None = option(
        None,
        "--memory-limit",
        least=0.001,
        help="GiB on each rank for parameters, optimizer state and saved activations.",
    )
    strict: bool = common.strict()
    json: bool = common.json_flag()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ui(Request):
    """Explore clusters, plans and runs in a browser: http://127.0.0.1:8501.

    It listens on this machine only, needs no GPU, and sends nothing anywhere but to the service of --server. Ctrl-C
    ends it.
    """

    port: int = option(8501, "--port", least=1, most=65535, help="Port on 127.0.0.1.")
    server: str | None = option(
        None,
        "--server",
        metavar="URL",
        help="Search, run and tune on this service; its token is read from MESHWRIGHT_TOKEN.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Service(Request):
    """Answer questions and start runs for others over HTTP: http://127.0.0.1:8600, described at /openapi.json.

    Every accepted job ends with a result or a stated failure, even if processes are killed. By default it listens on
    this machine only. Ctrl-C ends it.
    """

    port: int = option(8600, "--port", least=1, most=65535, help="Port to listen on.")
    host: str = option("127.0.0.1", "--host", help="Address to listen on; any but loopback needs --tokens.")
    database: str | None = option(
        None,
        "--database",
        environment="MESHWRIGHT_DATABASE",
        help="postgresql://user@host/name; default: SQLite in --folder.",
    )
    workers: int | None = option(
        None, "--workers", least=1, most=1024, help="Jobs at a time; default: the number of CPU cores."
    )
    folder: Path | None = option(
        None, "--folder", help="Folder for the files of jobs; default: the user's data folder."
    )
    tokens: Path | None = option(
        None, "--tokens", help="File with a line `user:token` for each user; only its owner may read it."
    )
    allowed_host: list[str] | None = option(
        None, "--allowed-host", help="Host name under which the service may be reached; may be repeated."
    )
    allow_program: list[str] | None = option(
        None, "--allow-program", help="Program that a tuning's command may start, as it names it; repeat it."
    )
    time_limit: float = option(600.0, "--time-limit", least=1, help="Most seconds for a question.")
    memory: float = option(4.0, "--memory", least=0.5, help="Most GiB for a question.")
    rate: float = option(100.0, "--rate", least=0.1, help="Most jobs that a user may submit per second.")
    keep_days: float = option(30.0, "--keep-days", least=0.01, help="Days to keep finished jobs.")
