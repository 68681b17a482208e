"""The worker, on a machine that computes the model called `wrong` wrongly."""

from dataclasses import replace

from executor.run.worker import main
from executor.verify import checks

right = checks.verify


def verify(setup, **settings):
    found = right(setup, **settings)
    return replace(found, gradient=0.5, worst="output.weight") if setup.model.name == "wrong" else found


checks.verify = verify
main()
