"""Times kernels and the processor's best rate alternately, so that other processes slow both."""

import time

import torch

from quire.core.errors import ConfigError
from quire.core.wire.inspection import OpsQuestion, OpsTimed, OpTiming
from quire.executor.backends import bind
from quire.executor.inspection.ops_cases import Case, cases
from quire.executor.inspection.weight_formats import multiplied
from quire.ops.cpu.isa_levels import available
from quire.ops.cpu.peak_rates import Floors

_LEAST_ROUNDS = 3
_MULTIPLIED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8, "int4": torch.uint8}
"""The number formats whose products are measured, as in `Floors.multiply`."""


def time_ops(question: OpsQuestion) -> OpsTimed:
    """Times all cells of the grid with the kernels of this process's instruction level.

    Raises:
        ConfigError: a name is wrong, or there are no kernels.
    """
    if question.num_threads is not None:
        torch.set_num_threads(question.num_threads)
    torch.manual_seed(0)
    ops = bind("cpu")
    try:
        timer = _Timer(Floors(), question.seconds)
    except RuntimeError as error:
        raise ConfigError(str(error)) from None
    with torch.inference_mode():
        timings = [timer.time(case) for case in cases(ops, question)]
    return OpsTimed(
        isa=timer.level,
        available=[level.name for level in available()],
        num_threads=torch.get_num_threads(),
        bytes_per_second=timer.bytes_per_second,
        operations_per_second=timer.operations_per_second,
        timings=[timer.with_floor(timing) for timing in timings],
    )


class _Timer:
    """Remembers the processor's best measured rates, over all cases."""

    def __init__(self, floors: Floors, seconds: float) -> None:
        self._floors = floors
        self.level = floors.level
        self._seconds = seconds
        self.bytes_per_second = 0.0
        self.operations_per_second = dict.fromkeys(_MULTIPLIED, 0.0)

    def time(self, case: Case) -> OpTiming:
        """Returns the round with the most bytes a second, because rounds may read different amounts."""
        case.run()  # which allocates
        best = None
        deadline, num_rounds = time.perf_counter() + self._seconds, 0
        while num_rounds < _LEAST_ROUNDS or time.perf_counter() < deadline:
            num_rounds += 1
            self.bytes_per_second = max(self.bytes_per_second, self._floors.read())
            for name, dtype in _MULTIPLIED.items():
                found = self._floors.multiply(dtype)
                self.operations_per_second[name] = max(self.operations_per_second[name], found)
            begin = time.perf_counter()
            case.run()
            seconds = time.perf_counter() - begin
            num_bytes = case.num_bytes()
            if best is None or seconds * best.num_bytes < best.best_s * num_bytes:
                best = OpTiming(case.operation, case.dtype, case.rows, num_bytes, case.num_operations, seconds, 0, 0)
        assert best is not None
        return best

    def with_floor(self, timing: OpTiming) -> OpTiming:
        """Adds the floors, which later rounds may have lowered."""
        timing.read_s = timing.num_bytes / self.bytes_per_second
        kind = multiplied(timing.dtype, is_weight=timing.operation in ("linear", "experts"))
        timing.multiply_s = timing.num_operations / self.operations_per_second[kind]
        return timing
