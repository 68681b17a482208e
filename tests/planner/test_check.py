"""`planner check`: configurations of other tools read, judged, and written back; public ones kept in examples/check."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import planner as package
from planner.configs.answer import Checked, check_text
from planner.configs.asked import ask
from planner.configs.formats.command_line import CommandLine, option_kinds
from planner.configs.formats.configuration import CheckFlags, NotAConfiguration, did_you_mean
from planner.configs.formats.documents import TomlDocument, YamlDocument
from planner.configs.formats.kinds import read_configuration
from planner.export.schema import schema
from simulator.config.estimate import SURE
from topology.errors import BadInput, PlannerError

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "examples" / "check"
# What each answer has to say, by the sums of the README there: (flags, legal, does it fit, something that is said).
LAUNCH = "torchrun --nproc_per_node 8 train.py --per_device_train_batch_size 1 --gradient_accumulation_steps 8 --bf16"
ANSWERS = {
    "torchtitan_llama3_8b.toml": (CheckFlags(), True, True, "64 GPUs (the file's own comment)"),
    "torchtitan_llama3_70b.toml": (CheckFlags(), True, True, "cluster dgx-a100"),
    "torchtitan_llama3_405b.toml": (CheckFlags(), True, None, "low_precision_recipe = tensorwise"),
    "torchtitan_deepseek_v3.toml": (CheckFlags(gpus=256), True, False, ""),
    "torchtitan_llama3_70b_8xb200.toml": (CheckFlags(cluster="dgx-b200"), False, None, "known: float32"),
    "torchtitan_llama3_70b_command.sh": (CheckFlags(), True, True, ""),
    "megatron_gpt3_175b.sh": (CheckFlags(), False, None, "8 GPUs are not a multiple of tp 8 x cp 1 x pp 16"),
    "megatron_llama3_8b_fp8.sh": (CheckFlags(), True, None, "low_precision_recipe = delayed"),
    "bridge_llama32_1b.yaml": (CheckFlags(gpus=8), True, True, ""),
    "deepspeed_zero3_auto.json": (CheckFlags(model="qwen2.5-7b", seq_len=2048, launch=LAUNCH), True, True, ""),
    "deepspeed_zero2_autotp.json": (CheckFlags(model="llama3-8b", launch=LAUNCH), True, True, ""),
    "accelerate_fsdp1.yaml": (CheckFlags(model="llama3-8b", seq_len=2048), True, True, "global batch 8 ("),
    "accelerate_zero3.yaml": (CheckFlags(model="llama3-8b", seq_len=2048), True, True, ""),
    "accelerate_tp_hsdp.yaml": (CheckFlags(model="llama3-8b", seq_len=4096), True, True, ""),
    "accelerate_cp.yaml": (CheckFlags(model="llama3-8b", seq_len=65536), True, False, ""),
    "arguments_zephyr_7b.yaml": (CheckFlags(model="mistral-7b"), True, False, "8 GPUs (the cluster's"),
}
FILES = sorted(path.name for path in KEPT.iterdir() if path.suffix != ".md" and path.name != "public.json")


def checked(name: str, *, changes: bool = False) -> Checked:
    """Judge a kept file; without `changes` none is sought, nor what would make its plan fit."""
    limit = None if changes else 0.0
    text = (KEPT / name).read_text()
    return check_text(text, str(KEPT / name), ANSWERS[name][0], changes=changes, search=False, time_limit_s=limit)


def patched(name: str, diff: str, folder: Path) -> str:
    """The file after `git apply` of a diff: an independent reader of diffs."""
    (folder / name).write_text((KEPT / name).read_text())
    done = subprocess.run(
        ["git", "apply", "--unsafe-paths", "-"], cwd=folder, input=diff, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return (folder / name).read_text()


def test_every_kept_file_is_checked() -> None:
    assert [name for name in FILES if name not in ANSWERS] == ["arguments_llama_7b.json"]
    assert len(FILES) > 12


@pytest.mark.parametrize("name", ANSWERS)
def test_public_configurations_get_the_answer_that_their_readme_judges(name: str) -> None:
    _, legal, fits, said = ANSWERS[name]
    found = checked(name)

    assert found.legal is legal
    assert said in " ".join([*found.assumed, *(problem.message for problem in found.problems)])
    if fits is not None:
        assert found.found.estimate.memory.fits is fits


@pytest.mark.skipif(shutil.which("git") is None, reason="git apply reads the diffs")
@pytest.mark.parametrize(
    "name",
    ["torchtitan_llama3_8b.toml", "megatron_llama3_8b_fp8.sh", "deepspeed_zero3_auto.json", "accelerate_fsdp1.yaml"],
)
def test_every_change_is_a_diff_that_makes_its_plan(name: str, tmp_path: Path) -> None:
    found = checked(name, changes=True)

    assert found.changes
    for change in found.changes:
        text = patched(name, change.diff, tmp_path)
        again = check_text(text, name, ANSWERS[name][0], changes=False, time_limit_s=0.0)
        assert again.legal, change.what
        assert again.found.estimate.step_s.value == pytest.approx(change.step_s, rel=1e-6), change.what
        assert change.better.plan.cp == found.found.case.plan.cp or name != "deepspeed_zero3_auto.json"  # the program's


def test_arguments_that_name_a_deepspeed_file_ask_for_that_file() -> None:
    with pytest.raises(BadInput, match=r"configs/ds_config_zero3\.json"):
        check_text((KEPT / "arguments_llama_7b.json").read_text(), "arguments_llama_7b.json")


def test_the_command_prints_the_document_of_the_contract(planner) -> None:
    file = KEPT / "bridge_llama32_1b.yaml"
    done = planner("check", file, "--gpus", "2", "--json")
    found = json.loads(done.stdout)

    assert done.returncode == 0
    assert {"framework", "version", "legal", "problems", "unknown", "estimate", "changes", "best"} <= set(found)
    assert found["framework"] == "megatron-bridge"
    assert (
        found["estimate"]["step_s"]["value"]
        > found["changes"][0]["step_s"]
        >= found["best"]["estimate"]["step_s"]["value"]
    )
    assert {"what", "diff", "step_s", "fits"} <= set(found["changes"][0])
    assert found["best"]["diff"].startswith("--- a/bridge_llama32_1b.yaml\n+++ b/bridge_llama32_1b.yaml\n@@")
    text = planner("check", file, "--gpus", "2", "--no-search").stdout
    assert "\nchange " in text
    assert planner("check", KEPT / "megatron_gpt3_175b.sh").returncode == 3
    assert planner("check", ROOT / "README.md").returncode == 2
    assert planner("check", KEPT / "none.toml").returncode == 2


def test_python_asks_the_same() -> None:
    found = package.check(KEPT / "accelerate_cp.yaml", model="llama3-8b", seq_len=65536, search=False)

    assert found.to_dict()["plan"]["cp"] == 4
    assert found.changes[0].fit_probability > 0.9


@pytest.mark.parametrize(
    ("name", "flags", "said"),
    [
        ("torchtitan_llama3_8b.toml", {"seq_len": 4096}, "--seq-len 4096, but the configuration says 8192"),
        ("torchtitan_llama3_8b.toml", {"global_batch": 32}, "--global-batch 32, but the configuration says 64"),
        ("megatron_llama3_8b_fp8.sh", {"micro_batch": 2}, "--micro-batch 2, but the configuration says 1"),
        ("accelerate_fsdp1.yaml", {"gpus": 16}, "--gpus 16, but the configuration says 8"),
        ("deepspeed_zero2_autotp.json", {"gpus": 4, "launch": LAUNCH}, "--gpus 4, but the launch line starts 8"),
        ("torchtitan_llama3_8b.toml", {"launch": "torchrun t.py --training.seq_len 1"}, "sets --training.seq_len"),
        ("arguments_zephyr_7b.yaml", {"launch": LAUNCH}, "says 1 for per_device_train_batch_size, and the file 16"),
        (
            "arguments_zephyr_7b.yaml",
            {"launch": "accelerate launch --config_file zero3.yaml sft.py"},
            "zero3.yaml --launch 'accelerate launch --config_file zero3.yaml sft.py --config arguments_zephyr_7b.yaml'",
        ),
    ],
)
def test_what_contradicts_the_file_is_refused(name: str, flags: dict[str, object], said: str) -> None:
    with pytest.raises(PlannerError, match=re.escape(said)):
        check_text((KEPT / name).read_text(), name, CheckFlags(**flags), changes=False)


def test_what_a_file_leaves_open_is_said_beside_it(tmp_path: Path) -> None:
    """By flags, by the launch line, whose options that nothing reads are listed, and by its file of arguments."""

    def plan_of(name: str, text: str = "", **flags: object) -> tuple[int, int, int, tuple[str, ...]]:
        known = CheckFlags(model="llama3-8b", **flags)
        asked = ask(text or (KEPT / name).read_text(), name, known)
        workload = asked.case.question.workload
        batch = (asked.case.plan.micro_batch_size, workload.global_batch_size)
        return (*batch, workload.seq_len, asked.configuration.unknown)

    line = f"{LAUNCH} --max_seq_length 1024 --optim adafactor --output_dir x"
    file = "accelerate_fsdp1.yaml"
    assert plan_of(file, micro_batch=2, global_batch=32, seq_len=512) == (2, 32, 512, ())
    assert plan_of(file, launch=line) == (1, 64, 1024, ("--optim",))
    arguments = tmp_path / "sft.yaml"
    arguments.write_text(
        "per_device_train_batch_size: 2\ngradient_accumulation_steps: 8\nmax_length: 1024\noptim: adamw_torch\n"
        "use_liger_kernel: true\npacking: false\ngradient_checkpointing: true\n"
    )
    line = "accelerate launch --config_file zero3.yaml sft.py --config"
    assert plan_of("accelerate_zero3.yaml", launch=f"{line} {arguments}") == (2, 128, 1024, ())
    assert plan_of(file, launch=f"{line} none.yaml") == (1, 8, 8192, ("--config",))
    assert plan_of("accelerate_zero3.yaml", micro_batch=2)[:2] == (2, 16)  # one micro batch a step, as the file says
    open_batch = (
        '{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": true}}'
    )
    assert plan_of("a.json", open_batch, gpus=8, micro_batch=2, global_batch=64)[:2] == (2, 64)
    # Nothing is accumulated where nobody says so: Transformers' and accelerate's default.
    assert plan_of("a.json", open_batch, gpus=8)[:2] == plan_of(file)[:2] == (1, 8)
    titan = ask((KEPT / "torchtitan_llama3_8b.toml").read_text(), "a.toml", CheckFlags(launch=LAUNCH))
    assert titan.case.plan.gpus == 8  # not the 64 of the file's comment
    assert not any("comment" in line and "GPUs" in line for line in titan.assumed)


def test_a_diff_says_all_of_its_plan() -> None:
    """DeepSpeed's JSON has no key for torch.compile: a plan that needs it has no diff."""
    name = "deepspeed_zero3_auto.json"
    asked = ask((KEPT / name).read_text(), name, ANSWERS[name][0])
    written, runtime = asked.writer(name, ANSWERS[name][0]), asked.case.question.runtime
    lower = asked.case.plan.with_(zero_stage=1)

    assert '+    "stage": 1,' in written.diff(lower)
    assert written.diff(lower, replace(runtime, compile=True)) == ""


