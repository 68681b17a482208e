"""Sharding cases with known answers against the planner's, and each program run on virtual ranks.

    python tests/bench/sharding_table.py CASES.json [--also OVERLAY.json] [--run]

A case of the file may carry `expect` (placements by tensor), `expected_collectives` and
`expected_ring_send_bytes_per_rank`; none of them is shown to the planner. OVERLAY maps ids to fields that a case states
only in prose (`schedule`, `stages`, `routed`). `--run` computes every case with numpy on one array a rank.
"""

import argparse
import json
import sys
from fractions import Fraction
from math import prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from planner.sharding.answers import answered
from planner.sharding.problem import problem_of
from tests.planner.sharding import cases, virtual_ranks

ASKED = ("id", "mesh", "axes", "ops", "inputs", "pins", "policy", "schedule", "stages", "routed")
LARGEST = 1 << 20  # elements of an array worth computing with
COMPARED = ("kind", "mesh_dim", "bytes_in", "bytes_out", "ring_send_bytes_per_rank")


def key(collective):
    return tuple(Fraction(v) if isinstance(v, float) else v for v in (collective[k] for k in COMPARED))


def differences(case, row):
    """What of the known answer the planner's is not."""
    if row["rejected"] is not None:
        return [f"rejected: {row['rejected']}"]
    found = []
    for name, known in case.get("expect", {}).items():
        if row["placements"].get(name) != known["placements"]:
            found.append(f"{name} is {row['placements'].get(name)}, known {known['placements']}")
    known = case.get("expected_collectives")
    if isinstance(known, list):
        ours = [key(one) for one in row["collectives"]]
        if ours != [key(one) for one in known]:
            same = sorted(map(str, ours)) == sorted(str(key(one)) for one in known)
            shown = ", ".join(f"{one['kind']} {one['bytes_in']} B" for one in row["collectives"])
            found.append("collectives in another order" if same else f"collectives: {shown or 'none'}")
    elif isinstance(known, dict):
        found += per_rank(known["per_rank"], row["collectives"])
    total = case.get("expected_ring_send_bytes_per_rank")
    if total is not None and total != row["ring_send_bytes_per_rank"]:
        found.append(f"{row['ring_send_bytes_per_rank']} ring bytes, known {total}")
    return found


def per_rank(known, ours):
    """Where ranks differ: every rank's collectives, a message being one of its sender and one of its receiver."""
    if any(one["kind"] == "send_recv" for one in ours):
        sides = sum(len(rank) for rank in known)
        return [] if sides == 2 * len(ours) else [f"{len(ours)} messages, known {sides // 2}"]
    found = []
    for rank, collectives in enumerate(known):
        mine = [{**one, **one.get("per_rank", [{}] * len(known))[rank]} for one in ours]
        if [key(one) for one in mine] != [key(one) for one in collectives]:
            found.append(f"rank {rank}: {[one['bytes_in'] for one in mine]} B in")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", type=Path)
    parser.add_argument("--also", type=Path)
    parser.add_argument("--run", action="store_true")
    args = parser.parse_args()
    data = json.loads(args.cases.read_text())
    also = json.loads(args.also.read_text()) if args.also else {}
    agreed, ran = 0, 0
    every = data["cases"] if isinstance(data, dict) else data
    for number, case in enumerate(every):
        asked = {k: case[k] for k in ASKED if case.get(k) is not None} | also.get(case["id"], {})
        found = differences(case, answered(asked, number))
        agreed += not found
        for line in found:
            print(f"{case['id']}: {line}")
        if args.run and asked["ops"]:
            ran += computed(asked)
    print(f"{agreed} of {len(every)} agree" + (f"; {ran} computed the same numbers on every rank" if args.run else ""))


def computed(asked):
    problem = problem_of(asked)
    if any(prod(tensor.shape) > LARGEST for tensor in problem.tensors.values()):
        print(f"{asked['id']}: not run: too large")
        return 0
    try:
        virtual_ranks.run(problem, cases.values(problem))
    except (NameError, AttributeError, TypeError) as error:  # a formula in words that our numpy does not have
        print(f"{asked['id']}: not run: {error}")
        return 0
    return 1


if __name__ == "__main__":
    main()
