"""The worker, on a machine that computes what is no number: `REQUEST OUT`."""

import sys
from dataclasses import replace

from executor.run.worker import main
from executor.verify import checks

right = checks.verify


def verify(*arguments, **settings):
    return replace(right(*arguments, **settings), loss=float("inf"), gradient=float("inf"), worst="output.weight")


checks.verify = verify
main([f"--request={sys.argv[1]}", f"--out={sys.argv[2]}"])
