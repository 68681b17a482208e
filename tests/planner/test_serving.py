"""`suggest --task serve` and `validate` on serving points, as a person and as a program see them."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.export.serving.commands import command
from planner.export.serving.files import serving_files
from planner.serving.candidates import refusal
from planner.serving.crossings import break_even, over_clients
from planner.serving.question.from_flags import ServingFlags, serving_question
from planner.serving.question.question import ServingQuestion
from planner.serving.search import search_serving
from planner.validate.serving_row import cluster_of, model_of
from simulator.config.hf_config import load_model
from simulator.serving.deployment import Deployment, Pool
from simulator.serving.server import OutOfTime
from tests.planner.conftest import ROOT, Finished
from topology.catalog.cluster_file import save_cluster
from topology.catalog.clusters import cluster_from_case
from topology.errors import Infeasible, UserError

QUICK = ("--isl", "256", "--osl", "32", "--concurrency", "8")


def asked(**changed: Any) -> ServingQuestion:
    options: dict[str, Any] = {"model": "llama3-8b", "cluster": "dgx-h100", "isl": 256, "osl": 32, "concurrency": 8}
    return serving_question(ServingFlags(**(options | changed)))


def test_a_time_limit_ends_the_simulation_of_a_deployment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that ticks at every event: searches and sweeps stop in the middle of a deployment, with what there is."""
    whole = search_serving(asked(gpus=2))
    ticks = itertools.count()
    monkeypatch.setattr("time.monotonic", lambda: next(ticks))

    with pytest.raises(OutOfTime, match="of 216 requests were simulated within"):
        search_serving(asked(gpus=2), time_limit_s=20)
    begin = next(ticks)
    search_serving(asked(gpus=2))
    took = next(ticks) - begin
    some = search_serving(asked(gpus=2), time_limit_s=took * 0.7)

    assert 0 < len(some.plans) < len(whole.plans)
    assert some.rejected["not simulated: --time-limit"] == len(whole.plans) - len(some.plans)
    assert over_clients(whole, until_s=next(ticks) + 20).rows == ()


def test_the_document_has_what_programs_read(planner: Callable[..., Finished]) -> None:
    done = planner(
        "suggest", "--task", "serve", "--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "4", *QUICK, "--json"
    )
    assert done.returncode == 0, done.output
    document = json.loads(done.stdout)
    best = document["plans"][0]
    assert {"replicas", "tp", "pp", "ep", "dp_attention", "prefill", "decode", "weights", "kv_cache"} <= set(
        best["plan"]
    )
    assert {"ttft_s", "tpot_s", "e2e_s", "output_tokens_per_s_per_gpu", "kv_blocks", "memory"} <= set(best["estimate"])
    for plan in document["plans"]:
        sizes = plan["plan"]
        assert sizes["replicas"] * sizes["tp"] * sizes["pp"] * sizes["dp_attention"] == 4
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            figure = plan["estimate"][name]
            assert 0 < figure["low"] < figure["value"] < figure["high"]
    values = [
        plan["estimate"]["output_tokens_per_s_per_gpu"]["value"] for plan in document["plans"] if not plan["tied"]
    ]
    assert values[1:] == sorted(values[1:], reverse=True)
    assert document["search"]["simulated"] == document["search"]["legal"]


def test_the_answer_is_a_sentence_a_table_and_memory_in_80_columns(planner: Callable[..., Finished]) -> None:
    done = planner("suggest", "--task", "serve", "--gpus", "2", *QUICK)
    assert done.returncode == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Serve llama3-8b as ")
    assert max(map(len, lines)) <= 80
    assert "GPU KV cache size:" in done.stdout, "vLLM's own words, to compare with its log"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--tp", "2"), "--tp 2: a search chooses the parts of a deployment"),
        (("--concurrency", "4", "--request-rate", "2"), "exclude each other"),
        (("--weights", "float6"), "use one of: bfloat16"),
        (("--engine", "triton"), "no serving engine"),
        (("--objective", "memory"), "latency, throughput, cost"),
        (("--objective", "cost"), "needs a price"),
        (("--seq-len", "4096"), "--seq-len: an option of training"),
        (("--seq-len", "8192"), "--seq-len: an option of training"),  # as its default
        (("--framework", "torchtitan"), "--framework: an option of training"),
        (("--objective", "time"), "latency, throughput, cost"),
        (("--runtime", "mine.toml"), "--runtime: an option of training"),
        (("--lora", "16"), "--lora: an option of training"),
        (("--spares", "2"), "--spares: an option of training"),
        (("--arrivals", "constant"), "needs a rate"),
        (("--request-rate", "2", "--arrivals", "gamma:-1"), "not a way of arriving"),
    ],
)
def test_what_serving_does_not_know_is_refused(
    planner: Callable[..., Finished], options: tuple[str, ...], words: str
) -> None:
    done = planner("suggest", "--task", "serve", *options)
    assert done.returncode == 2
    assert words in " ".join(done.output.split())


