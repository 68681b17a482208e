"""The executor's rank, for ranks that share one GPU: `executor.run.worker` in a group that `shared_gpu` has made."""

from executor.run import worker
from tests.executor import shared_gpu

if __name__ == "__main__":
    shared_gpu.join()
    worker.main()
