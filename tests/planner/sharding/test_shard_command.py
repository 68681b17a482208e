"""`planner shard`: what it prints, how it ends, and that no file makes it do anything else."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cli import main
from planner.sharding.frontends.decoder import decoder_case
from planner.sharding.problem.problem import parse_problem
from simulator.config.hf_config import load_model
from tests.planner.sharding import cases
from tests.planner.sharding.cases import report_case
from tests.planner.sharding.known import KNOWN

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "sharding" / "layer.json"
KEYS = {"id", "placements", "named", "collectives", "ring_send_bytes_per_rank", "rejected"}
TP = KNOWN[0][0]


def ask(capsys, tmp_path, content, *flags):
    path = tmp_path / "cases.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    code = main(["shard", str(path), *flags])
    return code, *capsys.readouterr()


def test_the_example_is_answered(capsys) -> None:
    """Bytes by formula: Megatron's sequence-parallel layer, Ulysses, a ring, a gradient across replicas."""
    assert main(["shard", str(EXAMPLE), "--json"]) == 0

    document = json.loads(capsys.readouterr().out)
    rows = document["cases"]
    assert document["schema_version"] == 1
    assert all(set(row) >= KEYS for row in rows)
    t, h, f, n = 8192, 4096, 14336, 4
    assert rows[0]["ring_send_bytes_per_rank"] == 2 * (n - 1) * t // n * h * 2
    q = 32 * 32768 // 8 * 128 * 2
    assert rows[1]["ring_send_bytes_per_rank"] == 4 * 7 * q // 8
    assert rows[2]["ring_send_bytes_per_rank"] == 7 * 2 * q
    assert rows[3]["ring_send_bytes_per_rank"] == 7 * f * h * 2 // 8 + 2 * 3 * f * h * 2 // 8 // 4
    assert rows[4]["rejected"]
    assert rows[4]["collectives"] == []


def test_a_collective_says_its_bytes_and_why(capsys, tmp_path) -> None:
    code, out, _ = ask(capsys, tmp_path, [TP], "--json")
    (row,) = json.loads(out)["cases"]
    (one,) = row["collectives"]

    assert code == 0
    assert one["kind"] == "all_reduce"
    assert one["mesh_dim"] == "tp"
    assert one["bytes_in"] == one["bytes_out"] == cases.X
    assert one["ring_send_bytes_per_rank"] == row["ring_send_bytes_per_rank"] == 1.5 * cases.X
    assert one["why"] == "y from P(sum) to R"
    assert row["placements"]["u"] == ["S(1)"]
    assert row["named"]["u"] == {"axes": {"f": ["tp"]}, "partial": {}}


def test_layouts_can_be_said_by_names(capsys, tmp_path) -> None:
    """One map from axes to mesh axes for all tensors, as in Haliax, or names by tensor; placements follow."""
    inputs = {name: {k: v for k, v in text.items() if k != "placements"} for name, text in TP["inputs"].items()}
    by_tensor = {**inputs, "w1": {**inputs["w1"], "named": {"axes": {"f": ["tp"]}}}}
    asked = [
        {**TP, "inputs": inputs, "axis_map": {"f": "tp"}},
        {**TP, "inputs": by_tensor, "axis_map": {"f": ["tp"]}},
    ]
    for row in json.loads(ask(capsys, tmp_path, asked, "--json")[1])["cases"]:
        assert row["placements"] == report_case(TP, 0)["placements"]

    for axis_map in ({"f": "no"}, {"f": ["tp", "tp"]}, {"f": "tp", "h": "tp"}):
        assert "cannot be placed" in report_case({**TP, "inputs": inputs, "axis_map": axis_map}, 0)["rejected"]