def test_an_fsdp_1_file_stays_one() -> None:
    name = "accelerate_fsdp1.yaml"
    asked = ask((KEPT / name).read_text(), name, ANSWERS[name][0])
    diff = asked.writer(name, ANSWERS[name][0]).diff(asked.case.plan.with_(reshard_after_forward=False))

    assert "+  fsdp_sharding_strategy: SHARD_GRAD_OP" in diff
    assert diff.count("\n+") == 2  # that line, and the file's name


def test_when_the_time_is_over_the_plan_is_judged_and_no_change_is_sought() -> None:
    path = KEPT / "torchtitan_llama3_8b.toml"

    checked = check_text(path.read_text(), str(path), time_limit_s=0.0)

    assert checked.found is not None
    assert checked.found.estimate is not None
    assert checked.changes == ()
    assert checked.found.fixes == ()


def test_unknown_fields_are_listed() -> None:
    text = (KEPT / "torchtitan_llama3_8b.toml").read_text() + "\n[parallelism2]\nfoo = 1\n"
    found = check_text(text.replace("seq_len =", "seq_lenn = 1\nseq_len ="), "a.toml", search=False)

    assert set(found.configuration.unknown) == {"training.seq_lenn", "parallelism2.foo"}


def test_tensor_parallelism_beyond_the_key_value_heads_is_refused_where_the_framework_does() -> None:
    text = (
        (KEPT / "torchtitan_llama3_70b.toml")
        .read_text()
        .replace("tensor_parallel_degree = 8", "tensor_parallel_degree = 16")
    )
    found = check_text(text, "a.toml", search=False)

    assert not found.legal
    assert any("8 key/value heads" in problem.message for problem in found.problems)


