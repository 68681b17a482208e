"""What bash hands the program of a script is what `planner check` reads of it, before and after an edit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from planner.configs.answer import check_text
from planner.configs.asked import ask
from planner.configs.formats.configuration import CheckFlags
from planner.configs.formats.megatron import command_line
from tests.planner.test_check_diffs import words_of
from topology.errors import Unproved
from topology.time_limit import ended

FLAGS = ("--num-layers 32", "--tensor-model-parallel-size 2", "--sequence-parallel", "--bf16", "--micro-batch-size 1")
START = "torchrun --nproc_per_node 8 pretrain_gpt.py"
ON = " \\\n  "
LAYOUTS = {
    "line by line": lambda flags: f"{START} \\\n  {ON.join(flags)}\ntrue --after\n",
    "to the file's end": lambda flags: f"{START} \\\n  {ON.join(flags)}",
    "two a line": lambda flags: f"{START} {flags[0]}{ON}{' '.join(flags[1:3])}{ON}{' '.join(flags[3:])}\ntrue\n",
    "into a log": lambda flags: f"{START} \\\n  {ON.join(flags)} 2>&1 | cat > /dev/null\ntrue\n",
    "a log of its own line": lambda flags: f"{START} \\\n  {ON.join(flags)} \\\n  2>/dev/null >> /dev/null &\nwait\n",
    "array": lambda flags: "A=(\n  " + "\n  ".join(flags) + f"\n)\n{START} ${{A[@]}}\n",
    "array, then lines": lambda flags: f"A=({flags[0]})\n{START} ${{A[@]}} \\\n  {ON.join(flags[1:])}\ntrue\n",
    "longer array": lambda flags: f"A=({flags[0]})\nA+=({' '.join(flags[1:])})\n{START} ${{A[@]}}\n",
    "longer text": lambda flags: f'A="{flags[0]}"\nA+=" {" ".join(flags[1:])}"\n{START} $A\n',
    "quoted": lambda flags: 'A="\n  ' + "\n  ".join(flags) + f'\n"\n{START} $A\n',
    "commented": lambda flags: "A=(\n  " + "\n  ".join(f"{flag}  # so" for flag in flags) + f"\n)\n{START} ${{A[@]}}\n",
    "with options of its own": lambda flags: (
        "while [ $# -gt 0 ]; do\n  case $1 in\n    --data)\n      shift 2\n      ;;\n    -h|--help)\n      exit 0\n"
        f"      ;;\n  esac\ndone\n{START} \\\n  {ON.join(flags)}\n"
    ),
}


def as_bash_says(text: str, folder: Path) -> dict[str, str]:
    words = " ".join(words_of(text, folder)).split("--")[1:]
    return {f"--{name}": value or "True" for name, _, value in (word.strip().partition(" ") for word in words)}


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash runs the scripts")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bash_and_check_read_the_same_flags(layout: str, tmp_path: Path) -> None:
    for first in (0, 3, 4):  # which flag is the last
        flags = (*FLAGS[first:], *FLAGS[:first])
        last, text = flags[-1].split()[0], LAYOUTS[layout](flags)
        for changes in ({}, {"--use-mcore-models": True}, {last: None}, {last: None, "--seq-length": 512}):
            edited = command_line(text, "a.sh", {}).edited(changes)
            read = command_line(edited, "a.sh", {})
            said = {flag: str(value) for flag, value in read.settings.items() if flag in read.flags}

            own = {flag: value for flag, value in said.items() if flag not in {"--nproc_per_node", "--after"}}
            assert own == as_bash_says(edited, tmp_path), (edited, changes)
            assert changes.keys() & own.keys() == {flag for flag, value in changes.items() if value is not None}


def test_flags_of_a_profiler_before_a_program_in_a_variable_are_not_the_program_s() -> None:
    """As examples/megatron_fsdp/train_llama3_8b_fsdp_h100_fp8.sh of Megatron-LM starts it."""
    text = 'RUN=pretrain_gpt.py\nBY=(nsys profile --sample=none --trace=cuda,nvtx)\n"${BY[@]}" torchrun "$RUN" --bf16\n'

    assert command_line(text, "a.sh", {}).launcher == {"--sample", "--trace"}


SHAPE = f"{START} --num-layers 4 --hidden-size 256 --num-attention-heads 8 --max-position-embeddings 512 --bf16"


@pytest.mark.parametrize(
    ("flags", "said"),
    [  # `validate_args` of megatron/training/arguments.py, and `TransformerConfig.__post_init__`
        ("--seq-length 512 --micro-batch-size 1 --patch-tokenizer-type GPT2BPETokenizer", ""),
        ("--seq-length 513 --micro-batch-size 1", "513 is more than"),
        ("--seq-length 512", "--micro-batch-size is not stated"),
        ("--seq-length 512 --micro-batch-size 1 --recompute-granularity full", "without --recompute-method"),
        ("--seq-length 512 --micro-batch-size 1 --num-layers-per-virtual-pipeline-stage 2", "of at least 2"),
        ("--seq-length 512 --micro-batch-size 1 --num-layers-per-virtual-pipeline-stage 4", ""),
    ],
)
def test_what_megatron_stops_at_is_not_estimated(flags: str, said: str) -> None:
    asked = ask(f"{SHAPE} {flags}\n", "a.sh", CheckFlags(gpus=8))

    assert (asked.case is None) is bool(said)
    assert said in " ".join(str(line) for line in (*asked.problems, *asked.questions))


def test_the_best_plan_under_a_ramp_divides_its_batches() -> None:
    """Most plans of the whole batch do not, and cannot be written next to the ramp."""
    shape = "--num-layers 4 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --bf16 --micro-batch-size 1"
    flags = "--global-batch-size 32 --rampup-batch-size 2 2 1000 --tensor-model-parallel-size 4"
    text = f"{START} {shape} --max-position-embeddings 2048 {flags}\n"

    found = check_text(text, "a.sh", CheckFlags(cluster="dgx-h100", gpus=4))

    assert found.best is not None
    assert 2 % (found.best.plan.micro_batch_size * found.best.plan.data_parallel) == 0
    assert found.best.estimate.step_s.value < min(change.step_s for change in found.changes)


def test_a_time_limit_that_ends_while_a_file_is_read_or_written_says_nothing_of_it(monkeypatch) -> None:
    def over(*_: object) -> None:
        raise ended()

    text, flags = f"{SHAPE} --seq-length 512 --micro-batch-size 1\n", CheckFlags(gpus=8)
    with monkeypatch.context() as reading:
        reading.setattr("planner.configs.asked._facts", over)
        with pytest.raises(Unproved):
            ask(text, "a.sh", flags)
    monkeypatch.setattr("planner.configs.written_back.read", over)

    found = check_text(text, "a.sh", flags)

    assert found.legal
    assert found.found is not None
    assert found.found.estimate is not None
    assert found.changes == ()
    assert "time limit" in found.no_better
