"""`planner calibrate`: what it asks to be measured, what it refuses, and that it runs end to end on a stand-in."""

import dataclasses
import importlib.util
import json
import re
from types import SimpleNamespace

import pytest

from planner.calibrate.calibrate_process import calibrate, read_records
from planner.calibrate.calibration_report import overlap_rows
from planner.calibrate.calibration_request import Request, collective_item, missing_from, plan_operators, unique
from planner.calibrate.layer_runs import (
    layer_request,
    narrow_requests,
    single_layer_plan,
    torchtitan_network,
    typical_steps,
)
from planner.calibrate.measurements import plan_sites
from planner.calibrate.planned_step import PlannedStep
from planner.cli import main
from planner.commands.calibrate import Machine, _cut_short, _known, _without_folder
from simulator.config.hf_config import load_model
from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.fitting.host_fit import REFERENCE_S
from simulator.overlap.modes import EXECUTED
from topology import codec
from topology.catalog.cluster_file import load_cluster
from topology.catalog.platform import take_gpus
from topology.errors import ProbeError
from topology.profile.profile import CollectiveSample, Profile, read_profile
from topology.profile.samples import HostSample, OperatorSample, OverlapSample
from topology.profile.store import add_to_store

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

MODEL = Model(
    name="m", family="llama", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256
)


def question(plan: Plan, *, runtime: Runtime | None = None, seq_len: int = 8192) -> PlannedStep:
    return PlannedStep(
        model=MODEL,
        plan=plan,
        workload=Workload(seq_len=seq_len, global_batch_size=plan.data_parallel * plan.micro_batch_size),
        runtime=runtime or Runtime(name="torchtitan"),
    )


def exact_request(steps: list[PlannedStep], *, gpus: int) -> Request:
    """Return the operators and overlap sites of steps."""
    operators = unique(one for step in steps for one in plan_operators(step))
    return Request(operators=tuple(operators), overlap=plan_sites(steps, gpus))


def shapes(request: Request, name: str, direction: str) -> set[tuple[tuple[str, int], ...]]:
    return {
        tuple(sorted(one.shape.items())) for one in request.operators if one.name == name and one.direction == direction
    }


def test_the_exact_operators_of_a_plan_are_the_ranks_own() -> None:
    request = exact_request([question(Plan(tp=2, dp_shard=2, sequence_parallel=True))], gpus=4)

    forward = {tuple(dict(s)[axis] for axis in "mnk") for s in shapes(request, "matmul", "forward")}
    # Column-parallel halves the outputs, row-parallel what is summed over: 8192 tokens, two ranks.
    assert forward == {
        (8192, 2048, 4096),  # wq
        (8192, 512, 4096),  # wk, wv
        (8192, 4096, 2048),  # wo
        (8192, 7168, 4096),  # w1, w3
        (8192, 4096, 7168),  # w2
        (8192, 64128, 4096),  # output
    }
    assert shapes(request, "attention", "backward") == {
        (("S", 8192), ("a", 16), ("b", 1), ("d", 128), ("kv", 4), ("s", 8192))
    }
    assert (("h", 4096), ("u", 4096)) in shapes(request, "rms_norm", "forward"), "sequence parallelism halves the rows"


def test_the_sites_of_a_plan_are_measured_as_its_ranks_run_them() -> None:
    """8192 tokens on two ranks: gate and up share a gather, so do queries, keys and values; all modes of each."""
    plan = Plan(tp=2, dp_shard=2, sequence_parallel=True, tp_overlap="mlp_in=fused")
    request = exact_request([question(plan)] * 2, gpus=2)

    assert [(one.operation, one.rows, one.columns, one.depth) for one in request.overlap] == [
        ("all_gather_matmul", 8192, (7168, 7168), 4096),
        ("matmul_reduce_scatter", 8192, (4096,), 7168),
        ("all_gather_matmul", 8192, (2048, 512, 512), 4096),
        ("matmul_reduce_scatter", 8192, (4096,), 2048),
    ]
    assert {one.ranks for one in request.overlap} == {2}
    for other in (Plan(tp=2), Plan(dp_shard=2), Plan(tp=8, sequence_parallel=True)):
        assert not exact_request([question(other)], gpus=4).overlap


