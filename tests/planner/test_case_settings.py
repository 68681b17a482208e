"""What settings of a runtime change in a case: low precision, optimizers, overlap, CUDA graphs, versions."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from planner.explain.plan_answer import answer_plan
from planner.question.case_runtime import resolve_runtime
from planner.question.cases import case_from_flags, load_case
from planner.question.flags import Flags, flags_of_plan
from planner.requests.training import OnePlan, Trained
from planner.validate.validation import validate_case
from simulator.config.runtime import Runtime
from simulator.runtimes.library import attention_kernel, runtime_names, runtime_spec
from tests.planner.stated_case import changed
from topology.errors import BadPlan, UserError


@pytest.mark.parametrize("word", ["float8", "float4"])
def test_nothing_is_stored_in_low_precision_by_itself(word):
    """An answer is not legal, a row of a validation is skipped, with the reason."""
    stated = changed(runtime={"param_dtype": word})
    found = answer_plan(load_case(stated))
    row = validate_case(stated | {"measured": {"step_s": 1.0}})

    assert found.estimate is None
    assert any(word in one.message and "cannot be predicted" in one.message for one in found.problems)
    assert row["predicted"] is None
    assert word in row["skipped"]


@pytest.mark.parametrize(
    ("gpu", "runtime", "why"),
    [
        ("a100-sxm-80gb", {"compute_dtype": "float8"}, "no tensor cores for float8"),
        ("h100-sxm", {"compute_dtype": "float4"}, "no tensor cores for float4"),
        ("h100-sxm", {"compute_dtype": "float8", "low_precision_recipe": "mxfp8"}, "scale blocks"),
        ("h100-sxm", {"compute_dtype": "float8", "name": "llm-foundry"}, "not modelled"),
        ("h100-sxm", {"compute_dtype": "float8", "low_precision_recipe": "nvfp4"}, "none of float8"),
    ],
)
def test_low_precision_that_cannot_be_is_refused_with_the_reason(gpu, runtime, why):
    machine = {"gpu": gpu, "gpus_per_node": 8, "nodes": 1, "interconnect": "nvswitch"}
    row = validate_case(changed(runtime=runtime, cluster=machine) | {"measured": {"step_s": 1.0}})

    assert row["predicted"] is None
    assert why in row["skipped"]


@pytest.mark.parametrize("name", ["megatron-lm", "torchtitan"])
def test_float8_gains_less_than_its_rate_and_quantising_is_paid_for(name):
    """Between the 16-bit step and half of it; a recipe that reads tensors twice costs more than one that does not."""

    def step_s(**runtime):
        plan = {"dp_replicate": 8, "dp_shard": 1} if name == "megatron-lm" else {}
        return validate_case(changed(plan=plan, runtime={"name": name, **runtime}))["predicted"]["step_s"]

    plain = step_s()
    found = {r: step_s(compute_dtype="float8", low_precision_recipe=r) for r in ("delayed", "current", "blockwise")}
    assert plain / 2 < found["delayed"] < found["current"] < plain
    assert found["blockwise"] > found["delayed"]
    assert step_s(compute_dtype="float8", low_precision_recipe="tensorwise") == found["current"]


def test_a_recipe_says_the_type_that_a_source_leaves_open():
    case = load_case(changed(runtime={"low_precision_recipe": "nvfp4"}))

    assert case.question.runtime.compute_dtype == "float4"
    assert any("float4 (low_precision_recipe nvfp4)" in line for line in case.assumed)
    kind = load_case(changed(runtime={"low_precision_recipe": "rowwise_by_hand", "compute_dtype": "float8"}))
    assert kind.question.runtime.low_precision_recipe == "rowwise"
    assert any("rowwise_by_hand: costed as rowwise" in line for line in kind.assumed)
    plain = load_case(changed(runtime={"low_precision_recipe": "delayed", "compute_dtype": "bfloat16"}))
    assert any("delayed changes nothing" in line for line in plain.assumed)


def test_layers_that_stay_in_16_bits_are_stated_or_noted():
    def wide(note="", **said):
        case = load_case(changed(note=note, runtime={"compute_dtype": "float8", **said}))
        return case.question.runtime.wide_layers

    layers = load_case(changed()).question.model.layers
    assert wide(wide_layers=[2, 4]) == (2, 4)
    assert wide("Float8 in layers 1-3 only") == (1, layers - 4)
    assert wide("NVFP4 in layers 1-3 only") == (0, 0)  # of another run of this source
    with pytest.raises(BadPlan, match="two whole numbers"):
        wide(wide_layers=4)


@pytest.mark.parametrize(
    ("word", "name", "version"),
    [
        ("NeMo AutoModel", "nemo-automodel", None),
        ("Megatron_Bridge@0.2", "megatron-bridge", "0.2"),
        ("Megatron-Core@0.14", "megatron-core", "0.14"),
        ("XTuner", "xtuner", None),
        ("Hugging Face", "transformers", None),
        ("PaddleNLP", "paddlenlp", None),
    ],
)
def test_runtimes_are_known_by_their_names_as_people_write_them(word, name, version):
    case = load_case(changed(runtime={"name": word}))

    assert (case.question.runtime.name, case.question.runtime.version) == (name, version)
    assert not any("not described" in line for line in case.assumed)
    assert case_from_flags(Flags(model="llama3.2-1b", runtime={"name": word})).question.runtime.name == name


@pytest.mark.parametrize(
    ("word", "plan", "name"),
    [
        ("axolotl", {}, "transformers"),
        ("torchtitn", {}, "torchtitan"),
        ("somebody's trainer", {}, "pytorch"),
        ("somebody's trainer", {"zero_stage": 1, "tp": 2, "dp_replicate": 4, "dp_shard": 1}, "megatron-lm"),
        ("somebody's trainer", {"zero_stage": 3, "dp_replicate": 8, "dp_shard": 1}, "deepspeed"),
    ],
)
def test_a_runtime_that_is_not_described_is_answered_as_the_nearest(word, plan, name):
    """From a case and from flags, and that is said first."""
    case = load_case(changed(runtime={"name": word}, plan=plan))
    asked = case_from_flags(Flags(model="llama3.2-1b", runtime={"name": word}, plan=plan))

    for found in (case, asked):
        assert found.question.runtime.name == name
        assert any(f"{word!r} is not described: answered as {name}" in line for line in found.assumed)


def test_recipes_of_a_runtime_fill_what_a_run_leaves_open_and_nothing_else():
    """Megatron-Bridge's recipes for experts on GB200 in MXFP8 (perf_recipes/qwen/common.py)."""
    machine = {"gpu": "gb200", "gpus_per_node": 4, "nodes": 2, "interconnect": "nvswitch"}
    runtime = {"name": "megatron-lm", "release": "Megatron-Bridge 0.3", "low_precision_recipe": "mxfp8"}
    stated = changed(
        cluster=machine, plan={"dp_replicate": 8, "dp_shard": 1, "zero_stage": 1, "ep": 8}, runtime=runtime
    ) | {"model": "qwen3-30b-a3b", "note": "router forced balanced; bf16 optimizer moments"}
    case = load_case(stated)

    assert case.question.workload.routing == "balanced"
    found = case.question.runtime
    assert (found.name, found.optimizer) == ("megatron-bridge", "adamwbf16moments")
    assert (found.moe_dispatcher, found.reduce_dtype, found.cuda_graph) == ("hybridep", "bfloat16", True)
    assert not found.graph_scopes
    assert case.plan.ep_overlap == "delay_wgrad"
    assert any(line == "ep_overlap delay_wgrad (megatron-bridge's recipes)" for line in case.assumed)

    stated["runtime"] |= {"moe_dispatcher": "alltoall", "reduce_dtype": "float32", "cuda_graph": False}
    stated["plan"]["ep_overlap"] = "none"
    kept = load_case(stated)
    assert kept.plan.ep_overlap == "none"
    assert (kept.question.runtime.moe_dispatcher, kept.question.runtime.reduce_dtype) == ("alltoall", "float32")
    assert not kept.question.runtime.cuda_graph
    assert not any("recipes)" in line for line in kept.assumed)


