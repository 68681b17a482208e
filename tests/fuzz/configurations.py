"""Configurations of other tools, as `planner check` takes them: a corpus a kind of file, and how each is judged."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from planner.configs.asked import ask
from planner.configs.formats.configuration import CheckFlags
from planner.configs.serving import check_serving, serving_engine
from planner.configs.serving_document import checked_serving_document
from planner.question.cases import Case
from planner.serving.question.from_flags import ServingFlags
from simulator.legality.rules import is_legal
from tests.fuzz.format import Format, text_inputs
from tests.fuzz.mutations import damaged_json, damaged_text
from tests.fuzz.structure import rearranged_json
from tests.planner.test_check_formats import TEXTS
from topology import codec
from topology.errors import BadInput

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LAUNCH = "torchrun --nproc_per_node 8 train.py --per_device_train_batch_size 1 --gradient_accumulation_steps 8 --bf16"
LINES = [  # what starts an engine, as its users write it
    (
        "MODEL=meta-llama/Llama-3.1-8B\nvllm serve $MODEL \\\n  --tensor-parallel-size 2 --data-parallel-size=2 \\\n"
        "  --max-num-seqs 64 --max-model-len 4096 --gpu-memory-utilization 0.9 --kv-cache-dtype fp8 # one node\n"
    ),
    "vllm serve Qwen/Qwen3-30B-A3B -tp 4 --enable-expert-parallel --quantization fp8 --max-num-batched-tokens 8192\n",
    (
        "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B --tp-size 4 --mem-fraction-static 0.85"
        " --chunked-prefill-size 4096\n"
    ),
    "python3 -m sglang.launch_server --model Qwen/Qwen3-30B-A3B --tp 8 --dp 8 --enable-dp-attention --ep-size 8\n",
]


ALONE = CheckFlags()


@cache
def kept(*patterns: str) -> list[str]:
    """Return the texts of public configurations and of our exports whose names match."""
    folders = (EXAMPLES / "check", *sorted(path for path in (EXAMPLES / "exports").iterdir() if path.is_dir()))
    found = [path.read_text("utf-8") for folder in folders for one in patterns for path in sorted(folder.glob(one))]
    assert found, patterns
    return found


@cache
def _documents(*patterns: str) -> list[Any]:
    """Return files whose names match as JSON, YAML too; without a DeepSpeed file that is named and not there."""
    found = [yaml.safe_load(text) for text in kept(*patterns)]
    return [{key: value for key, value in one.items() if key != "deepspeed"} for one in found]


def _damaged_documents(*patterns: str) -> st.SearchStrategy[str]:
    documents = _documents(*patterns)
    return st.one_of(
        damaged_json(documents),
        rearranged_json(documents),
        damaged_text([json.dumps(one, indent=2) for one in documents]),
    )


_estimates: dict[str, Any] = {}


def _estimated(case: Case) -> Any:
    """Return the estimate of a case as a document. Most damage leaves the question as it was, which is answered
    once.
    """
    asked = repr((case.question, case.plan))
    if asked not in _estimates:
        _estimates[asked] = codec.to_builtins(case.question.estimate([case.plan]).estimate(0))
    return _estimates[asked]


def _judge(text: str, _path: Path, *, name: str, flags: CheckFlags = ALONE) -> list[Any]:
    """Read a configuration, cost its plan where it is legal, and write another plan into one text of four.

    Costs are the analytical model's: what simulates a plan is tried by cases and plan files. Writing reads five times.
    """
    asked = ask(text, name, flags)
    case = asked.case
    if case is None or not is_legal(case.question.problems(case.plan)):
        return [list(asked.configuration.unknown), list(asked.assumed)]
    shown: list[Any] = [_estimated(case)]
    if len(text) % 4 == 0:
        other = case.plan.with_(recompute="none" if case.plan.recompute == "full" else "full")
        shown.append(asked.writer(name, flags).diff(other))
    return shown


def _judge_launched(text: str, path: Path) -> list[Any]:
    return _judge(kept("deepspeed_zero3_auto.json")[0], path, name="a.json", flags=CheckFlags(launch=text))


def _judge_serving(text: str, _path: Path) -> list[Any]:
    if not serving_engine(text):
        raise BadInput("the text starts no engine")
    load = ServingFlags(isl=64, osl=8, concurrency=4)
    checked = check_serving(text, "serve.sh", CheckFlags(), load, search=False)
    return [checked_serving_document("serve.sh", checked)]


CONFIGURATIONS = {
    "torchtitan TOML": Format(
        inputs=text_inputs(partial(kept, "torchtitan*.toml")), read=partial(_judge, name="a.toml")
    ),
    "torchtitan command": Format(
        inputs=text_inputs(partial(kept, "torchtitan*.sh")), read=partial(_judge, name="a.sh")
    ),
    "Megatron-LM command": Format(inputs=text_inputs(partial(kept, "megatron*.sh")), read=partial(_judge, name="a.sh")),
    "Megatron-Bridge dump": Format(
        inputs=text_inputs(partial(kept, "bridge*.yaml")), read=partial(_judge, name="a.yaml")
    ),
    "DeepSpeed JSON": Format(
        inputs=partial(_damaged_documents, "deepspeed*.json"),
        read=partial(_judge, name="a.json", flags=CheckFlags(launch=LAUNCH)),
    ),
    "launch line": Format(inputs=text_inputs(lambda: [LAUNCH]), read=_judge_launched),
    "accelerate YAML": Format(
        inputs=text_inputs(partial(kept, "accelerate*.yaml")), read=partial(_judge, name="a.yaml")
    ),
    "TrainingArguments YAML": Format(
        inputs=text_inputs(partial(kept, "arguments*.yaml")), read=partial(_judge, name="a.yaml")
    ),
    "TrainingArguments JSON": Format(
        inputs=partial(_damaged_documents, "arguments*"), read=partial(_judge, name="a.json")
    ),
    "further tools' YAML": Format(
        inputs=text_inputs(lambda: list(TEXTS.values())), read=partial(_judge, name="a.yaml")
    ),
    "serving command": Format(inputs=text_inputs(lambda: LINES), read=_judge_serving),
}
