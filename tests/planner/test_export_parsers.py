"""Exports, read back by the real parser of the tool: for whoever has the tool installed.

`pytest -m parsers` in an environment that has one of the packages; the others are skipped, each with its reason.
tests/tools/export_table.py asks all of them at once.
"""

from __future__ import annotations

import shutil
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest

from planner.export.targets.registry import TARGETS, export
from tests.planner.target_schemas import schema_of
from tests.planner.test_export import JOBS
from tests.tools.export_schemas import package_version
from tests.tools.export_table import read_back
from topology.errors import Infeasible

pytestmark = [pytest.mark.parsers, pytest.mark.slow]


def _installed(target) -> str | None:
    """Return the version of a target's tool in this environment, None where it is not there."""
    if target.name == "slurm":
        return package_version("slurm") if shutil.which("sbatch") else None
    try:
        version(schema_of(target.name, target.version)["package"])
    except PackageNotFoundError:
        return None
    return package_version(target.name)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"{target.name}@{target.version}")
def test_real_parser_reads_every_value_back(target) -> None:
    found = _installed(target)
    if found != target.version:
        pytest.skip(f"{target.title} {target.version} is not installed here (found {found})")
    done = {}
    for name, job in JOBS.items():
        try:
            done[name] = export(job, target)
        except Infeasible:
            continue
    for name, (equal, differ) in zip(done, read_back(list(done.values()), sys.executable), strict=True):
        assert not differ, name
        assert equal == len(done[name].settings)
