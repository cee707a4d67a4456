"""The kernels' team of threads: right results from several callers, with any number of threads, and after a fork."""

import os
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from quire.ops.cpu.native import NativeBackend


@pytest.fixture(scope="module")
def native(own_native: NativeBackend) -> NativeBackend:
    """One build: threads do not depend on the processor's instructions."""
    return own_native


@pytest.fixture(params=[2, 7], autouse=True)
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def many_calls(native: NativeBackend, x: Tensor, expected: Tensor, times: int) -> bool:
    return all(torch.equal(native.activate_and_mul(x), expected) for _ in range(times))


def alone(native: NativeBackend, x: Tensor) -> Tensor:
    """Computes row by row; each row is too small for a second thread."""
    return torch.cat([native.activate_and_mul(row) for row in x.split(1)])


def test_thousands_of_short_loops(native: NativeBackend) -> None:
    """Threads that are late for one loop may join the next: no piece may be computed for the wrong loop, or twice."""
    inputs = [torch.randn(rows, 2048) for rows in (17, 40)]
    expected = [alone(native, x) for x in inputs]
    for _ in range(2000):
        for x, result in zip(inputs, expected, strict=True):
            assert torch.equal(native.activate_and_mul(x), result)


def test_callers_from_several_threads_at_once(native: NativeBackend) -> None:
    inputs = [torch.randn(64, 1024) for _ in range(3)]
    done: list[bool] = []

    def call(x: Tensor) -> None:
        done.append(many_calls(native, x, alone(native, x), 300))

    callers = [threading.Thread(target=call, args=(x,)) for x in inputs]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert done == [True, True, True]


def test_a_forked_process_has_a_team_of_its_own(native: NativeBackend) -> None:
    x = torch.randn(64, 1024)
    expected = alone(native, x)
    assert many_calls(native, x, expected, 3)
    child = os.fork()
    if child == 0:
        os._exit(0 if many_calls(native, x, expected, 50) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_helpers_make_way_for_other_threads(native: NativeBackend) -> None:
    x = torch.randn(64, 1024)
    assert many_calls(native, x, alone(native, x), 3)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert own + 5 in {os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir("/proc/self/task")}
    assert own == os.getpriority(os.PRIO_PROCESS, os.getpid())
