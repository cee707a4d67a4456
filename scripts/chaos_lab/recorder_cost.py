"""Measures the flight recorder: microseconds and bytes a step, by the number of rows."""

import argparse
import os
import statistics
import time

from quire.core.flight.recorder import FlightRecorder
from quire.core.flight.segments import MemorySegments
from quire.core.wire.protocol import EngineReady, RequestDelta, StepPlan, StepResult
from tests.core.engine.null_engine import engine_config

READY = EngineReady(16, 16, 256, 0, 0, "none", [], caches_prefixes=True)
NAME = "recorder"
SUMMARY = "Microseconds and bytes that the flight recorder takes of a step."
STEPS = 2000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Takes no options of its own."""


def run(args: argparse.Namespace) -> int:
    print("| rows | microseconds a step | bytes a step |")
    print("|---|---|---|")
    for num_rows in (1, 16, 64, 256):
        descriptors = os.memfd_create("a"), os.memfd_create("b")
        recorder = FlightRecorder(MemorySegments(descriptors))
        recorder.start(engine_config(), READY)
        slots = list(range(num_rows))
        times, start = [], os.fstat(descriptors[0]).st_size
        for step_id in range(STEPS):
            plan = StepPlan(step_id, [], [], slots, [1000] * num_rows, [1] * num_rows, [1] * num_rows, [])
            result = StepResult(step_id, [[70_000]] * num_rows)
            deltas = [RequestDelta("cmpl-0123456789abcdef-0", [70_000]) for _ in slots]
            began = time.perf_counter()
            recorder.add_plan(plan, [])
            recorder.add_result(result)
            recorder.add_deltas(deltas)
            times.append(time.perf_counter() - began)
            if step_id == 99:
                num_bytes = (os.fstat(descriptors[0]).st_size - start) / 100
        print(f"| {num_rows} | {1e6 * statistics.median(times):.1f} | {num_bytes:.0f} |")

    return 0
