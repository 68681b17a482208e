"""Write every example plan for every target, and ask the real parsers what they read.

    python tests/tools/export_table.py                                   # examples/exports/ only
    python tests/tools/export_table.py --with torchtitan@0.2.2=/v/bin/python --with slurm@22.05=python3

`--with` names an interpreter whose environment has the tool (tests/tools/export_schemas.py says how to make one); with
any of them examples/validation/exports.md is written too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from planner.export.draft import Exported, Target  # noqa: E402
from planner.export.job import export_job  # noqa: E402
from planner.export.targets.registry import TARGETS, export  # noqa: E402
from planner.question.cases import case_of_file  # noqa: E402
from tests.tools.export_readers import plain, same  # noqa: E402
from topology.errors import Infeasible  # noqa: E402

PLANS = sorted((ROOT / "examples" / "plans").glob("*.json"))
FOLDER = ROOT / "examples" / "exports"
TABLE = ROOT / "examples" / "validation" / "exports.md"
REFUSED = "refused.txt"
HEAD = """# Exports, read back by the tools themselves

Each example plan (`examples/plans/`), written for each target, then handed to the real parser of that version, which had to
read every setting as it was written. Nothing was started. Refused plans have no row; `examples/exports/*/refused.txt` says why.
Made by `python tests/tools/export_table.py --with TARGET@VERSION=PYTHON ...`; the same is asked of a dozen more plans by
`pytest -m parsers tests/planner/test_export_parsers.py` wherever one of the tools is installed.

Reading is not running: the gate also builds exports with the tools' own code on a fake process group, and compares world,
degrees, batch, accumulation, stages, recomputed blocks, parameters a rank and types with the plan
(`tests/planner/test_export_builds.py`): torchtitan 0.2.2, Megatron-Core 0.19.2, DeepSpeed 0.19.8 and accelerate 1.15.0. torchtitan 0.3.0 is built by
hand with the same test, through its DTensor backend (its default one needs a torch newer than 2.13), with the same answers.
megatron-core's wheel has no `pretrain_gpt.py`: what is built is `GPTModel` over its own arguments, checks and process groups, with
its local layers in the place of Transformer Engine's, which need a GPU.

| parser | what reads |
|---|---|
| torchtitan | `torchtitan.config.ConfigManager.parse_args` of the wheel |
| megatron | `megatron.training.arguments`: the parser, then `validate_args` for the plan's number of ranks (wheel of megatron-core) |
| deepspeed | `deepspeed.runtime.config.DeepSpeedConfig` |
| accelerate | `accelerate launch`'s parser and `_validate_launch_command` |
| slurm | `sbatch -vv --test-only`, which lists the options it understood |
| trainjob | the pydantic models of `kubeflow-trainer-api` |
| skypilot | `sky.Task.from_yaml_config` |
| torchrun | `torch.distributed.run.get_args_parser` |

"""


def files(plan: Path) -> dict[str, str]:
    """Return what belongs into a plan's folder: a file a target, and why the others refused."""
    made: dict[str, str] = {}
    refused = []
    for target in TARGETS:
        try:
            made[_name(target)] = export(export_job(case_of_file(str(plan))), target).text
        except Infeasible as error:
            refused.append(f"{target.name} {target.version}: {error}\n")
    if refused:
        made[REFUSED] = "\n".join(refused)
    return made


def _name(target: Target) -> str:
    return target.file_name


def read_back(files: Sequence[Exported], python: str) -> list[tuple[int, list[str]]]:
    """Return for each file of one target how many settings its parser read as written, and those that it did not."""
    with tempfile.TemporaryDirectory() as folder:
        asked = Path(folder, "files.json")
        asked.write_text(json.dumps([{"text": done.text, "keys": list(done.settings)} for done in files]))
        script = ROOT / "tests" / "tools" / "export_readers.py"
        run = subprocess.run(
            [python, "-W", "ignore", str(script), files[0].target, str(asked)],
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
            cwd=folder,
        )
    if run.returncode:
        last = (run.stderr.strip().splitlines() or [f"exit {run.returncode}"])[-1]
        return [(0, [last]) for _ in files]
    return [
        _compared(done, answer) for done, answer in zip(files, json.loads(run.stdout.splitlines()[-1]), strict=True)
    ]


def _compared(done: Exported, answer: dict[str, Any]) -> tuple[int, list[str]]:
    if "error" in answer:
        return 0, [answer["error"]]
    read, written = answer["read"], plain(done.settings)
    differ = [f"{key}: wrote {v!r}, read {read.get(key)!r}" for key, v in written.items() if not same(v, read.get(key))]
    return len(written) - len(differ), differ


def table(pythons: dict[str, str]) -> str:
    lines = ["| target | version | plan | fields set | read back equal | differences |", "|---|---|---|--:|--:|---|"]
    for target in TARGETS:
        made = {}
        for plan in PLANS:
            try:
                made[plan.stem] = export(export_job(case_of_file(str(plan))), target)
            except Infeasible:
                continue
        python = pythons.get(f"{target.name}@{target.version}")
        answers = read_back(list(made.values()), python) if python and made else [None] * len(made)
        for (plan, done), answer in zip(made.items(), answers, strict=True):
            equal, differ = answer or ("not read", ["its package was not at hand"])
            said = "; ".join(differ)[:300] or "-"
            lines.append(f"| {target.name} | {target.version} | {plan} | {len(done.settings)} | {equal} | {said} |")
            print(lines[-1])
    return HEAD + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--with", dest="pythons", action="append", default=[], metavar="TARGET@VERSION=PYTHON")
    options = parser.parse_args()
    for plan in PLANS:
        folder = FOLDER / plan.stem
        folder.mkdir(parents=True, exist_ok=True)
        made = files(plan)
        for path in folder.iterdir():
            if path.name not in made:
                path.unlink()
        for name, text in made.items():
            (folder / name).write_text(text)
    if options.pythons:
        TABLE.write_text(table(dict(pair.split("=", 1) for pair in options.pythons)))


if __name__ == "__main__":
    main()
