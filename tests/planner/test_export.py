"""Exports: keys that the real packages know, values that say what the plan says, refusals where a tool cannot."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from executor.launch.local_ranks import FORCED_VARIABLES
from executor.launch.request import Request
from planner.export.hosts import hosts_of
from planner.export.job import ExportJob, export_job
from planner.export.launchers import torchrun
from planner.export.planned import planned_in
from planner.export.targets.registry import TARGETS, export, find_target
from planner.question.cases import case_of_file
from planner.question.question import question_of
from simulator.config.adapter import Adapter
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from tests.planner.conftest import make_cluster
from tests.planner.target_schemas import schema_of
from topology import codec
from topology.catalog import clusters as catalog
from topology.cluster import NodeGroup
from topology.errors import Infeasible, UserError

ROOT = Path(__file__).resolve().parents[2]
PLANS = sorted((ROOT / "examples" / "plans").glob("*.json"))


def job(plan, *, model="llama3-8b", nodes=1, seq_len=4096, batch=64, framework="torchtitan", cluster=None, **runtime):
    question = question_of(
        load_model(model),
        cluster or make_cluster(nodes),
        Workload(seq_len=seq_len, global_batch_size=batch),
        runtime=Runtime(**{"name": framework, **runtime}),
        framework=framework,
    )
    return ExportJob(name="a run", plan=plan, question=question)


FSDP = Plan(dp_shard=8, recompute="full")
TP = Plan(dp_shard=4, tp=2, sequence_parallel=True, recompute="selective-op")
PP = Plan(dp_shard=2, pp=4, schedule="1F1B", micro_batch_size=2, recompute="none")
ZERO = Plan(dp_replicate=4, zero_stage=1, tp=2, sequence_parallel=True, recompute="selective")
HYBRID = Plan(dp_replicate=2, dp_shard=8, recompute="full")
MOE = Plan(dp_shard=8, ep=8, recompute="full")
JOBS = {
    "fsdp": job(FSDP),
    "tp": job(TP, compile=True),
    "async": job(TP.with_(tp_overlap="async"), compile=True),
    "by-site": job(TP.with_(tp_overlap="attention_in=fused,mlp_in=fused,mlp_out=chunked"), compile=True),
    "pp": job(PP),
    "interleaved": job(PP.with_(schedule="Interleaved1F1B", virtual_stages=2, micro_batch_size=1)),
    "uneven": job(PP.with_(layers_per_stage=(7, 9, 9, 7))),
    "cp": job(Plan(dp_shard=4, cp=2, recompute="full", cp_method="ring"), seq_len=8192),
    "zero": job(ZERO, framework="megatron-lm", param_dtype="bfloat16"),
    "zero2": job(Plan(dp_replicate=8, zero_stage=2, recompute="none"), framework="deepspeed"),
    "hybrid": job(HYBRID, nodes=2),
    "moe": job(MOE, model="qwen3-30b-a3b"),
    "latent": job(Plan(dp_replicate=8, zero_stage=1, ep=8), model="deepseek-v2-lite", framework="megatron-lm"),
}
NAMES = [f"{target.name}@{target.version}" for target in TARGETS]


def exported(name: str, to: str):
    return export(JOBS[name], find_target(to))


def every_export_of(name: str):
    """Yield a job's files; which targets refuse it is another test's business."""
    for to in NAMES:
        try:
            yield exported(name, to)
        except Infeasible:
            continue


@pytest.mark.parametrize("name", JOBS)
def test_every_key_is_one_that_the_package_knows(name: str) -> None:
    for done in every_export_of(name):
        keys = schema_of(done.target, done.version)["keys"]

        assert done.settings
        for key, value in done.settings.items():
            assert key in keys, (done.target, key)
            choices = keys[key].get("choices")
            if choices and not isinstance(value, (list, bool)):
                assert str(value) in {str(choice) for choice in choices}, (done.target, key)
            if keys[key]["type"] == "flag":
                assert value is True, (done.target, key)


def test_most_plans_reach_most_targets() -> None:
    """Skips above are refusals; this says which, so that a target does not come to refuse everything."""
    refused = set()
    for name in JOBS:
        for to in NAMES:
            try:
                exported(name, to)
            except Infeasible:
                refused.add((name, to.partition("@")[0]))

    def targets(name):
        return {to for job_name, to in refused if job_name == name}

    assert targets("fsdp") == set()
    assert targets("hybrid") == set()
    assert targets("zero2") <= {"accelerate"}
    assert targets("pp") == {"deepspeed", "accelerate"}  # DeepSpeed has no ZeRO-3 alongside pipelines
    assert targets("zero") == {"torchtitan", "torchrun", "accelerate"}
    assert targets("tp") == set()


def test_torchtitan_runs_a_pipelines_micro_batches_in_one_pass() -> None:
    config = tomllib.loads(exported("pp", "torchtitan@0.2.2").text)

    # 64 sequences over two data-parallel ranks, two at a time.
    assert config["training"]["local_batch_size"] == 32
    assert config["training"]["global_batch_size"] == 64
    assert config["parallelism"]["pipeline_parallel_microbatch_size"] == 2
    degrees = {key: value for key, value in config["parallelism"].items() if key.endswith("_degree")}
    assert sorted(degrees.values()) == [1, 1, 1, 1, 2, 4]


@pytest.mark.parametrize(
    ("model", "flavor"), [("gpt-oss-20b", "20b"), ("gpt-oss-120b", "120b"), ("deepseek-v3", "671B")]
)
def test_a_routers_bias_is_a_parameter_or_a_buffer(model: str, flavor: str) -> None:
    """Torchtitan's gpt-oss counts it among the parameters, its DeepSeek does not: both are its own flavors."""
    one = job(Plan(dp_shard=64), model=model, nodes=8)

    assert f'flavor = "{flavor}"' in export(one, find_target("torchtitan@0.2.2")).text
    assert f'model_registry("{flavor}")' in export(one, find_target("torchtitan@0.3.0")).text


