"""Try N damaged inputs of every format and write the table: `python tests/bench/fuzz_table.py N OUT.md [FORMAT...]`.

Takes minutes a format at 10,000. An internal error is listed with the line that raised it, so that it can become a
seed.
"""

from __future__ import annotations

import argparse
import platform
import resource
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz.formats import FORMATS, wrong_numbers
from topology.errors import PlannerError


@dataclass(slots=True)
class Count:
    answered: int = 0
    refused: int = 0
    internal: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    seconds: float = 0.0


def attack(name: str, inputs: int, folder: Path) -> Count:
    """Return what became of so many inputs of one format; the first input of every kind of failure is kept in
    `folder`.
    """
    count, started = Count(), time.monotonic()

    @settings(
        max_examples=inputs,
        database=None,
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(FORMATS[name].inputs())
    def one(text: str) -> None:
        begun = time.monotonic()
        try:
            shown = FORMATS[name].read(text, folder / "input.json")
        except PlannerError:
            count.refused += 1
        except Exception as error:  # noqa: BLE001 - what is looked for
            at = traceback.extract_tb(error.__traceback__)[-1]
            _keep(count.internal, f"{type(error).__name__} at {Path(at.filename).name}:{at.lineno}", text, folder)
        else:
            count.answered += 1
            for problem in list(wrong_numbers(shown))[:1]:
                _keep(count.wrong, problem.partition(" is ")[0][:80], text, folder)
        count.slowest_s = max(count.slowest_s, time.monotonic() - begun)

    one()
    count.seconds = time.monotonic() - started
    return count


def _keep(found: Counter[str], what: str, text: str, folder: Path) -> None:
    found[what] += 1
    if found[what] == 1:
        (folder / f"{abs(hash(what)):x}.txt").write_text(f"{what}\n{text}", "utf-8", errors="replace")


def main(inputs: int, out: Path, names: list[str]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="meshwright-fuzz-"))
    how = (
        f"`python tests/bench/fuzz_table.py {inputs} FILE` on {datetime.now(UTC):%Y-%m-%d}, Python"
        f" {platform.python_version()}, {platform.machine()}. *answered*: read and used as the commands do; *refused*: an error"
        " of ours with its field; *internal*: any other exception; *wrong*: a number that is not finite, of the wrong sign,"
        " or outside its own range in what was shown. The generators and the corpus are in `tests/fuzz`."
    )
    lines = [
        "# Damaged inputs, format by format",
        "",
        how,
        "",
        "| format | inputs | answered | refused | internal | wrong | slowest, s | together, s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    found = []
    for name in names:
        count = attack(name, inputs, folder)
        tried = count.answered + count.refused + count.internal.total()
        counts = f"{count.answered} | {count.refused} | {count.internal.total()} | {count.wrong.total()}"
        lines.append(f"| {name} | {tried} | {counts} | {count.slowest_s:.1f} | {count.seconds:.0f} |")
        found += [f"- {name}: {what}, {n} times" for what, n in (count.internal + count.wrong).most_common()]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        memory = f"Largest resident set of the whole run: {peak:.1f} GiB."
        out.write_text("\n".join([*lines, "", memory, *found, ""]), "utf-8")
        print(lines[-1], *found[-8:], sep="\n", flush=True)
    print(f"inputs that failed are in {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", type=int)
    parser.add_argument("out", type=Path)
    parser.add_argument("formats", nargs="*", default=list(FORMATS))
    options = parser.parse_args()
    main(options.inputs, options.out, options.formats)
