"""Commands of vLLM and SGLang: exports read back as they were meant, and `planner check` on what people start."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import planner as package
from planner.cli import main
from planner.configs.formats.command_line import CommandLine, option_kinds
from planner.configs.formats.configuration import CheckFlags
from planner.configs.serving import VERSIONS, CheckedServing, check_serving, flag_of, serving_engine, setting_of
from planner.export.schema import schema
from planner.export.serving.commands import command
from planner.export.serving.files import serving_files
from planner.serving.question.from_flags import ServingFlags, serving_question
from simulator.serving.deployment import Deployment, Pool, made_even
from simulator.serving.forward_pass import ForwardPass
from tests.examples import examples
from topology.errors import BadInput, PlannerError, UserError

ROOT = Path(__file__).resolve().parents[2]
LOAD = ServingFlags(isl=256, osl=32, concurrency=8)


def checked(
    text: str, reported: CheckFlags | None = None, *, search: bool = False, load: ServingFlags = LOAD
) -> CheckedServing:
    return check_serving(text, "serve.sh", reported or CheckFlags(), load, search=search)


DEGREE = st.sampled_from([1, 2, 4, 8])
POOLS = st.one_of(
    st.builds(Pool, tp=DEGREE, pp=st.sampled_from([1, 2])),
    st.builds(lambda tp, pp: Pool(tp=tp, pp=pp, ep=tp), DEGREE, st.sampled_from([1, 2])),
    st.builds(lambda dp: made_even(Pool(dp_attention=dp, ep=dp), 128), st.sampled_from([1, 2, 3, 8])),
)


@examples(40)
@given(
    st.sampled_from(["vllm", "sglang"]),
    POOLS,
    st.sampled_from(["bfloat16", "float8"]),
    st.sampled_from(["bfloat16", "float8"]),
    st.sampled_from([False, True]),
)
def test_a_command_written_is_read_as_the_same_engine(
    engine: str, pool: Pool, weights: str, cache: str, both: Any
) -> None:
    every = 30 if engine == "sglang" else 1
    deployment = Deployment(
        engine=engine,
        pool=pool,
        weights=weights,
        kv_cache=cache,
        max_num_seqs=77,
        two_batches=both,
        receive_every=every,
    )
    words = command(deployment, pool, "Qwen/Qwen3-30B-A3B", longest=4096)
    found = checked(shlex.join(words))
    assert found.unknown == ()
    assert found.answer is not None
    read = found.answer.deployment
    assert read.pool == pool
    assert (read.engine, read.weights, read.kv_cache, read.max_num_seqs) == (engine, weights, cache, 77)
    assert (read.two_batches, read.receive_every) == (both, every)
    assert read.memory_fraction > 0


@pytest.mark.parametrize("said", [{"two_batch_overlap": True}, {"receive_every": 30}])
def test_a_setting_that_an_engine_lacks_is_refused_and_dropped_among_others(said: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="--engine sglang"):
        serving_question(ServingFlags(engine="trtllm", **said))
    asked = serving_question(ServingFlags(engine="sglang", **said))
    other = asked.of_engine("trtllm")
    assert (other.two_batches, other.receive_every) == (False, 1)
    assert asked.of_engine("sglang").deployment(Pool()) == asked.deployment(Pool())


@pytest.mark.parametrize("machine", ["dgx-h100", "dgx-b200"])
def test_commands_state_the_tokens_of_a_step_that_is_predicted(machine: str) -> None:
    """SGLang's default depends on a GPU's memory, which a command does not see."""
    question = serving_question(ServingFlags(model="llama3-8b", cluster=machine, gpus=1, engine="sglang"))
    plan = question.deployment(Pool())
    words = command(question.stated(plan), Pool(), "m", longest=100)
    predicted = ForwardPass(question.model, question.cluster, plan, Pool()).max_batched_tokens
    assert words[words.index("--chunked-prefill-size") + 1] == str(predicted)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_files_hold_commands_that_the_engine_takes(engine: str) -> None:
    """Compose and Kubernetes start the words that `vllm serve` and SGLang have flags for, each with a value of its
    type.
    """
    pool = Pool(engines=2, tp=2)
    files = serving_files(Deployment(engine=engine, pool=pool), "Qwen/Qwen3-30B-A3B", longest=4096, gpus_per_node=8)
    services = yaml.safe_load(files["compose.yaml"])["services"].values()
    container = yaml.safe_load(files["kubernetes.yaml"])["spec"]["template"]["spec"]["containers"][0]
    script = [line for line in files["serve.sh"].splitlines() if "CUDA_VISIBLE_DEVICES" in line]
    commands = [[*one["entrypoint"], *one["command"]] for one in services]
    commands += [container["command"], *(shlex.split(line.removesuffix("&"))[1:] for line in script)]
    assert len(commands) == 5
    keys = schema(engine, VERSIONS[engine])["keys"]
    for words in commands:
        line = CommandLine(shlex.join(words), "x", option_kinds(keys))
        for flag, value in line.settings.items():
            kind = keys[flag]["type"]
            assert (value is True) == (kind == "flag"), flag
            if kind in {"int", "float"}:
                float(value)
            if "choices" in keys[flag]:
                assert value in keys[flag]["choices"]


@pytest.mark.parametrize(
    ("text", "pool"),
    [
        ("vllm serve Qwen/Qwen3-30B-A3B -tp 4 -pp 2", Pool(tp=4, pp=2)),
        (
            "vllm serve --model Qwen/Qwen3-30B-A3B --tensor_parallel_size=2 -dp 4 --enable-expert-parallel",
            Pool(tp=2, dp_attention=4, ep=8),
        ),
        ("vllm serve meta-llama/Llama-3.1-8B-Instruct -dp 4", Pool(engines=4)),
        (
            (
                "TP=8\npython -m sglang.launch_server --model-path deepseek-ai/DeepSeek-R1 --tp $TP --dp 8 "
                "--enable-dp-attention"
            ),
            Pool(dp_attention=8),
        ),
        (
            "sglang serve --model deepseek-ai/DeepSeek-R1 --tp-size 16 --attn-dp-size 4 --ep 16",
            Pool(tp=4, dp_attention=4, ep=16),
        ),
        ("python3 -m vllm.entrypoints.openai.api_server --model Qwen/Qwen3-8B", Pool()),
    ],
)
def test_degrees_as_people_write_them(text: str, pool: Pool) -> None:
    answer = checked(text).answer
    assert answer is not None
    assert answer.deployment.pool == pool


def test_what_the_parser_would_refuse_is_named() -> None:
    found = checked(
        "vllm serve Qwen/Qwen3-8B --max-num-sequences 8 --kv-cache-dtype fp7 --max-model-len 8k "
        "--tensor-parallel-size two"
    )
    said = "\n".join(found.problems)
    assert "--max-num-sequences is not a flag of vllm 0.33.0; near it: --max-num-seqs" in said
    assert "--kv-cache-dtype fp7: vllm 0.33.0 takes auto" in said
    assert "--tensor-parallel-size two: not a number" in said
    assert "--max-model-len" not in said, "8k is how vLLM lets people write 8,000"
    assert not found.legal


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("vllm serve Qwen/Qwen3-8B -tp 3", "tp 3 does not divide 32 attention heads"),
        ("vllm serve meta-llama/Llama-3.1-70B-Instruct", "no room for a KV cache"),
        ("vllm serve Qwen/Qwen3-8B --max-model-len 128", "tokens are refused: the limit is 128"),
        ("vllm serve Qwen/Qwen3-8B --gpu-memory-utilization 0.3 --max-model-len 200000", "it does not start"),
        ("python -m sglang.launch_server --model-path Qwen/Qwen3-8B --tp 4 --attn-dp-size 3", ("does not divide "
        "--tp-size 4")),
        ("vllm serve Qwen/Qwen3-8B -tp $TP", "the text does not assign that variable"),
    ],
)  # fmt: skip
def test_what_would_not_start_or_not_serve_is_illegal(text: str, words: str) -> None:
    found = checked(text)
    assert not found.legal
    assert any(words in problem for problem in found.problems), found.problems


def test_a_context_of_all_positions_starts() -> None:
    assert checked("vllm serve Qwen/Qwen3-8B --max-model-len 40960").legal
    assert not checked("vllm serve Qwen/Qwen3-8B --max-model-len 40961").legal


def test_a_better_deployment_is_a_diff_that_reads_back_as_it() -> None:
    serve = "vllm serve meta-llama/Llama-3.1-8B-Instruct \\\n  -tp $TP --max-model-len 4096\n"
    text = f"#!/bin/bash\nTP=8  # all of them\n{serve}"
    found = checked(text, search=True, load=ServingFlags(isl=256, osl=64, concurrency=128))
    best = found.changes[0]
    assert best.plan.deployment.pool.tp < 8
    lines = best.diff.splitlines()
    removed = [line[1:] for line in lines if line.startswith("-") and not line.startswith("---")]
    assert all(line in text for line in removed)
    kept = [line[1:] for line in lines[3:] if not line.startswith("-")]
    again = checked("\n".join(kept), load=ServingFlags(isl=256, osl=64, concurrency=128))
    assert again.answer is not None
    assert again.answer.deployment.pool == best.plan.deployment.pool
    assert again.answer.estimate is not None
    assert again.answer.estimate.tpot_s.value == pytest.approx(best.plan.estimate.tpot_s.value)


def test_the_command_line_of_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "serve.sh"
    path.write_text("vllm serve meta-llama/Llama-3.1-8B-Instruct -tp 8\n")
    assert main(["check", str(path), "--concurrency", "128", "--isl", "128", "--osl", "32", "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert {"framework", "version", "legal", "problems", "unknown", "estimate", "changes", "best"} <= set(document)
    assert document["schema_version"] == 1
    assert {"what", "diff", "step_s", "fits"} <= set(document["changes"][0])
    assert {"plan", "estimate", "diff"} <= set(document["best"])
    assert main(["check", str(path), "--seq-len", "128"]) == 2
    path.write_text("vllm serve meta-llama/Llama-3.1-8B-Instruct -tp 3\n")
    assert main(["check", str(path), "--no-search"]) == 3
    trainer = tmp_path / "train.toml"
    trainer.write_text("[parallelism]\n")
    capsys.readouterr()
    assert main(["check", str(trainer), "--concurrency", "4"]) == 2
    said = capsys.readouterr().err
    assert "an option of serving" in said
    assert "--task" not in said, "check has no such flag"


def test_python_asks_the_same(tmp_path: Path) -> None:
    file = tmp_path / "serve.sh"
    file.write_text("vllm serve meta-llama/Llama-3.1-8B --tensor-parallel-size 2 --max-model-len 8k")

    found = package.check(file, isl=256, osl=32, concurrency=8, search=False)

    reported = checked(file.read_text())
    assert isinstance(found.checked, CheckedServing)
    assert found.checked.answer is not None
    assert reported.answer is not None
    assert found.checked.answer.estimate == reported.answer.estimate
    with pytest.raises(UserError, match="--seq-len"):
        package.check(file, seq_len=512)
    with pytest.raises(UserError, match="tp"):
        package.check(file, tp=2)
    with pytest.raises(UserError, match="isl"):
        package.check(ROOT / "examples" / "check" / "torchtitan_llama3_8b.toml", isl=512)


@pytest.mark.parametrize(("said", "tokens"), [("8k", 8000), ("8K", 8192), ("4096", 4096)])
def test_numbers_of_tokens_are_read_as_vllm_writes_them(said: str, tokens: int) -> None:
    found = checked(f"vllm serve meta-llama/Llama-3.1-8B --max-num-batched-tokens {said}")

    assert found.answer is not None
    assert found.answer.deployment.max_num_batched_tokens == tokens


def test_a_share_above_the_whole_is_refused() -> None:
    found = checked("vllm serve meta-llama/Llama-3.1-8B --gpu-memory-utilization 7")

    assert any("at most 1" in problem for problem in found.problems)


def test_a_command_without_a_known_model_is_refused() -> None:
    for text in ("vllm serve", "vllm serve someone/something-else"):
        with pytest.raises(BadInput):
            checked(text)
    assert checked("vllm serve someone/something-else", CheckFlags(model="qwen3-8b")).answer is not None


@examples(80)
@given(
    st.lists(
        st.sampled_from(
            [
                "vllm",
                "serve",
                "Qwen/Qwen3-8B",
                "-tp",
                "--tensor-parallel-size",
                "--data-parallel-size=2",
                "4",
                "99999999999",
                "-1",
                "''",
                "$X",
                "--",
                "\\\n",
                "--quantization",
                "fp8",
                "--enable-expert-parallel",
                "true",
                "--max-model-len",
                "=",
                "#",
            ]
        ),
        max_size=12,
    )
)
def test_any_command_is_judged_or_refused(words: list[str]) -> None:
    text = "vllm serve " + " ".join(words)
    try:
        found = checked(text, CheckFlags(model="qwen3-8b", gpus=8))
    except PlannerError:
        return
    assert found.legal or found.problems


def test_abbreviations_as_argparse_has_them() -> None:
    keys = schema("sglang", VERSIONS["sglang"])["keys"]
    assert setting_of(flag_of("--tp", keys), keys) == "tp_size"
    assert flag_of("--enable", keys) == "", "many flags begin so"
    assert serving_engine("torchrun train.py") == ""
    assert re.fullmatch(r"\d+\.\d+\.\d+", VERSIONS["vllm"])


def test_limits_of_a_rank_are_those_that_sglang_gives_it() -> None:
    """SGLang divides both limits by the ranks of attention: `chunked_prefill_size // dp_size` of its server_args.py and
    `max_running_requests // dp_size` of its pool configurator.
    """
    for ranks in (1, 8):
        pool = Pool(tp=8 // ranks, dp_attention=ranks, ep=8)
        deployment = Deployment(engine="sglang", pool=pool, max_num_seqs=96, max_num_batched_tokens=4096)
        words = command(deployment, pool, "deepseek-ai/DeepSeek-R1", longest=4096)
        flags = dict(pairwise(words))
        assert int(flags["--max-running-requests"]) // ranks == 96
        assert int(flags["--chunked-prefill-size"]) // ranks == 4096

        answer = checked(" ".join(words)).answer
        assert answer is not None
        assert (answer.deployment.max_num_seqs, answer.deployment.max_num_batched_tokens) == (96, 4096)


def test_a_change_of_the_ranks_of_attention_keeps_the_limits_of_each() -> None:
    text = (
        "sglang serve --model Qwen/Qwen3-30B-A3B --tp-size 8 --attn-dp-size 8 --ep-size 8"
        " --max-running-requests 64 --chunked-prefill-size 65536"
    )
    changes = checked(text, search=True, load=replace(LOAD, concurrency=64)).changes
    assert {change.plan.deployment.pool.dp_attention for change in changes} == {1, 2}
    for change in changes:
        assert change.plan.deployment.max_num_seqs == 8
        assert f"--max-running-requests 64 -> {8 * change.plan.deployment.pool.dp_attention}" in change.what