def test_recipes_for_sharded_networks_keep_layers_in_host_memory():
    """perf_recipes/llama of Megatron-Bridge: on GB200 40 layers of 70B in float8, 20 in bfloat16 (gb200/llama3.py), on
    GB300 40 of 405B in bfloat16 (gb300/llama31.py); NeMo's container has the same.
    """
    machine = {"gpu": "gb200", "gpus_per_node": 4, "nodes": 2, "interconnect": "nvswitch"}
    plan = {"dp_replicate": 1, "dp_shard": 8, "recompute": "none"}
    runtime = {"name": "megatron-bridge", "compute_dtype": "float8"}
    case = changed(cluster=machine, plan=plan, runtime=runtime) | {"model": "llama3-70b"}

    def away(**said: object) -> int | None:
        return load_case(case | {"plan": plan | said}).plan.offload_layers

    assert (away(), away(offload_layers=7)) == (40, 7)
    assert {
        away(recompute="full"),
        away(pp=2, dp_shard=4),
        load_case(case | {"model": "llama3-8b"}).plan.offload_layers,
    } == {None}
    for name in ("megatron-bridge", "nemo"):
        wide = case | {"runtime": {"name": name, "compute_dtype": "bfloat16"}}
        large = wide | {"model": "llama3-405b", "cluster": machine | {"gpu": "gb300"}}
        assert [load_case(one).plan.offload_layers for one in (wide, large)] == [20, 40]


