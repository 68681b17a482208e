"""One table writes and reads: what is written of any plan reads back as that plan, in settings and in whole files."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace

import pytest
import tomli_w
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from planner.configs.formats.command_line import CommandLine
from planner.configs.formats.configuration import CheckFlags
from planner.configs.formats.kinds import read_configuration
from planner.export.frameworks import accelerate_fields, deepspeed_fields, megatron_fields, torchtitan_fields
from planner.export.frameworks.megatron import flag_words
from planner.export.frameworks.megatron_model import model_flags, model_of_flags
from planner.export.mapping import Facts, facts_of, keys_of, read, write
from planner.export.targets.registry import TARGETS, export
from simulator.config.hf_config import load_model, shipped_models
from simulator.config.plan import EP_OVERLAPS, Plan, default_schedule
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.pipeline.schedules.registry import SCHEDULES
from tests.examples import examples
from tests.planner.test_export import JOBS
from topology.errors import BadInput, Infeasible

LAYERS = 32
TABLES = {
    "torchtitan@0.2.2": torchtitan_fields.TOML,
    "torchtitan@0.3.0": torchtitan_fields.COMMAND_LINE,
    "megatron": megatron_fields.TABLE,
    "deepspeed": deepspeed_fields.TABLE,
    "accelerate": accelerate_fields.TABLE,
}
few = st.sampled_from([1, 2, 3, 4, 8])


@st.composite
def stages(draw, schedules: tuple[str, ...], *, listed: bool):
    """A pipeline's part of a plan."""
    pp = draw(st.sampled_from([1, 2, 4]))
    if pp == 1:
        return {}
    schedule = draw(st.sampled_from(schedules))
    kind = SCHEDULES[schedule]
    virtual = draw(st.sampled_from([2, 4])) if kind.most_stages == 0 else kind.least_stages
    parts: dict = {"pp": pp, "schedule": schedule, "virtual_stages": virtual}
    if listed and draw(st.booleans()):
        counts = draw(st.lists(st.integers(1, 4), min_size=pp * virtual, max_size=pp * virtual))
        counts[0] += LAYERS - sum(counts)
        assume(counts[0] > 0)
        parts["layers_per_stage"] = tuple(counts)
    return parts