def test_uneven_stages_are_spelled_out_or_refused() -> None:
    parts = tomllib.loads(exported("uneven", "torchtitan@0.2.2").text)["parallelism"]["module_fqns_per_model_part"]

    assert [sum(name.startswith("layers.") for name in part) for part in parts] == [7, 9, 9, 7]
    assert parts[0][0] == "tok_embeddings"
    assert parts[-1][-2:] == ["norm", "output"]
    assert [name for part in parts for name in part if "layers" in name] == [f"layers.{i}" for i in range(32)]
    with pytest.raises(Infeasible, match="splits this pipeline differently"):
        exported("uneven", "torchtitan@0.3.0")
    assert exported("uneven", "megatron").settings["--pipeline-model-parallel-layout"] == "|".join(
        ["E" + "t" * 7, "t" * 9, "t" * 9, "t" * 7 + "L"]
    )


def test_the_three_batch_sizes_of_deepspeed_agree() -> None:
    config = json.loads(exported("zero2", "deepspeed").text)

    assert config["zero_optimization"]["stage"] == 2
    assert (
        config["train_batch_size"]
        == config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 8
        == 64
    )


def test_sharding_in_the_words_of_each_school() -> None:
    assert exported("hybrid", "deepspeed").settings["zero_optimization.zero_hpz_partition_size"] == 8
    hybrid = exported("hybrid", "megatron").settings
    assert hybrid["--data-parallel-sharding-strategy"] == "optim_grads_params"
    assert hybrid["--num-distributed-optimizer-instances"] == 2
    zero2 = yaml.safe_load(exported("zero2", "accelerate").text)
    assert zero2["fsdp_config"]["fsdp_reshard_after_forward"] is False
    assert zero2["parallelism_config"]["parallelism_config_dp_shard_size"] == 8
    assert any("ZeRO-2" in line for line in exported("zero2", "accelerate").not_expressed)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan(tp=8, sequence_parallel=True, recompute="none"), True),
        (Plan(pp=4, tp=2, schedule="1F1B", sequence_parallel=True, recompute="none"), True),
        (TP, False),
        (Plan(dp_replicate=8, recompute="none"), False),  # autocast
    ],
)
def test_torchtitan_0_2_computes_in_what_it_stores_without_sharding(plan: Plan, said: bool) -> None:
    unsaid = {to: export(job(plan), find_target(to)).not_expressed for to in ("torchtitan@0.2.2", "torchtitan@0.3.0")}

    assert any(line.startswith("computing in bfloat16") for line in unsaid["torchtitan@0.2.2"]) is said
    assert not any(line.startswith("computing in") for line in unsaid["torchtitan@0.3.0"])