def test_notes_name_graphs_routing_and_the_power_of_a_card():
    note = 'natural routing; {"cuda_graph_scopes": ["moe_router", "moe_preprocess"]}; these were 500 W cards'
    machine = {"gpu": "h100-sxm", "gpus_per_node": 8, "nodes": 1, "interconnect": "nvswitch"}
    stated = changed(cluster=machine, model="qwen3-30b-a3b", runtime={"cuda_graph": True}) | {"note": note}
    case = load_case(stated)

    assert case.question.runtime.graph_scopes == ("moe_router", "moe_preprocess")
    assert case.question.workload.routing == "natural"
    assert case.question.cluster.slowest_kind.power_w == 500
    assert sum("the note" in line for line in case.assumed) == 3


def test_unknown_optimizers_are_refused_and_known_ones_recognised():
    """Adam by any spelling is Adam; what has other states is not costed as if it were."""
    assert load_case(changed(runtime={"optimizer": "FusedAdam"})).question.runtime.optimizer == "adam"
    assert answer_plan(load_case(changed(runtime={"optimizer": "distributed_adamw"}))).estimate is not None
    for word in ("soap", "shampoo", "lamb", "adam8bits"):
        found = answer_plan(load_case(changed(runtime={"optimizer": word})))
        assert found.estimate is None
        assert any(word in one.message for one in found.problems)


def test_every_optimizer_has_its_own_states_and_update():
    """In float32 over 8 ranks: 8 bytes a parameter for Adam's two moments, 4 for Lion's one, none for plain SGD; an
    update reads parameter and gradient, writes the parameter, and reads and writes each moment.
    """
    found = {
        word: answer_plan(load_case(changed(runtime={"optimizer": word}, plan={"recompute": "full"}))).estimate
        for word in ("adamw", "lion", "sgd")
    }
    parameters = load_case(changed()).question.model.parameters
    states = [found[word].memory.by_stage[0].get("optimizer", 0.0) for word in found]

    assert states == pytest.approx([parameters * width / 8 for width in (8, 4, 0)], rel=0.01)
    # Clipping moves 12 bytes a parameter alongside the 28, 20 and 12 of the updates.
    updates = [found[word].breakdown_s["optimizer"] for word in found]
    assert [one / updates[0] for one in updates] == pytest.approx([1, 32 / 40, 24 / 40], rel=0.01)


def test_userbuffers_hide_tensor_parallel_traffic_inside_a_node():
    plan = {"tp": 8, "dp_shard": 1, "sequence_parallel": True}
    rows = {
        mode: validate_case(changed(plan={**plan, "tp_overlap": mode}, runtime={"name": "megatron-lm"}))
        for mode in ("none", "userbuffers")
    }

    assert rows["userbuffers"]["predicted"]["step_s"] < 0.97 * rows["none"]["predicted"]["step_s"]
    two_nodes = {"gpu": "h100-sxm", "gpus_per_node": 8, "nodes": 2, "interconnect": "nvswitch", "nic_gbit_per_gpu": 400}
    wide = validate_case(
        changed(
            plan={**plan, "tp": 16, "tp_overlap": "userbuffers"}, runtime={"name": "megatron-lm"}, cluster=two_nodes
        )
    )
    assert "NVLink domain" in wide["skipped"]