def test_variables_of_a_script_are_edited_where_they_are_assigned() -> None:
    kinds = option_kinds(schema("megatron", "0.19.2")["keys"])
    text = (
        "TP=8\nPP=$((TP / 4))\nARGS=(\n    --tensor-model-parallel-size $TP  # shards\n    --bf16\n)\n"
        'GPT_ARGS="--pipeline-model-parallel-size ${PP} \\\n  --num-layers=32"\ntorchrun --nnodes ${N:-2} x.py '
        "${ARGS[@]} $GPT_ARGS\n"
    )
    line = CommandLine(text, "a.sh", kinds)

    assert line.settings["--tensor-model-parallel-size"] == 8
    assert line.settings["--pipeline-model-parallel-size"] == 2
    assert line.settings["--num-layers"] == 32
    assert line.settings["--bf16"] is True
    assert line.settings["--nnodes"] == 2
    edited = line.edited({"--tensor-model-parallel-size": 4, "--num-layers": 40, "--bf16": None, "--fp16": True})
    assert edited.startswith("TP=4\nPP=$((TP / 4))\n")
    assert "--num-layers=40" in edited
    assert "--bf16" not in edited
    assert "    --fp16\n" in edited
    assert "# shards" in edited


@pytest.mark.parametrize(
    "text",
    [
        "A=$(touch pwned)\n--num-layers $A",
        "--num-layers `touch pwned`",
        "--num-layers $((__import__('os').system('x')))",
    ],
)
def test_nothing_in_a_script_is_run(text: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    CommandLine(text, "a.sh", lambda _: True)

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a: &x [1]\nb: *x\ndistributed_type: FSDP\n", "a.yaml"),
        ("[" * 4000, "a.json"),
        ('{"train_batch_size": 1' + ', "a": {' * 60 + "}" * 61, "a.json"),
        ("a = [" * 5000, "a.toml"),
        ("x" * (2 << 20), "a.sh"),
        ("!!python/object/apply:os.system ['x']", "a.yaml"),
        ("echo hello", "a.sh"),
        ("key = 1", "a.toml"),
        ("{}", "a.json"),
    ],
)
def test_what_is_no_configuration_is_refused(text: str, name: str) -> None:
    with pytest.raises((BadInput, NotAConfiguration)):
        read_configuration(text, name, CheckFlags())