def test_what_cannot_be_said_is_listed_in_the_file_too() -> None:
    for name in JOBS:
        for done in every_export_of(name):
            if done.target == "deepspeed":
                assert json.loads(done.text)["meshwright"]["not_expressed"] == list(done.not_expressed)
            for line in done.not_expressed:
                assert json.dumps(line)[1:-1] in done.text or line in done.text


def test_overlap_by_site_is_said_to_be_more_than_a_target_takes() -> None:
    for to in ("torchtitan", "megatron"):
        assert any(
            "fused (attention_in, mlp_in) chunked (mlp_out)" in line for line in exported("by-site", to).not_expressed
        )


def test_the_header_says_which_plan_it_is() -> None:
    a, b = exported("tp", "slurm"), exported("fsdp", "slurm")

    assert a.plan_hash != b.plan_hash
    assert a.plan_hash in a.text
    assert a.plan_hash == exported("tp", "skypilot").plan_hash
    assert "not expressed" not in exported("tp", "torchtitan@0.2.2").text


def test_our_executor_gets_its_request_and_its_environment() -> None:
    text = exported("fsdp", "torchrun").text
    body = text.split("<<'REQUEST'\n")[1].split("\nREQUEST\n")[0]

    assert codec.convert(json.loads(body), Request, where="request").plan == FSDP
    assert torchrun.ENVIRONMENT == FORCED_VARIABLES
    own = Plan(tp=8, sequence_parallel=True, tp_overlap="fused", recompute="selective-op")
    written = export(job(own, framework="meshwright"), find_target("torchrun"))
    assert "predicted for torchtitan, whose kernels" in " ".join(text.replace("#", " ").split())
    assert "whose kernels" not in written.text
    assert '"tp_overlap":"fused"' in written.text
    assert '"recompute":"selective-op"' in written.text
    for name, value in FORCED_VARIABLES.items():
        assert f"\nexport {name}={value}\n" in text


def test_a_model_that_torchtitan_does_not_ship_is_not_replaced_by_another() -> None:
    with pytest.raises(Infeasible, match=r"ships no model[^$]*no other norms"):
        export(job(FSDP, model="gemma2-9b"), find_target("torchtitan@0.2.2"))
    written = export(job(FSDP, model="llama2-7b"), find_target("torchtitan@0.2.2"))
    config = tomllib.loads(written.text)
    assert config["model"] == {"name": "llama3", "flavor": "llama2-7b"}
    assert f"{config['experimental']['custom_import']}.py" in written.files
    for model, flavor in (("llama3-8b", "8B"), ("qwen3-8b", "8B"), ("deepseek-v3", "671B")):
        config = tomllib.loads(export(job(FSDP, model=model), find_target("torchtitan@0.2.2")).text)
        assert config["model"] == {"name": re.sub(r"(qwen3|llama3).*|deepseek.*", _module, model), "flavor": flavor}


def _module(found: re.Match[str]) -> str:
    return found[1] or "deepseek_v3"


# Placement


