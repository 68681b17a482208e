"""Write serving plans of all kinds as files, and ask the engines' and the orchestrators' own parsers what they read.

    python tests/tools/serving_table.py --with vllm@0.33.0=/v/bin/python --with sglang@0.5.23=/v/bin/python --with
    docker-compose@1.29.2=/v/bin/python --with kubernetes-validate@1.37.0=/v/bin/python

`--with` names an interpreter whose environment has the parser: the unpacked packages of `serving_schemas.py` on its
path with what they import, torch for CPUs among it. Writes examples/validation/serving_exports.md.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from planner.export.serving.files import serving_files  # noqa: E402 - after the path
from planner.serving.question.from_flags import ServingFlags, serving_question  # noqa: E402 - as above
from simulator.config.hf_config import hub_name  # noqa: E402 - as above
from simulator.serving.deployment import Deployment, Pool  # noqa: E402 - as above

TABLE = ROOT / "examples" / "validation" / "serving_exports.md"
ENGINES = ("vllm", "sglang")
READERS = {"vllm": "vllm", "sglang": "sglang", "compose": "docker-compose", "kubernetes": "kubernetes-validate"}
HEAD = """# Serving plans as files, read back by the tools themselves

Each plan is written as `planner export` and `planner suggest --task serve --out FOLDER` write it; every command of its
script, its compose file and its Kubernetes documents is handed to the engine's own parser, and what that took is compared
with the plan, setting by setting. The compose file and the documents are read by their tools, unknown fields refused. Nothing was
started. Made by `python tests/tools/serving_table.py`.

| parser | what reads |
|---|---|
| vllm | `vllm.entrypoints.common.cli_args`: the parser of `vllm serve` and its checks (package of that version, a platform of CPUs) |
| sglang | `sglang.srt.server_args.ServerArgs`: the parser of `sglang.launch_server` (package of that version) |
| docker-compose | `compose.config.config.load` |
| kubernetes-validate | the JSON schemas of the newest Kubernetes it has, strictly |

"""
PLANS: dict[str, tuple[ServingFlags, Pool, Pool | None]] = {
    "Llama 3 8B, one GPU": (ServingFlags(model="llama3-8b", cluster="dgx-h100"), Pool(), None),
    "Llama 3 70B, 4 x TP 2": (ServingFlags(model="llama3-70b", cluster="dgx-h200"), Pool(engines=4, tp=2), None),
    "Llama 3 70B, TP 4 PP 2, 8-bit weights and cache": (
        ServingFlags(model="llama3-70b", cluster="dgx-h100", weights="float8", kv_cache="float8"), Pool(tp=4, pp=2), None,
    ),
    "Llama 3 8B, TP 2, eager, NCCL's all-reduce": (
        ServingFlags(model="llama3-8b", cluster="dgx-h100", eager=True, no_custom_all_reduce=True), Pool(tp=2), None,
    ),
    "Llama 3 8B, 2 x TP 4, limits of the scheduler": (
        ServingFlags(
            model="llama3-8b", cluster="dgx-h100", max_num_seqs=96, max_num_batched_tokens=4096, gpu_memory_utilization=0.85
        ),
        Pool(engines=2, tp=4), None,
    ),
    "Qwen3 30B-A3B, TP 4 EP 4": (ServingFlags(model="qwen3-30b-a3b", cluster="dgx-h100"), Pool(tp=4, ep=4), None),
    "DeepSeek V3, attention DP 8 EP 8": (
        ServingFlags(model="deepseek-v3", cluster="dgx-h200"), Pool(dp_attention=8, ep=8), None,
    ),
    "gpt-oss 120B, TP 8": (ServingFlags(model="gpt-oss-120b", cluster="dgx-h100"), Pool(tp=8), None),
    "Llama 3 8B, 2 x TP 2 reading, TP 4 writing": (
        ServingFlags(model="llama3-8b", cluster="dgx-h100"), Pool(tp=4), Pool(engines=2, tp=2),
    ),
}  # fmt: skip


@dataclass(slots=True)
class Written:
    """The files of one plan for one engine: commands with the pool of each, and documents' texts."""

    plan: str
    engine: str
    deployment: Deployment
    longest: int
    commands: list[tuple[list[str], str]] = field(default_factory=list)  # words, and the file that has them
    documents: dict[str, str] = field(default_factory=dict)


def written(name: str, engine: str) -> Written:
    """Write a plan's files and take the engines' commands out of them."""
    flags, pool, prefill = PLANS[name]
    question = serving_question(ServingFlags(**{**_fields(flags), "engine": engine, "isl": 1024, "osl": 256}))
    deployment = question.deployment(pool, prefill)
    model = hub_name(question.model.name)
    files = serving_files(deployment, model, longest=question.longest, gpus_per_node=question.cluster.gpus_per_node)
    found = Written(name, engine, deployment, question.longest)
    for line in files["serve.sh"].splitlines():
        if line.startswith(("CUDA_VISIBLE_DEVICES=", "VLLM_")):
            words = shlex.split(line.removesuffix(" &"))
            start = next(index for index, word in enumerate(words) if "=" not in word)
            found.commands.append((words[start:], "serve.sh"))
    services = yaml.safe_load(files["compose.yaml"])["services"]
    commands = [(service["entrypoint"] + service["command"], "compose.yaml") for service in services.values()]
    for document in yaml.safe_load_all(files["kubernetes.yaml"]):
        pod = document["spec"].get("template", {}).get("spec", {})
        commands += [(container["command"], "kubernetes.yaml") for container in pod.get("containers", ())]
    # Routers have no parser in the engines' packages.
    starts = ("vllm", "serve") if engine == "vllm" else ("python", "-m", "sglang.launch_server")
    found.commands += [one for one in commands if tuple(one[0][: len(starts)]) == starts]
    found.documents = {"compose": files["compose.yaml"], "kubernetes": files["kubernetes.yaml"]}
    return found


