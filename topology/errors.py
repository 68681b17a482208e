"""The exceptions of all packages. Each says what happened, why, and what to do, and has an exit code:

    PlannerError
    ├── UserError                2   invalid input
    │   ├── BadInput             2   a file or text: malformed, too large, of another version
    │   │   └── NewerSchema      2   written by a newer release
    │   ├── BadModel             2   a model that is unknown or cannot be read without guessing
    │   ├── BadCluster           2   a cluster that is unknown or impossible
    │   └── BadPlan              2   a plan or a case that is invalid
    ├── Infeasible               3   a valid question without a legal or fitting answer
    ├── Stale                    1   made for another cluster, model or profile than the given one
    ├── ProbeError               1   the machine cannot be read or measured
    ├── OutOfTolerance           4   ran, but not as predicted
    └── Unproved                 5   the time limit ended with no plan found, and none ruled out

The tree lives in the lowest package so that every layer can raise it; only the command line turns it into text.
"""

from __future__ import annotations

MOST = 1000  # longest part of a message, in characters; the longest ones list names
MOST_OF_A_WORD = 200  # characters shown of a value that the user gave, which may be a whole file


def shortened(text: str) -> str:
    """Return a part of a message with at most a line of any value in it."""
    words = text.split(" ") if len(text) > MOST_OF_A_WORD else [text]
    text = " ".join(word if len(word) <= MOST_OF_A_WORD else f"{word[:120]}...{word[-40:]}" for word in words)
    return text if len(text) <= MOST else f"{text[: MOST - 240]} ... {text[-200:]}"


class PlannerError(Exception):
    """Base of the tree: `what` happened, `why`, and the `remedy` a person can try, which is the only part kept
    whole.
    """

    exit_code = 1

    def __init__(self, what: str, *, why: str = "", remedy: str = "") -> None:
        what, why = shortened(what), shortened(why)
        super().__init__(what)
        self.what = what
        self.why = why
        self.remedy = remedy

    def __str__(self) -> str:
        parts = [self.what]
        if self.why:
            parts.append(f"why: {self.why}")
        if self.remedy:
            parts.append(f"do: {self.remedy}")
        return "\n  ".join(parts)


class UserError(PlannerError):
    exit_code = 2


class BadInput(UserError):
    pass


class NewerSchema(BadInput):
    pass


class BadModel(UserError):
    pass


class BadCluster(UserError):
    pass


class BadPlan(UserError):
    pass


class Infeasible(PlannerError):
    exit_code = 3


class Stale(PlannerError):
    exit_code = 1


class ProbeError(PlannerError):
    exit_code = 1


class OutOfTolerance(PlannerError):
    exit_code = 4


class Unproved(PlannerError):
    exit_code = 5
