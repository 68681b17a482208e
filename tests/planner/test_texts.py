"""What commands print in their own words: a file a command in tests/data/texts, written by `pytest --update-goldens`.

Numbers are written as `#`, but in names: other tests hold their values, and a cost that changes is no change of words.
"""

from __future__ import annotations

import re
import shlex

import pytest

from tests.planner.conftest import ROOT

TEXTS = ROOT / "tests" / "data" / "texts"
ASKED = "--model tiny-llama --cluster dgx-h100 --gpus 4 --seq-len 512 --global-batch 8"
PLAN = "--tp 2 --dp-shard 2 --pp 1 --micro-batch 1 --recompute full"
SERVED = "--task serve --model llama3-8b --cluster dgx-h100 --gpus 1"
QWEN = "examples/plans/qwen3_8b_tp2_fsdp4.json"
COMMANDS = {
    "suggest": [
        f"suggest {ASKED} {PLAN} --no-simulate",
        "suggest --model llama3-9b",
        "suggest --cluster dgx-h10",
        "suggest --gpus lots",
        "suggest --time-limit 1e999",
        "suggest --framework torchtitn",
        "suggest --profile /nonexistent",
        "suggest --param-dtype float8",
        "suggest --gpus 7 --global-batch 3 --framework llm-foundry",
        f"suggest {ASKED} --tp=4-2",
        f"suggest {ASKED} --deadline 30d",
        f"suggest {ASKED} --budget 1M",
        f"suggest {ASKED} --tokens 2T --budget 1M",
        f"suggest {ASKED} --tokens many",
        f"suggest {ASKED} --tokens 0",
        f"suggest {ASKED} --tokens 2T --deadline 30",
        f"suggest {ASKED} --tokens 2T --deadline -3d",
    ],
    "estimate": [
        f"estimate {ASKED} {PLAN}",
        "estimate --tp 16 --gpus 16",
        "estimate --case /nonexistent",
        "estimate --case README.md",
    ],
    "collective": ["collective --cluster dgx-h100 --gpus 8", "collective --bytes 0.5"],
    "probe": ["probe --from tests/data/topo/47_3x_a6000_one_pair.txt", "probe --from README.md"],
    "doctor": ["doctor --cluster h200x4", "doctor --cluster h200x4 --expect dgx-h200", "doctor --budget forever"],
    "suggest --task serve": [
        f"suggest {SERVED} --isl 1000 --osl 100 --concurrency 8",
        f"suggest {SERVED} --isl 1000 --osl 1 --concurrency 8",
        f"suggest {SERVED} --isl 120000 --osl 100",
        f"suggest {SERVED} --isl 1000 --osl 100 --concurrency 8 --ttft 0.001",
    ],
    "explain": [f"explain {QWEN} --no-flips", "explain README.md", "explain /nonexistent"],
    "compare": [f"compare {QWEN} examples/plans/qwen3_30b_experts.json", f"compare {QWEN} README.md"],
    "export": [
        f"export {QWEN} --to torchtitan",
        f"export {QWEN} --to deepspeed",
        f"export {QWEN} --to jax",
        "export README.md --to torchtitan",
    ],
    "validate": ["validate --example", "validate examples/plans/qwen3_8b_tp2_fsdp4.json", "validate README.md"],
    "learn": ["learn --example", "learn README.md --runtime mine --out /nonexistent/mine.json"],
    "shard": ["shard examples/sharding/layer.json", "shard README.md"],
    "trace": [f"trace {ASKED} {PLAN} --out README.md", "trace README.md"],
    "apply": [f"apply {QWEN}", "apply README.md"],
    "tune": [f"tune {ASKED} --budget 0", "tune --resume README.md", "tune --launcher lsf --resume README.md"],
    "calibrate": ["calibrate --cluster dgx-h100 --dry-run --budget 10", "calibrate --cluster dgx-h10"],
    "report": ["report /nonexistent"],
    "runs": ["runs"],
    "ui": ["ui --port 99999999"],
    "service": ["service --port 0x"],
    "check": [
        "check examples/check/torchtitan_llama3_70b_8xb200.toml --cluster dgx-b200",
        "check examples/check/megatron_gpt3_175b.sh",
        "check README.md",
    ],
}


def words_of(done) -> str:
    """Return an exit code and both streams, with `#` for every number, and for the space that depends on its width."""
    text = done.stdout + "".join(f"error stream: {line}\n" for line in done.stderr.splitlines())
    text = re.sub(r"(?<=\()[\d,.]+-[\d,.]+(?=\))|(?<= )[\d.]+x$", "#", text, flags=re.MULTILINE)
    text = re.sub(r"(?<![\w.])(?<!\w-)\d+(?:[.,]\d+)*(?:e[+-]?\d+)?(?!\w|\.\d)", "#", text)
    return f"exit {done.returncode}\n" + re.sub(r" {2,}", "  ", re.sub(r" +$", "", text, flags=re.MULTILINE))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_prints_the_words_of_its_file(planner, monkeypatch, request, command) -> None:
    monkeypatch.chdir(ROOT)
    found = ""
    for words in COMMANDS[command]:
        done = planner(*shlex.split(words), env={"COLUMNS": "200"})
        assert "Traceback" not in done.stderr, words
        assert done.stdout == "" or done.returncode != 2, words
        found += f"$ planner {words}\n{words_of(done)}\n"
    file = TEXTS / f"{command.replace(' --', '_').replace(' ', '_')}.txt"
    if request.config.getoption("--update-goldens"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(found, "utf-8")

    assert found == file.read_text("utf-8"), (
        "if these words are right: pytest --update-goldens tests/planner/test_texts.py"
    )