def _fields(flags: ServingFlags) -> dict[str, Any]:
    return {name: getattr(flags, name) for name in flags.__dataclass_fields__}


def wanted(plan: Written, words: list[str]) -> dict[str, Any]:
    """Return what the engine has to take from a command, by its own names."""
    deployment, pool = plan.deployment, plan.deployment.pool
    if deployment.prefill is not None and ("prefill" in words or "kv_producer" in " ".join(words)):
        pool = deployment.prefill
    fp8, fp8_cache = deployment.weights == "float8", deployment.kv_cache == "float8"
    if plan.engine == "vllm":
        return {
            "model": words[2],
            "tensor_parallel_size": pool.tp,
            "pipeline_parallel_size": pool.pp,
            "data_parallel_size": pool.dp_attention,
            "enable_expert_parallel": pool.ep > 1,
            "max_model_len": plan.longest,
            "max_num_seqs": deployment.max_num_seqs or 1024,
            "max_num_batched_tokens": deployment.max_num_batched_tokens or 8192,
            "gpu_memory_utilization": deployment.memory_fraction or 0.92,
            "quantization": "fp8" if fp8 else None,
            "kv_cache_dtype": "fp8" if fp8_cache else "auto",
            "enforce_eager": deployment.eager,
            "disable_custom_all_reduce": not deployment.custom_all_reduce,
        }
    return {
        "model_path": words[4],
        "tp_size": pool.tp * pool.dp_attention,
        "pp_size": pool.pp,
        "dp_size": 1,
        "ep_size": pool.ep,
        "attn_dp_size": pool.dp_attention,
        "context_length": plan.longest,
        "max_running_requests": deployment.max_num_seqs or 1024,
        "chunked_prefill_size": deployment.max_num_batched_tokens or 8192,
        "mem_fraction_static": deployment.memory_fraction or 0.88,
        "quantization": "fp8" if fp8 else None,
        "kv_cache_dtype": "fp8_e4m3" if fp8_cache else "auto",
        "disable_cuda_graph": deployment.eager,
        "disable_custom_all_reduce": not deployment.custom_all_reduce,
        "disaggregation_mode": "null"
        if deployment.prefill is None
        else words[words.index("--disaggregation-mode") + 1],
    }


def read_back(reader: str, items: list[Any], python: str) -> list[Any]:
    """Return what a parser says of each item, or its last words for all of them."""
    with tempfile.TemporaryDirectory() as folder:
        asked = Path(folder, "items.json")
        asked.write_text(json.dumps(items))
        script = ROOT / "tests" / "tools" / "serving_readers.py"
        command = [python, "-W", "ignore", str(script), reader, str(asked)]
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, cwd=folder)
    if run.returncode:
        raise SystemExit(f"{reader}: {run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])


def table(pythons: dict[str, tuple[str, str]]) -> str:
    """Return the table; a parser that is not at hand says so."""
    plans = [written(name, engine) for name in PLANS for engine in ENGINES]
    lines = [
        "| plan | engine | commands in its files | settings | read back equal | compose | Kubernetes | differences |"
    ]
    lines += ["|---|---|--:|--:|--:|---|---|---|"]
    answers = {
        name: read_back(name, [words for plan in plans if plan.engine == name for words, _ in plan.commands], at[1])
        for name in ENGINES
        if (at := pythons.get(READERS[name]))
    }
    refused = {
        name: read_back(name, [plan.documents[name] for plan in plans], at[1])
        for name in ("compose", "kubernetes")
        if (at := pythons.get(READERS[name]))
    }
    taken = {name: iter(found) for name, found in answers.items()}
    for number, plan in enumerate(plans):
        equal, differ, settings = 0, [], 0
        for words, file in plan.commands:
            mine = wanted(plan, words)
            settings += len(mine)
            read = next(taken[plan.engine]) if plan.engine in taken else {}
            wrong = [
                f"{file} {key}: {value!r}, read {read.get(key)!r}"
                for key, value in mine.items()
                if read.get(key) != value
            ]
            differ += wrong
            equal += len(mine) - len(wrong)
        said = [
            refused[name][number] or "read" if name in refused else "not read" for name in ("compose", "kubernetes")
        ]
        shown = "; ".join(dict.fromkeys(differ))[:300] or "-"
        engine = f"{plan.engine} {pythons.get(READERS[plan.engine], ('not at hand',))[0]}"
        lines.append(
            f"| {plan.plan} | {engine} | {len(plan.commands)} | {settings} | {equal} | {said[0]} | {said[1]} | {shown} |"
        )
    versions = ", ".join(f"{name} {version}" for name, (version, _) in pythons.items())
    return HEAD + f"Read by {versions}.\n\n" + "\n".join(lines) + "\n"


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--with", dest="pythons", action="append", default=[], metavar="TOOL@VERSION=PYTHON")
    options = parser.parse_args()
    pythons = {}
    for text in options.pythons:
        tool, _, rest = text.partition("@")
        version, _, python = rest.partition("=")
        pythons[tool] = (version, python)
    text = table(pythons)
    TABLE.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
