"""A request in JSON says what a command line says: every flag of every command that is served."""

from __future__ import annotations

import json
import shlex
from enum import Enum
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.service import needs  # noqa: F401 - skips where a package is missing
from topology.errors import BadInput

from planner.cli import app  # isort: skip

# Isort: skip
from planner.service.requests import PLAIN_NAME, arguments, job_request, request_type, served, write_inputs

from pydantic import ValidationError  # isort: skip

FLAGS = served()
TYPES = {command: request_type(command, flags) for command, flags in FLAGS.items()}


def asked(command, said, *, may_read=False):
    request = TYPES[command].model_validate_json(json.dumps(said))
    return job_request(command, FLAGS[command], request, may_read=may_read, programs=("torchrun",))


def parsed(words):
    """Return what the real command line reads from these words, by parameter."""
    command = app.get_command(app.make_context("planner", [words[0]]), words[0])
    return command.make_context(words[0], list(words[1:])).params


def values(flag):
    """Return values that a flag takes."""
    if flag.program:
        return st.lists(text(), max_size=3).map(lambda words: shlex.join(["torchrun", *words]))
    if flag.many and not flag.reads:
        return st.lists(text(), min_size=1, max_size=3)
    if flag.choices:
        return st.sampled_from(flag.choices)
    if flag.kind is bool:
        return st.booleans()
    if flag.kind is int:
        return st.integers(int(flag.least or 0), int(flag.most or 1 << 20))
    if flag.kind is float:
        return st.floats(flag.least or 0.0, flag.most or 1e6)
    if flag.writes or flag.reads:
        return st.from_regex(PLAIN_NAME, fullmatch=True)
    return text()


def text():
    return st.text(st.characters(codec="utf-8", exclude_characters="\0\r\n"), min_size=1, max_size=20)


@st.composite
def requests(draw):
    command = draw(st.sampled_from(sorted(FLAGS)))
    flags = FLAGS[command]
    names = set(draw(st.sets(st.sampled_from(sorted(flags)))))
    names |= {name for name, flag in flags.items() if flag.required}
    said = {name: draw(values(flags[name])) for name in sorted(names - {"json", "tolerance", "within", "online"})}
    return command, said


@settings(max_examples=60)
@given(requests())
def test_the_command_line_reads_what_the_request_says(case):
    command, said = case
    read = parsed(arguments(FLAGS[command], asked(command, said)))

    for name, value in said.items():
        found = read[FLAGS[command][name].parameter]
        found = found.value if isinstance(found, Enum) else str(found) if isinstance(found, Path) else found
        found = list(found) if isinstance(value, list) else found
        plain = FLAGS[command][name]
        if plain.kind is bool and not value and not plain.off:
            assert found is False
        else:
            assert found == value
    assert read["json"] is True


def test_the_service_fetches_nothing():
    with pytest.raises(BadInput, match="fetches nothing"):
        asked("suggest", {"model": "someone/something", "online": True})


def test_a_flag_that_may_be_repeated_takes_one_value_or_several():
    once, twice = ({"file": "train.sh", "set": said} for said in ("TP=8", ["TP=8", "PP=2"]))

    assert parsed(arguments(FLAGS["check"], asked("check", once)))["variable"] == ("TP=8",)
    assert parsed(arguments(FLAGS["check"], asked("check", twice)))["variable"] == ("TP=8", "PP=2")


def test_equal_requests_are_equal_texts_in_every_order():
    said = {"model": "llama3-8b", "gpus": 8, "tp": 2, "seq_len": 4096, "cluster": "dgx-h100"}
    texts = [list(asked("estimate", dict(order)).values.items()) for order in (said.items(), reversed(said.items()))]

    assert texts[0] == texts[1]
    assert [name for name, _ in texts[0]] == [name for name in FLAGS["estimate"] if name in said]


def test_both_spellings_of_a_flag_and_numbers_as_text_are_read():
    read = parsed(arguments(FLAGS["suggest"], asked("suggest", {"seq-len": 4096, "gpus": 16, "config": "llama3-8b"})))

    assert (read["seq_len"], read["gpus"], read["model"]) == (4096, "16", "llama3-8b")


@pytest.mark.parametrize(
    "said",
    [{"models": "llama3-8b"}, {"gpus": 0}, {"tp": "two"}, {"seq_len": 1, "seq": 2}, {"out": "../x"}, {"out": "/x"}],
)
def test_what_no_flag_says_is_refused(said):
    with pytest.raises(ValidationError):
        asked("estimate", said)


@pytest.mark.parametrize("value", ["/etc/passwd", "../secrets.json", "~/x", "-", "a/../../b", "a\nb"])
def test_files_of_the_service_are_not_read(value):
    with pytest.raises(BadInput):
        asked("estimate", {"case": value})


def test_a_service_of_this_user_alone_may_read_files_by_absolute_path():
    assert asked("estimate", {"case": "/data/case.json"}, may_read=True).values == {"case": "/data/case.json"}
    with pytest.raises(BadInput):
        asked("estimate", {"case": "../case.json"}, may_read=True)


@pytest.mark.parametrize(
    ("sent", "name", "text"),
    [
        ({"name": "topo.txt", "content": "GPU0 GPU1"}, "topo.txt", "GPU0 GPU1"),
        ({"gpu": "h100-sxm", "nodes": 2}, "cluster.json", {"gpu": "h100-sxm", "nodes": 2}),
        ({"name": "mine", "gpu": "h100-sxm"}, "cluster.json", {"name": "mine", "gpu": "h100-sxm"}),
        ([1, 2], "cluster.json", [1, 2]),
    ],
)
def test_files_that_are_sent_lie_where_the_command_line_names_them(tmp_path, sent, name, text):
    given_ = asked("estimate", {"cluster": sent})
    write_inputs(given_, tmp_path)

    path = tmp_path / parsed(arguments(FLAGS["estimate"], given_))["cluster"]
    assert path.name == name
    assert (path.read_text() if isinstance(text, str) else json.loads(path.read_text())) == text


@pytest.mark.parametrize("name", ["../x", "/x", ".hidden", "a/b", "", "x" * 101, "a b"])
def test_names_of_files_lead_nowhere_else(name):
    with pytest.raises(BadInput):
        asked("estimate", {"cluster": {"name": name, "content": "text"}})
