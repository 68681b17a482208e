"""Ends well, and leaves a grandchild in a session of its own behind."""

import subprocess
import sys

subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("done", flush=True)
