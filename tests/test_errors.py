"""The error tree and its exit codes, as documented."""

import pytest

from topology import errors

EXPECTED = {
    "PlannerError": 1,
    "UserError": 2,
    "BadInput": 2,
    "BadModel": 2,
    "BadCluster": 2,
    "BadPlan": 2,
    "Infeasible": 3,
    "Stale": 1,
    "ProbeError": 1,
    "OutOfTolerance": 4,
}


@pytest.mark.parametrize(("name", "code"), EXPECTED.items())
def test_exit_codes(name: str, code: int) -> None:
    error = getattr(errors, name)("what", why="why", remedy="remedy")

    assert error.exit_code == code
    assert issubclass(type(error), errors.PlannerError)
    assert "why" in str(error)
    assert "remedy" in str(error)


def test_the_tree_is_drawn_in_full() -> None:
    """Every class is in the docstring's drawing, with its code."""
    for name, code in EXPECTED.items():
        line = next(line for line in (errors.__doc__ or "").splitlines() if name in line)
        if name != "PlannerError":
            assert str(code) in line
