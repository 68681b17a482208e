"""Inputs that once crashed, hung or lied: each ends in an error of ours, or in sound numbers where it is an answer."""

import json
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.formats import FORMATS, captured, clusters, measurements, plan_files, profiles, runs, wrong_numbers
from tests.fuzz.serving import LEARNED, POINT, deployments
from topology.errors import PlannerError

MATRIX = (Path(__file__).resolve().parents[1] / "data" / "h200x4" / "nvidia_smi_topo_m.txt").read_text()
TITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 4
seq_len = 4096
"""


def altered(document: Any, **values: Any) -> str:
    """Return the text of a document with values replaced; names have two underscores between keys and indices."""
    copy = deepcopy(document)
    for at, value in values.items():
        *path, last = [int(key) if key.isdigit() else key for key in at.split("__")]
        spot = copy
        for key in path:
            spot = spot[key]
        spot[last] = value
    return json.dumps(copy)


def absent(document: Any) -> Any:
    copy = deepcopy(document)
    for link in copy["groups"][0]["node"]["links"]:
        link["state"] = "absent"
    return copy


def within_arguments(document: Any) -> str:
    """Return the text of a captured graph, the first argument of which is the list of all its operators."""
    copy = deepcopy(document)
    copy["graph"]["nodes"][0]["args"][0] = deepcopy(document["graph"]["nodes"])
    return json.dumps(copy)


def seeds() -> Iterator[tuple[str, str, str]]:
    """Yield (format, what is wrong, text)."""
    plan, run, machine, profile, measured = (
        some()[0] for some in (plan_files, runs, lambda: clusters()[2:], lambda: profiles()[1:], measurements)
    )
    for at, value in {
        "plan__tp": -1,
        "plan__pp": 0,
        "plan__micro_batch_size": 10**12,
        "runtime__param_dtype": "float64",
        "workload__global_batch_size": -64,
        "workload__seq_len": 10**400,
        "model__layers": -1,
        "estimate__step_s__value": -0.14,
        "cluster__gpu_kinds__0__compute_capability": -1,
        "model__name": "x" * 300,
        "framework": "x" * 300,
    }.items():
        yield "plan file", f"{at} {value!r:.20}", altered(plan, **{at: value})
    for at, value in {
        "measured__step_s": [1],
        "predicted__memory__peak_bytes__value": "much",
        "plan__pp": 0,
        "taken_at": "x" * 10**6,
        "effects": [3],
        "gpus": [[]],
        "measured__memory_by_rank": [1],
        "cluster__groups": [],
    }.items():
        yield "run report", f"{at} {value!r:.20}", altered(run, **{at: value})
    for at, value in {
        "gpu_kinds__0__compute_capability": -1,
        "gpu_kinds__0__memory_bytes": 1,
        "groups__0__node__nics": [],
        "fabric": None,
        "groups__0__node__links": [],
        "groups__0__count": 10**400,
        "groups__0__node__gpus": [],
        "name": "\x00" * 300,
    }.items():
        yield "cluster", f"{at} {value!r:.20}", altered(machine, **{at: value})
    yield "cluster", "all links absent", json.dumps(absent(machine))
    yield "cluster", "a thousand GPUs a node", json.dumps({"gpu": "h100-sxm", "gpus_per_node": 1024, "nodes": 1024})
    yield "profile", "a collective of 1e-12 s", altered(profile, collectives__0__time_s=1e-12)
    yield "profile", "negative spread", altered(profile, operators__0__spread=-1.0)
    for at, value in {
        "layers__0__model__heads": 0,
        "layers__0__plan__virtual_stages": 1000,
        "layers__0__plan__dp_replicate": 10**5,
        "layers__0__runtime__optimizer": "",
        "layers__0__data_s": 1e3,
        "operators__0__shape": {"u": 8},
        "operators__1__name": "clip",
        "operators__2__name": "copy",
        "collectives__0__launch": "x",
    }.items():
        yield "profile", f"{at} {value!r:.20}", altered(profile, **{at: value})
    yield "profile", "thousands of runs of layers", altered(profile, layers=profile["layers"][:1] * 5000)
    yield "measurement", "a flow of no GPU", altered(measured, flows__0__flows__0__dst="gpu-1")
    yield "nvidia-smi", "400,000 brackets", "index, " + "[" * 400_000 + "name\n0, x\n"
    yield "nvidia-smi", "capabilities without rows", "$ nvidia-smi topo -p2p r\n \tGPU0\tGPU1\n\nLegend:\n"
    yield "topo -m", "a thousand columns", "\t" + "\t".join(f"GPU{n}" for n in range(1000)) + "\nGPU0\t X \n"
    yield "topo -m", "a name of 300 characters", MATRIX.replace("GPU0", "GPU" + "0" * 300)
    yield "topo -m", "a NUMA node of 400 digits", MATRIX.replace("0-63\t0", "0-63\t1" + "0" * 400)
    yield "captured", "an operator among the arguments", within_arguments(captured())
    yield "NCCL XML", "entities", '<!DOCTYPE x [<!ENTITY a "aa"><!ENTITY b "&a;&a;">]><system>&b;</system>'
    yield "case", "numbers of 400 digits", '{"plan": {"tp": 1' + "0" * 400 + "}}"
    yield "torchtitan TOML", "components that are no list", "[compile]\nenable = true\ncomponents = 0\n" + TITAN
    yield "torchtitan command", "no option", "python -m torchtitan.train\n"
    yield (
        "torchtitan command",
        "other nodes, no option",
        "#SBATCH --nodes=32\n#SBATCH --gpus-per-node=8\n-m torchtitan.train \\\n",
    )
    yield "serving point", "a rate of 1e-320", json.dumps({**POINT, "output_tok_s_per_gpu": 1e-320})
    yield "serving point", "a surrogate in a key", json.dumps(POINT)[:-1] + ', "\\ud800": 1}'
    yield "serving command", "a number of 400 digits", "vllm serve llama3-8b --max-num-batched-tokens 1" + "0" * 400
    other = {"question__cluster__groups__0__node__gpus__0__kind": "a GPU of no kind"}
    yield "serving plan", "a GPU of no kind", altered(deployments()[0], **other)
    for at, value in {
        "deployment__weights": "-1",
        "question__traffic__prompt__low": 1.6,
        "question__traffic__requests": 2**31,
        "question__traffic__trace": [[-1.0, 0, 0]],
        "question__traffic__request_rate": 1e-300,
    }.items():
        yield "serving plan", f"{at} {value!r:.20}", altered(deployments()[0], **{at: value})
    for name in ("accelerate YAML", "Megatron-Bridge dump", "DeepSpeed JSON"):
        yield name, "20,000 brackets", '{"a": ' + "[" * 20_000
    line = "step:  {0}  loss: 2.0  memory: {1}GiB(80%)  tps: {2}  tflops: 1  mfu: 9%\n"
    yield "training log", "a memory of 400 digits", line.format(1, "9" * 400, 100)
    yield "training log", "a rate of 400 digits", line.format(1, 9, "9" * 400)
    yield "runs to learn from", "a cell of 50,000 brackets", "id,model\na," + "[" * 50_000 + "\n"
    yield "runs to learn from", "a carriage return in a heading", "id,model\ry\na,tiny-llama\n"
    yield "requests to serve", "a cell of 200,000 characters", "arrival_s,prompt,output\n" + "1" * 200_000 + ",1,1\n"
    planned = {"model": "qwen3-30b-a3b", "gpus": 8, "seq_len": {}}
    stated = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    text = json.dumps({"meshwright": {"planned": planned}, **stated})
    yield "DeepSpeed JSON", "a header's sequence that is no number", text
    yield "serving point", "an engine without a name", json.dumps({**POINT, "backend": " "})
    yield (
        "learned runtime",
        "a factor of 1e300",
        altered(LEARNED, fitted__kernel_factor={"value": 1e300, "low": 1.0, "high": 1e301}),
    )
    yield "learned runtime", "10^400 runs", altered(LEARNED, rows=10**400)
    yield "learned runtime", "a value outside its range", altered(LEARNED, fitted__launch_s__value=0.0)
    yield "config.json", "no layers", '{"model_type": "llama", "num_hidden_layers": 0}'
    yield "config.json", "code", '{"model_type": "llama", "auto_map": {"AutoModel": "os.system"}}'


SEEDS = list(seeds())


@pytest.mark.parametrize(("name", "what", "text"), SEEDS, ids=[f"{name}: {what}" for name, what, _ in SEEDS])
def test_a_seed_ends_well(name: str, what: str, text: str, tmp_path: Path) -> None:
    with suppress(PlannerError):
        assert list(wrong_numbers(FORMATS[name].read(text, tmp_path / "input.json"))) == []
