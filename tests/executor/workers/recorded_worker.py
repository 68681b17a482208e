"""One rank raises inside torchelastic's `record`; the others wait for ever."""

import os
import time

from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    if os.environ["RANK"] == "1":
        raise RuntimeError("rank one has had enough")
    time.sleep(600)


main()
