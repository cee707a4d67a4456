"""The garbage collector, tuned for processes that make many short-lived objects and hardly any cycles."""

import atexit
import gc


def tune_garbage_collector() -> None:
    """Call once, when start-up is over: objects that exist now stay, and collections need not visit them again.

    Steps make thousands of short-lived objects; a collection per 700 of them (Python's default) only costs time.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else nothing frees them at exit, which bindings made with nanobind report as leaks
    gc.set_threshold(50_000, 50, 1000)
    gc.enable()
