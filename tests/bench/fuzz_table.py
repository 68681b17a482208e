"""Try N damaged inputs of every format: `python -m tests.bench.fuzz_table 10000 OUT.jsonl [FORMAT...]`.

Processes take the inputs in parts of `PART`, each with a seed of its own, and append what became of a part as a line.
Parts that are in OUT.jsonl are not tried again, so runs can be cut and go on, also on other machines. The table of all
lines is printed at the end. An internal error is listed with the line that raised it and kept with its input, so that
it can become a seed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import signal
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.formats import FORMATS, wrong_numbers
from topology.errors import PlannerError

PART = 250  # inputs
LONGEST_S = 120.0  # CPU seconds of an input
MOST_BYTES = 8 * 2**30  # of address space


class TooLong(BaseException):
    """An input that has taken `LONGEST_S`; no handler of the product catches it."""


@dataclass(slots=True)
class Count:
    """What became of the inputs of a part."""

    format: str
    part: int
    answered: int = 0
    refused: int = 0
    internal: dict[str, int] = field(default_factory=dict)  # how often, by what and where
    wrong: dict[str, int] = field(default_factory=dict)
    slowest_s: float = 0.0
    seconds: float = 0.0
    peak_gib: float = 0.0
    kept: dict[str, str] = field(default_factory=dict)  # the first input of each kind of failure


def attack(name: str, part: int, inputs: int = PART) -> Count:
    """Return what became of so many inputs of a format; seconds are of CPU time."""
    count, started = Count(name, part), time.process_time()

    @seed(part)
    @settings(
        max_examples=inputs,
        database=None,
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(FORMATS[name].inputs())
    def one(text: str) -> None:
        begun = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, LONGEST_S)
        try:
            shown = FORMATS[name].read(text, folder / "input.json")
        except PlannerError:
            count.refused += 1
        except TooLong:
            _keep(count, count.internal, f"more than {LONGEST_S:g} CPU s", text)
        except Exception as error:  # noqa: BLE001 - what is looked for
            at = traceback.extract_tb(error.__traceback__)[-1]
            _keep(count, count.internal, f"{type(error).__name__} at {Path(at.filename).name}:{at.lineno}", text)
        else:
            count.answered += 1
            for problem in list(wrong_numbers(shown))[:1]:
                _keep(count, count.wrong, problem.partition(" is ")[0][:80], text)
        signal.setitimer(signal.ITIMER_PROF, 0)
        count.slowest_s = max(count.slowest_s, time.process_time() - begun)

    with tempfile.TemporaryDirectory(prefix="meshwright-fuzz-") as made:
        folder = Path(made)
        one()
    count.seconds = time.process_time() - started
    count.peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return count


def _keep(count: Count, found: dict[str, int], what: str, text: str) -> None:
    found[what] = found.get(what, 0) + 1
    count.kept.setdefault(what, text[:200_000])


def _end(_signal: int, _frame: FrameType | None) -> None:
    raise TooLong


def _prepare() -> None:
    signal.signal(signal.SIGPROF, _end)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, resource.RLIM_INFINITY))


def _attack(task: tuple[str, int]) -> str:
    return json.dumps(asdict(attack(*task)))


def try_parts(tasks: list[tuple[str, int]], out: Path, workers: int, seconds: float) -> None:
    """Append a line for every part that ends within `seconds`."""
    until = time.monotonic() + seconds
    context = multiprocessing.get_context("fork")
    with context.Pool(workers, _prepare, maxtasksperchild=20) as pool, out.open("a", encoding="utf-8") as file:
        found = pool.imap_unordered(_attack, tasks)
        for _ in tasks:
            try:
                file.write(found.next(timeout=max(until - time.monotonic(), 0.0)) + "\n")
            except multiprocessing.TimeoutError:
                print(f"stopped after {seconds:g} s", flush=True)
                break
            file.flush()
        pool.terminate()


def lines(counts: list[Count]) -> Iterator[str]:
    """Yield the table of all parts, and what was found."""
    yield "| format | inputs | answered | refused | internal | wrong | slowest, CPU s | together, CPU s |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    by_format = defaultdict[str, list[Count]](list)
    for count in counts:
        by_format[count.format].append(count)
    found: list[str] = []
    for name in (name for name in FORMATS if name in by_format):
        parts = by_format[name]
        answered, refused = sum(one.answered for one in parts), sum(one.refused for one in parts)
        internal, wrong = (
            sum((Counter(getattr(one, what)) for one in parts), Counter[str]()) for what in ("internal", "wrong")
        )
        slowest_s, together_s = max(one.slowest_s for one in parts), sum(one.seconds for one in parts)
        yield (
            f"| {name} | {answered + refused + internal.total()} | {answered} | {refused} | {internal.total()} |"
            f" {wrong.total()} | {slowest_s:.1f} | {together_s:.0f} |"
        )
        found += [f"- {name}: {what}, {number} times" for what, number in (internal + wrong).most_common()]
    yield f"\nMost memory of a process: {max(one.peak_gib for one in counts):.1f} GiB."
    yield from found


def read(out: Path) -> list[Count]:
    """Return the parts that were tried."""
    return [Count(**json.loads(line)) for line in out.read_text("utf-8").splitlines()] if out.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", type=int)
    parser.add_argument("out", type=Path)
    parser.add_argument("formats", nargs="*", default=list(FORMATS))
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=1e6)
    options = parser.parse_args()
    tried = {(one.format, one.part) for one in read(options.out)}
    parts = range(-(-options.inputs // PART))
    tasks = [(name, part) for part in parts for name in options.formats if (name, part) not in tried]
    try_parts(tasks, options.out, options.workers, options.seconds)
    print("\n".join(lines(read(options.out))))


if __name__ == "__main__":
    main()