def test_a_shape_in_every_mode_is_asked_for_once() -> None:
    request = exact_request([question(Plan(tp=4, sequence_parallel=True), seq_len=n) for n in (2048, 8192)], gpus=4)
    known = tuple(
        OverlapSample(**dataclasses.asdict(one), seconds={"nccl": 1e-3}, product_s=1e-3, collective_s=1e-4)
        for one in request.overlap[:3]
    )
    throttled = dataclasses.replace(known[0], invalid="hot")

    assert {one.ranks for one in request.overlap} == {4}
    assert missing_from(request, Profile(machine="m", gpu="x", overlap=known)).overlap == request.overlap[3:] != ()
    assert missing_from(request, Profile(machine="m", gpu="x", overlap=(throttled,))).overlap == request.overlap


def test_the_report_names_the_fastest_mode_and_what_it_hides() -> None:
    """A product of 4 ms, a collective of 1 ms, both in 4.25 ms: three quarters of the shorter are hidden."""
    sample = OverlapSample(
        operation="all_gather_matmul",
        ranks=4,
        rows=8192,
        columns=(3584, 3584),
        depth=4096,
        dtype="bfloat16",
        seconds={"nccl": 5.1e-3, "fused": 4.25e-3},
        product_s=4e-3,
        collective_s=1e-3,
    )
    (row,) = overlap_rows(Profile(machine="m", gpu="h200-sxm", overlap=(sample,)))

    assert (row.fastest, row.hidden) == ("fused", pytest.approx(0.75))


def test_compiled_fusions_are_left_to_layers() -> None:
    request = exact_request([question(Plan(dp_shard=2), runtime=Runtime(name="torchtitan", compile=True))], gpus=2)

    assert not shapes(request, "silu", "forward")
    assert shapes(request, "matmul", "forward")


def test_a_layer_keeps_its_tensor_parallel_group_and_loses_its_pipeline() -> None:
    plan = Plan(pp=4, dp_shard=4, tp=2, sequence_parallel=True, schedule="1F1B", recompute="full")

    single = single_layer_plan(plan, 4)

    assert single is not None
    assert (single.tp, single.dp_shard, single.pp, single.schedule, single.recompute) == (2, 2, 1, None, "full")
    assert single.gpus == 4
    assert single_layer_plan(Plan(tp=3), 2) is None


def test_a_layer_without_fsdp_computes_in_what_it_is_stored_in() -> None:
    request = layer_request(question(Plan(tp=2, dp_shard=2, sequence_parallel=True)), 2)

    assert request is not None
    assert request.ranks == 2
    assert request.model.layers == 1
    assert request.runtime.param_dtype == request.runtime.compute_dtype == "bfloat16"


@pytest.mark.parametrize("name", ["llama3.2-1b", "qwen2.5-7b", "qwen3-8b", "mixtral-8x7b", "gemma2-9b", "deepseek-v3"])
def test_layers_are_of_networks_that_torchtitan_has(name: str) -> None:
    """Its Llama: no biases, no tied embeddings, heads as wide as the model. Its Qwen 3: norms of queries and keys."""
    found = torchtitan_network(load_model(name))

    assert found.gated_mlp
    assert (found.qkv_bias, found.latent, found.sliding_layers) == (False, None, 0)
    if found.qk_norm:
        assert found.moe is None or (found.moe.shared_ffn, found.moe.dense_layers) == (0, 0)
    else:
        assert (found.moe, found.tied_embeddings, found.heads * found.head_dim) == (None, False, found.hidden)


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_typical_layers_fit_the_machine(gpus: int) -> None:
    requests = [one for step in typical_steps("torchtitan", gpus) for one in narrow_requests(step, gpus)]

    assert requests
    assert {one.ranks for one in requests} <= {1, 2, min(gpus, 4)}
    assert all(one.model.layers == 1 for one in requests)


def test_every_kind_of_parallelism_has_a_narrow_layer() -> None:
    """On four GPUs none is a guess: FSDP, tensor, context and expert parallelism, both axes at once, pipelines,
    compiled.
    """
    requests = [one for step in typical_steps("torchtitan", 4) for one in narrow_requests(step, 4)]
    kinds = {tuple(getattr(one.plan, axis) for axis in ("dp_shard", "tp", "cp", "ep", "pp")) for one in requests}

    assert {(1, 1, 1, 1, 1), (4, 1, 1, 1, 1), (1, 4, 1, 1, 1), (2, 2, 1, 1, 1), (1, 1, 4, 1, 1)} <= kinds
    assert {(4, 1, 1, 4, 1), (2, 1, 1, 1, 2)} <= kinds
    assert len({one.workload.seq_len / one.plan.cp for one in requests}) == 1, "as many tokens a rank"
    assert {one.plan.recompute for one in requests} == {"none", "full", "selective-op"}
    assert {one.runtime.compile for one in requests} == {False, True}
    staged = [one for one in requests if one.plan.pp == 2]
    assert {one.counts for one in staged} == {(2,)}, "a layer for each stage"


