"""Cross every command with kinds of cluster, model and size: `python -m tests.tools.cross 5000 --seed 1`.

Each question is a command line that a person could write: valid, tiny or extreme, and answered in this process. What
may not happen is an internal error, an exit code that the command does not have, more CPU seconds than `LONGEST_S`, and
a number in JSON that is not finite, of the wrong sign or outside its own range. `tests/test_cross.py` asks a few of
them, chosen so that any two values meet.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import resource
import shlex
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from planner.cli import main as planner
from planner.question.cases import load_case
from tests.fuzz.formats import wrong_numbers
from topology import codec
from topology.catalog.clusters import cluster
from topology.errors import PlannerError

ROOT = Path(__file__).resolve().parents[2]
LONGEST_S = 60.0  # of CPU time
MOST_BYTES = 8 * 2**30  # of address space
CODES = {0, 2, 3, 5}
ALSO = {"doctor": {1}, "calibrate": {1}, "apply": {1, 4}, "validate": {4}, "report": {1, 4}, "tune": {1}}

# --- the axes -----------------------------------------------------------------------------------------------------

CLUSTERS: dict[str, str] = {
    "catalogue": "--cluster dgx-h100",
    "no multicast": "--cluster dgx-a100-40gb --gpus 16",
    "mesh of GPUs": "--cluster mi300x-x8",
    "cube": "--cluster dgx-1v",
    "one GPU": "--cluster 1xH100",
    "one GPU a node": "--cluster gh200 --gpus 4",
    "two racks": "--cluster gb200-nvl72 --gpus 144",
    "part of a rack": "--cluster gb300-nvl72 --gpus 3",
    "PCIe only": "--cluster l40s-x8",
    "consumer": "--cluster rtx4090-x8 --gpus 5",
    "in words": "--cluster 2x8xA100-40GB@100GbE",
    "machine type": "--cluster p5.48xlarge",
    "topo without a GPU's name": f"--cluster {ROOT}/tests/data/topo/51_h100_8gpu_epyc9654.txt",
    "topo": f"--cluster {ROOT}/tests/data/topo/47_3x_a6000_one_pair.txt --gpu a6000",
    "NCCL XML without a GPU's name": f"--cluster {ROOT}/tests/data/nccl_xml/azure_ndv4-topo.xml",
    "NCCL XML": f"--cluster {ROOT}/tests/data/nccl_xml/azure_ndv5-topo.xml --gpu h100-sxm",
    "part of a capture": f"--cluster {ROOT}/tests/data/topo/19_8gpu_pix_pairs_truncated.txt --gpu l40s",
    "hand-written": f"--cluster {ROOT}/examples/clusters/four_a6000_two_bridges.json",
    "2,048 GPUs": f"--cluster {ROOT}/examples/clusters/h800_2048.json",
    "1M GPUs": '--cluster \'{"gpu": "h100-sxm", "nodes": 131072}\'',
    "MIG": "--cluster mig.txt",
    "mixed": "--cluster mixed.json",
    "slow links": "--cluster slow.json",
}
MODELS: dict[str, str] = {
    "tiny": "tiny-llama",
    "dense": "llama3-8b",
    "large": "llama3-405b",
    "experts": "qwen3-30b-a3b",
    "latent": "deepseek-v2-lite",
    "learned positions": "gpt2",
    "windowed": "gemma2-9b",
    "windowed experts": "gpt-oss-20b",
    "least": "least.json",
    "deep": "deep.json",
    "wide": "wide.json",
    "most experts": "most_experts.json",
}
SIZES: dict[str, str] = {
    "usual": "",
    "least": "--seq-len 1 --global-batch 1",
    "odd": "--seq-len 4097 --global-batch 7",
    "long": "--seq-len 1048576 --global-batch 2",
    "longest": "--seq-len 2147483648 --global-batch 1",
    "most": "--seq-len 128 --global-batch 2147483648",
    "prime": "--seq-len 509 --global-batch 1021",
    "short": "--seq-len 256 --global-batch 4096",
    "many": "--seq-len 2048 --global-batch 1048576",
    "divisible": "--seq-len 16384 --global-batch 720",
}
LOADS: dict[str, str] = {
    "usual": "",
    "least": "--isl 1 --osl 1 --concurrency 1",
    "one token": "--isl 8192 --osl 1 --concurrency 7",
    "long answers": "--isl 1 --osl 4096 --concurrency 3",
    "long prompts": "--isl 262144 --osl 2 --concurrency 2",
    "longest": "--isl 16777216 --osl 1 --concurrency 1",
    "crowd": "--isl 16 --osl 4 --concurrency 65536",
    "trickle": "--isl 128 --osl 16 --request-rate 1e-06",
    "flood": "--isl 128 --osl 4 --request-rate 1000000",
    "bursts": "--isl 128 --osl 16 --request-rate 4 --arrivals gamma:5 --vary 1",
    "cached": "--isl 1024 --osl 8 --concurrency 4 --cached-prompt 1",
    "targets": "--isl 256 --osl 8 --concurrency 4 --ttft 0.000001 --tpot 0",
}
ENGINES: dict[str, str] = {
    "usual": "",
    "eager": "--eager --no-custom-all-reduce",
    "SGLang": "--engine sglang --weights float8 --kv-cache float8",
    "TensorRT-LLM": "--engine trtllm --weights float4",
    "release": "--engine vllm==0.8.3 --max-num-seqs 1",
    "narrow": "--max-num-batched-tokens 16 --gpu-memory-utilization 0.01",
    "ours": "--engine meshwright",
}
DEPLOYMENTS: dict[str, str] = {
    "usual": "",
    "tensor": "--tp 2",
    "tensor of many": "--tp 1024",
    "pipeline": "--pp 2",
    "replicas": "--replicas 3",
    "experts": "--tp 2 --ep 2",
    "attention": "--dp-attention 2 --ep 2",
    "prefill": "--prefill 1xtp1",
    "prefill of tensor": "--prefill 1xtp2 --tp 2",
}
PLANS: dict[str, str] = {
    "usual": "",
    "tensor": "--tp 2",
    "tensor of many": "--tp 1024",
    "pipeline": "--pp 2 --schedule 1F1B",
    "interleaved": "--pp 2 --virtual-stages 2 --schedule Interleaved1F1B",
    "zero bubble": "--pp 2 --schedule ZBVZeroBubble",
    "deep pipeline": "--pp 65536",
    "context": "--cp 2 --recompute selective-op",
    "experts": "--ep 2",
    "replicas": "--dp-replicate 2",
    "recompute": "--recompute full --micro-batch 3",
    "ZeRO": "--runtime deepspeed --zero 3 --offload optimizer",
    "Megatron": "--runtime megatron-lm --tp 2 --tp-overlap userbuffers",
    "float8": "--compute-dtype float8 --compile",
    "float32": "--param-dtype float32 --compute-dtype float32",
    "ours": "--runtime meshwright --tp 2 --tp-overlap chunked",
    "nanotron": "--runtime nanotron --pp 2",
}
LIMITS: dict[str, str] = {
    "usual": "",
    "any": "--framework any",
    "Megatron": "--framework megatron-lm --max-tp 1",
    "fixed": "--tp 2 --pp 1",
    "memory": "--objective memory",
    "both": "--objective pareto",
    "run": "--tokens 1T --gpu-price 2",
    "deadline": "--gpus 1,8 --tokens 300B --deadline 1d",
}
OPS: dict[str, str] = {
    op: f"--op {op} --bytes 1,4096,1048577,1099511627776"
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """`line` has the names of `axes` in braces; `share` is how often it is asked."""

    line: str
    axes: tuple[str, ...]
    share: float = 1.0

    @property
    def name(self) -> str:
        return self.line.split()[0]


AXES: dict[str, Mapping[str, str]] = {
    "cluster": CLUSTERS,
    "model": MODELS,
    "size": SIZES,
    "load": LOADS,
    "engine": ENGINES,
    "deployment": DEPLOYMENTS,
    "plan": PLANS,
    "limits": LIMITS,
    "op": OPS,
}
_TRAINING = "--model {model} {cluster} {size}"
_SERVING = "--task serve --model {model} {cluster} {load} {engine}"
_FEW = "--top 1 --time-limit 1 --json"
COMMANDS: dict[str, Command] = {
    "estimate": Command(
        line=f"estimate {_TRAINING} {{plan}} --json", axes=("model", "cluster", "size", "plan"), share=6
    ),
    "estimate, text": Command(line=f"estimate {_TRAINING} {{plan}}", axes=("model", "cluster", "size", "plan")),
    "estimate serving": Command(
        line=f"estimate {_SERVING} {{deployment}} --json",
        axes=("model", "cluster", "load", "engine", "deployment"),
        share=6,
    ),
    "estimate serving, text": Command(
        line=f"estimate {_SERVING} {{deployment}}", axes=("model", "cluster", "load", "engine", "deployment")
    ),
    "trace": Command(
        line=f"trace {_TRAINING} {{plan}} --out trace.json --force", axes=("model", "cluster", "size", "plan"), share=2
    ),
    "suggest": Command(
        line=f"suggest {_TRAINING} {{limits}} {_FEW}", axes=("model", "cluster", "size", "limits"), share=2
    ),
    "suggest serving": Command(line=f"suggest {_SERVING} {_FEW}", axes=("model", "cluster", "load", "engine")),
    "explain": Command(line=f"explain {_TRAINING} --time-limit 1", axes=("model", "cluster", "size"), share=0.5),
    "explain serving": Command(
        line=f"explain {_SERVING} --time-limit 1", axes=("model", "cluster", "load", "engine"), share=0.5
    ),
    "compare": Command(line="compare plan.json case.json --json", axes=("cluster", "model", "size", "plan")),
    "validate": Command(line="validate case.json --json", axes=("cluster", "model", "size", "plan")),
    "learn": Command(
        line="learn cases.json --runtime torchtitan --out learned.json --force --json",
        axes=("cluster", "model", "size", "plan"),
        share=0.3,
    ),
    "export": Command(
        line="export case.json --all --out exported --force", axes=("cluster", "model", "size", "plan"), share=2
    ),
    "apply": Command(line="apply plan.json --dry-run", axes=("cluster", "model", "size", "plan")),
    "check": Command(
        line=f"check {ROOT}/examples/check/torchtitan_llama3_8b.toml {{cluster}} {{size}} --no-search --json",
        axes=("cluster", "size"),
        share=0.5,
    ),
    "check serving": Command(
        line="check serve.sh {cluster} {load} --no-search --json", axes=("cluster", "load", "engine"), share=0.5
    ),
    "collective": Command(line="collective {cluster} {op} --json", axes=("cluster", "op"), share=2),
    "shard": Command(
        line="shard --model {model} --layers 1 --mesh data=2,model=2 {cluster} --time-limit 1 --json",
        axes=("cluster", "model"),
    ),
    "calibrate": Command(line="calibrate --dry-run {cluster} --json", axes=("cluster",), share=0.1),
    "probe": Command(line="probe --from {machine} --explain --json", axes=("cluster",), share=0.5),
    "probe, NCCL": Command(line="probe --from {machine} --to nccl-xml", axes=("cluster",), share=0.3),
    "probe, ASTRA-sim": Command(line="probe --from {machine} --to astra-sim", axes=("cluster",), share=0.3),
    "probe, SimAI": Command(line="probe --from {machine} --to simai", axes=("cluster",), share=0.3),
    "doctor": Command(line="doctor --from {machine} --json", axes=("cluster",), share=0.5),
}
# `report` needs a run; `runs`, `ui` and `service` no machine; `tune` asks what `suggest` and `apply` do.


# --- questions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A command and a value of each of its axes."""

    command: str
    values: Mapping[str, str]

    def pairs(self) -> set[tuple[tuple[str, str], tuple[str, str]]]:
        """Return which values meet, the command among them."""
        stated = [("command", self.command), *sorted(self.values.items())]
        return {(one, other) for place, one in enumerate(stated) for other in stated[place + 1 :]}

    def words(self) -> list[str]:
        """Return the command line."""
        values = {axis: AXES[axis][value] for axis, value in self.values.items()}
        machine = values.get("cluster", "").removeprefix("--cluster ").partition(" --gpus")[0]
        return shlex.split(COMMANDS[self.command].line.format(**values, machine=machine))


