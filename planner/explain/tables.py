"""Plans, questions and estimates as lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log10
from textwrap import wrap

from rich.console import Console

from planner.io.figures import gib_text, last_digit_s, seconds_text
from planner.io.printable import printable
from planner.question.prediction import Method
from planner.question.question import Question
from planner.search.flips import FlipPoint
from planner.search.result import SearchResult
from simulator.calibration.published_mfu import exceeded
from simulator.config.estimate import SURE, Estimate, MemoryEstimate
from simulator.config.model import Model
from simulator.config.runtime import Runtime
from simulator.config.savers import TITLES
from simulator.config.workload import Workload
from topology.cluster import Cluster, LinkKind
from topology.rates.reach import mixed_gpus
from topology.rates.scaling import network_bytes_per_s, nvlink_bytes_per_s
from topology.units import GIB, in_gb_per_s, in_gib

LABEL = 10  # width of the label at the left of a line


def share_text(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if part > 0 else "-"


LEAST_SHARE = 0.005  # share of the step below which a source is not named


def parts_line(estimate: Estimate) -> str:
    """Return the parts of the step, largest first, without those below its last known digit."""
    last_s = last_digit_s(estimate.step_s)
    parts = sorted(estimate.breakdown_s.items(), key=lambda item: -item[1])
    named = (f"{name.replace('_', ' ')} {seconds_text(part, last_s)}" for name, part in parts if part >= last_s / 2)
    return f"step      {', '.join(named)}"


def _against_published(estimate: Estimate, question: Question, gpus: int) -> str:
    best = exceeded(estimate, question.cluster, question.runtime, gpus)
    if best is None:
        return ""
    of = f"{best.parameters / 1e9:.1f} B parameters on {best.gpus:,} GPUs in {best.runtime}, row {best.source}"
    return f"; {best.mfu:.0%} is the most that the published runs on about as many of these GPUs reached ({of})"


def basis_lines(estimate: Estimate, method: Method, question: Question, gpus: int) -> list[str]:
    """Return the meaning of the figures and their sources."""
    step, memory = estimate.step_s, estimate.memory
    low, high = (step.low / step.value - 1, step.high / step.value - 1) if step.value else (0.0, 0.0)
    if step.source in {"datasheet", "assumed"}:
        basis = "datasheet values, uncalibrated"
    else:
        shares = (f"{share:.0%} {source}" for source, share in estimate.sources.items() if share >= LEAST_SHARE)
        basis = f"of the step's time {', '.join(shares) or step.source}"
    how = "simulated" if method is Method.SIMULATION else "analytical model, as a simulation would take too long"
    return [
        f"basis     {basis}; {how}; 80% of measured steps are expected within {low:+.0%} to {high:+.0%}",
        (
            f"MFU       counts model FLOPs (no recompute) against the dense peak of {estimate.peak_flops / 1e12:.0f}"
            f" TFLOP/s{_against_published(estimate, question, gpus)}"
        ),
        vendor_text(
            f"fits      the probability that what the fullest rank reserves{_beside(memory)} is within"
            f" {gib_text(memory.capacity_bytes)} GiB (a GPU's {in_gib(question.cluster.gpu_memory_bytes)} less CUDA's"
            f" context); yes means at least {SURE:.0%}",
            question.cluster,
        ),
    ]


def _beside(memory: MemoryEstimate) -> str:
    """Return the text for NCCL's memory, which torch does not reserve; empty if it is too little to show."""
    held = memory.communicator_bytes
    return f" and {in_gib(held)} for NCCL" if held >= 0.05 * GIB else ""


def changed_lines(changed: Sequence[str]) -> list[str]:
    """Return one line with all changes of a file by flags."""
    return [f"changed: {'; '.join(changed)}"] if changed else []


def memory_line(estimate: Estimate) -> str:
    """Return the memory of the fullest rank by category, largest first."""
    memory = estimate.memory
    parts = sorted(memory.by_category.items(), key=lambda item: (-item[1], item[0]))
    named = ", ".join(f"{name.replace('_', ' ')} {gib_text(size)}" for name, size in parts if size >= 0.05 * GIB)
    low, high = gib_text(memory.reserved_low_bytes), gib_text(memory.reserved_high_bytes)
    return (
        f"memory    {gib_text(memory.reserved_bytes)} GiB ({low} to {high}) reserved on rank {memory.worst_rank}, "
        f"{gib_text(memory.peak_bytes.value)} of it allocated: {named}{elsewhere_text(memory)}"
    )