def test_an_axis_can_be_split_for_fewer_key_heads_than_ranks() -> None:
    """GQA of 16 query and 2 key heads on 8 ranks: keys are cut in two and copied four times, and nothing moves."""
    heads = [f"{y} = einsum('te,hde->thd', x, {w}) :: t e+, {n} d e+ -> t {n} d" for y, w, n in ("qwH", "kvK")]
    sizes = {"t": 3, "e": 8, "H": 16, "K": 2, "d": 2}
    of = cases.case("gqa", {"tp": 8}, heads, {"x": "t e: R", "w": "H d e: S(0)", "v": "K d e: S(0) R"}, sizes)
    of["mesh"]["split"] = {"tp": {"kv": 2, "rep": 4}}

    row = report_case(of, 0)

    assert row["mesh_axes"] == ["kv", "rep"]
    assert row["placements"]["q"] == ["S(1)", "S(1)"]
    assert row["placements"]["k"] == ["S(1)", "R"]
    assert row["collectives"] == []
    inputs = {name: {**text, "placements": None} for name, text in of["inputs"].items()}
    assert report_case({**of, "inputs": inputs, "axis_map": {"H": "tp", "K": "kv"}}, 0) == row
    assert "multiply" in report_case({**of, "mesh": {**of["mesh"], "split": {"tp": {"a": 3, "b": 4}}}}, 0)["rejected"]


def test_the_text_shows_placements_and_collectives(capsys, tmp_path) -> None:
    code, out, _ = ask(capsys, tmp_path, TP)

    assert code == 0
    assert "all_reduce" in out
    assert "f: tp" in out


def test_one_bad_case_does_not_take_the_others_along(capsys, tmp_path) -> None:
    code, out, _ = ask(capsys, tmp_path, {"cases": [{**TP, "mesh": {"names": ["x"], "shape": [0]}}, TP]}, "--json")
    bad, good = json.loads(out)["cases"]

    assert code == 0
    assert "positive" in bad["rejected"]
    assert good["rejected"] is None


def test_a_file_without_an_answer_ends_with_3(capsys, tmp_path) -> None:
    assert ask(capsys, tmp_path, [{**TP, "pins": {"y": ["S(7)"]}}], "--json")[0] == 3


@pytest.mark.parametrize("text", ["", "{", "3", '{"cases": 3}', "[]", "[3]"])
def test_a_file_that_is_none_ends_with_2(capsys, tmp_path, text) -> None:
    code, out, error = ask(capsys, tmp_path, text, "--json")

    assert (code, out) == (2, "")
    assert error.startswith("error:")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"ops": ["u linear(x, w1)"]}, "cannot read the operator"),
        ({"ops": ["u = mystery(x)"]}, "is not known"),
        ({"ops": ["u = linear(x, w1) :: t h+, f h+"]}, "annotation"),
        ({"ops": ["u = linear(x, w1) :: t h+, (f h+ -> t f"]}, "not closed"),
        ({"ops": ["u = linear(x, w1 :: t h+, f h+ -> t f"]}, "not an expression"),
        ({"ops": ["u = linear(x, w1) :: t f+, f+ h -> t h"]}, "axis f"),
        ({"ops": ["x = gelu(x) :: t h -> t h"]}, "given twice"),
        ({"ops": ["u = other(x) :: t h -> t q"]}, "size of axis q"),
        ({"ops": ["u = gelu(x) :: t -> t"]}, "2 dims"),
        ({"ops": ["u = gelu(n) :: t -> t"]}, "0 tensors"),
        ({"pins": {"nobody": ["R"]}}, "no operator makes it"),
        ({"pins": {"u": ["R", "R"]}}, "2 placements"),
        ({"pins": {"x": ["S(0)"]}}, "say it once"),
        ({"parameters": ["u"]}, "is a parameter"),
        ({"policy": "guess"}, "unknown policy"),
        ({"pin": {"y": ["R"]}}, "no 'pin'"),
        ({"schedule": {"y": "chunked"}}, "no schedule"),
        ({"schedule": {"q": "ring"}}, "no operator makes it"),
        ({"mesh": {"names": ["tp", "tp"], "shape": [2, 2]}}, "twice"),
        ({"mesh": {"names": list("abcde"), "shape": [2] * 5}}, "5 axes"),
        ({"inputs": {"x": {"shape": [4, 4], "dtype": "q8", "placements": ["R"]}}}, "unknown dtype"),
        ({"inputs": {"x": {"shape": [4, 4], "placement": ["R"]}}}, "unknown field"),
        ({"inputs": {"x": {"shape": [1 << 40, 1 << 40], "placements": ["R"]}}}, "elements"),
    ],
)
def test_what_is_wrong_with_a_case_is_said(change, why) -> None:
    row = report_case({**TP, "pins": {}, **change}, 0)

    assert row["rejected"] is not None
    assert why in row["rejected"]
    assert row["placements"] == {}