def drawn(number: int, seed: int, commands: Sequence[str] = tuple(COMMANDS)) -> Iterator[Question]:
    """Yield questions by chance, commands by their shares."""
    chance = random.Random(seed)
    shares = [COMMANDS[name].share for name in commands]
    for _ in range(number):
        (name,) = chance.choices(list(commands), weights=shares)
        yield Question(command=name, values={axis: chance.choice(list(AXES[axis])) for axis in COMMANDS[name].axes})


def pairwise(candidates: Sequence[Question], most: int) -> list[Question]:
    """Return at most so many of the questions, each the one in which most values meet that have not met (greedy, as
    AETG: Cohen, Dalal, Fredman, Patton, IEEE Trans. Software Eng. 23, 1997).
    """
    left, met, found = list(candidates), set[tuple[tuple[str, str], tuple[str, str]]](), list[Question]()
    while left and len(found) < most:
        best = max(range(len(left)), key=lambda place: len(left[place].pairs() - met))
        one = left.pop(best)
        if not one.pairs() - met:
            break
        met |= one.pairs()
        found.append(one)
    return found


# --- files that command lines name ------------------------------------------------------------------------------------

_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 2**24}
_SHAPES: dict[str, dict[str, object]] = {
    "least": {"num_hidden_layers": 1, "hidden_size": 2, "num_attention_heads": 1, "intermediate_size": 1, "vocab_size": 2},
    "deep": {"num_hidden_layers": 4096, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128,
             "vocab_size": 128},
    "wide": {"num_hidden_layers": 2, "hidden_size": 2**17, "num_attention_heads": 1024, "intermediate_size": 2**19,
             "vocab_size": 2**22},
    "most_experts": {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 4,
                     "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64,
                     "intermediate_size": 256, "moe_intermediate_size": 32, "num_experts": 4096,
                     "num_experts_per_tok": 4096, "vocab_size": 1000},
}  # fmt: skip
_MIG = (
    "index, uuid, name, memory.total [MiB], pci.bus_id, mig.mode.current\n"
    "0, GPU-1, NVIDIA H100 80GB HBM3, 81559, 00000000:1B:00.0, Enabled\n"
    "1, GPU-2, NVIDIA H100 80GB HBM3, 81559, 00000000:1C:00.0, Disabled\n"
)