def elsewhere_text(memory: MemoryEstimate) -> str:
    """Return the part of a rank's state outside torch's memory, after a semicolon; empty if there is none."""
    parts = [paged_text(memory)] if memory.paged_bytes >= 0.05 * GIB else []
    if memory.host_bytes:
        has = "" if memory.host_capacity_bytes is None else f", which has {gib_text(memory.host_capacity_bytes)}"
        parts.append(f"{gib_text(memory.host_bytes)} of host memory for each GPU{has}")
    return "".join(f"; {part}" for part in parts)


def paged_text(memory: MemoryEstimate) -> str:
    """Return where the states of a paged optimizer are, and their cost."""
    left, states = gib_text(max(0.0, memory.headroom_bytes)), f"paged states {gib_text(memory.paged_bytes)} GiB"
    if not memory.paging_s:
        return f"{states}, on the GPU, which has {left} left for them"
    return (
        f"{states}, more than the {left} left on the GPU: all come from the host and go back in every step, "
        f"{memory.paging_s:.2g} s of the optimizer's"
    )


def direct_links(cluster: Cluster) -> tuple[float, int, int] | None:
    """Return, for the GPU whose links to other GPUs have the least rate together: that rate in bytes per second, the
    number of GPUs it reaches, and the number of other GPUs. None if GPUs are connected by a switch or not at all, or if
    a rate is unknown.
    """
    node = cluster.groups[0].node
    links = [link for link in node.links if link.kind is LinkKind.NVLINK]
    if not links or any(link.bytes_per_s is None for link in links):
        return None
    own = [[link for link in links if gpu.vertex in {link.a, link.b}] for gpu in node.gpus]
    rate, peers = min((sum(link.bytes_per_s or 0.0 for link in mine), len(mine)) for mine in own)
    return (rate, peers, len(node.gpus) - 1) if peers else None


def cluster_line(cluster: Cluster) -> str:
    kind = cluster.slowest_kind
    link = nvlink_bytes_per_s(cluster)
    network = network_bytes_per_s(cluster)
    plural = "s" if cluster.node_count > 1 else ""
    has_nvlink = any(link.kind in {LinkKind.NVLINK, LinkKind.NVSWITCH} for link in cluster.groups[0].node.links)
    parts = [f"{cluster.name}: {cluster.node_count} node{plural} x {cluster.gpus_per_node} {kind.title}"]
    if mixed := mixed_gpus(cluster):
        parts.append(mixed[0])
    if cluster.gpu_memory_bytes:
        parts.append(in_gib(cluster.gpu_memory_bytes))
    name = vendor_text("NVLink", cluster)
    direct = direct_links(cluster)
    if direct is not None:
        rate, peers, others = direct
        reach = "" if peers == others else f" to {peers} of {others} other GPUs"
        parts.append(f"{name} {rate / 1e9:.0f} GB/s/GPU{reach}")
    elif link:
        parts.append(f"{name} {link / 1e9:.0f} GB/s/GPU")
    else:
        parts.append(f"{name} of unknown rate" if has_nvlink else f"no {name}")
    if cluster.node_count > 1:
        parts.append(f"network {in_gb_per_s(network)}/GPU" if network else "no network described")
    return " | ".join(parts)


def _parameters(model: Model) -> str:
    return f"{model.parameters / 1e9:.2f} B" if model.parameters >= 1e8 else f"{model.parameters / 1e6:.3g} M"


def model_line(model: Model) -> str:
    moe = f", {model.moe.experts} experts ({model.moe.experts_per_token} used)" if model.moe else ""
    return (
        f"{model.name}: {_parameters(model)} parameters, {model.layers} layers, {model.heads} heads / "
        f"{model.kv_heads} KV{moe}"
    )


def workload_line(workload: Workload) -> str:
    tokens = workload.tokens_per_step
    batch = f"global batch {workload.global_batch_size:,} ({tokens:,} tokens a step)"
    packed = f" packed of documents of {workload.document_len:,}" if workload.document_len else ""
    return f"train, sequences of {workload.seq_len:,} tokens{packed}, {batch}"


