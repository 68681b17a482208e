"""Models by their names on the Hub: every row against the count that its publisher states, and how names are found."""

import json
import re

import pytest

from simulator.config.hf_config import is_known, load_model, model_from_config, shipped_models
from simulator.config.hub_models import SHIPPED, hub_table
from simulator.config.stored_weights import stored_weights
from topology.errors import BadModel

ROWS = hub_table().rows
UNITS = {"B": 1e9, "M": 1e6}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.ids[0])
def test_a_row_has_the_parameters_that_its_publisher_states(row):
    """Within one unit of the last digit stated, since cards round and cut; exact where every digit is stated."""
    model = model_from_config(row.shape(), name=row.ids[0])
    counted = model.parameters
    if "prediction layer" in row.counted:
        counted += model.multi_token_parameters
    if "copies of embedding and head" in row.counted:
        counted += model.embedding_parameters + model.head_parameters
    stated = row.parameters.replace(",", "")
    unit = UNITS.get(stated[-1], 1)
    digits = stated.rstrip("BM")
    step = unit / 10 ** len(digits.partition(".")[2]) if unit > 1 else 0
    assert abs(counted - float(digits) * unit) <= step
    assert model.assumed == ()


def test_every_row_says_where_it_is_from_and_no_name_has_two():
    names = [name.casefold() for row in (*ROWS, *hub_table().refused) for name in row.ids]
    assert len(names) == len(set(names)) >= 400
    assert all(row.source and (row.like or row.config) for row in ROWS)
    assert {row.like for row in ROWS} <= {"", *shipped_models()}


@pytest.mark.parametrize(
    ("said", "name", "billions"),
    [
        ("meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-70B-Instruct", 70.55),
        ("META-LLAMA/llama-3.3-70b-instruct", "meta-llama/Llama-3.3-70B-Instruct", 70.55),
        ("https://huggingface.co/Qwen/Qwen2.5-14B-Instruct", "Qwen/Qwen2.5-14B-Instruct", 14.77),
        ("phi-4", "microsoft/phi-4", 14.66),
        ("Qwen/Qwen2.5-14B-Instruct-AWQ", "Qwen/Qwen2.5-14B-Instruct-AWQ", 14.77),
        ("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", 8.03),
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", 70.55),
        ("Qwen/Qwen3-8B", "qwen3-8b", 8.19),  # shipped under a name of its own
        ("llama3.1-8b", "meta-llama/Llama-3.1-8B", 8.03),
        ("llama3.3-70b", "meta-llama/Llama-3.3-70B-Instruct", 70.55),
        ("phi4", "microsoft/phi-4", 14.66),
    ],
)
def test_names_as_people_write_them(said, name, billions):
    model = load_model(said)
    assert model.name == name
    assert round(model.parameters / 1e9, 2) == billions
    assert is_known(said)


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("deepseek-ai/DeepSeek-R1", "float8"),
        ("nvidia/DeepSeek-R1-NVFP4", "float4"),
        ("openai/gpt-oss-20b", "mxfp4"),
        ("moonshotai/Kimi-K2-Thinking", "int4"),
        ("Qwen/Qwen2.5-14B-Instruct", ""),
    ],
)
def test_a_checkpoint_has_the_format_that_it_is_published_in(name, weights):
    assert stored_weights(name) == weights


def test_parts_that_are_left_out_are_said():
    assert "not modelled: the vision tower and projector" in load_model("google/gemma-3-27b-it").assumed


@pytest.mark.parametrize("row", hub_table().refused, ids=lambda row: row.ids[0])
def test_what_is_not_modelled_is_refused_with_the_part(row):
    with pytest.raises(BadModel, match=re.escape(row.why)):
        load_model(row.ids[0].upper())
    assert is_known(row.ids[0])


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name_is_refused(name):
    with pytest.raises(BadModel, match="empty"):
        load_model(name)


def test_an_unknown_name_gets_near_ones_and_the_command_that_fetches_it():
    with pytest.raises(BadModel) as caught:
        load_model("meta-llama/Llama-3.1-7B@abc123")
    text = str(caught.value)
    assert "meta-llama/Llama-3.1-8B" in text
    assert "hf download meta-llama/Llama-3.1-7B config.json --revision abc123 --local-dir Llama-3.1-7B" in text
    assert not is_known("meta-llama/Llama-3.1-7B")


@pytest.mark.parametrize(
    ("folder", "said", "name"),
    [
        ("my-model", "my-model/config.json", "my-model"),
        ("my-model", "my-model", "my-model"),
        ("hub/models--Qwen--Qwen3-8B/snapshots/b968", "hub/models--Qwen--Qwen3-8B/snapshots/b968", "Qwen/Qwen3-8B"),
        (".", "./config.json", "org/named-inside"),
        (".", ".", "org/named-inside"),
    ],
)
def test_a_model_of_a_file_has_the_name_that_says_most(tmp_path, monkeypatch, folder, said, name):
    config = json.loads((SHIPPED / "qwen3-8b.json").read_text()) | {"_name_or_path": "org/named-inside"}
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    (tmp_path / folder / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    assert load_model(said).name == name
