"""The end of a process of our own; tests of engines and hosts have those of others."""

import subprocess
import sys

PROGRAM = """
import atexit, threading, time
from quire.core.processes import leave

class Late:
    def __del__(self):
        print("taken apart")

late = Late()
atexit.register(print, "left")
threading.Thread(target=time.sleep, args=[600]).start()
print("printed", end=" ")
leave(3)
"""


def test_a_process_leaves_without_taking_itself_apart() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (3, "printed left\n", "")
