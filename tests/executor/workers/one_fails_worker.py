"""The worker, which one model of those it is asked for ends."""

from executor.run import worker

right = worker.check_numbers


def check_numbers(request, *arguments):
    if request.model.name == "bad":
        raise RuntimeError("this one ends its processes")
    return right(request, *arguments)


worker.check_numbers = check_numbers
if __name__ == "__main__":
    worker.main()