EXPERTS = {
    "model": "qwen3-30b-a3b",
    "plan": {"dp_replicate": 8, "dp_shard": 1, "zero_stage": 1, "ep": 8, "micro_batch_size": 1},
    "workload": {"seq_len": 8192, "global_batch_size": 32},
    "runtime": {"name": "megatron-lm"},
}


def test_a_source_says_yes_or_no_of_experts_overlap_or_how():
    words = {
        word: load_case(changed(plan={"ep_overlap": word})).plan.ep_overlap for word in (True, False, "delay_wgrad")
    }

    assert words == {True: "combined", False: "none", "delay_wgrad": "delay_wgrad"}
    assert load_case(changed()).plan.ep_overlap == "none"
    with pytest.raises(BadPlan, match="ep_overlap"):
        load_case(changed(plan={"ep_overlap": "sometimes"}))
    assert "torchtitan 0.3 has nothing" in validate_case(changed(plan={"ep_overlap": True}))["skipped"]


def test_overlapped_exchanges_of_experts_are_shorter():
    def answered(word):
        case = changed(**{name: part for name, part in EXPERTS.items() if isinstance(part, dict)})
        case |= {"model": EXPERTS["model"], "plan": EXPERTS["plan"] | {"ep_overlap": word}}
        return answer_plan(load_case(case)).estimate

    plain, alongside = answered(False), answered(True)

    assert 0.6 < alongside.step_s.value / plain.step_s.value < 0.95
    assert alongside.memory.reserved_bytes > plain.memory.reserved_bytes


def test_cuda_graphs_take_the_host_out_of_the_way():
    """A short step that waits for its host waits less with graphs, and no step gets longer."""

    def host_s(graphs, seq_len):
        stated = changed(runtime={"cuda_graph": graphs, "compute_dtype": "bfloat16"}, workload={"seq_len": seq_len})
        case = load_case(stated)
        return float(case.question.estimate([case.plan]).breakdown_s["host"][0])

    assert host_s(True, 256) < 0.5 * host_s("no", 256)
    assert host_s(None, 256) == host_s("impl none, scope full_iteration", 256)
    assert host_s(True, 8192) <= host_s(None, 8192)


def test_learned_positions_end_where_their_table_ends():
    """GPT-2 has 1,024 rows of positions: no tokens after them. Rotary positions go on, at the price of a note."""
    short, long = (
        answer_plan(load_case(changed(model="gpt2", workload={"seq_len": length}))) for length in (1024, 2048)
    )

    assert short.estimate is not None
    assert long.estimate is None
    assert any("1024 learned positions" in one.message for one in long.problems)


@pytest.mark.parametrize(
    ("stated", "kernel"),
    [
        ({}, "cudnn"),
        ({"version": "0.2.2"}, "cudnn"),
        ({"version": "0.1"}, "flash2"),
        ({"version": "2024-12"}, "flash2"),
        ({"version": "2025-11"}, "cudnn"),
        ({"release": "2024-12"}, "flash2"),
        ({"release": "2024-12", "version": "0.2.0"}, "cudnn"),
        ({"release": "nightly of 2024-12"}, "flash2"),
        ({"release": "nightly of last 2024"}, "flash2"),
        ({"release": "nightly of 2024-12..2025-11"}, "cudnn"),
    ],
)
def test_a_stated_version_or_month_decides_which_software_ran(stated, kernel):
    case = load_case(changed(runtime=stated))

    assert attention_kernel(case.question.runtime, "hopper") == kernel
    assert any("no month" in line for line in case.assumed) == (".." in stated.get("release", ""))


def test_torch_on_amd_answers_flash_attention_with_its_only_kernel():
    """Also where the runtime asked for FlashAttention first."""
    kernels = {attention_kernel(Runtime(name="torchtitan", version=v), "cdna3") for v in ("0.1", "0.2.2")}

    assert len(kernels) == 1


def test_layers_are_those_that_a_release_names_with_what_others_fuse_of_them():
    """Of several that are named liger's loss is the one that runs, and foak has adapters of packed weights as well."""
    stated = {"name": "pytorch", "release": "loop of 2024 with transformers"}
    replaced = stated | {"kernels": "foak-fast-kernels-liger"}

    assert load_case(changed(runtime=stated)).question.runtime.name == "transformers"
    assert load_case(changed(runtime=replaced)).question.runtime.name == "transformers"
    assert load_case(changed(runtime=replaced)).question.runtime.fused == ("layers", "linear_loss", "packed_adapters")


