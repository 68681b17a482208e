"""Ignores SIGTERM and waits for ever, alone: whoever ends it must kill it."""

import signal
import time

signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("started", flush=True)
time.sleep(600)
