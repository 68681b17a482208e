"""The command line as people and scripts meet it: exit codes, streams, JSON shapes, and a light `--help`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from planner import cli
from tests.planner.conftest import CASES, ROOT
from topology.errors import BadInput, Infeasible, OutOfTolerance, Stale

# A question small enough to ask often, and one without pipelines, which take most of the time of a search.
PIPED = ("suggest", "--model", "llama3.2-1b", "--top", "2", "--seq-len", "4096", "--global-batch", "8")
SUGGEST = (*PIPED, "--gpus", "4", "--pp", "1")


def modules_after(*arguments):
    """Return the top-level modules that a run of the command line loads."""
    code = (
        "import sys\nfrom planner.cli import main\n"
        f"main({list(arguments)!r})\n"
        "print('\\n'.join(sorted({m.partition('.')[0] for m in sys.modules})), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, timeout=60
    )
    return set(done.stderr.split()), done.stdout


@pytest.mark.parametrize("arguments", [("--help",), ("--version",)])
def test_help_loads_nothing_heavy(arguments):
    """`--help` is fast because it loads only click: no command, and none of the libraries that answer questions."""
    loaded, text = modules_after(*arguments)

    assert text.strip()
    assert not loaded & {"numpy", "networkx", "ortools", "rich", "simpy", "msgspec", "yaml", "torch", "streamlit"}


@pytest.fixture(scope="module")
def helps():
    """Return of every command its help, and the top-level modules loaded by then, all from one process."""
    code = f"""
import contextlib, io, json, sys
from planner.cli import main
found = {{}}
for command in {list(cli.COMMANDS)!r}:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        main([command, "--help"])
    found[command] = text.getvalue(), sorted({{name.partition(".")[0] for name in sys.modules}})
print(json.dumps(found))
"""
    command = [sys.executable, "-c", code]
    return json.loads(subprocess.run(command, capture_output=True, check=True, cwd=ROOT, timeout=120).stdout)


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_every_command_says_what_it_does(helps, command):
    """One command's help loads that command: what it answers with, and nothing that needs a GPU or a browser."""
    text, loaded = helps[command]

    assert text.startswith(f"Usage: planner {command} ")
    assert not set(loaded) & {"torch", "triton", "streamlit"}


def test_help_states_units_and_exit_codes(planner):
    done = planner("--help")

    assert done.returncode == 0
    assert "GiB" in done.stdout
    assert "decimal GB/s" in done.stdout
    for code in (0, 1, 2, 3, 4, 130):
        assert re.search(rf"^\s+{code}\s+\w", done.stdout, re.MULTILINE), code
    for command in ("suggest", "estimate", "validate", "probe", "collective"):
        assert re.search(rf"^\s+{command}\s", done.stdout, re.MULTILINE)


def test_version(planner):
    assert re.match(r"planner \(meshwright\) \S+$", planner("--version").stdout.strip())


def test_suggest_without_flags_answers(planner):
    """A laptop with nothing but this package gets an answer, its assumptions, and the words that it is uncalibrated."""
    done = planner("suggest")

    assert done.returncode == 0, done.stderr
    for words in ("llama3-8b", "dgx-h100", "assumed", "global batch 512", "uncalibrated", "Use ", "\n#2 ", "start "):
        assert words in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\x1b" not in done.stdout
    assert re.search(r"^start +.*planner export \S+ --to torchtitan$", done.stdout, re.MULTILINE)


def test_suggest_json_has_the_keys_of_the_contract(planner):
    done = planner(*SUGGEST, "--json")
    answer = json.loads(done.stdout)

    assert answer["schema_version"] == 1
    assert {"candidates", "legal", "pruned", "simulated", "seconds", "status", "bound_s", "gap"} <= set(
        answer["search"]
    )
    assert answer["search"]["status"] == "optimal within the model"
    first, second = answer["plans"]
    assert {"rank", "plan", "estimate", "lost_because", "flips"} <= set(first)
    case_keys = set(json.loads((CASES / "torchtitan.json").read_text())[0]["plan"])
    assert case_keys | {"placement"} <= set(first["plan"])
    estimate = first["estimate"]
    assert {"step_s", "tokens_per_s_per_gpu", "mfu", "tflops_per_gpu", "memory", "breakdown_s"} <= set(estimate)
    assert {"value", "low", "high", "source"} <= set(estimate["step_s"])
    assert {"peak_bytes", "reserved_bytes", "by_category", "worst_rank", "fits"} <= set(estimate["memory"])
    assert sum(estimate["breakdown_s"].values()) == pytest.approx(estimate["step_s"]["value"])
    assert {"compute", "exposed_communication", "bubble", "host", "optimizer"} <= set(estimate["breakdown_s"])
    assert all(isinstance(n, int) for n in answer["rejected"].values())
    for flip in second["flips"]:
        assert {"quantity", "now", "at", "unit"} <= set(flip)


