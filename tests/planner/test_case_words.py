"""A run of a person's own in the words of the command line, and what is said of what nothing reads."""

import json

import pytest

from planner.question.case_words import in_sections
from planner.question.cases import load_case
from simulator.config.runtime import Runtime
from topology import codec
from topology.errors import BadPlan

ROW = {
    "model": "llama3.2-1b",
    "cluster": "dgx-h100",
    "--gpus": 2,
    "seq-len": 4096,
    "global_batch": 8,
    "--micro-batch": 2,
    "dp-shard": 2,
    "recompute": "full",
    "framework": "torchtitan",
    "step_s": 0.5,
}
CASE = {
    "model": "llama3.2-1b",
    "cluster": {"gpu": "h100-sxm", "gpus_per_node": 2, "nodes": 1, "interconnect": "nvswitch"},
    "workload": {"seq_len": 4096, "global_batch_size": 8},
    "plan": {"micro_batch_size": 2, "dp_shard": 2, "recompute": "full"},
    "runtime": {"name": "torchtitan"},
    "measured": {"step_s": 0.5},
}


def test_words_of_the_command_line_say_what_sections_say() -> None:
    by_words, by_sections = load_case(ROW), load_case(CASE)

    assert by_words.plan == by_sections.plan
    assert by_words.question.workload == by_sections.question.workload
    assert by_words.question.count == by_sections.question.count == 2
    assert by_words.measured == by_sections.measured


def test_data_parallelism_that_a_row_leaves_open_fills_the_gpus() -> None:
    """As on the command line; where a degree of it is said, or none fills them, nothing is filled."""
    open_row = {name: value for name, value in ROW.items() if name != "dp-shard"}

    assert load_case(open_row).plan == load_case(ROW).plan
    assert "dp_shard 2 (fills 2 GPUs)" in load_case(open_row).assumed
    assert load_case({**open_row, "dp-replicate": 1}).plan.dp_shard == 1
    assert load_case({**open_row, "--gpus": 3, "tp": 2}).plan.dp_shard == 1


def test_a_row_with_misspelt_words_is_read_as_training(planner, tmp_path) -> None:
    row = {"id": "a", "model": "llama3.2-1b", "cluster": "dgx-h100", "seq": 4096, "batch": 8, "steptime": 0.5}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row), "utf-8")
    found = planner("validate", file)
    words = " ".join(found.stdout.split())

    assert "'batch' (did you mean 'micro_batch' or 'global_batch'?), 'steptime' (did you mean 'step_s'?)" in words


def test_all_that_nothing_reads_is_named_at_once_with_what_it_may_mean() -> None:
    wrong = {**CASE, "plan": {"tpp": 2, "microbatch": 1}, "globalbatch": 8, "colour": "red"}

    with pytest.raises(BadPlan) as caught:
        in_sections(wrong, "one")

    for words in (
        "'globalbatch' (did you mean 'global_batch'?)",
        "'colour'",
        "'plan.tpp' (did you mean 'plan.tp'?)",
        "'plan.microbatch' (did you mean 'plan.micro_batch_size'?)",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"micro_batch": 4}, "said twice"),
        ({"gpus": "eight"}, "gpus is 'eight'"),
        ({"gpus": 4, "cluster": CASE["cluster"]}, "a cluster by name"),
        ({"plan": 3, "tp": 2}, "plan is a number"),
    ],
)
def test_what_contradicts_itself_is_refused(more, message) -> None:
    with pytest.raises(BadPlan, match=message):
        in_sections({**{k: v for k, v in ROW.items() if k != "--gpus"}, **more}, "one")


def test_the_example_is_a_run_that_validate_and_learn_read(planner, tmp_path) -> None:
    example = planner("validate", "--example").stdout
    file = tmp_path / "runs.jsonl"
    file.write_text(example + json.dumps({**ROW, "recompoot": "none"}) + "\n", "utf-8")

    rows = json.loads(planner("validate", file, "--json").stdout)["rows"]
    learned = planner("learn", file, "--runtime", "mine", "--out", tmp_path / "mine.json")

    assert example == planner("learn", "--example").stdout
    assert rows[0]["error"]["step"] is not None
    assert "did you mean 'recompute'" in rows[1]["skipped"]
    assert learned.returncode == 3
    assert "1 case is not used" in learned.stderr


def test_fused_kernels_that_a_source_names_are_listed_as_left_out() -> None:
    """Cases say `runtime.kernels` in their source's own words."""
    fused, none = (load_case({**CASE, "runtime": {"name": "torchtitan", "kernels": one}}) for one in ("apex", "none"))

    assert any("runtime.kernels apex" in line for line in fused.assumed)
    assert not any("kernels" in line for line in none.assumed)


def test_the_runtime_of_a_plan_file_is_one_of_a_case() -> None:
    runtime = Runtime(cuda_graph=True, graph_scopes=("attn",), fused=("layers", "linear_loss"))

    assert load_case({**CASE, "runtime": codec.to_builtins(runtime)}).question.runtime == runtime
    with pytest.raises(BadPlan, match=r"runtime\.fused has 'liger'"):
        load_case({**CASE, "runtime": {**codec.to_builtins(runtime), "fused": ["liger"]}})