def test_the_time_on_a_machine_is_said(capsys) -> None:
    assert main(["shard", str(EXAMPLE), "--cluster", "dgx-h100", "--gpus", "32", "--json"]) == 0

    rows = json.loads(capsys.readouterr().out)["cases"]
    for row in rows[:4]:
        time = row["time_s"]
        assert time["value"] == pytest.approx(time["compute"] + time["exposed_communication"])
        assert time["source"] == "datasheet"
    assert main(["shard", str(EXAMPLE), "--gpus", "32"]) == 2


def test_formulas_are_read_and_never_run(tmp_path) -> None:
    mark = tmp_path / "ran"
    formula = f"u = __import__('pathlib').Path({str(mark)!r}).touch() or gelu(x) :: t h -> t h"

    report_case({**TP, "pins": {}, "ops": [formula]}, 0)

    assert not mark.exists()


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 1 << 40)
    | st.text(max_size=12)
    | st.sampled_from(["S(0)", "t h -> t h"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(TP)), JSON)
def test_any_value_anywhere_is_answered_or_rejected(key, value) -> None:
    row = report_case({**TP, key: value}, 0)

    assert set(row) >= KEYS


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="abxyw=:->+^*(), .[]0123'\n", max_size=60))
def test_any_operator_is_answered_or_rejected(text) -> None:
    row = report_case({**TP, "pins": {}, "ops": [text]}, 0)

    assert set(row) >= KEYS


def test_a_backward_pass_and_a_machine_are_asked_for_in_a_case(capsys, tmp_path) -> None:
    of = {**TP, "pins": {}, "policy": "min_time", "parameters": ["w1", "w2"], "backward": {"y": "dy"}}
    of["inputs"] = {n: {**t, "placements": t["placements"] if n == "x" else None} for n, t in TP["inputs"].items()}
    code, out, _ = ask(
        capsys, tmp_path, [of], "--json", "--cluster", "h200x4", "--time-limit", "60", "--memory-limit", "1"
    )
    (row,) = json.loads(out)["cases"]

    assert code == 0
    assert row["placements"]["d_w1"] == row["placements"]["w1"]
    assert row["cost"]["unit"] == "s"
    assert row["cost"]["bound"] <= row["cost"]["value"]
    assert "without a machine" in report_case(of, 0)["rejected"]
    assert ask(capsys, tmp_path, [of], "--time-limit", "1")[0] == 2


def test_layers_of_a_shipped_model_are_placed_by_name(capsys) -> None:
    """On one node, 64 sequences over all ranks: the layer's own products are divided evenly, and it is proved."""
    flags = ["--model", "llama3-8b", "--layers", "1", "--mesh", "data=2,model=4", "--cluster", "dgx-h100", "--json"]
    assert main(["shard", *flags, "--micro-batch", "64"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["cases"]

    assert row["rejected"] is None
    assert row["cost"]["gap"] == pytest.approx(0, abs=1e-9)
    weights = 2 * (4096 * 4096 + 1024 * 4096) + 3 * 14336 * 4096
    flops = 6 * weights * 64 * 4096 / 8
    assert row["cost"]["value"] > flops / 989e12  # at the datasheet's peak, without attention and communication


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--model", "mixtral-8x7b", "--mesh", "d=8", "--cluster", "dgx-h100"], "experts"),
        (["--model", "llama3-8b", "--mesh", "d", "--cluster", "dgx-h100"], "no mesh"),
        (["--model", "llama3-8b", "--mesh", "d=8"], "--cluster"),
        (["--layers", "2", str(EXAMPLE)], "--model"),
        ([], "FILE or --model"),
    ],
)
def test_a_model_that_cannot_be_asked_about_says_why(capsys, flags, why) -> None:
    assert main(["shard", *flags]) == 2
    assert why in capsys.readouterr().err


def test_whole_models_have_embedding_and_loss() -> None:
    for name in ("llama2-7b", "gpt3-175b", "qwen3-8b"):
        model = replace(load_model(name), layers=2, learned_positions=0)
        problem = parse_problem(decoder_case(model, {"d": 2}, layers=None, batch=2, seq_len=64))
        held = sum(prod(problem.tensors[one].shape) for one in problem.graph.parameters)
        assert set(problem.graph.gradients) == set(problem.graph.parameters)
        assert held == model.parameters