def test_the_same_question_prints_the_same_bytes(planner_process, tmp_path):
    """In two processes: JSON but for the seconds the search took, and the plan file to the last byte."""
    texts = []
    for name in ("a.json", "b.json"):
        done = planner_process(*PIPED, "--gpus", "2", "--json", "--out", tmp_path / name)
        texts.append(re.sub(r'"seconds": [\d.e-]+', '"seconds": 0', done.stdout))

    assert texts[0] == texts[1]
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_a_saved_plan_can_be_estimated_and_goes_stale(planner, tmp_path):
    path = tmp_path / "plan.json"
    assert planner(*SUGGEST, "--out", path).returncode == 0
    again = planner("estimate", "--plan", path, "--json")
    other = planner("estimate", "--plan", path, "--cluster", "dgx-a100")
    same = planner("estimate", "--plan", path, "--cluster", "dgx-h100", "--json")

    saved = json.loads(path.read_text())
    assert json.loads(again.stdout)["estimate"] == saved["estimate"]
    assert other.returncode == 1
    assert "cluster" in other.stderr
    assert "planner estimate --case FILE" in other.stderr
    there = json.loads(planner("estimate", "--case", path, "--cluster", "dgx-a100", "--json").stdout)
    assert there["estimate"]["step_s"]["value"] > saved["estimate"]["step_s"]["value"]
    assert same.returncode == 0
    refused = planner(*SUGGEST, "--out", path)
    assert refused.returncode == 2
    assert "--force" in refused.stderr
    assert json.loads(path.read_text()) == saved


