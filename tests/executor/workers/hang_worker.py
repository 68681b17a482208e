"""Ignores SIGTERM, starts a child in a session of its own that does the same, and waits for ever."""

import signal
import subprocess
import sys
import time

signal.signal(signal.SIGTERM, signal.SIG_IGN)
CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", CHILD], start_new_session=True)
print("started", flush=True)
time.sleep(600)