@st.composite
def plans(draw, name: str):
    """A plan that the framework's keys can hold; whether it is legal is not the tables' business."""
    micro, accumulated, cp, tp = (
        draw(few),
        draw(few),
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([1, 2, 8])),
    )
    values: dict = {"micro_batch_size": micro, "tp": tp, "cp": cp}
    runtime: dict = {"compile": draw(st.booleans())}
    if name.startswith("torchtitan"):
        recomputes = ["none", "full", "selective-op"] + (["selective"] if name.endswith("2.2") else [])
        values |= draw(stages(tuple(k for k, v in SCHEDULES.items() if v.in_torch), listed=name.endswith("2.2")))
        values |= {"dp_replicate": draw(few), "dp_shard": draw(few), "ep": draw(few)}
        values |= {"recompute": draw(st.sampled_from(recomputes))}
        values |= {"reshard_after_forward": draw(st.sampled_from([None, True, False]))}
        values |= {"sequence_parallel": tp > 1, "tp_overlap": draw(st.sampled_from(["none", "async"]))}
        method = st.sampled_from(["ring", "all_gather"]) if name.endswith("2.2") else st.just("all_gather")
        values["cp_method"] = draw(method) if cp > 1 else None
        if name.endswith("2.2") and values["ep"] > 1 and values.get("schedule") == "DualPipeV":
            values["ep_overlap"] = draw(st.sampled_from(["none", "combined"]))
        runtime["param_dtype"] = draw(st.sampled_from(["float32", "bfloat16"]))
    elif name == "megatron":
        values |= draw(stages(("1F1B", "Interleaved1F1B"), listed=True))
        if values.get("layers_per_stage"):
            values["schedule"] = default_schedule(values["virtual_stages"])
        values |= {"dp_replicate": draw(few), "zero_stage": draw(st.sampled_from([0, 1, 2, 3])), "ep": draw(few)}
        values |= {"recompute": draw(st.sampled_from(["none", "selective", "full", "moe_act+layernorm"]))}
        values |= {"etp": draw(st.sampled_from([1, tp])) if tp > 1 else None}
        runtime["moe_dispatcher"] = draw(st.sampled_from(["", "allgather", "deepep", "hybridep"]))
        parts = draw(st.sampled_from([None, (), ("attn",), ("moe_router", "moe_preprocess")]))
        runtime |= {"cuda_graph": parts is not None, "graph_scopes": parts or ()}
        values |= {
            "sequence_parallel": tp > 1 and draw(st.booleans()),
            "tp_overlap": draw(st.sampled_from(["none", "userbuffers"])),
        }
        values |= {"cp_method": draw(st.sampled_from(list(megatron_fields.CONTEXT))) if cp > 1 else None}
        values |= {"ep_overlap": draw(st.sampled_from(EP_OVERLAPS))}
        values |= {
            "capacity_factor": draw(st.sampled_from([None, 1.25])),
            "offload_layers": draw(st.sampled_from([None, 3])),
        }
        compute = draw(st.sampled_from(["bfloat16", "float16"]))
        reduce = draw(st.sampled_from(["float32", "bfloat16"])) if compute == "bfloat16" else "float16"
        runtime |= {"compile": False, "param_dtype": compute, "compute_dtype": compute, "reduce_dtype": reduce}
    elif name == "deepspeed":
        values["tp"], values["cp"], values["ep"] = draw(st.sampled_from([(1, 1, 1), (4, 1, 1), (1, 2, 1), (1, 1, 4)]))
        values |= {"dp_replicate": draw(few), "zero_stage": draw(st.sampled_from([0, 1, 2, 3]))}
        values["cp_method"] = "all_to_all" if values["cp"] > 1 else None
        compute = draw(st.sampled_from(["bfloat16", "float16"]))
        reduce = draw(st.sampled_from(["float32", "bfloat16"]))
        runtime = {"param_dtype": compute, "compute_dtype": compute, "reduce_dtype": reduce}
    else:
        values |= {"dp_replicate": draw(few), "dp_shard": draw(st.sampled_from([2, 4])), "micro_batch_size": 1}
        values |= {"reshard_after_forward": draw(st.booleans()), "recompute": draw(st.sampled_from(["none", "full"]))}
        values |= {"cp_method": draw(st.sampled_from(["ring", "all_gather"])) if cp > 1 else None}
        runtime |= {"param_dtype": "float32", "compute_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
    plan = Plan(**values)
    plan = replace(plan, offload=draw(st.sampled_from(_offloads(name, plan))))
    batch = plan.data_parallel * plan.micro_batch_size * accumulated
    return plan, Workload(seq_len=draw(st.sampled_from([2048, 8192])), global_batch_size=batch), Runtime(**runtime)


def _offloads(name: str, plan: Plan) -> list[str]:
    """The words of offload that mean something in a plan."""
    if name == "megatron":
        return ["none", "optimizer"]
    if name == "deepspeed":
        return ["none", *(["optimizer"] if plan.zero_stage else []), *(["parameters"] if plan.zero_stage == 3 else [])]
    return ["none", *(["parameters"] if plan.dp_shard * plan.cp > 1 else [])]


def known(plan: Plan, workload: Workload, runtime: Runtime) -> Facts:
    return facts_of(plan, workload, runtime, LAYERS) | {"moe": True, "max_positions": 0}


@pytest.mark.parametrize("name", TABLES)
@given(st.data())
@examples(150)
def test_what_is_written_of_a_plan_reads_back_as_that_plan(name: str, data) -> None:
    facts = known(*data.draw(plans(name)))
    table = TABLES[name]
    written = write(table, facts)
    back = read(table, written, {"gpus": facts["gpus"], "layers": LAYERS})

    assert set(written) <= keys_of(table)
    assert {key: facts[key] for key in back if key in facts} == {
        key: value for key, value in back.items() if key in facts
    }
    assert write(table, facts | back) == written


@pytest.mark.parametrize("name", shipped_models())
def test_shapes_written_as_flags_read_back_as_the_same_flags(name: str) -> None:
    """Also the count of parameters, for the families that Megatron-LM's flags describe in full."""
    model = load_model(name)
    flags = model_flags(model)
    back, _ = model_of_flags(flags, name)

    assert model_flags(back) == flags
    if model.family in {"llama", "mistral", "qwen2", "mixtral", "gpt"} and not model.windowed_layers:
        assert back.parameters == pytest.approx(model.parameters, rel=2e-3)


def test_exported_files_say_their_plan_to_the_readers() -> None:
    """Of every job and target with a reader: the plan that the file was written for, as far as its keys hold it."""
    compared = 0
    for name, job in JOBS.items():
        for target in TARGETS:
            if f"{target.name}@{target.version}" not in TABLES and target.name not in TABLES:
                continue
            try:
                done = export(job, target)
            except Infeasible:
                continue
            found = read_configuration(done.text, target.file_name, CheckFlags())
            given = {"gpus": job.plan.gpus, "layers": job.question.model.layers, "moe": False, "max_positions": 0}
            back = read(found.table, found.settings, given)
            for key in ("tp", "cp", "pp", "ep", "micro_batch_size"):
                assert back.get(key, getattr(job.plan, key)) == getattr(job.plan, key), (name, target.name, key)
            assert back.get("dp_replicate", 1) * back.get("dp_shard", 1) == job.plan.data_parallel
            assert not found.unknown, (name, target.name)
            compared += 1
    assert compared > 30


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"parallelism.tensor_parallel_degree": "8x"}, "whole number"),
        ({"parallelism.tensor_parallel_degree": True}, "whole number"),
        ({"parallelism.tensor_parallel_degree": 1 << 40}, "whole number"),
        ({"parallelism.fsdp_reshard_after_forward": "sometimes"}, "known: default"),
        ({"compile.enable": 1}, "true or false"),
        ({"parallelism.pipeline_parallel_degree": 2, "parallelism.pipeline_parallel_schedule": "mine"}, "known: 1F1B"),
        ({"training.mixed_precision_reduce": "bfloat16"}, "known: float32"),
        ({"parallelism.tensor_parallel_degree": 3}, "not a multiple"),
    ],
)
def test_values_are_decoded_by_type(settings_, message) -> None:
    with pytest.raises(BadInput, match=message):
        read(torchtitan_fields.TOML, settings_, {"gpus": 8, "layers": LAYERS})


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("Et|tt|tL", (1, 2, 1)),
        ("E|t*3|L", (0, 3, 0)),
        ("Et*3|(tt|)*3,m|L", (3, 2, 2, 2, 0, 0)),
        ("(t|)*2tL", (1, 1, 1)),
        ([["embedding", "decoder", "decoder"], ["decoder", "loss"]], (2, 1)),
    ],
)
def test_layouts_of_pipelines_are_read_as_megatron_writes_them(text: str, layers) -> None:
    assert megatron_fields.layers_of_layout(text) == layers


