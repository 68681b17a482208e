"""The worker, which the model called `bad` ends, on a machine that computes the one called `wrong` wrongly."""

from dataclasses import replace

from executor.run import worker
from executor.verify import checks

right, verified = worker.check_numbers, checks.verify


def check_numbers(request, *arguments):
    if request.model.name == "bad":
        raise RuntimeError("this one ends its processes")
    return right(request, *arguments)


def verify(setup, **settings):
    found = verified(setup, **settings)
    return replace(found, gradient=0.5, worst="output.weight") if setup.model.name == "wrong" else found


worker.check_numbers = check_numbers
checks.verify = verify
if __name__ == "__main__":
    worker.main()
