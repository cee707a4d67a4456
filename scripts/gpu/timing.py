"""Times of work on an accelerator, from CUDA events; medians."""

import statistics
from collections.abc import Callable, Sequence

import torch

L2_BYTES = 64 << 20
"""At least the bytes of a card's second-level cache: operands that should come from memory are rotated beyond them."""


def milliseconds(run: Callable[[], object], repeats: int = 10) -> float:
    """Returns the median time of one call."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def microseconds_in_graph(runs: Sequence[Callable[[], object]], repeats: int = 20) -> float:
    """Returns the median time of one of `runs`, which are captured in one graph, one after the other.

    So launches cost what they cost in a recorded step, and operands of different runs do not stay in a cache.
    """
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for run in runs:
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return milliseconds(graph.replay, repeats) * 1e3 / len(runs)


def num_copies(nbytes: int) -> int:
    """Returns how many operands of `nbytes` lie beyond the cache."""
    return min(max(2, -(-4 * L2_BYTES // max(nbytes, 1))), 64)
