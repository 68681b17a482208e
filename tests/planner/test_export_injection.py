"""Names are data: whatever they hold, files parse back to exactly them, and scripts start nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from planner.export.job_files import slug
from planner.export.launchers.trainjob import NAME_ANNOTATION
from planner.export.targets.registry import TARGETS, export, find_target
from tests.planner.test_export import FSDP, job

NASTY = [
    '"; touch pwned; #',
    "' ; touch pwned ; '",
    "$(touch pwned)",
    "`touch pwned`",
    "a\ntouch pwned\n",
    "a\r\n#SBATCH --wrap=touch\n",
    "REQUEST\ntouch pwned\n",
    "!!python/object/apply:os.system ['touch pwned']",
    "a: b\n- c: {d: &e [*e]}",
    '"""\n[job]\ndump_folder = "/"\n',
    "\\u0041\\n\\",
    "%s {0} ${HOME} $HOME ~ * ?",
    "\x1b[31mred\x07\x00",
    "ümläut 模型 🙂",
    "-" * 300,
    "",
]
anything = st.one_of(st.sampled_from(NASTY), st.text(max_size=60))


def nasty(name: str, framework: str = "torchtitan"):
    made = job(FSDP.with_(placement=(1, 0, 2, 3, 4, 5, 6, 7)), framework=framework)
    asked = made.question
    question = replace(asked, model=replace(asked.model, name=name), cluster=replace(asked.cluster, name=name))
    return replace(made, name=name, question=question)


@given(anything)
def test_toml_and_json_hold_the_name_as_it_is(name: str) -> None:
    toml = tomllib.loads(export(nasty(name), find_target("torchtitan@0.2.2")).text)
    assert toml["job"] == {"description": name}
    assert toml["model"] == {"name": "llama3", "flavor": "8B"}
    document = json.loads(export(nasty(name), find_target("deepspeed")).text)
    assert document["meshwright"]["model"] == document["meshwright"]["cluster"] == name


@given(anything)
def test_yaml_holds_the_name_as_it_is(name: str) -> None:
    manifest = yaml.safe_load(export(nasty(name), find_target("trainjob")).text)
    assert manifest["metadata"]["annotations"][NAME_ANNOTATION] == name
    assert set(manifest) == {"apiVersion", "kind", "metadata", "spec"}
    for target in ("skypilot", "accelerate"):
        assert isinstance(yaml.safe_load(export(nasty(name), find_target(target)).text), dict)


@given(anything)
def test_short_names_are_dns_labels_and_differ(name: str) -> None:
    assert re.fullmatch(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?", slug(name))
    assert slug(name) == slug(name)
    assert slug(slug(name)) == slug(name) or len(slug(name)) > 40
    assert slug(f"{name}!") != slug(name)


@given(anything)
def test_headers_stay_comments(name: str) -> None:
    for target in TARGETS:
        if target.file_name.endswith(".json"):  # a format without comments
            continue
        lines = export(nasty(name), target).text.splitlines()
        head = lines[bool(target.first_line) : lines.index("#")]
        assert all(line.startswith("# ") for line in head)
        assert not any(line.startswith("#SBATCH") for line in head)


FAKE = '#!/bin/sh\nprintf "%s\\0" "$0" "$@" >> "$LOG"\n'
# What the batch script hands to srun is run by a shell on each node.
SRUN = '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n'


STARTED = [(to, "torchtitan") for to in ("torchrun", "torchtitan", "megatron")] + [
    (to, framework)
    for to in ("slurm", "skypilot")
    for framework in ("torchtitan", "megatron-lm", "deepspeed", "pytorch")
]


@pytest.mark.parametrize(("to", "framework"), STARTED)
@pytest.mark.parametrize("name", NASTY, ids=lambda name: repr(name)[:24])
def test_scripts_start_torchrun_and_nothing_else(to: str, framework: str, name: str, tmp_path: Path) -> None:
    text = export(nasty(name, framework), find_target(to)).text
    if to == "skypilot":
        text = yaml.safe_load(text)["run"]
    tools, here = tmp_path / "tools", tmp_path / "here"
    tools.mkdir()
    here.mkdir()
    for command, script in (("torchrun", FAKE), ("srun", SRUN)):
        (tools / command).write_text(script)
        (tools / command).chmod(0o755)
    script = here / "script.sh"
    script.write_text(text)
    run = subprocess.run(
        ["sh", script.name],
        cwd=here,
        env={"PATH": f"{tools}{os.pathsep}/usr/bin:/bin", "LOG": str(tmp_path / "log")},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert run.returncode == 0, run.stderr
    words = (tmp_path / "log").read_text().split("\0")
    assert words[0].endswith("/torchrun")
    assert "--nproc-per-node=8" in words
    made = {path.name for path in here.iterdir()} - {script.name}
    ours = {"torchtitan_config.py", "deepspeed.json"}
    assert all(re.fullmatch(r"meshwright-[0-9a-f]{16}", name) for name in made - ours)
    if to == "torchrun":
        (request,) = here.glob("meshwright-*/request.json")
        assert json.loads(request.read_text())["model"]["name"] == name
