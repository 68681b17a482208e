"""`planner check DIR`: every configuration of a repository, as a table, JSON and SARIF."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "examples" / "check"
TYPO = """{"train_micro_batch_size_per_gpu": 1,
 "bf16": {"enabled": true},
 "zero_optimization": {"stage": 2,
  "overlap_com": true}}
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "configs" / "deep").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    for name in ("megatron_gpt3_175b.sh", "torchtitan_llama3_8b.toml"):
        shutil.copy(KEPT / name, tmp_path / "configs" / name)
    (tmp_path / "configs" / "deep" / "ds.json").write_text(TYPO)
    (tmp_path / ".hidden" / "ds.json").write_text(TYPO)
    (tmp_path / "package.json").write_text('{"name": "something else"}')
    (tmp_path / "broken.yaml").write_text("a: [")
    (tmp_path / "broken_one.yaml").write_text("per_device_train_batch_size: 1\n# parallel\n  a: [")
    (tmp_path / "run.sh").write_text("pip install -r requirements.txt\n")
    return tmp_path


def test_a_folder_is_a_row_a_configuration(planner, repository: Path) -> None:
    done = planner("check", repository, "--json")
    found = json.loads(done.stdout)
    rows = {row["file"]: row for row in found["rows"]}

    assert done.returncode == 3  # one of them is illegal
    assert rows.keys() == {
        "broken_one.yaml",
        "configs/deep/ds.json",
        "configs/megatron_gpt3_175b.sh",
        "configs/torchtitan_llama3_8b.toml",
    }
    assert {file: row["legal"] for file, row in rows.items()} == {
        "broken_one.yaml": None,
        "configs/deep/ds.json": True,
        "configs/megatron_gpt3_175b.sh": False,
        "configs/torchtitan_llama3_8b.toml": True,
    }
    assert rows["configs/deep/ds.json"]["model"] is None
    titan = rows["configs/torchtitan_llama3_8b.toml"]
    assert titan["changes"][0]["step_s"] < titan["estimate"]["step_s"]["value"]
    assert found["summary"] == {"files": 7, "configurations": 4, "legal": 2, "illegal": 1, "open": 1}


def test_sarif_says_where_each_finding_is(planner, repository: Path) -> None:
    found = json.loads(planner("check", repository, "--sarif").stdout)

    assert found["version"] == "2.1.0"
    (run,) = found["runs"]
    rules = {rule["id"] for rule in run["tool"]["driver"]["rules"]}
    said = {}
    for result in run["results"]:
        assert result["ruleId"] in rules
        assert result["level"] in {"none", "note", "warning", "error"}
        place = result["locations"][0]["physicalLocation"]
        file = place["artifactLocation"]["uri"]
        assert place["region"]["startLine"] <= len((repository / file).read_text().splitlines())
        said[file, result["ruleId"]] = (result["level"], place["region"]["startLine"], result["message"]["text"])
    assert said["configs/megatron_gpt3_175b.sh", "configuration"][0] == "error"
    level, line, text = said["configs/deep/ds.json", "unknown-field"]
    assert (level, line) == ("warning", 4)
    assert "overlap_comm?" in text
    diff = said["configs/torchtitan_llama3_8b.toml", "change"][2].partition("\n")[2]
    applied = subprocess.run(
        ["git", "apply", "--check", "--unsafe-paths", "-"],
        cwd=repository / "configs",
        input=diff,
        text=True,
        check=False,
    )
    assert applied.returncode == 0


def test_a_folder_without_configurations_says_so(planner, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: 1\n")
    done = planner("check", tmp_path)

    assert done.returncode == 2
    assert "1 files with the endings" in done.stderr
    assert planner("check", KEPT / "accelerate_fsdp1.yaml", "--sarif").returncode == 2
