"""SECURITY.md is true to the letter: its sentences have tests, and its numbers are the code's."""

import hashlib
import re
from pathlib import Path

import pytest

from planner import cli
from planner.commands.service import NEEDS, read_tokens
from planner.commands.trace import MAX_INSTRUCTIONS
from planner.configs.formats.documents import MAX_CHARACTERS
from planner.runs.run_report import MAX_TRACE_BYTES
from simulator.config import verify
from simulator.legality.pipeline import MOST_PASSES
from tests.fuzz.watch import watching
from tests.topology.test_probe_machine import probe, smi
from topology import codec
from topology.catalog.platform import MAX_GPUS_PER_NODE
from topology.catalog.verify import MAX_GPUS
from topology.errors import BadInput
from topology.probe import from_machine
from topology.probe.from_text import MAX_DOMAIN_GPUS, MAX_HOST_GPUS
from topology.profile.profile import MOST_LAYER_RUNS, MOST_SAMPLES
from topology.readers import nccl_xml

ROOT = Path(__file__).resolve().parents[1]
TEXT = re.sub(
    r"\s+", " ", re.sub(r"\*\*[^*]+\*\*|`|\n", " ", (ROOT / "SECURITY.md").read_text("utf-8").partition("\n\n")[2])
)
MIB = 1 << 20


def test_every_sentence_is_shown_by_a_test_that_exists() -> None:
    table = (ROOT / "examples" / "validation" / "security.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| (.+?) \| (.+) \|$", table, re.MULTILINE))
    sentences = re.split(r"(?<=\.)\s+(?=[A-Z]|planner |--)", TEXT.strip())

    assert [one for one in sentences if not any(re.sub(r"\s+", " ", one).startswith(row) for row in rows)] == []
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", table)
    assert len(named) > len(rows) / 2
    assert [pair for pair in named if f"def {pair[1]}(" not in (ROOT / pair[0]).read_text("utf-8")] == []


@pytest.mark.parametrize(
    ("words", "bounds"),
    [
        (r"A file has at most (\d+) MiB", {codec.MAX_BYTES / MIB}),
        (r"\(a timeline (\d+)\)", {MAX_TRACE_BYTES / MIB}),
        (r"a configuration of another tool (\d+)", {MAX_CHARACTERS / MIB}),
        (r"the output of nvidia-smi (\d+) MiB", {from_machine.MAX_OUTPUT_BYTES / MIB}),
        (r"NCCL's XML (\d+) MiB", {nccl_xml.MAX_BYTES / MIB}),
        (r"a text of one host (\d+) GPUs", {MAX_HOST_GPUS}),
        (r"an NVLink domain (\d+)", {MAX_DOMAIN_GPUS, MAX_GPUS_PER_NODE}),
        (r"a cluster 2\^(\d+)", {MAX_GPUS.bit_length() - 1}),
        (r"a plan 2\^(\d+)", {verify.MAX_GPUS.bit_length() - 1}),
        (r"a model ([\d,]+) layers", {verify.MAX_LAYERS}),
        (r"a timeline ([\d,]+) instructions", {MAX_INSTRUCTIONS}),
        (r"a profile ([\d,]+) samples\s+of a kind", {MOST_SAMPLES}),
        (r"and ([\d,]+) runs of layers", {MOST_LAYER_RUNS}),
        (r"a schedule ([\d,]+) ranks x ranks x stages a rank", {MOST_PASSES}),
    ],
)
def test_bounds_are_those_of_the_code(words: str, bounds: set[float]) -> None:
    (stated,) = re.findall(words, TEXT.replace(" ,", ",").replace("  ", " "))

    assert bounds == {int(stated.replace(",", ""))}


def test_uploads_are_bounded_as_the_explorer_is_told() -> None:
    assert "maxUploadSize = 4 " in (ROOT / "ui" / "config.toml").read_text("utf-8")
    assert "an upload and the output of" in TEXT


@pytest.mark.parametrize(
    "words",
    [
        "estimate --model tiny-llama --cluster dgx-h100 --gpus 2 --dp-shard 2 --seq-len 256 --out plan.json",
        "suggest --model tiny-llama --cluster dgx-h100 --gpus 2 --seq-len 256 --no-simulate",
        "collective --cluster dgx-h100",
        "probe --from dgx-h100",
        "doctor --cluster dgx-h100",
    ],
)
def test_commands_that_compute_start_nothing(words: str, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    with watching(tmp_path) as seen:
        code = cli.main(words.split())

    assert code == 0, capsys.readouterr().err
    assert seen == []


def test_nvidia_smi_is_asked_by_a_fixed_list(tmp_path) -> None:
    asked = []

    def run(arguments, timeout_s):
        asked.append((tuple(arguments), timeout_s))
        return smi()(arguments, timeout_s)

    probe(tmp_path, run=run)

    fixed = {from_machine.LIST, from_machine.QUERY, from_machine.TOPO, *from_machine.P2P, *from_machine.NVLINK}
    assert {words for words, _ in asked} <= fixed
    assert {seconds for _, seconds in asked} == {2.0}


def test_other_addresses_than_loopback_need_tokens(capsys) -> None:
    for name in NEEDS:
        pytest.importorskip(name, reason=f"{name} is not installed: pip install 'meshwright[service]'")

    assert cli.main(["service", "--host", "0.0.0.0"]) == 2  # noqa: S104 - refused
    assert "needs --tokens" in capsys.readouterr().err


def test_tokens_are_kept_as_digests(tmp_path) -> None:
    path = tmp_path / "tokens"
    path.write_text("ada:a token that is long enough\n")
    path.chmod(0o644)
    with pytest.raises(BadInput, match="read by others"):
        read_tokens(path)
    path.chmod(0o600)

    assert read_tokens(path) == {"ada": hashlib.sha256(b"a token that is long enough").hexdigest()}


def test_temporary_folders_have_no_fixed_names() -> None:
    """`tempfile` makes what only its user may enter; nothing else names the temporary directory."""
    for package in ("topology", "simulator", "planner", "executor", "ui"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text("utf-8")

            assert not re.search(r"[\"']/tmp\b|mktemp\(", text), path
            assert text.count("gettempdir()") == text.count('gettempdir()) / f"torchinductor_'), path