def test_a_newer_plan_file_is_refused(planner, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text('{"schema_version": 99, "tool_version": "9.9", "plan": {}, "fingerprints": {}}')
    done = planner("estimate", "--plan", path)

    assert done.returncode == 2
    assert "9.9" in done.stderr


def test_estimate_of_a_case_has_the_keys_of_the_contract(planner, tmp_path):
    one = json.loads((CASES / "torchtitan_h200x4.json").read_text())[0]
    done = planner("estimate", "--case", "-", "--json", stdin=json.dumps(one))
    answer = json.loads(done.stdout)

    assert done.returncode == 0
    assert {"id", "legal", "problems", "assumed", "estimate"} <= set(answer)
    assert answer["id"] == one["id"]
    assert answer["legal"] is True
    (tmp_path / "one.json").write_text(json.dumps([one]))
    assert json.loads(planner("estimate", "--case", tmp_path / "one.json", "--json").stdout) == [answer]


def test_default_overlap_rates_are_listed_as_assumed(planner):
    """As `estimate` does: plans that overlap by modes whose rates nobody measured here rest on those of another
    machine.
    """
    question = ("--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "4", "--seq", "16384", "--global-batch", "1")
    done = planner(
        "suggest", *question, "--framework", "meshwright", "--top", "8", "--pp", "1", "--no-simulate", "--json"
    )
    answer = json.loads(done.stdout)
    overlaps = any(plan["plan"]["tp_overlap"] != "none" for plan in answer["plans"])

    assert overlaps
    assert sum("as measured on H200s" in line for line in answer["assumed"]) == 1


def test_one_unreadable_case_does_not_spoil_a_list(planner):
    """The others are answered; it is answered with what is wrong. Alone, it is exit code 2."""
    good = json.loads((CASES / "torchtitan_h200x4.json").read_text())[0]
    bad = {**good, "id": "bad", "model": "no-such-model"}
    done = planner("estimate", "--case", "-", "--json", stdin=json.dumps([bad, good]))
    first, second = json.loads(done.stdout)

    assert done.returncode == 0
    assert (first["id"], first["legal"], first["estimate"]) == ("bad", False, None)
    assert "no-such-model" in first["problems"][0]["message"]
    assert second["legal"] is True
    alone = planner("estimate", "--case", "-", "--json", stdin=json.dumps(bad))
    assert (alone.returncode, alone.stdout) == (2, "")


def test_an_illegal_plan_is_code_3_with_its_problems(planner):
    done = planner("estimate", "--tp", "16", "--gpus", "16", "--json")
    answer = json.loads(done.stdout)

    assert done.returncode == 3
    assert answer["legal"] is False
    assert answer["estimate"] is None
    assert any(p["rule"] == "kv-heads" and p["grade"] == "illegal" and p["nearest"] == [8] for p in answer["problems"])


def test_estimate_prints_text_with_units(planner):
    done = planner("estimate", "--gpus", "16", "--tp", "2", "--micro-batch", "1", "--recompute", "full")

    assert done.returncode == 0
    for words in ("16 = dp 1 x fsdp 8 x tp 2 x pp 1", "GiB", "GB/s", "fits", "dp_shard 8 (fills 16 GPUs)"):
        assert words in done.stdout


def two_rows(name, folder):
    """Return a file with the first two cases of another."""
    rows = json.loads((CASES / name).read_text(encoding="utf-8"))[:2]
    (folder / name).write_text(json.dumps(rows), encoding="utf-8")
    return folder / name


def test_validate_json_has_the_keys_of_the_contract(planner, tmp_path):
    files = (two_rows(name, tmp_path) for name in ("torchtitan_h200x4.json", "vtrain_multi.json"))
    done = planner("validate", *files, "--tolerance", "1000", "--json")
    answer = json.loads(done.stdout)

    assert done.returncode == 0
    for row in answer["rows"]:
        assert {"id", "predicted", "measured", "error", "within_interval", "skipped"} <= set(row)
        assert {"step_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "peak_memory_bytes", "fits"} <= set(
            row["predicted"]
        )
        assert {"step", "memory"} == set(row["error"])
    assert {"mean_abs", "bias", "worst", "coverage"} <= set(answer["summary"]["step"])
    assert {name: part["rows"] for name, part in answer["summary"]["by_file"].items()} == {
        "torchtitan_h200x4.json": 2,
        "vtrain_multi.json": 2,
    }


def test_a_price_for_one_count_prints_what_tokens_cost(planner):
    """Price an hour over tokens an hour of one GPU."""
    asked = (*SUGGEST, "--gpu-price", "2.5", "--no-simulate")
    rate = json.loads(planner(*asked, "--json").stdout)["plans"][0]["estimate"]["tokens_per_s_per_gpu"]

    assert f"{2.5 / 3600 / rate * 1e6:.3g} per million tokens" in planner(*asked).stdout


def test_a_part_too_small_to_matter_is_no_term(planner):
    text = planner("estimate", "--gpus", "8", "--recompute", "none").stdout

    assert not re.search(r"\de-(0[6-9]|[1-9]\d) s", text)


def test_validate_holds_a_tolerance(planner, tmp_path):
    strict = planner("validate", two_rows("vtrain_multi.json", tmp_path), "--tolerance", "0.001")

    assert strict.returncode == 4
    assert "mean absolute error" in strict.stderr
    assert "vtrain" in strict.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "Usage"),
        (("plan",), 2, "No such command"),
        (("suggest", "--top", "0"), 2, "--top"),
        (("suggest", "--nonsense"), 2, "--nonsense"),
        (("suggest", "--gpu-price", "9" * 400), 2, "--gpu-price"),
        (("suggest", "--time-limit", "nan"), 2, "--time-limit"),
        (("validate",), 2, "FILE"),
        (("suggest", "--gpus", "1"), 3, "GiB missing"),
    ],
)
def test_exit_codes(planner, arguments, code, words):
    """Every refusal has its code and says what is wrong on standard error, with nothing on standard output.

    Those in words of our own are in test_texts.py.
    """
    done = planner(*arguments)

    assert done.returncode == code, done.stderr
    assert words in done.stderr + (done.stdout if not arguments else "")
    assert "Traceback" not in done.stderr
    if arguments:
        assert done.stdout == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadInput("what", why="why", remedy="do"), 2),
        (Infeasible("what", why="why", remedy="do"), 3),
        (Stale("what", why="why", remedy="do"), 1),
        (OutOfTolerance("what", why="why", remedy="do"), 4),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("division by zero"), 1),
        (BrokenPipeError(), 0),
    ],
    ids=lambda e: type(e).__name__ if isinstance(e, BaseException) else str(e),
)
def test_every_ending_has_its_code(monkeypatch, capsys, error, code):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("planner.answers.suggest.answer", fail)
    monkeypatch.delenv("MESHWRIGHT_DEBUG", raising=False)
    monkeypatch.setattr(cli, "_silence_stdout", lambda: None)

    assert cli.main(["suggest"]) == code
    said = capsys.readouterr().err
    assert "Traceback" not in said
    if isinstance(error, (BadInput, Infeasible, Stale, OutOfTolerance)):
        assert said == "error: what\n  why: why\n  do: do\n"
    if isinstance(error, ZeroDivisionError):
        assert "internal error: ZeroDivisionError: division by zero; please report" in said
    monkeypatch.setenv("MESHWRIGHT_DEBUG", "1")
    if isinstance(error, ZeroDivisionError):
        assert cli.main(["suggest"]) == 1
        assert "Traceback" in capsys.readouterr().err