def test_options_of_serving_are_refused_for_training(planner: Callable[..., Finished]) -> None:
    done = planner("suggest", "--isl", "128")
    assert done.returncode == 2
    assert "--isl: an option of serving" in done.output


@pytest.mark.parametrize(("clients", "said"), [(4096, False), (8192, True)])
def test_figures_of_a_crowd_are_said_to_follow_from_fewer_clients(clients: int, *, said: bool) -> None:
    assert any("8,192 clients waits for one more answer" in one for one in asked(concurrency=clients).assumed) == said


def test_requests_beyond_the_positions_of_a_model_are_refused_with_what_is_not(tmp_path: Path) -> None:
    long = ServingFlags(model="qwen3-8b", gpus=1, isl=50_000, osl=100)
    with pytest.raises(UserError, match="40,960 positions") as refused:
        serving_question(long)
    assert refused.value.remedy is not None
    shorter = int(refused.value.remedy.split()[1].rstrip(","))
    assert 40_000 < serving_question(replace(long, isl=shorter)).longest <= 40_960

    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    config = json.loads((ROOT / "simulator" / "models" / "qwen3-8b.json").read_text()) | {"rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert serving_question(replace(long, model=str(tmp_path / "config.json"))).longest > 50_000
    assert serving_question(ServingFlags(model="gpt2", gpus=1)).longest <= 1_024, "lengths that nobody has given fit"


def test_a_model_too_large_is_infeasible_with_the_reason(planner: Callable[..., Finished]) -> None:
    done = planner("suggest", "--task", "serve", "--model", "llama3-70b", "--gpus", "1")
    assert done.returncode == 3
    assert "no room for a KV cache" in " ".join(done.output.split())


def test_one_answer_wants_few_links_many_want_replicas() -> None:
    """Latency of one client: tensor parallelism. Throughput of so many of a model that fits one GPU that products take
    longer than reading weights, which ranks share: replicas.
    """
    alone = search_serving(asked(gpus=4, concurrency=1, objective="latency")).plans[0].deployment.pool
    many = search_serving(asked(gpus=4, concurrency=512, isl=128)).plans[0].deployment.pool
    assert alone.tp == 4
    assert (many.engines, many.tp) == (4, 1)


def test_more_clients_want_more_replicas(planner: Callable[..., Finished]) -> None:
    done = planner(
        "suggest",
        "--task",
        "serve",
        "--gpus",
        "4",
        "--objective",
        "latency",
        *QUICK[:4],
        "--concurrency",
        "16",
        "--json",
    )
    rows = json.loads(done.stdout)["by_clients"]
    assert [row["clients"] for row in rows] == [1, 4, 16, 64, 256]
    replicas = [row["plan"]["replicas"] for row in rows]
    assert replicas[0] == 1
    assert replicas == sorted(replicas)
    throughput = [row["output_tokens_per_s_per_gpu"]["value"] for row in rows]
    assert throughput == sorted(throughput)


def test_without_fast_links_replicas_win_and_two_gpus_are_slower_than_one(tmp_path: Path) -> None:
    """vllm-project/vllm#689 and gpt-fast#111: with 0.5 ms an all-reduce, 64 of them cost more than a second GPU
    saves.
    """
    v100 = cluster_from_case({"gpu": "v100-sxm-32gb", "gpus_per_node": 2, "nodes": 1, "interconnect": "nvlink"})[0]
    save_cluster(v100, tmp_path / "v100.json")
    question = asked(model="llama2-7b", cluster=str(tmp_path / "v100.json"), engine="torch", weights="float16")
    found = break_even(question, 2, 1, context=100, all_reduce_s=500e-6)
    assert not found.pays
    assert found.limit_s == pytest.approx((found.fewer_token_s - (found.token_s - 64 * 500e-6)) / 64)
    assert 0 < found.limit_s < 0.27e-3, "their GPU, slower than its datasheet, had 17.2 ms to gain: 0.27 ms each"


def test_degrees_that_do_not_divide_heads_are_named() -> None:
    assert refusal(load_model("llama3-8b"), Pool(tp=3)) == "tp 3 does not divide 32 attention heads"
    found = search_serving(asked(gpus=6))
    assert found.rejected["tp 3 does not divide 32 attention heads"]
    assert max(plan.deployment.gpus for plan in found.plans) == 6


def test_targets_come_before_the_objective() -> None:
    free = search_serving(asked(gpus=4, concurrency=64))
    times = sorted(plan.estimate.tpot_s.value for plan in free.plans)
    limit = (times[0] + times[1]) / 2
    bound = search_serving(asked(gpus=4, concurrency=64, tpot=limit))
    assert bound.plans[0].meets
    assert bound.plans[0].estimate.tpot_s.value <= limit
    assert any("wanted" in plan.lost_because for plan in bound.plans if not plan.meets)


def test_deployments_apart_are_asked_for() -> None:
    together, apart = (search_serving(asked(gpus=4, separate=separate)) for separate in (False, True))
    assert all(plan.deployment.prefill is None for plan in together.plans)
    split = [plan.deployment for plan in apart.plans if plan.deployment.prefill is not None]
    assert split
    assert all(deployment.gpus == 4 for deployment in split)


# --- files that start it ---------------------------------------------------------------------------------------------


def test_files_start_every_engine_on_its_own_gpus(planner: Callable[..., Finished], tmp_path: Path) -> None:
    folder = tmp_path / "start"
    done = planner(
        "suggest", "--task", "serve", "--gpus", "4", "--out", str(folder), "--concurrency", "256", *QUICK[:4]
    )
    assert done.returncode == 0, done.output
    compose = yaml.safe_load((folder / "compose.yaml").read_text())
    engines = compose["services"].values()
    devices = [d for e in engines for d in e["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]]
    assert sorted(devices) == ["0", "1", "2", "3"], "every GPU once"
    pods = yaml.safe_load((folder / "kubernetes.yaml").read_text())["spec"]
    container = pods["template"]["spec"]["containers"][0]
    assert pods["replicas"] * container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert container["command"][:3] == ["vllm", "serve", "meta-llama/Meta-Llama-3.1-8B"]
    assert subprocess.run(["bash", "-n", str(folder / "serve.sh")], check=False).returncode == 0
    again = planner("suggest", "--task", "serve", "--out", str(folder), *QUICK)
    assert again.returncode == 2
    assert "is there already" in again.output


def test_separated_engines_start_on_their_own_gpus_behind_a_router_that_knows_them() -> None:
    """Of a node's eight GPUs each is one engine's; every address and bootstrap port of the router is an engine's."""
    plan = Deployment(engine="sglang", pool=Pool(engines=2, tp=2), prefill=Pool(tp=4))
    script = serving_files(plan, "meta-llama/Llama-3.1-70B", longest=4096, gpus_per_node=8)["serve.sh"]

    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    devices = [d for line in script.splitlines() if "CUDA" in line for d in line.split()[0].split("=")[1].split(",")]
    assert sorted(devices) == list("01234567")
    engines = [shlex.split(line)[1:-1] for line in script.splitlines() if "CUDA" in line]
    router = shlex.split(next(line for line in script.splitlines() if "launch_router" in line))
    reported = [word.rsplit(":", 1)[1] for word in router if word.startswith("http://")]
    assert reported == [words[words.index("--port") + 1] for words in engines]
    modes = [words[words.index("--disaggregation-mode") + 1] for words in engines]
    assert modes == ["prefill", "decode", "decode"]
    assert router[router.index("--prefill") + 2] == engines[0][-1]

    for refused, gpus in ((replace(plan, engine="trtllm"), 8), (plan, 2)):
        with pytest.raises(Infeasible):
            serving_files(refused, "m", longest=4096, gpus_per_node=gpus)
    assert set(serving_files(plan, "m", longest=4096, gpus_per_node=4)) == {
        "kubernetes.yaml"
    }  # pods go to several nodes


ENGINE_POOLS = [
    ("vllm", Pool(tp=2)),
    ("vllm", Pool(dp_attention=8, ep=8)),
    ("sglang", Pool(tp=4, pp=2)),
    ("sglang", Pool(dp_attention=4, ep=4)),
    ("trtllm", Pool(tp=8, ep=8)),
]


@pytest.mark.parametrize(("engine", "pool"), ENGINE_POOLS)
def test_a_command_takes_as_many_gpus_as_its_engine_has(engine: str, pool: Pool) -> None:
    """Each engine multiplies its own flags: vLLM tensor, pipeline and data; SGLang has attention's data inside
    tensor.
    """
    words = command(Deployment(engine=engine, pool=pool), pool, "org/model", longest=4096)
    flags = dict(itertools.pairwise(words))
    names = {
        "vllm": ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size"),
        "sglang": ("--tp-size", "--pp-size"),
        "trtllm": ("--tp_size", "--pp_size"),
    }
    assert math.prod(int(flags.get(name, 1)) for name in names[engine]) == pool.gpus


# --- published points -----------------------------------------------------------------------------------------------

POINT = {
    "id": "a/1", "source_group": "a", "hardware": "H100 SXM 80GB (DGX H100)", "n_gpus": 2, "backend": "vllm 0.12",
    "model": "meta-llama/Llama-3.1-8B-Instruct", "precision": "bf16", "tp": 2, "isl": 512, "osl": 64, "concurrency": 4,
    "ttft_ms": 40.0, "tpot_ms": 5.0, "metric_kind": "latency under load",
}  # fmt: skip


def validate(planner: Callable[..., Finished], tmp_path: Path, *rows: object, packed: bool = False) -> Finished:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path = tmp_path / ("points.jsonl.gz" if packed else "points.jsonl")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return planner("validate", str(path), "--json")


@pytest.mark.parametrize("packed", [False, True])
def test_points_are_predicted_and_errors_are_signed(
    planner: Callable[..., Finished], tmp_path: Path, packed: bool
) -> None:
    done = validate(planner, tmp_path, POINT, {**POINT, "id": "a/2", "spec_decode": "mtp"}, packed=packed)
    assert done.returncode == 0, done.output
    good, skipped = json.loads(done.stdout)["rows"]
    assert good["measured"] == {"ttft_s": 0.04, "tpot_s": 0.005, "output_tokens_per_s_per_gpu": None}
    assert good["error"]["tpot"] == pytest.approx(good["predicted"]["tpot_s"] / 0.005 - 1)
    assert good["error"]["throughput"] is None
    assert "speculative" in skipped["skipped"]
    assert skipped["predicted"] is None


def test_what_a_point_does_not_say_is_assumed_aloud(planner: Callable[..., Finished], tmp_path: Path) -> None:
    row = {key: value for key, value in POINT.items() if key != "precision"} | {"n_gpus": 4}
    done = validate(planner, tmp_path, row)
    assumed = json.loads(done.stdout)["rows"][0]["assumed"]
    assert "weights: 16 bits" in assumed
    assert any("one engine of 2 GPUs" in line for line in assumed)


@pytest.mark.parametrize("line", ["[]", "{", '"x"', "[" * 100_000])
def test_a_line_that_is_no_point_is_named(planner: Callable[..., Finished], tmp_path: Path, line: str) -> None:
    path = tmp_path / "points.jsonl"
    path.write_text(json.dumps(POINT) + "\n" + line + "\n")
    done = planner("validate", str(path))
    assert done.returncode == 2
    assert "line 2" in done.output


@pytest.mark.parametrize(
    "changed",
    [
        {"tp": "two"},
        {"isl": -5},
        {"isl": 1e30},
        {"osl": 0},
        {"concurrency": 10**12},
        {"tp": 0.5},
        {"n_gpus": -1},
        {"tp": 10**9},
    ],
)
def test_figures_that_cannot_be_skip_their_row(
    planner: Callable[..., Finished], tmp_path: Path, changed: dict[str, object]
) -> None:
    done = validate(planner, tmp_path, POINT, {**POINT, **changed})
    assert done.returncode == 0, done.output
    assert json.loads(done.stdout)["rows"][1]["skipped"]


def test_names_as_sources_spell_them() -> None:
    for name in ("deepseek-ai/DeepSeek-R1", "DeepSeek R1 0528", "nvidia/DeepSeek-V3.1-NVFP4"):
        assert model_of(name).name == "deepseek-v3"
    assert model_of("Qwen/Qwen3-235B-A22B-FP8").name == "qwen3-235b-a22b"
    for name, kind in (
        ("H200 SXM 141GB", "h200-sxm"), ("Nvidia A100 GPU", "a100-sxm-40gb"), ("A100 (80GB)", "a100-sxm-80gb"),
        ("RTX 6000 Pro Blackwell Server Edition (PCIe)", "rtx-pro-6000-server"), ("NVIDIA H100-SXM-80GB", "h100-sxm"),
        ("L40S 48GB (PCIe)", "l40s"), ("GB200 NVL72", "gb200"), ("B200 180GB (DGX B200)", "b200-sxm"),
    ):  # fmt: skip
        assert cluster_of(name, 4).slowest_kind.name == kind
    assert cluster_of("GB200 NVL72", 32).node_count == 1
    assert cluster_of("H100 SXM 80GB", 16).node_count == 2
