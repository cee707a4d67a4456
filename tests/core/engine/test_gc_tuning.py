"""Calmed garbage collections."""

import subprocess
import sys

CODE = """
import gc
from quire.core.engine.gc_tuning import tune_garbage_collector

class Ring:
    def __init__(self):
        self.own = self
    def __del__(self):
        print("freed", flush=True)

ring = Ring()
tune_garbage_collector()
del ring
gc.collect()
print("end of the program", flush=True)
"""


def test_what_was_there_at_start_up_stays_until_the_end_and_is_then_freed() -> None:
    """A binding made with nanobind tells the user of leaks if it is left."""
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["end of the program", "freed"]


def test_collections_that_the_start_did_without_are_enabled() -> None:
    code = "import gc; gc.disable()\n" + CODE + "print(gc.isenabled())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["end of the program", "True", "freed"]
