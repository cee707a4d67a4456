"""Tunes Python's garbage collector for processes that make many short-lived objects and few cycles."""

import atexit
import gc


def tune_garbage_collector() -> None:
    """Exempts all existing objects from collections and makes collections rare. Call it once, after start-up.

    A step makes thousands of short-lived objects. Collecting after every 700 of them, Python's default, only costs
    time.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else nothing frees them at exit, which bindings made with nanobind report as leaks
    gc.set_threshold(50_000, 50, 1000)
    gc.enable()