def write_files(folder: Path) -> None:
    """Write what every command line may name."""
    for name, shape in _SHAPES.items():
        (folder / f"{name}.json").write_text(json.dumps(_LLAMA | shape))
    (folder / "mig.txt").write_text(_MIG)
    first, second = cluster("dgx-h100", 8), cluster("dgx-a100", 8)
    mixed = replace(
        first, name="mixed", gpu_kinds=first.gpu_kinds + second.gpu_kinds, groups=first.groups + second.groups
    )
    (folder / "mixed.json").write_text(json.dumps(codec.to_builtins(mixed)))
    slow = {"gpu": "l40s", "gpus_per_node": 2, "nodes": 3, "interconnect": "pcie", "nic_gbit_per_gpu": 0.01}
    (folder / "slow.json").write_text(json.dumps(slow))
    (folder / "serve.sh").write_text("vllm serve meta-llama/Llama-3.1-8B --tensor-parallel-size 2\n")


def write_case(question: Question, folder: Path) -> bool:
    """Write the case, cases and plan file of a question about files; return whether there are such."""
    flags = " ".join(AXES[axis][value] for axis, value in question.values.items() if axis != "model")
    model = MODELS[question.values["model"]]
    for name in ("plan.json", "case.json", "cases.json"):
        (folder / name).unlink(missing_ok=True)
    made = ask(["estimate", "--model", model, *shlex.split(flags), "--out", "plan.json", "--force"])
    if not (folder / "plan.json").exists():
        return made.problems() == []
    plan = json.loads((folder / "plan.json").read_text())
    case = {name: plan[name] for name in ("cluster", "workload", "plan", "runtime") if name in plan}
    case["model"] = json.loads((folder / model).read_text()) if model.endswith(".json") else model
    case |= {"id": "one", "measured": {"step_s": 1.0, "peak_memory_gib": 10.0}, "outcome": "ran"}
    (folder / "case.json").write_text(json.dumps(case))
    (folder / "cases.json").write_text(json.dumps([{**case, "id": str(number)} for number in range(4)]))
    return True