def test_placement_becomes_devices_in_bus_order() -> None:
    placed = job(TP.with_(placement=(0, 2, 1, 3, 4, 5, 6, 7)))
    text = export(placed, find_target("torchtitan")).text

    assert "\nexport CUDA_DEVICE_ORDER=PCI_BUS_ID\n" in text
    assert "\nexport CUDA_VISIBLE_DEVICES=0,2,1,3,4,5,6,7\n" in text
    assert "CUDA_VISIBLE_DEVICES" not in exported("tp", "torchtitan").text
    trainer = yaml.safe_load(export(placed, find_target("trainjob")).text)["spec"]["trainer"]
    assert {"name": "CUDA_VISIBLE_DEVICES", "value": "0,2,1,3,4,5,6,7"} in trainer["env"]


def test_a_part_of_a_host_asks_for_the_whole_host() -> None:
    placed = job(Plan(dp_shard=2, tp=2, sequence_parallel=True, placement=(4, 5, 6, 7)))
    text = export(placed, find_target("slurm")).text

    assert "#SBATCH --gpus-per-node=8\n#SBATCH --exclusive\n" in text
    assert "--nproc-per-node=4" in text
    assert "CUDA_VISIBLE_DEVICES=4,5,6,7" in text


def test_hosts_in_another_order_and_with_their_own_devices() -> None:
    swapped = (*range(8, 16), *reversed(range(8)))
    hosts = hosts_of(HYBRID.with_(placement=swapped), make_cluster(2))

    assert hosts.order == (1, 0)
    assert hosts.devices == (tuple(range(8)), tuple(reversed(range(8))))
    text = export(job(HYBRID.with_(placement=swapped), nodes=2), find_target("skypilot")).text
    run = yaml.safe_load(text)["run"]
    assert "  0) export CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 ;;\n" in run
    assert "  1) export CUDA_VISIBLE_DEVICES=7,6,5,4,3,2,1,0 ;;\n" in run
    assert "the order of hosts" in text
    with pytest.raises(Infeasible, match="same environment"):
        export(job(HYBRID.with_(placement=swapped), nodes=2), find_target("trainjob"))