def runtime_line(runtime: Runtime, title: str) -> str:
    mode = "compiled" if runtime.compile else "eager"
    plain = title.rstrip("0123456789.")
    trained = f"; {runtime.adapter.title}" if runtime.adapter is not None else ""
    trained += "".join(f"; {TITLES[word]}" for word in runtime.savers)
    if runtime.cuda_graph:
        trained += "; CUDA graphs" + (f" of {', '.join(runtime.graph_scopes)}" if runtime.graph_scopes else "")
    if runtime.low and any(runtime.wide_layers):
        trained += "; first {} and last {} layers in 16 bits".format(*runtime.wide_layers)
    trained += "; re-entrant checkpoints" if runtime.reentrant else ""
    trained += "; every step logged" if runtime.logs_each_step else ""
    name = f"{plain}{runtime.version}" if runtime.version and plain != title else title
    return (
        f"{name}, {mode}, parameters {runtime.param_dtype}, compute {runtime.compute_dtype}, gradients reduced in "
        f"{runtime.reduce_dtype}, {runtime.optimizer}{trained}"
    )


def search_line(result: SearchResult) -> str:
    search = result.search
    parts = [
        f"{search.legal:,} legal of {search.candidates:,} candidates, {search.legal - search.fitting:,} do not fit",
        # The possible gain of other stages is from the search's experience, not a bound
        # (`plan_space.branch_and_bound`).
        f"{search.status} (gap {search.gap:.1%}{'' if search.proved else ', an estimate'})",
        f"{search.seconds:.1f} s",
    ]
    if search.filled:
        proof = f"to within {search.filled_gap:.1%} of" if search.filled_gap > 5e-4 else "in"
        pipelines = f"{search.filled} pipeline{'s' * (search.filled > 1)}"
        parts.append(f"layers of {pipelines} spread over their stages {proof} the best way")
    if search.pruned:
        parts.append("left out: " + ", ".join(f"{name} ({n:,})" for name, n in search.pruned.items()))
    return "; ".join(parts)


# AMD's name of each part that has NVIDIA's in our words (ROCm documentation; xGMI: the links of Infinity Fabric).
_AMD_NAMES = {"NVLink": "xGMI", "NCCL": "RCCL", "CUDA": "HIP"}


def vendor_text(text: str, cluster: Cluster) -> str:
    """Return a text with the names that the vendor of the cluster's GPUs uses; `text` has NVIDIA's."""
    if cluster.slowest_kind.by_amd:
        for name, its_name in _AMD_NAMES.items():
            text = text.replace(name, its_name)
    return text


def flip_text(flip: FlipPoint) -> str:
    """Return a flip point as text: `beats #1 if network per GPU < 31 GB/s (now 50)`."""
    scale, _ = _flip_unit(flip)
    sign = "<" if flip.wins == "below" else ">"
    return f"beats #1 if {flip.quantity} {sign} {flip_at(flip)} (now {flip.now / scale:.3g})"


def flip_at(flip: FlipPoint) -> str:
    """Return where a flip point is, rounded to the side where its plan wins: `31 GB/s`."""
    scale, unit = _flip_unit(flip)
    at = flip.at / scale
    digit = 10.0 ** (max(0, floor(log10(at)) - 1) if at >= 1 else floor(log10(at)) - 1)
    at = (floor(at / digit) if flip.wins == "below" else ceil(at / digit)) * digit
    return f"{at:.4g} {unit}"


def _flip_unit(flip: FlipPoint) -> tuple[float, str]:
    return (GIB, "GiB") if flip.unit == "bytes" else (1e9, "GB/s")


def print_lines(screen: Console, lines: Sequence[str], *, hanging: str = "  ") -> None:
    """Print lines; long ones are wrapped and indented to the text after the label, or by `hanging` without a label."""
    for line in lines:
        labelled = bool(hanging) and len(line) > LABEL and line[LABEL - 1] == " " and line[LABEL] != " "
        indent = " " * LABEL if labelled else hanging
        for folded in wrap(printable(line), max(40, screen.width), subsequent_indent=indent) or [""]:
            screen.print(folded)