PP, VP, FIRST, LAST = (
    "--pipeline-model-parallel-size",
    "--num-virtual-stages-per-pipeline-rank",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
)


@pytest.mark.parametrize(
    ("settings_", "layers"),
    [
        ({PP: 16, FIRST: 3, LAST: 2}, (3, *[4] * 14, 2)),  # DeepSeek-V3's 61
        ({PP: 16, LAST: 1}, (*[4] * 15, 1)),
        ({PP: 2, FIRST: 31, LAST: 30}, (31, 30)),  # none in between
        ({PP: 4, VP: 2, FIRST: 15, LAST: 14}, "do not spread"),  # 15 are not for two virtual stages
        ({PP: 2, FIRST: 31, LAST: 31}, "do not spread"),  # 62
        ({PP: 16}, "61 layers do not divide by pp 16"),
        ({PP: 16, VP: 2}, r"Et\|tt\|.*in the place of"),
        ({PP: 2}, "--account-for-loss-in-pipeline-split"),
        ({PP: 3}, "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"),
    ],
)
def test_layers_that_do_not_divide_are_read_as_megatron_spreads_them(settings_, layers) -> None:
    """Expected values by TransformerConfig.__post_init__ and get_num_layers_to_build of megatron-core 0.19.2."""
    facts = {"gpus": 240, "layers": 61}
    if isinstance(layers, str):
        with pytest.raises(BadInput) as caught:
            read(megatron_fields.TABLE, settings_, facts)
        assert re.search(layers, f"{caught.value} {caught.value.remedy}")
    else:
        assert read(megatron_fields.TABLE, settings_, facts)["layers_per_stage"] in {layers, ()}