def test_a_terminal_shows_the_plan_before_it_is_simulated(monkeypatch, capsys):
    """The plan and its step stand on standard error while simulations run; a file or pipe gets the answer alone."""
    assert cli.main([*SUGGEST]) == 0
    answer = capsys.readouterr()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert cli.main([*SUGGEST]) == 0
    shown = capsys.readouterr()

    early, _, rest = shown.err.partition("Before simulation: ")[2].partition("\n")
    assert early.startswith("Use ")
    assert "simulating plan 1" in rest
    # Between runs only the time of the search differs.
    assert re.sub(r"[\d.]+ s;", "s;", shown.out) == re.sub(r"[\d.]+ s;", "s;", answer.out)
    assert answer.err == ""


def test_a_closed_pipe_is_quiet(planner_process):
    """`planner ... | head` has its answer: no traceback, and nothing failed."""
    reader, writer = os.pipe()
    os.close(reader)
    done = planner_process(*SUGGEST, "--json", stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)

    assert done.stderr == ""
    assert done.returncode == 0


def test_an_interrupt_is_130(tmp_path):
    """Ctrl-C while waiting for standard input."""
    process = subprocess.Popen(
        [sys.executable, "-m", "planner", "estimate", "--case", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    )
    process.stdin.write(" " * (1 << 18))  # more than a pipe holds: it is being read once this returns
    process.stdin.flush()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)

    assert process.returncode == 130
    assert "Traceback" not in errors


def test_colours_stay_off_a_pipe_and_under_no_color(planner):
    done = planner(*SUGGEST, env={"NO_COLOR": "1", "FORCE_COLOR": "1"})

    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize("name", ['"; rm -rf ~ #', "a\nb", "!!python/object", "../../etc/passwd", "\x1b[2J"])
def test_hostile_names_are_text(planner, name):
    """A model's name is looked up and quoted back; it is never run, and never reaches the terminal raw."""
    done = planner("suggest", "--model", name)

    assert done.returncode == 2
    assert "\x1b" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("framework", ["torchtitan@0.3.0", "megatron-lm", "deepspeed", "llm-foundry", "pytorch", "any"])
def test_every_framework_has_an_answer(planner, framework):
    """Pipelines of each are in tests/test_one_legality.py and tests/planner/test_candidates.py."""
    done = planner(*PIPED, "--gpus", "2", "--pp", "1", "--framework", framework, "--no-simulate", "--json")

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["plans"]


def test_the_fewest_gpus(planner):
    """An 8B model with float32 Adam needs 16 bytes a parameter, 120 GiB: two 80 GB GPUs at least."""
    done = planner("suggest", "--gpus", "min", "--seq-len", "4096", "--global-batch", "16", "--pp", "1", "--json")
    answer = json.loads(done.stdout)

    assert answer["question"]["gpus"] >= 2
    assert any("fewest that surely fit" in line for line in answer["assumed"])


@pytest.mark.parametrize("flag", ["--cluster", "--out"])
def test_a_name_too_long_for_a_file_is_bad_input(planner, flag):
    done = planner("suggest", flag, "x" * 300)

    assert done.returncode == 2
    assert re.search("unknown cluster|File name too long", done.stderr)
    assert not done.stdout  # before the search