def test_ranks_of_a_host_must_be_consecutive_and_equally_many() -> None:
    mixed = tuple(i // 2 + 8 * (i % 2) for i in range(16))
    with pytest.raises(Infeasible, match="interleaves hosts"):
        hosts_of(HYBRID.with_(placement=mixed), make_cluster(2))
    with pytest.raises(Infeasible, match="hosts get 4 and 8 ranks"):
        hosts_of(Plan(dp_shard=12), make_cluster(2))
    with pytest.raises(Infeasible, match="needs 16 GPUs, test has 8"):
        hosts_of(Plan(dp_shard=16), make_cluster(1))
    with pytest.raises(Infeasible, match="on GPU 9, which test does not have"):
        hosts_of(Plan(dp_shard=2, placement=(0, 9)), make_cluster(1))


def test_gpus_that_are_visible_under_other_numbers() -> None:
    cluster = make_cluster(1, 8)
    node = cluster.groups[0].node
    some = replace(cluster, groups=(NodeGroup(node=replace(node, gpus=node.gpus[4:])),))

    assert hosts_of(Plan(dp_shard=4), some).devices == ((4, 5, 6, 7),)
    assert hosts_of(Plan(dp_shard=4), some).devices_matter
    assert not hosts_of(Plan(dp_shard=8), cluster).devices_matter


def test_trays_of_a_rack_are_hosts() -> None:
    hosts = hosts_of(Plan(dp_shard=72), catalog.cluster("gb200-nvl72"))

    assert (hosts.count, hosts.ranks_per_host, hosts.devices_matter) == (18, 4, False)


def test_network_variables_only_where_a_port_is_down() -> None:
    assert "NCCL" not in exported("hybrid", "slurm").text
    cluster = make_cluster(2)
    node = cluster.groups[0].node
    nics = (replace(node.nics[0], up=False), *node.nics[1:3])
    broken = replace(cluster, groups=(NodeGroup(node=replace(node, nics=nics), count=2),))
    done = export(job(HYBRID, cluster=broken), find_target("slurm"))

    assert "# mlx5_0 was found down; the others are named exactly\nexport NCCL_IB_HCA==mlx5_1,mlx5_2\n" in done.text


# The command


def test_versions_are_chosen_by_name_or_by_the_plan() -> None:
    assert find_target("torchtitan").version == "0.3.0"
    assert find_target("torchtitan", "0.2.2").version == "0.2.2"
    assert find_target("torchtitan@0.2").version == "0.2.2"
    with pytest.raises(UserError, match=r"no export to torchtitan '9.9'"):
        find_target("torchtitan@9.9")
    with pytest.raises(UserError, match="did you mean megatron"):
        find_target("megatorn")


def test_command_writes_once_and_says_what_is_missing(planner, tmp_path) -> None:
    plan, out = ROOT / "examples" / "plans" / "llama3_8b_two_nodes.json", tmp_path / "config.toml"
    first = planner("export", plan, "--to", "torchtitan@0.2.2", "--out", out)

    assert first.returncode == 0
    assert tomllib.loads(out.read_text())["model"]["flavor"] == "8B"
    assert planner("export", plan, "--to", "torchtitan@0.2.2", "--out", out).returncode == 2
    document = planner("export", plan, "--to", "accelerate", "--out", out, "--force", "--json")
    found = json.loads(document.stdout)
    assert found["schema_version"] == 1
    assert found["text"] == out.read_text()
    assert any("sequence length" in line for line in found["not_expressed"])


@pytest.mark.parametrize(
    ("to", "code"), [("deepspeed", 0), ("torchtitan@1.0", 2), ("nonsense", 2), ("slurm", 0), ("torchtitan", 0)]
)
def test_exit_codes(planner, to: str, code: int) -> None:
    done = planner("export", ROOT / "examples" / "plans" / "llama3_8b_two_nodes.json", "--to", to)

    assert done.returncode == code
    assert bool(done.stdout) == (code == 0)


def test_a_saved_plan_exports_like_its_case(planner, tmp_path) -> None:
    saved = tmp_path / "plan.json"
    asked = ("--model", "llama3-8b", "--gpus", "4", "--framework", "megatron-lm", "--pp", "1", "--no-simulate")
    assert planner("suggest", *asked, "--seq-len", "4096", "--global-batch", "64", "--out", saved).returncode == 0
    done = planner("export", saved, "--to", "megatron", "--json")

    settings = json.loads(done.stdout)["settings"]
    plan = json.loads(saved.read_text())["plan"]
    assert settings["--tensor-model-parallel-size"] == plan["tp"]
    assert settings["--micro-batch-size"] == plan["micro_batch_size"]
    assert settings["--num-layers"] == 32


@pytest.mark.parametrize("plan", PLANS, ids=lambda path: path.stem)
def test_kept_examples_are_what_is_written_today(plan: Path) -> None:
    """But for the release of ours that wrote them. Made again by `python tests/tools/export_table.py`."""
    from tests.tools.export_table import files

    def without_release(texts: dict[str, str]) -> dict[str, str]:
        return {name: re.sub(r"meshwright \d+\.\d+\.\d+", "meshwright", text) for name, text in texts.items()}

    folder = ROOT / "examples" / "exports" / plan.stem

    assert without_release({path.name: path.read_text() for path in folder.iterdir()}) == without_release(files(plan))


def test_example_commands_are_words() -> None:
    words = shlex.split(
        export(export_job(case_of_file(str(PLANS[0]))), find_target("megatron")).text.replace("\\\n", " "),
        comments=True,
    )

    assert "torchrun" in words
    assert words[-1] == "$@"


def test_every_tool_in_one_folder_with_one_command_each(planner, tmp_path) -> None:
    plan, folder = ROOT / "examples" / "plans" / "llama3_8b_two_nodes.json", tmp_path / "exports"
    done = planner("export", plan, "--all", "--out", folder)

    assert done.returncode == 0, done.stderr
    readme = (folder / "README.md").read_text()
    for target in TARGETS:
        assert (folder / target.file_name).is_file()
        assert f"## {target.name} {target.version}: {target.file_name}\n" in readme
    assert "\nsbatch job.sbatch\n" in readme
    assert planner("export", plan, "--all", "--out", folder).returncode == 2
    assert planner("export", plan, "--all", "--out", folder, "--force").returncode == 0
    assert planner("export", plan, "--out", folder).returncode == 2


def test_any_listed_plan_is_saved(planner, tmp_path) -> None:
    asked = ("--model", "llama3.2-1b", "--gpus", "4", "--seq-len", "4096", "--global-batch", "16")
    asked += ("--pp", "1", "--no-simulate")
    listed = json.loads(planner("suggest", *asked, "--json").stdout)["plans"]
    saved, again = tmp_path / "third.json", tmp_path / "again.json"

    assert planner("suggest", *asked, "--out", saved, "--pick", "3").returncode == 0
    assert json.loads(saved.read_text())["plan"] == listed[2]["plan"]
    assert planner("estimate", "--plan", saved, "--out", again).returncode == 0
    assert json.loads(again.read_text())["plan"] == listed[2]["plan"]
    environment = json.loads(planner("estimate", "--plan", saved, "--json").stdout)["environment"]
    assert environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert planner("suggest", *asked, "--pick", "3").returncode == 2
    assert (
        planner(
            "estimate", "--case", ROOT / "examples" / "plans" / "llama3_8b_two_nodes.json", "--out", again
        ).returncode
        == 2
    )


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"{target.name}@{target.version}")
def test_every_launcher_sets_the_environment_that_was_predicted(target) -> None:
    plan = Plan(dp_shard=4, cp=2, recompute="full", cp_method="all_gather")
    done = export(job(plan, seq_len=8192), target)

    assert {"PYTORCH_ALLOC_CONF", "TORCH_NCCL_HIGH_PRIORITY"} <= {one.name for one in done.environment}
    for variable in done.environment:
        assert variable.name in f"{done.text} {done.run}"
        assert variable.value in f"{done.text} {done.run}"