def test_experts_are_split_as_megatron_does_where_the_ranks_are_enough():
    """`--expert-tensor-parallel-size` is that of tensor parallelism unless said; a run that could not have been so was
    not.
    """
    megatron = {"name": "megatron-lm"}
    plan = {"tp": 2, "dp_replicate": 4, "dp_shard": 1, "zero_stage": 1, "micro_batch_size": 1}
    split, whole = (
        load_case(changed(model="mixtral-8x7b", runtime=megatron, plan=plan | {"ep": ep})).plan for ep in (4, 8)
    )

    assert (split.etp, whole.etp) == (2, 1)
    assert split.sequence_parallel, "without it Megatron-LM's experts stop"


def test_modules_are_a_recompute_mode_of_their_own():
    plan = {"recompute": "selective", "recompute_modules": ["moe_act", "layernorm"]}

    assert load_case(changed(runtime={"name": "megatron-lm"}, plan=plan)).plan.recompute == "moe_act+layernorm"
    with pytest.raises(BadPlan, match="recompute_modules"):
        load_case(changed(plan={"recompute": "none", "recompute_modules": ["moe_act"]}))


def test_cuda_graphs_are_asked_by_a_flag():
    """As `runtime.cuda_graph` of a case; a misspelt part is refused and not launched kernel by kernel."""

    def runtime(graphs):
        trained = Trained(cuda_graph=graphs)
        asked = flags_of_plan(OnePlan(model="llama3-8b", runtime="megatron-lm", trained=trained))
        return resolve_runtime(asked.runtime)[0]

    assert runtime(None) == replace(runtime("full"), cuda_graph=False)
    assert runtime("attn, mlp") == replace(runtime("full"), graph_scopes=("attn", "mlp"))
    with pytest.raises(UserError, match="atn is no part of a layer"):
        runtime("atn")


@pytest.mark.parametrize(
    ("note", "tokens"), [("batch 2, packed 2048", 256), ("not packed", 0), ("packed", 256), ("a package", 0)]
)
def test_a_note_that_says_packed_means_documents_of_the_recipes(note, tokens):
    """Torchtune's data set, where a source gives no length; a length that it gives goes before it."""
    case = load_case(changed(runtime={"name": "torchtune"}) | {"note": note})
    stated = load_case(changed(runtime={"name": "torchtune"}, workload={"document_len": 700}) | {"note": note})

    assert case.question.workload.document_len == tokens
    assert any("documents of 256 tokens" in line for line in case.assumed) == bool(tokens)
    assert stated.question.workload.document_len == 700


def test_documents_are_a_flag_as_well():
    asked = case_from_flags(Flags(model="llama3.2-1b", document_len=300))

    assert asked.question.workload.document_len == 300


def test_our_own_program_refuses_documents_that_it_would_not_tell_apart(planner):
    asked = ["estimate", "--model", "llama3.2-1b", "--cluster", "dgx-h100", "--dp-shard", "8", "--document-len", "300"]
    ours = planner(*asked, "--runtime", "meshwright", "--json")

    assert "documents that share a sequence" in ours.stdout
    assert json.loads(planner(*asked, "--runtime", "torchtune", "--json").stdout)["legal"]


@pytest.mark.parametrize(
    ("note", "compiled"),
    [
        ("2D+compile+Float8", True),
        ("per-op SAC, torch.compile, FSDP2", True),
        ("no compile", False),
        ("without torch.compile", False),
        ("compile off", False),
        ("a compiler", False),
    ],
)
def test_a_note_says_that_layers_were_compiled(note, compiled):
    open_case = changed(runtime={"name": "torchtitan", "compile": None}) | {"note": note}

    assert load_case(open_case).question.runtime.compile is compiled
    assert not load_case(
        changed(runtime={"name": "torchtitan", "compile": False}) | {"note": note}
    ).question.runtime.compile


def test_a_release_gives_the_number_of_the_runtime_among_other_software():
    release = "torchtitan 0.0.2, torch 2.7.0a0+gitb98af95, torchao 0.10.0"
    case = load_case(changed(runtime={"name": "torchtitan", "release": release}))

    assert case.question.runtime.version == "0.0.2"


