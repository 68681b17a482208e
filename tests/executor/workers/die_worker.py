"""Dies as it is asked: `exit 7`, `signal 9`, or `raise`; only the given rank does, the others wait for ever."""

import os
import signal
import sys
import time

how, what, who = sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else "0"
if os.environ.get("RANK", "0") != who:
    time.sleep(600)
if how == "exit":
    sys.exit(int(what))
if how == "signal":
    os.kill(os.getpid(), int(what))
    signal.pause()
raise RuntimeError(what)