def test_tf32_is_a_switch_of_torch_that_the_program_sets_itself() -> None:
    wide = {"param_dtype": "float32", "compute_dtype": "tf32"}
    for to in ("torchtitan", "accelerate", "deepspeed", "megatron"):
        done = export(job(Plan(dp_replicate=8, recompute="none"), **wide), find_target(to))

        assert any("set_float32_matmul_precision" in line for line in done.not_expressed)
        assert "tf32" not in json.dumps(done.settings)
    own = export(job(FSDP, framework="meshwright", **wide), find_target("torchrun"))
    assert not any("TF32" in line for line in own.not_expressed)


@pytest.mark.parametrize("framework", ["megatron-lm", "deepspeed"])
def test_master_weights_stay_where_a_plan_is_written_for_fsdp2(framework: str) -> None:
    """Both keep a float32 copy of 16-bit parameters; FSDP2 stores float32 parameters and casts what it gathers."""
    plan = Plan(dp_replicate=8, zero_stage=3, recompute="full")
    masters = job(plan, framework=framework, param_dtype="bfloat16", compute_dtype="bfloat16")

    for target in ("torchtitan@0.2.2", "torchtitan@0.3.0"):
        done = export(masters, find_target(target))
        assert done.settings["training.dtype"] == "float32"
        assert done.settings["training.mixed_precision_param"] == "bfloat16"
        assert any("master weights" in line for line in done.not_expressed)
    assert export(masters, find_target("accelerate")).settings["mixed_precision"] == "bf16"
    alone = job(plan.with_(zero_stage=None, dp_replicate=1, dp_shard=8), param_dtype="bfloat16")
    assert export(alone, find_target("torchtitan@0.2.2")).settings["training.dtype"] == "bfloat16"


