"""Files people hand us: typed, bounded, and written whole or not at all."""

import contextlib
import dataclasses
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topology.codec import convert, fingerprint, parse_json, read_json, read_text, to_json, write_text
from topology.errors import BadInput

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    x: int
    tag: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    parts: tuple[Inner, ...] = ()
    table: dict[str, Inner] = dataclasses.field(default_factory=dict)
    one: Inner | None = None


outers = st.builds(
    Outer,
    name=st.text(max_size=5),
    parts=st.lists(st.builds(Inner, x=st.integers(-5, 5), tag=st.none() | st.text(max_size=3)), max_size=3).map(tuple),
    table=st.dictionaries(st.text(max_size=3), st.builds(Inner, x=st.integers(0, 3)), max_size=2),
    one=st.none() | st.builds(Inner, x=st.integers(0, 3)),
)


@given(outers)
def test_objects_survive_a_round_trip(value: Outer) -> None:
    assert convert(parse_json(to_json(value), where="text"), Outer, where="text") == value


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ({"name": "a", "colour": 1}, "$.colour"),
        ({"name": "a", "parts": [{"x": 1}, {"x": 2, "y": 3}]}, "$.parts[1].y"),
        ({"name": "a", "table": {"k": {"x": 1, "z": 0}}}, "$.table.k.z"),
        ({"name": "a", "one": {"x": 1, "w": 0}}, "$.one.w"),
    ],
)
def test_unknown_keys_are_named_with_their_path(data: object, path: str) -> None:
    with pytest.raises(BadInput) as caught:
        convert(data, Outer, where="file")

    assert path in caught.value.what


@pytest.mark.parametrize(
    "data", [{}, {"name": 3}, {"name": "a", "parts": [{"x": "1"}]}, [], None, 7, {"name": "a", "parts": {}}]
)
def test_wrong_types_are_refused(data: object) -> None:
    with pytest.raises(BadInput):
        convert(data, Outer, where="file")


@given(st.text(max_size=200))
def test_no_text_crashes_the_reader(text: str) -> None:
    with contextlib.suppress(BadInput):
        parse_json(text, where="text")


@pytest.mark.parametrize("text", ["NaN", '{"a": Infinity}', "[" * 100_000, "{", '{"a":1}{', "\x00"])
def test_hostile_json_is_refused(text: str) -> None:
    with pytest.raises(BadInput):
        parse_json(text, where="text")


def test_pickles_and_archives_are_refused_by_content(tmp_path) -> None:
    for name, content in {"a.json": b"\x80\x04K\x01.", "b.pt": b"PK\x03\x04rest"}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadInput, match="pickle"):
            read_text(tmp_path / name)


def test_large_binary_and_missing_files_are_refused(tmp_path) -> None:
    (tmp_path / "big").write_text("x" * 101)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="larger"):
        read_text(tmp_path / "big", max_bytes=100)
    with pytest.raises(BadInput, match="UTF-8"):
        read_text(tmp_path / "binary")
    with pytest.raises(BadInput, match="cannot read"):
        read_json(tmp_path / "missing.json")


def test_fingerprint_depends_on_content_alone() -> None:
    a, b = {"x": 1, "y": [1, 2]}, {"y": [1, 2], "x": 1}

    assert fingerprint(a) == fingerprint(b)
    assert fingerprint(a) != fingerprint({"x": 1, "y": [2, 1]})
    assert len(fingerprint(a)) == 16


def test_writing_leaves_the_old_file_or_the_new_one(tmp_path) -> None:
    target = tmp_path / "deep" / "plan.json"
    write_text(target, "old")
    write_text(target, "new")

    assert target.read_text() == "new"
    assert [p.name for p in target.parent.iterdir()] == ["plan.json"]


def test_what_killed_writers_left_is_removed_by_the_next(tmp_path) -> None:
    path = tmp_path / "plan.json"
    code = f"""
import os, signal
from topology import codec
codec.os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
codec.write_text({str(path)!r}, "half")
"""
    for _ in range(3):
        assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1  # each removes what the one before it left

    write_text(path, "whole")

    assert [one.name for one in tmp_path.iterdir()] == ["plan.json"]
    assert path.read_text() == "whole"


def test_writing_where_one_cannot_is_an_error_with_a_remedy(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput) as caught:
        write_text(tmp_path / "file" / "plan.json", "x")

    assert caught.value.remedy


def test_floats_that_json_cannot_hold_become_null() -> None:
    assert json.loads(to_json({"a": float("nan"), "b": float("inf")})) == {"a": None, "b": None}


def test_a_file_keeps_its_permissions_and_a_new_one_gets_the_usual(tmp_path):
    shared, fresh = tmp_path / "shared.json", tmp_path / "fresh.json"
    shared.write_text("old", encoding="utf-8")
    shared.chmod(0o664)
    ordinary = tmp_path / "ordinary"
    ordinary.write_text("", encoding="utf-8")

    write_text(shared, "new")
    write_text(fresh, "new")

    assert stat.S_IMODE(shared.stat().st_mode) == 0o664
    assert fresh.stat().st_mode == ordinary.stat().st_mode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh.json", "ordinary", "shared.json"]


def test_paths_that_are_no_files_are_bad_input(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInput, match="named pipe"):
        read_text(tmp_path / "pipe")
    with pytest.raises(BadInput, match="cannot read"):
        read_text("a\0b")
    with pytest.raises(BadInput, match="cannot read"):
        read_text("x" * 300)


def test_a_pipe_is_written_to_if_somebody_reads_it(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInput, match="cannot write"):
        write_text(tmp_path / "pipe", "unread")

    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_text(tmp_path / "pipe", "read")

    assert os.read(reader, 100) == b"read"
    os.close(reader)
    write_text("/dev/null", "dropped")
    assert Path("/dev/null").is_char_device()
