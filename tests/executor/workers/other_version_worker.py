"""The worker as one of two nodes, the second of which has another release of meshwright: `REQUEST OUT`."""

import os
import sys

from executor.run import same_software
from executor.run.worker import main

right = same_software.versions


def versions() -> dict[str, str]:
    return {**right(), "meshwright": "9.9.9"} if os.environ["RANK"] == "1" else {**right(), "meshwright": "1.0.0"}


same_software.versions = versions
os.environ["LOCAL_WORLD_SIZE"] = "1"
main([f"--request={sys.argv[1]}", f"--out={sys.argv[2]}"])