def case_problems(folder: Path) -> list[str]:
    """Return why the case is not read: its plan was estimated, so it should be."""
    try:
        load_case(json.loads((folder / "case.json").read_text()))
    except PlannerError as error:
        return [f"its case is not read: {error}"]
    return []


# --- answers ----------------------------------------------------------------------------------------------------------


class TooLong(BaseException):
    """A command that has taken `LONGEST_S`; no handler of the product catches it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    words: Sequence[str]
    code: int | None  # None where it took too long
    out: str
    err: str
    seconds: float

    def problems(self) -> list[str]:
        """Return what may not happen and has."""
        if self.code is None:
            return [f"takes more than {LONGEST_S:g} CPU s"]
        command, found = self.words[0], []
        if "internal error" in self.err or "Traceback" in self.err:
            found.append(next(line for line in self.err.splitlines() if "error" in line.lower() or "Trace" in line))
        if self.code not in CODES | ALSO.get(command, set()):
            found.append(f"exit code {self.code}")
        if self.code and not self.err.strip() and not self.out.strip():
            found.append(f"exit code {self.code} without a word")
        if self.code == 0 and "--json" in self.words:
            try:
                shown = json.loads(self.out)
            except ValueError:
                found.append("no JSON")
            else:
                found += list(wrong_numbers(shown))[:1]
        return found


def ask(words: Sequence[str]) -> Answer:
    """Run a command line in this process."""
    out, err, code = io.StringIO(), io.StringIO(), None
    begun = time.process_time()
    try:
        with _at_most(LONGEST_S), redirect_stdout(out), redirect_stderr(err):
            code = planner(list(words))
    except TooLong:
        pass
    return Answer(
        words=tuple(words), code=code, out=out.getvalue(), err=err.getvalue(), seconds=time.process_time() - begun
    )


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    def end(_signal: int, _frame: FrameType | None) -> None:
        raise TooLong

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def answered(question: Question, folder: Path) -> tuple[Answer | None, list[str]]:
    """Return the answer of a question and what is wrong with it; None where the plan that it is about cannot be."""
    words = question.words()
    if any(word in ("plan.json", "case.json", "cases.json") for word in words) and not write_case(question, folder):
        return None, ["its plan: see estimate"]
    if "plan.json" in words or "case.json" in words or "cases.json" in words:
        named = next(word for word in words if word in ("plan.json", "case.json", "cases.json"))
        if not (folder / named).exists():
            return None, []
    answer = ask(words)
    found = answer.problems()
    if any(word in ("case.json", "cases.json") for word in words):
        found += case_problems(folder)
    return answer, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip", type=int, default=0, help="questions of the draw that were asked before")
    parser.add_argument("--command", action="append", choices=list(COMMANDS), help="only this command; repeat it")
    parser.add_argument("--stop-after", type=float, default=float("inf"), help="CPU seconds")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, resource.RLIM_INFINITY))
    os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp()
    counts: Counter[str] = Counter()
    slowest: list[tuple[float, str]] = []
    with tempfile.TemporaryDirectory() as name, chdir(name):
        folder = Path(name)
        write_files(folder)
        questions = list(drawn(options.number, options.seed, tuple(options.command or COMMANDS)))
        for number, question in enumerate(questions[options.skip :], options.skip):
            if time.process_time() > options.stop_after:
                print(f"stopped before question {number}")
                break
            answer, problems = answered(question, folder)
            counts["no such plan" if answer is None else f"exit code {answer.code}"] += 1
            counts["problems"] += bool(problems)
            for problem in problems:
                print(f"{number}: {problem}\n   {shlex.join(question.words())}\n   {dict(question.values)}", flush=True)
            if number % 250 == 249:
                print(f"{number + 1} questions, {time.process_time():.0f} CPU s", flush=True)
            if answer is not None:
                slowest = sorted([*slowest, (answer.seconds, shlex.join(answer.words))], reverse=True)[:8]
    print(f"{counts.total() - counts['problems']} questions in {time.process_time():.0f} CPU s:", dict(counts))
    for seconds, line in slowest:
        print(f"{seconds:6.1f} s  {line}")
    return int(counts["problems"] > 0)


if __name__ == "__main__":
    sys.exit(main())