scalars = st.one_of(
    st.integers(-5, 5000), st.booleans(), st.sampled_from(["auto", "a b", "no", "x: y", "#", "1F1B", ""])
)
names = st.text("abcxyz_", min_size=1, max_size=6)
documents = st.dictionaries(
    names, st.one_of(scalars, st.dictionaries(names, scalars, min_size=1, max_size=3)), min_size=1, max_size=4
)


@given(documents, st.data())
@settings(max_examples=200, deadline=None)
def test_an_edit_changes_its_key_and_nothing_else(document, data) -> None:
    """Of YAML in both styles, JSON in three layouts and TOML: the library reads the edited value and all others as they
    were.
    """
    kind = data.draw(st.sampled_from(["block", "flow", "json", "indented", "tabs", "toml"]))
    flat = {
        f"{k}.{i}" if isinstance(v, dict) else k: None
        for k, v in document.items()
        for i in (v if isinstance(v, dict) else [0])
    }
    key, value = data.draw(st.sampled_from(sorted(flat))), data.draw(st.one_of(scalars, st.none()))
    section, _, name = key.rpartition(".")
    wanted = json.loads(json.dumps(document))
    inner = wanted[section] if section else wanted
    if value is None:
        del inner[name]
    else:
        inner[name] = value
    if kind == "toml":
        import tomli_w

        made = TomlDocument(tomli_w.dumps(document), "a.toml")
        assert tomllib.loads(made.edited({key: value})) == wanted
        return
    if kind in {"block", "flow"}:
        text = yaml.safe_dump(document, default_flow_style=kind == "flow", sort_keys=False)
        back = yaml.safe_load(YamlDocument(text, "a.yaml").edited({key: value}))
    else:
        text = json.dumps(document, indent={"json": None, "indented": 2, "tabs": "\t"}[kind])
        back = json.loads(YamlDocument(text, "a.json", is_json=True).edited({key: value}))
    assert back == wanted or (not inner and {**wanted, section: None} == back) or (not wanted and back is None)