@pytest.mark.parametrize(
    ("release", "version"),
    [
        ("torch 2.9.0.dev20250811+rocm6.4, torchao 0.13", "2025-08"),  # a nightly build
        ("torch 2.14.0a0, torchao 0.18.0", "2026-08"),  # before the branch of 2.14
        ("torch 2.9.1", None),  # a release is in use for months
        ("torch 9.9.0a0", None),
    ],
)
def test_a_build_of_torch_between_releases_says_of_which_month_a_run_is(release, version):
    case = load_case(changed(runtime={"name": "torchtitan", "release": release}))

    assert case.question.runtime.version == version
    assert any(release in line for line in case.assumed)


@pytest.mark.parametrize(
    ("source", "version"),
    [
        ("benchmarks/llama3_h100_202412_torchtitan.md Table 3", "2024-12"),
        ("a table of 2025-06, again in 2025-07", "2025-07"),
        ("A paper (arXiv 2407.21783), table 4", "2024-07"),
        ("owner/repository@a2024123 README.md of 1202412", None),
    ],
)
def test_a_row_without_a_release_ran_what_there_was_when_it_was_published(source, version):
    assert load_case(changed() | {"source": source}).question.runtime.version == version
    stated = changed(runtime={"version": "0.2.2"}) | {"source": source}
    assert load_case(stated).question.runtime.version == "0.2.2"


@pytest.mark.parametrize(
    ("note", "dtype"),
    [
        ("FSDP+torch.compile+Float8. memory in GiB", "float8"),
        ("4D FSDP+TP+PP+CP 1F1B compile Float8 AsyncTP", "float8"),
        ("torch.compile, FSDP2; tensorwise with float8 all-gather", "bfloat16"),
        ("vanilla TP, compile; baseline float8 rowwise slow", "bfloat16"),
    ],
)
def test_float8_that_a_note_lists_is_that_of_products(note, dtype):
    """The 16-bit type that such a row states is that of all else."""
    case = load_case(changed(runtime={"compute_dtype": "bfloat16"}) | {"note": note})

    assert case.question.runtime.compute_dtype == dtype


@pytest.mark.parametrize(
    ("stated", "note", "gpu"),
    [
        ("b200-sxm", "184 GiB card (SM100)", "gb200"),
        ("b200-sxm", "178 GiB card", "b200-sxm"),
        ("h100-sxm", "184 GiB card", "h100-sxm"),
    ],
)
def test_the_memory_that_a_note_gives_a_card_says_which_it_was(stated, note, gpu):
    """Torch prints 178.35 GiB of a B200 and 184.31 of a GB200, both of compute capability 10.0."""
    machine = {"gpu": stated, "gpus_per_node": 4, "nodes": 1, "interconnect": "nvswitch"}
    case = load_case(changed(cluster=machine, plan={"dp_shard": 4}) | {"note": note})

    assert case.question.cluster.slowest_kind.name == gpu


def test_publications_on_torchtitan_call_selection_by_operator_selective():
    """Its configurations of networks set selective_ac_option to op; a plan's own word is the default option."""
    stated = changed(plan={"recompute": "selective"})

    assert load_case(stated).plan.recompute == "selective"
    assert load_case(stated | {"source": "a page"}).plan.recompute == "selective-op"
    recorded = stated | {"source": "a run", "runtime": {"name": "torchtitan", "version": "0.2.2"}}
    assert load_case(recorded).plan.recompute == "selective"


def test_pai_megatron_patch_keeps_experts_whole():
    """Parameters of Qwen3-235B on 256 GPUs with TP 4, EP 8 and PP 8 take 6.6 GiB a GPU (xtuner's chart); with experts
    split over four ranks they would take 2.
    """
    megatron = {"name": "megatron-lm", "release": "Pai-Megatron-Patch 2b201af (2025-05)"}
    plan = {"tp": 4, "pp": 8, "ep": 8, "dp_replicate": 8, "dp_shard": 1, "zero_stage": 1, "micro_batch_size": 1}
    machine = {"gpu": "h800-sxm", "gpus_per_node": 8, "nodes": 32, "interconnect": "nvswitch"}
    case = load_case(changed(model="qwen3-235b-a22b", runtime=megatron, plan=plan, cluster=machine))

    assert case.plan.etp == 1
    held = answer_plan(case).estimate.memory.by_category["parameters"]
    assert held / 2**30 == pytest.approx(6.6, rel=0.1)


