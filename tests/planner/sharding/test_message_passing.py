"""The bound by messages: below every choice, never falling, and nothing that the best choice takes is ruled out by
it.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.sharding.problem.deadline import Deadline
from planner.sharding.problem.problem import Machine, MemoryLimit
from planner.sharding.solver.by_messages import solve_by_messages
from planner.sharding.solver.candidates import enumerate_candidates
from planner.sharding.solver.equivalence import find_equivalent
from planner.sharding.solver.message_passing import MessagePassing
from planner.sharding.solver.pricing import pricing_of
from planner.sharding.solver.solvable_program import SolvableProgram
from tests.examples import examples
from tests.planner.sharding.random_graphs import graphs, placed
from topology.catalog.cluster_file import load_cluster
from topology.errors import Infeasible


def program_of(problem):
    pricing = pricing_of(problem.mesh, problem.machine)
    equivalence = find_equivalent(problem.graph, {**problem.input_layouts, **problem.pins}, fold=True)
    return SolvableProgram(enumerate_candidates(problem, pricing, equivalence))


def exact(problem):
    """The best assignment by the whole integer program, without a bound by messages."""
    program = program_of(problem)
    program.build()
    everything = np.ones(len(program.costs), dtype=bool)
    found, left = program.branch_and_bound(everything, Deadline.after(3.0))
    assume(found is not None and left == np.inf)  # nothing better is left
    return program.cost_of(found), found


@pytest.fixture(scope="module")
def machine():
    return Machine(load_cluster("dgx-h100", 8))


def timed(data, machine):
    problem = data.draw(placed(graphs(backward=data.draw(st.booleans()))))
    assume(problem.mesh.ranks <= 4)
    return replace(problem, machine=machine, policy="min_time")


@examples(8)
@given(st.data())
def test_the_bound_is_below_the_best_choice_and_leaves_it_in(machine, data) -> None:
    problem = timed(data, machine)
    least, assignment = exact(problem)
    graph = MessagePassing(program_of(problem))
    bounds = []
    for _ in range(6):
        bounds.append(graph.sweep())
        graph.reshare()
    bounds.append(graph.sweep())
    above = graph.above()

    slack = 1e-6 * least + 10
    assert bounds[-1] <= least + slack
    assert all(after >= before - slack for before, after in pairwise(bounds))
    program = graph.program
    for pairs, costs in above.items():
        kind, tensor, operator, position = pairs
        if kind == "use":
            rows = program.layout_lists[tensor].index(assignment.layouts[tensor])
            needs, groups = program.needs_of(operator, position)
            column = next(n for n, group in enumerate(groups) if assignment.options[operator] in group)
            assert costs.shape == (len(program.layout_lists[tensor]), len(needs))
            assert costs[rows, column] <= least - bounds[-1] + slack


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_the_answer_is_that_of_the_whole_program(machine, data) -> None:
    problem = timed(data, machine)
    least, _ = exact(problem)
    program = program_of(problem)

    found, bound = solve_by_messages(program, Deadline())

    assert program.cost_of(found) <= least + 10
    assert bound == pytest.approx(least, rel=1e-6, abs=10)


@settings(max_examples=4, deadline=None)
@given(st.data())
def test_with_little_memory_the_answer_fits_or_there_is_none(machine, data) -> None:
    problem = timed(data, machine)
    program = program_of(replace(problem, memory=MemoryLimit(limit_bytes=1e12)))
    share = data.draw(st.sampled_from([1.0, 1.1, 2.0]))
    limit = program.least_held() * share
    assume(limit > 0)
    little = replace(problem, memory=MemoryLimit(limit_bytes=limit))
    program = program_of(little)
    try:
        found, bound = solve_by_messages(program, Deadline())
    except Infeasible:
        return

    assert program.held(found) <= limit
    assert bound <= program.cost_of(found) + 10
    least, _ = exact(little)
    assert program.cost_of(found) <= least + 10