def test_virtual_stages_share_what_a_rank_has() -> None:
    found = read(megatron_fields.TABLE, {PP: 4, VP: 2, FIRST: 14, LAST: 16}, {"gpus": 8, "layers": 62})

    assert found["layers_per_stage"] == (7, 8, 8, 8) * 2


def test_a_megatron_layout_in_another_notation_is_refused() -> None:
    with pytest.raises(BadInput, match="not a layout"):
        megatron_fields.layers_of_layout("__import__('os')")


def test_deepspeed_without_a_data_parallel_size_ignores_the_context_degree() -> None:
    """As `deepspeed.initialize` does (its mesh needs both), so that the answer is that of the run."""
    said = {"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": 2}

    assert read(deepspeed_fields.TABLE, said, {"gpus": 8, "layers": 32})["cp"] == 1
    both = said | {"data_parallel_size": 4}
    assert read(deepspeed_fields.TABLE, both, {"gpus": 8, "layers": 32})["cp"] == 2


def test_the_readers_formats_are_those_of_standard_libraries() -> None:
    """A file that a library writes is read as the library reads it."""
    document = {"parallelism": {"tensor_parallel_degree": 2}, "training": {"seq_len": 1024}}
    found = read_configuration(tomli_w.dumps(document), "a.toml", CheckFlags())
    assert found.settings == {"parallelism.tensor_parallel_degree": 2, "training.seq_len": 1024}
    assert tomllib.loads(found.document.text) == document
    zero = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 4}
    for text in (json.dumps(zero), json.dumps(zero, indent="\t"), json.dumps(zero, indent=2)):
        assert read_configuration(text, "a.json", CheckFlags()).settings["zero_optimization.stage"] == 3
    launch = {
        "distributed_type": "FSDP",
        "mixed_precision": "no",
        "num_processes": 8,
        "fsdp_config": {"fsdp_version": 2},
    }
    assert read_configuration(yaml.safe_dump(launch), "a.yaml", CheckFlags()).settings["fsdp_config.fsdp_version"] == 2


def test_names_of_a_list_are_words_of_their_own():
    """`--recompute-modules` of Megatron-LM takes one or more words (nargs "*"): quoted together they would be one."""
    words = flag_words({"--recompute-modules": ["core_attn", "moe_act"], "--bf16": True})
    assert words == ["--recompute-modules", "core_attn", "moe_act", "--bf16"]

    text = "torchrun pretrain_gpt.py --recompute-modules core_attn \\\n  moe_act --bf16"
    line = CommandLine(text, "line", lambda flag: flag != "--bf16")
    assert line.settings["--recompute-modules"] == "core_attn moe_act"
    assert "--recompute-modules moe --bf16" in line.edited({"--recompute-modules": ["moe"]})
    assert "--recompute-modules moe layernorm --bf16" in line.edited({"--recompute-modules": ["moe", "layernorm"]})
