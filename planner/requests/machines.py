"""What commands about a machine are asked."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from planner.requests import common
from planner.requests.flag import Request, option


class ClusterFormat(StrEnum):
    """Formats of other tools: an NCCL topology file, an ASTRA-sim network file, a SimAI edge list."""

    NCCL_XML = "nccl-xml"
    ASTRA_SIM = "astra-sim"
    SIMAI = "simai"


class CostModel(StrEnum):
    MESHWRIGHT = "meshwright"
    NCCL = "nccl"


class Launch(StrEnum):
    QUEUED = "queued"
    GRAPH = "graph"
    EAGER = "eager"
    ISOLATED = "isolated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(Request):
    """Read the GPUs, links and NICs of this machine, or of files captured on another.

    Tokens that are not understood are reported, never guessed.
    """

    sources: list[str] | None = option(
        None,
        "--from",
        help="Captured nvidia-smi topo -m, nvlink, p2p or NCCL XML, or a cluster (8xH100); repeatable; - for stdin.",
    )
    gpu: str | None = option(None, "--gpu", help="GPU model, such as h100-sxm, if the text does not name it.")
    out: Path | None = option(None, "--out", help="Save the cluster to this file.")
    force: bool = option(False, "--force", help="Let --out and --svg overwrite files.")
    to: ClusterFormat | None = option(
        None, "--to", help="Print the cluster for another tool instead, or save it with --out."
    )
    svg: Path | None = option(None, "--svg", help="Draw the node and its links to this file.")
    explain: bool = option(False, "--explain", help="Describe in words what is connected, and how.")
    redact: bool = common.redact()
    json: bool = common.json_flag()


@dataclass(frozen=True, slots=True, kw_only=True)
class Doctor(Request):
    """Compare the machine with its datasheet and its GPUs with each other, and say what each fault costs.

    The exit code is 1 if it is unhealthy, and 0 if it is healthy or has no GPU. Nothing is changed, and no process is
    ended.
    """

    sources: list[str] | None = option(
        None, "--from", help="Captured nvidia-smi or NCCL output, instead of this machine; may be repeated."
    )
    cluster: str | None = option(
        None, "--cluster", help="Check a catalogue name or cluster file, instead of this machine."
    )
    expect: str | None = option(None, "--expect", help="What the machine should be: a catalogue name or cluster file.")
    gpu: str | None = option(None, "--gpu", help="GPU model, such as h100-sxm, if the text does not name it.")
    measure: bool = option(False, "--measure", help="Measure links, GPUs and collectives; needs torch.")
    measured: Path | None = option(None, "--measured", help="Use a measurement that --save-measured wrote.")
    launcher: str | None = option(
        None, "--launcher", help="slurm or ray: check what a job needs, on free nodes, instead of this machine."
    )
    nodes: int | None = option(None, "--nodes", least=1, most=1024, help="Nodes of such a job; default 2.")
    gpus_per_node: int | None = option(
        None, "--gpus-per-node", least=0, most=64, help="GPUs of each; default: as many as nodes declare."
    )
    budget: str = option("60s", "--budget", help="Time for --measure, such as 60s or 2m.")
    allow_busy: bool = option(False, "--allow-busy", help="Measure even if others use the GPUs.")
    out: Path | None = option(None, "--out", help="Save the cluster, with measured rates.")
    save_measured: Path | None = option(None, "--save-measured", help="Save the raw measurement.")
    save_profile: Path | None = option(None, "--save-profile", help="Save measured collectives as a profile.")
    force: bool = option(False, "--force", help="Let --out and --save-... overwrite files.")
    redact: bool = common.redact()
    json: bool = common.json_flag()


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective(Request):
    """Predict the time of a collective by message size, or compare with a file of measured tables."""

    cluster: str = common.cluster("dgx-h100")
    gpu: str | None = common.gpu()
    op: str = option("all_reduce", "--op", help="all_reduce, all_gather, reduce_scatter, all_to_all, broadcast.")
    gpus: int | None = option(
        None, "--gpus", least=2, most=1 << 20, help="Number of ranks; default: all GPUs of the cluster."
    )
    sizes: str = option(
        "1048576,16777216,268435456",
        "--bytes",
        help="Message sizes, comma separated (nccl-tests' size column): 1048576,512MiB,1GB.",
    )
    tables: Path | None = option(None, "--tables", help="Measured tables to compare with.")
    cost_model: CostModel = option(
        CostModel.MESHWRIGHT, "--cost-model", help="Ours, or the formulas of NCCL's own tuner."
    )
    algorithm: str | None = option(
        None, "--algorithm", help="ring, tree, nvls, nvls_tree, pat, one_shot, two_shot or copy_engine."
    )
    launch: Launch | None = option(
        None, "--launch", help="What a time includes; default: queued, which is device time alone."
    )
    known_every: int | None = option(
        None, "--known-every", least=2, help="Calibrate with every Nth row of a table, and score the others."
    )
    profile: Path | None = common.profile()
    strict: bool = common.strict()
    json: bool = common.json_flag()


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrate(Request):
    """Measure layers, operators, collectives, contention and overlap, and save them as a profile.

    With --model, it finds the plans that could win, and measures first what narrows the choice between them most per
    second. What the profile already has is not measured again, so the same command continues a run that was cut short.
    With 90 s or more the host is timed first, on the CPU alone: what a layer and DTensor's dispatch of it cost. The
    exit code is 1 if there is no GPU to measure.
    """

    cluster: str = option("local", "--cluster", help="What this machine is: local, a catalogue name or a cluster file.")
    gpu: str | None = common.gpu()
    out: Path | None = option(None, "--out", help="Profile to write; new samples are added to one that exists.")
    host_only: bool = option(
        False, "--host-only", help="Time the host alone, in seconds, without a GPU; --cluster says which it belongs to."
    )
    budget: str = option("120s", "--budget", help="Time for measuring, such as 60s or 10m.")
    model: str | None = option(None, "--model", "--config", help="Measure what decides between this model's plans.")
    seq_len: int | None = option(
        None, "--seq-len", "--seq", least=1, most=1 << 31, help="Tokens in a sequence, with --model."
    )
    global_batch: int | None = option(
        None, "--global-batch", least=1, most=1 << 31, help="Sequences in a step, with --model."
    )
    micro_batch: int | None = option(
        None, "--micro-batch", least=1, most=1 << 20, help="Only plans with this micro batch."
    )
    framework: str | None = option(
        None, "--framework", help="Framework whose plans compete, with --model; default: torchtitan."
    )
    compile_model: bool | None = common.compiled()
    param_dtype: str | None = common.param_dtype()
    compute_dtype: str | None = common.compute_dtype()
    wanted: list[Path] | None = option(
        None, "--for", help="Plan or case file: measure what its steps rest on; may be repeated."
    )
    runtime: list[str] | None = option(
        None, "--runtime", help="Measure what typical plans of this runtime rest on; may be repeated."
    )
    gpus: int | None = option(None, "--gpus", least=1, help="How many GPUs to use; default: all.")
    operators: bool = option(True, "--operators/--no-operators", help="Measure operators.")
    collectives: bool = option(True, "--collectives/--no-collectives", help="Measure collectives.")
    text: Path | None = option(
        None, "--text", help="Folder with torchtitan's tokenizer/ and c4_test/, to time its data loading."
    )
    store: bool = option(True, "--store/--no-store", help="Also keep the samples in the user's data folder.")
    allow_busy: bool = option(False, "--allow-busy", help="Measure even if others use the GPUs.")
    dry_run: bool = option(
        False,
        "--dry-run",
        help="Show what would be measured, in which order and how long; --cluster may be another machine.",
    )
    device: str = option("cuda", "--device", hidden=True)
    json: bool = common.json_flag()
