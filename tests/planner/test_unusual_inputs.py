"""Valid but unusual inputs: each has an answer, or an error that says what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.cli import main
from tests.planner.conftest import ROOT

NAMELESS = (
    "tests/data/topo/51_h100_8gpu_epyc9654.txt",
    "examples/clusters/h200x4_topo_m.txt",
    "tests/data/nccl_xml/dgx1_v100_8gpu.xml",
)
MODEL = ("--model", "llama3.2-1b")
PLAN = str(ROOT / "examples" / "plans" / "llama3_8b_two_nodes.json")
COMMANDS = (
    ("estimate", *MODEL),
    ("trace", *MODEL, "--out", "trace.json"),
    ("suggest", *MODEL),
    ("suggest", "--task", "serve", *MODEL),
    ("estimate", "--task", "serve", *MODEL),
    ("explain", *MODEL),
    ("check", str(ROOT / "examples" / "check" / "torchtitan_llama3_8b.toml"), "--gpus", "4"),
    ("shard", *MODEL, "--layers", "1", "--mesh", "data=4"),
    ("calibrate", "--dry-run"),
    ("collective", "--op", "all_reduce"),
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: "-".join(w for w in words[:3] if "/" not in w))
def test_gpus_of_an_unknown_model_are_refused_with_the_flag_that_names_them(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = main([*command, "--cluster", str(ROOT / NAMELESS[0])])

    said = capsys.readouterr().err
    assert code == 2
    assert "unknown model" in said
    assert "--gpu h100-sxm" in said


def test_the_flag_names_them(capsys):
    assert main(["estimate", *MODEL, "--cluster", str(ROOT / NAMELESS[0]), "--gpu", "h100-sxm", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "words",
    [
        ("suggest", "--gpus", "4"),
        ("suggest", "--gpus", "4", "--separate"),
        ("estimate", "--prefill", "1xtp2", "--gpus", "4"),
    ],
)
def test_answers_of_one_token_have_no_token_after_the_first(words, capsys):
    assert main([words[0], "--task", "serve", *MODEL, "--osl", "1", *words[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("mode", "code"), [("chunked", 0), ("copy_engine", 3), ("fused", 3)])
def test_overlap_without_nvlink_is_predicted_where_nccl_moves_the_data_and_refused_where_copies_do(mode, code, capsys):
    flags = "--model tiny-llama --cluster l40s-x8 --gpus 2 --seq-len 128 --global-batch 4 --runtime meshwright --tp 2"

    assert main(["estimate", *flags.split(), "--tp-overlap", mode]) == code
    shown = " ".join(capsys.readouterr().out.split())
    assert ("without NVLink: copies into memory of other GPUs" in shown) == (code == 3)


NO_GPU = """<system version="1"><cpu numaid="0" affinity="ffff" arch="x86_64" vendor="GenuineIntel" familyid="6"
modelid="143"><pci busid="0000:18:00.0" class="0x020000" link_speed="32.0 GT/s PCIe" link_width="16"><nic>
<net name="mlx5_0" dev="0" speed="400000" port="1" guid="0x1" gdr="1"/></nic></pci></cpu></system>
"""


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    """A NCCL topology file of a host with a NIC and no GPU."""
    path = tmp_path / "host.xml"
    path.write_text(NO_GPU)
    return path


@pytest.mark.parametrize("kind", ["simai", "astra-sim", "nccl-xml"])
def test_a_capture_without_gpus_is_no_network(kind, capture, capsys):
    assert main(["probe", "--from", str(capture), "--to", kind]) == 3
    assert "shows no GPU" in capsys.readouterr().err


def test_a_capture_without_gpus_is_no_cluster_file(capture, tmp_path, capsys):
    out = tmp_path / "cluster.json"
    assert main(["probe", "--from", str(capture), "--out", str(out)]) == 2
    assert "no GPU was found" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("key", ["gpus_per_node", "nodes"])
@pytest.mark.parametrize("count", [0, -3])
def test_a_machine_of_no_gpu_is_refused_with_the_count(key, count, capsys):
    machine = {"gpu": "gb200", "gpus_per_node": 4, "nodes": 2, key: count}

    assert main(["estimate", *MODEL, "--cluster", json.dumps(machine)]) == 2
    assert f"{key} is {count}" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["dangling", "file/below"])
def test_export_says_where_it_cannot_make_a_folder(where, capsys, tmp_path):
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "at all")
    (tmp_path / "file").write_text("x")

    assert main(["export", PLAN, "--all", "--out", str(tmp_path / where)]) == 2
    assert "cannot make the folder" in capsys.readouterr().err


def test_an_integer_of_thousands_of_digits_is_no_toml(capsys, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(f"[training]\nsteps = {'9' * 5000}\n")

    assert main(["check", str(path)]) == 2
    assert "is not TOML" in capsys.readouterr().err


def test_a_name_that_is_not_text_is_refused_before_any_work(capsys):
    assert main(["suggest", "--out", "plan\udcff.json"]) == 2
    assert "not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--model", "--cluster", "--gpus", "--framework", "--no-such-flag"])
@pytest.mark.parametrize("value", ["x" * 80_000, "x y " * 20_000])
def test_messages_repeat_at_most_a_line_of_a_bad_value(flag, value, capsys):
    """An unknown framework is answered as the nearest one that is known."""
    code = main(["estimate", f"{flag}={value}"])
    printed = capsys.readouterr()

    assert code == (0 if flag == "--framework" else 2)
    assert len(printed.err) < 2500
    assert value[:150] not in printed.out


SMALL = ("--model", "tiny-llama", "--cluster", "dgx-h100", "--gpus", "2", "--seq-len", "256")
LONG = {"a name": "f" * 4000, "folders": "/".join(["d" * 200] * 20), "folders in each other": "x/" * 2000 + "y"}


@pytest.mark.parametrize("path", LONG.values(), ids=LONG)
@pytest.mark.parametrize(
    "words",
    [
        ("estimate", *SMALL, "--out"),
        ("estimate", "--plan"),
        ("export", PLAN, "--all", "--out"),
        ("export", PLAN, "--to", "torchrun", "--out"),
        ("probe", "--from", "dgx-h100", "--svg"),
        ("validate",),
        ("check",),
    ],
    ids=lambda words: "-".join(word for word in words if "/" not in word),
)
def test_paths_of_4000_characters_are_read_and_written_or_refused(words, path, capsys, tmp_path, monkeypatch):
    """Systems take paths of 4,095 bytes, of names of 255."""
    monkeypatch.chdir(tmp_path)
    if (code := main([*words, path])) == 0:
        assert words[0] == "export"
        assert (tmp_path / path).exists()
    else:
        assert code == 2
        assert "why: " in capsys.readouterr().err


def test_a_working_folder_of_4000_characters(capsys, tmp_path, monkeypatch):
    folder = tmp_path
    while len(str(folder)) < 3700:
        folder /= "e" * 200
        folder.mkdir()
        monkeypatch.chdir(folder)

    assert main(["estimate", *SMALL, "--out", "plan.json"]) == 0
    assert main(["export", "plan.json", "--all", "--out", "files"]) == 0
    assert main(["check", "files/torchtitan.toml", "--no-search"]) == 0


def test_files_that_this_user_may_not_use_are_named_with_what_moves_them(capsys, monkeypatch):
    def refuse(*_args):
        raise PermissionError(13, "Permission denied", "/home/other/.local/share/meshwright/runs.sqlite3")

    monkeypatch.setattr("planner.runs.runs_store.default_path", refuse)

    assert main(["runs"]) == 2
    said = capsys.readouterr().err
    assert "/home/other/.local/share/meshwright/runs.sqlite3" in said
    assert "XDG_DATA_HOME" in said