@given(st.dictionaries(names, scalars, min_size=1, max_size=3), st.data())
@settings(max_examples=100, deadline=None)
def test_a_key_that_is_new_is_added_where_it_belongs(values, data) -> None:
    kind = data.draw(st.sampled_from(["yaml", "json", "indented"]))
    document = {"first": 1, "inner": values, "last": [1, 2]}
    if kind == "yaml":
        text = "# head\n" + yaml.safe_dump(document, sort_keys=False) + "# tail\n"
        edited = YamlDocument(text, "a.yaml").edited({"inner.new": 5, "other": "no"})
        assert re.search(r"# head\n(?s:.*)# tail\n", edited)
        back = yaml.safe_load(edited)
    else:
        text = json.dumps(document, indent=2 if kind == "indented" else None)
        back = json.loads(YamlDocument(text, "a.json", is_json=True).edited({"inner.new": 5, "other": "no"}))
    assert back == {**document, "inner": {**values, "new": 5}, "other": "no"}


@given(st.text(max_size=400), st.sampled_from(["a.toml", "a.yaml", "a.json", "a.sh"]))
@settings(max_examples=200, deadline=None)
def test_any_text_is_read_or_refused(text: str, name: str) -> None:
    try:
        read_configuration(text, name, CheckFlags())
    except PlannerError:
        return


def test_a_misspelt_field_is_named_with_the_one_it_meant() -> None:
    text = """{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true},
      "activation_checkpointing": {"partition_activations": true, "cpu_checkpointing": false},
      "zero_optimization": {"stage": 2, "overlap_com": true, "nothing_like_it": 1}}"""
    configuration = read_configuration(text, "a.json", CheckFlags())

    assert set(configuration.unknown) == {"zero_optimization.overlap_com", "zero_optimization.nothing_like_it"}
    assert did_you_mean(configuration) == {"zero_optimization.overlap_com": "zero_optimization.overlap_comm"}


@pytest.mark.nightly  # a search puts plans in the same order: test_search.py
def test_a_slower_plan_is_the_best_only_where_it_surely_fits() -> None:
    """Replicas of a Mistral, which need 156 GiB each: some changes may fit, and are faster than what surely does."""
    name = "arguments_zephyr_7b.yaml"
    found = check_text((KEPT / name).read_text(), name, ANSWERS[name][0])

    assert found.best is not None
    assert found.best.estimate.memory.fit_probability >= SURE
    slower = any(change.step_s < found.best.estimate.step_s.value for change in found.changes)
    assert slower is ("surely fits" in found.best_because)
    assert all(
        change.fit_probability < SURE for change in found.changes if change.step_s < found.best.estimate.step_s.value
    )


def test_a_stated_time_is_below_inside_or_above_what_is_predicted(planner) -> None:
    file = KEPT / "torchtitan_llama3_8b.toml"
    judged = ("check", file, "--time-limit", "0", "--json")  # no changes are sought
    plain = json.loads(planner(*judged).stdout)
    step, tokens = plain["estimate"]["step_s"], 8192 * 64

    def stated(*flags: str) -> dict[str, object]:
        return json.loads(planner(*judged, *flags).stdout)["measured"]

    assert plain["measured"] is None
    inside, above, below = (
        stated("--measured", f"{1e3 * step['value']:.3f}ms"),
        stated("--measured", "9.2s"),
        stated("--measured", "0.1"),
    )
    assert (inside["side"], above["side"], below["side"]) == ("inside", "above", "below")
    assert inside["causes"] == []
    assert above["error"] == pytest.approx(step["value"] / 9.2 - 1)
    assert above["causes"]
    assert any("of the GPU's peak" in cause for cause in below["causes"])  # twenty times as fast as the prediction
    by_rate = stated("--tokens-per-s", f"{tokens / 9.2}")
    assert by_rate["step_s"] == pytest.approx(9.2)
    assert planner("check", file, "--measured", "soon").returncode == 2
    assert planner("check", file, "--measured", "1s", "--tokens-per-s", "5").returncode == 2