def test_what_the_profile_has_is_not_asked_for_again() -> None:
    request = exact_request([question(Plan(dp_shard=2))], gpus=2)
    known = tuple(OperatorSample(**dataclasses.asdict(one), seconds=1e-5) for one in request.operators[:10])
    bad = tuple(
        OperatorSample(**dataclasses.asdict(one), seconds=1e-5, invalid="hot") for one in request.operators[10:20]
    )
    profile = Profile(machine="m", gpu="h200-sxm", operators=known + bad)

    assert missing_from(request, profile).operators == request.operators[10:], "a throttled sample is no sample"
    assert missing_from(request, None) == request
    assert missing_from(Request(), profile).empty


def test_layers_that_a_profile_file_has_are_not_asked_for_again(tmp_path) -> None:
    """A profile that was read has lists where a request has tuples."""
    (item,) = narrow_requests(question(Plan(dp_shard=2)), 2)
    request = Request(layers=(item,))
    samples = [
        {
            **{name: getattr(item, name) for name in ("plan", "workload", "runtime")},
            "model": dataclasses.replace(item.model, layers=n),
            "step_s": 1e-2,
        }
        for n in item.counts
    ]
    path = tmp_path / "p.json"

    def lacking(*layers: object) -> Request:
        path.write_text(codec.to_json({"machine": "m", "gpu": "h200-sxm", "layers": layers}), encoding="utf-8")
        return missing_from(request, read_profile(path))

    assert lacking(*samples).empty
    assert lacking(samples[0]) == request


def test_sizes_of_a_collective_that_were_measured_are_left_out() -> None:
    request = Request(
        collectives=tuple(collective_item(op, 2, (2**14, 2**20, 2**26)) for op in ("all_gather", "all_reduce"))
    )
    first = request.collectives[0]
    samples = tuple(
        CollectiveSample(op=first.op, ranks=2, nodes=1, nbytes=nbytes, time_s=1e-3) for nbytes in first.sizes[1:]
    )

    left = missing_from(request, Profile(machine="m", gpu="x", collectives=samples)).collectives

    assert left[0] == dataclasses.replace(first, sizes=first.sizes[:1])
    assert left[1:] == request.collectives[1:]