def test_megatron_gets_the_numbers_of_a_known_model() -> None:
    """As the models' config.json have them; DeepSeek-V3's router as its paper and its inference code say."""

    def flags(model: str) -> dict[str, object]:
        plan = Plan(dp_replicate=8, zero_stage=1, recompute="full")
        return dict(export(job(plan, model=model, framework="megatron-lm"), find_target("megatron")).settings)

    llama = flags("llama3-8b")
    assert (llama["--rotary-base"], llama["--norm-epsilon"], llama["--rope-scaling-factor"]) == (500000, 1e-5, 8.0)
    mixtral = flags("mixtral-8x7b")
    assert (mixtral["--rotary-base"], mixtral["--moe-aux-loss-coeff"]) == (1000000, 0.02)
    deepseek = flags("deepseek-v3")
    assert (deepseek["--moe-router-num-groups"], deepseek["--moe-router-group-topk"]) == (8, 4)
    # Its bias only selects experts whose scores are sigmoids; that of gpt-oss is of a linear layer before a softmax.
    assert (deepseek["--moe-router-score-function"], deepseek["--moe-router-enable-expert-bias"]) == ("sigmoid", True)
    assert not {"--moe-router-score-function", "--moe-router-enable-expert-bias"} & flags("gpt-oss-20b").keys()
    assert (deepseek["--moe-router-topk-scaling-factor"], deepseek["--moe-aux-loss-coeff"]) == (2.5, 1e-4)
    assert (deepseek["--rotary-scaling-factor"], deepseek["--mscale"], deepseek["--mscale-all-dim"]) == (40, 1.0, 1.0)
    assert "--rotary-base" not in flags("Qwen/Qwen2.5-14B-Instruct-1M")  # like another model, but for its positions


@pytest.mark.parametrize(("model", "start"), [("llama3.2-3b", "llama3_8b"), ("llama3-70b", "llama3_70b")])
def test_a_recipe_starts_from_the_one_nearest_in_size(model: str, start: str) -> None:
    done = export(job(FSDP, model=model), find_target("torchtitan@0.3.0"))

    assert f"config = {start}()" in done.text


QLORA = Adapter(rank=16, target_modules=("q_proj", "v_proj"), base_weights="nf4", dropout=0.1)


@pytest.mark.parametrize(
    ("to", "plan", "framework", "adapter", "said"),
    [
        (
            "accelerate",
            Plan(dp_shard=8),
            "pytorch",
            QLORA,
            ('LoraConfig(r=16, target_modules=["q_proj", "v_proj"]', "nf4"),
        ),
        (
            "deepspeed",
            Plan(dp_replicate=8, zero_stage=3),
            "deepspeed",
            QLORA,
            ("lora_dropout=0.1", "BitsAndBytesConfig"),
        ),
        (
            "megatron",
            Plan(dp_replicate=8),
            "megatron-lm",
            replace(QLORA, base_weights="", dropout=0.0),
            ('CanonicalLoRA(dim=16, target_modules=["linear_q", "linear_v"])',),
        ),
        (
            "torchtitan",
            Plan(dp_shard=8),
            "torchtitan",
            Adapter(rank=8, target_modules=("wq",)),
            ("LoRAConverter", "wq"),
        ),
    ],
)
def test_adapters_are_said_to_be_the_programs_to_build(to, plan, framework, adapter, said) -> None:
    """And are read back from the file's header."""
    asked = job(plan, framework=framework, param_dtype="bfloat16", adapter=adapter)
    written = export(asked, find_target(to))

    assert all(word in " ".join(written.needed) for word in said)
    assert planned_in(written.text).facts["adapter"] == json.loads(codec.to_json(adapter))