@pytest.mark.parametrize(("stage", "published"), [(0, 36.7), (1, 23.8)])
def test_nanotron_holds_what_its_own_grid_found(stage, published):
    """A 1B on 32 H100, one sequence a micro batch: GiB that nanotron's own grid found (bench2 of 2024-12)."""
    model = {
        "model_type": "llama", "num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 32,
        "num_key_value_heads": 32, "intermediate_size": 8192, "vocab_size": 131072, "tie_word_embeddings": True,
    }  # fmt: skip
    stated = changed(
        model=model,
        cluster={"gpu": "h100-sxm", "gpus_per_node": 8, "nodes": 4, "interconnect": "nvswitch"},
        workload={"seq_len": 4096, "global_batch_size": 256},
        plan={"dp_replicate": 32, "dp_shard": 1, "zero_stage": stage, "micro_batch_size": 1, "recompute": "none"},
        runtime={"name": "nanotron", "param_dtype": "bfloat16", "reduce_dtype": "float32"},
    )

    assert answer_plan(load_case(stated)).estimate.memory.reserved_bytes / 2**30 == pytest.approx(published, rel=0.06)


def test_userbuffers_are_not_for_rocm(planner):
    """ROCm's TransformerEngine builds without them (build_tools/pytorch.py: sources are for `not rocm_build()`)."""
    plan = ("--tp", "8", "--sequence-parallel", "--tp-overlap", "userbuffers")
    same = ("--model", "llama3-8b", "--gpus", "8", "--runtime", "megatron-lm", *plan, "--json")
    amd, nvidia = (
        json.loads(planner("estimate", *same, "--cluster", cluster).stdout) for cluster in ("mi300x-x8", "dgx-h100")
    )

    assert nvidia["legal"]
    assert not amd["legal"]
    assert any("ROCm" in problem["message"] for problem in amd["problems"])


# What a source may say of a run, each with a value that is no runtime's default.
STATED = {
    "compile": {"runtime": {"compile": True}},
    "graphs": {"runtime": {"cuda_graph": "full"}},
    "graphs of attention": {"runtime": {"cuda_graph": ["attn"]}},
    "float32 parameters": {"runtime": {"param_dtype": "float32", "compute_dtype": "float32"}},
    "float8": {"runtime": {"compute_dtype": "float8"}},
    "a recipe alone": {"runtime": {"low_precision_recipe": "delayed"}},
    "sgd": {"runtime": {"optimizer": "sgd"}},
    "adapters": {"runtime": {"adapter": {"kind": "lora", "rank": 8}}},
    "a dispatcher": {"runtime": {"moe_dispatcher": "allgather"}},
    "experts one by one": {"runtime": {"expert_products": "loop"}},
    "user buffers": {"plan": {"tp_overlap": "userbuffers"}},
    "a schedule": {"plan": {"schedule": "GPipe"}},
    "recomputation": {"plan": {"recompute": "full"}},
    "offload": {"plan": {"offload": "optimizer"}},
    "documents": {"workload": {"document_len": 16}},
}


@pytest.mark.parametrize("name", sorted({runtime_spec(name).names[0] for name in runtime_names()}))
def test_what_a_source_says_is_used_refused_or_said_to_change_nothing(name):
    """Nothing that is stated is dropped without a word, under any runtime: small layers, whose host decides too."""
    about = {"model": "tiny-llama", "cluster": "h200x4", "runtime": {"name": name}}
    sizes = {"workload": {"seq_len": 256, "global_batch_size": 8}, "plan": {"dp_shard": 1, "dp_replicate": 4}}
    base = changed(**about, **sizes)
    plain = answer_plan(load_case(base))
    assert plain.estimate is not None
    dropped = []
    for what, stated in STATED.items():
        try:
            found = answer_plan(load_case(base | {part: base[part] | said for part, said in stated.items()}))
        except UserError:
            continue
        if found.estimate == plain.estimate and {*found.case.assumed} <= {*plain.case.assumed}:
            dropped.append(what)

    assert dropped == []