def test_without_a_gpu_the_command_says_so(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    assert main(["calibrate", "--out", str(tmp_path / "p.json"), "--no-store"]) == 1
    said = capsys.readouterr().err
    assert "there is no GPU to measure" in said
    assert not (tmp_path / "p.json").exists()
    (remedy,) = re.findall(r"--dry-run --cluster [\w-]+", said)
    assert main(["calibrate", *remedy.split()]) == 0


def test_the_host_alone_is_timed_without_a_gpu(tmp_path, monkeypatch, capsys) -> None:
    """The profile says of which machine it is, and a second one in the same file takes the place of the first."""
    samples = tuple(HostSample(name=name, seconds=1.3 * seconds) for name, seconds in REFERENCE_S.items())
    timed = Profile(machine="dgx-h100", gpu="h100-sxm", versions={"torch": "2.13.0"}, host=samples)
    monkeypatch.setattr("planner.commands.calibrate.time_host", lambda **_: timed)
    out = tmp_path / "profile.json"
    words = ["calibrate", "--host-only", "--cluster", "dgx-h100", "--out", str(out), "--no-store"]

    assert main(words) == 0
    assert "host      takes 1.00 times" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["host"]["dtensors"] == pytest.approx(1.0)
    assert len(read_profile(out).host) == 2


def test_a_slow_host_does_not_take_the_seconds_of_wide_layers(tmp_path, monkeypatch, capsys) -> None:
    """The host is timed first; what it shows must not leave the kernels of large layers to those of small ones."""
    samples = tuple(HostSample(name=name, seconds=2.5 * seconds) for name, seconds in REFERENCE_S.items())
    timed = Profile(machine="h200x4", gpu="h200-sxm", host=samples)
    machine = Machine("h200x4", "h200-sxm", [0], take_gpus(load_cluster("h200x4"), 1))
    monkeypatch.setattr("planner.commands.calibrate._machine", lambda *_: machine)
    monkeypatch.setattr("planner.commands.calibrate.time_host", lambda **_: timed)

    def stopped(*_, **__):
        raise ProbeError("stopped before anything is measured")

    monkeypatch.setattr("planner.commands.calibrate.run", stopped)
    words = ["calibrate", "--runtime=meshwright", "--budget=90s", "--no-store", f"--out={tmp_path / 'p.json'}"]

    assert main(words) != 0
    said = capsys.readouterr().err
    assert "first the host alone" in said
    assert "layers of meshwright, one GPU, width 4096, 8192 tokens" in said


def test_a_dry_run_for_another_machine_says_what_would_be_measured_and_how_long(tmp_path, capsys) -> None:
    """Each measurement with its seconds, in the order in which a second narrows most; nothing is written."""
    plan = {"dp_shard": 2, "tp": 2, "micro_batch_size": 1}
    workload = {"seq_len": 4096, "global_batch_size": 4}
    case = {"id": "a", "cluster": "h200x4", "model": "llama3-8b", "runtime": {"name": "torchtitan"}}
    path = tmp_path / "case.json"
    path.write_text(json.dumps([case | {"plan": plan, "workload": workload}]))
    wanted = ["calibrate", "--cluster", "h200x4", "--for", str(path), "--budget", "60s", "--no-store", "--dry-run"]

    assert main([*wanted, "--out", str(tmp_path / "p.json"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert main(wanted) == 0
    shown = capsys.readouterr().out

    seconds = [one["expected_s"] for one in answer["agenda"]]
    assert seconds
    assert sum(seconds) <= 60
    assert f"{len(seconds)} measurements on" in shown
    assert all("fsdp 2 x tp 2" in one["name"] and one["name"] in shown for one in answer["agenda"])
    assert not (tmp_path / "p.json").exists()


@pytest.mark.parametrize(
    ("word", "shown"),
    [("/home/ada/p.json", "p.json"), ("--out=/home/ada/p.json", "--out=p.json"), ("--gpus", "--gpus")],
)
def test_a_profile_that_is_shared_tells_no_folders(word: str, shown: str) -> None:
    assert _without_folder(word) == shown


@pytest.mark.parametrize("budget", ["0s", "fast", "3h"])
def test_budgets_are_checked(budget: str, tmp_path) -> None:
    assert main(["calibrate", "--budget", budget, "--no-store"]) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--global-batch", "8"], "--global-batch is about a question"),
        (["--seq-len", "512"], "--seq-len is about a question"),
        (["--model", "tiny-llama", "--runtime", "torchtitan"], "--model and --runtime both"),
        (["--model", "tiny-llama", "--for", "p.json"], "--model and --for both"),
    ],
)
def test_what_was_said_is_used_or_refused(words: list[str], said: str, capsys) -> None:
    assert main(["calibrate", "--device", "cpu", "--no-store", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_file_of_another_gpu_is_not_added_to(tmp_path, capsys) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"machine": "m", "gpu": "h200-sxm", "schema_version": 1}), encoding="utf-8")

    assert main(["calibrate", "--device", "cpu", "--out", str(path), "--no-store"]) == 2
    assert "is a profile of h200-sxm" in capsys.readouterr().err


def test_records_of_a_killed_run_are_a_profile(tmp_path) -> None:
    head = {"kind": "header", "machine": "m", "gpu": "h200-sxm"}
    sample = {
        "kind": "matmul",
        "name": "matmul",
        "shape": {"m": 1, "n": 1, "k": 1},
        "dtype": "bfloat16",
        "seconds": 1e-6,
    }
    path = tmp_path / "r"
    path.write_text(
        "\n".join([json.dumps(head), json.dumps({"kind": "operator", "sample": sample}), '{"kind": "oper']),
        encoding="utf-8",
    )

    found = read_records(path)

    assert found is not None
    assert len(found.operators) == 1
    assert read_records(tmp_path / "absent") is None


def test_a_calibration_that_was_killed_is_gone_on_with(tmp_path, capsys) -> None:
    path = tmp_path / "p.json.partial"
    head = {"kind": "header", "machine": "m", "gpu": "h200-sxm"}
    sample = {"op": "all_gather", "ranks": 2, "nodes": 1, "nbytes": 1024, "time_s": 1e-5}
    group = {"kind": "group", "sample": sample, "gpus": [0, 1], "iterations": 20}
    path.write_text("\n".join(map(json.dumps, (head, group))) + '\n{"kind": "gro', encoding="utf-8")

    found = _cut_short(path, "H200-SXM")

    assert found is not None
    assert [one.nbytes for one in found.collectives] == [1024]
    assert _cut_short(path, "b200-sxm") is None, "of another GPU"
    assert _cut_short(tmp_path / "absent", "h200-sxm") is None
    path.write_text(json.dumps(head) + "\n" + json.dumps({"kind": "gossip"}) + "\n", encoding="utf-8")
    assert _cut_short(path, "h200-sxm") is None
    assert "set aside" in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["p.json.partial.damaged"]


def test_a_new_file_has_kernels_of_the_store_for_this_driver_and_nothing_of_other_hosts(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_DATA", str(tmp_path / "store"))
    kernel = OperatorSample(kind="move", name="copy", dtype="bfloat16", shape={"bytes": 2**30}, seconds=5e-4)
    sent = CollectiveSample(op="all_reduce", ranks=2, nodes=1, nbytes=2**20, time_s=1e-4)
    add_to_store(Profile(machine="m", gpu="h200", driver="580.1", operators=(kernel,), collectives=(sent,)))
    here = {
        driver: SimpleNamespace(findings=[SimpleNamespace(code="driver", what=f"driver {driver}")])
        for driver in ("580.1", "590.2")
    }

    found = _known(tmp_path / "new.json", "h200", here["580.1"], store=True)

    assert found is not None
    assert [one.seconds for one in found.operators] == [5e-4]
    assert not found.collectives
    assert _known(tmp_path / "new.json", "h200", here["590.2"], store=True) is None
    assert _known(tmp_path / "new.json", "h200", here["580.1"], store=False) is None
    assert len(_known(None, "h200", here["580.1"], store=True).collectives) == 1


@needs_torch
@pytest.mark.slow
def test_a_calibration_for_a_question_runs_and_is_continued(tmp_path, capsys, monkeypatch) -> None:
    path = tmp_path / "p.json"
    monkeypatch.setenv("MESHWRIGHT_DATA", str(tmp_path / "store"))
    question = ["--model", "tiny-llama", "--framework", "meshwright", "--seq-len", "512", "--global-batch", "4"]
    arguments = [
        "calibrate",
        "--device",
        "cpu",
        "--gpus",
        "2",
        *question,
        "--out",
        str(path),
        "--budget",
        "100s",
        "--json",
    ]

    assert main(arguments) == 0
    captured = capsys.readouterr()
    answer, first = json.loads(captured.out), read_profile(path)

    assert "measurements on" in captured.err, "it says beforehand what it measures, and for how long"
    assert len(first.layers) >= 4
    assert first.gpu == "cpu", "a stand-in never claims to be a GPU"
    assert {sample.run for sample in first.layers} <= set(first.runs)
    times = [sample.at_s for sample in first.layers]
    assert times == sorted(times)
    assert answer["unsure_now"] < answer["unsure_before"]
    assert answer["assumed"], "it says what is left"
    assert not (tmp_path / "store").exists(), "a stand-in is not kept among measurements"
    assert not list(tmp_path.glob("*.partial"))

    said = ""
    for _ in range(4):  # a loaded machine needs more than one budget to get through
        if "nothing was measured" not in said:
            assert main(arguments) == 0
            said = capsys.readouterr().err
    assert "nothing was measured" in said


@needs_torch
@pytest.mark.slow
def test_overlap_modes_are_measured_on_a_stand_in(tmp_path) -> None:
    """Both operations, in every mode, with their parts; two processes with gloo."""
    sites = [
        {"operation": operation, "ranks": 2, "rows": 16, "columns": [8], "depth": 8, "dtype": "float32"}
        for operation in ("all_gather_matmul", "matmul_reduce_scatter")
    ]
    job = {"kind": "overlap", "name": "both", "ranks": 2, "seconds": 20.0, "items": sites}

    found = calibrate([job], [0, 1], budget_s=200, machine="m", gpu="cpu", records=tmp_path / "r", device="cpu").overlap

    assert [sample.operation for sample in found] == ["all_gather_matmul", "matmul_reduce_scatter"]
    for sample in found:
        assert set(sample.seconds) == set(sample.host_s) == set(sample.spread) == set(EXECUTED)
        assert min(sample.product_s, sample.shard_product_s, sample.slice_product_s, sample.slice_collective_s) > 0
