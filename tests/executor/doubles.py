"""Workers that misbehave, named by string in the tests of the executors, and the configuration they share."""

import ctypes
import gc
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from quire.core.config.cache import CacheConfig
from quire.core.config.load import LoadConfig
from quire.core.config.resolved import EngineConfig, ModelSpec, SchedulerLimits
from quire.core.engine.engine import Executor
from quire.core.errors import ModelLoadError
from quire.core.wire.kv_groups import KVGroupSpec
from quire.core.wire.protocol import StepPlan, StepResult, WorkerAnswer, WorkerCall, WorkerReady
from quire.core.wire.rank import Layout, Rank
from quire.core.wire.row_outputs import RequestFailure
from quire.executor.processes.null_worker import AnsweredStep, NullWorker

POISON = 313
"""The first token of a prompt that `PoisonWorker` does not survive."""


def make_config(tensor_parallel_size: int = 1) -> EngineConfig:
    spec = ModelSpec(
        path="", name="null", architecture="Null", hf_config={}, dtype="float32", vocab_size=1000, num_layers=1,
        num_attention_heads=1, num_kv_heads=1, head_dim=8, hidden_size=8, max_position_embeddings=64, eos_token_ids=[],
        config_json={},
    )  # fmt: skip
    return EngineConfig(
        spec=spec,
        limits=SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, block_size=8),
        load=LoadConfig(),
        cache=CacheConfig(),
        device="cpu",
        layout=Layout(tensor=tensor_parallel_size),
        executor="uni" if tensor_parallel_size == 1 else "mp",
        max_model_len=64,
        fit_max_model_len=False,
        seed=0,
    )


def make_plan(step_id: int, num_admitted_tokens: int = 0) -> StepPlan:
    """One decode in slot 3 at position `step_id`; a double takes `num_admitted_tokens` released slots as ballast."""
    return StepPlan(step_id, list(range(num_admitted_tokens)), [], [3], [step_id], [1], [1], [])


def submit(executor: Executor, step_ids: Iterable[int]) -> None:
    for step_id in step_ids:
        executor.submit(make_plan(step_id))


async def results_of(executor: Executor, num_steps: int) -> list[StepResult]:
    return [await executor.next_result() for _ in range(num_steps)]


def token_of(step_id: int) -> list[list[int]]:
    """The tokens that `NullWorker` returns for `make_plan(step_id)`."""
    return [[(3 + step_id + 1) % 1000]]


class UnequalWorker(NullWorker):
    """Rank r holds less than rank r - 1, except for the length, where it holds more."""

    def load(self) -> WorkerReady:
        groups = [KVGroupSpec("full", [0], page_bytes=10 + self._rank.tensor)]
        num_pages = 100 - 20 * self._rank.tensor
        return WorkerReady(self._rank, num_pages, 32 + self._rank.tensor, 10, 10 * num_pages, "null", groups)

    def allocate(self, num_pages: int, max_model_len: int) -> None:
        self._agreed = [num_pages, max_model_len]

    def launch(self, plan: StepPlan) -> AnsweredStep:
        return AnsweredStep(StepResult(plan.step_id, [self._agreed]))


class OtherWindowWorker(NullWorker):
    """The window of rank r's layer is 4 + r tokens."""

    def load(self) -> WorkerReady:
        groups = [KVGroupSpec("window", [0], page_bytes=10, window=4 + self._rank.tensor)]
        return WorkerReady(self._rank, 100, 32, 10, 1000, "null", groups)


class WholePromptWorker(NullWorker):
    """All of a prompt sees its end."""

    def load(self) -> WorkerReady:
        return replace(super().load(), whole_prompts=True)


class SlowWorker(NullWorker):
    def launch(self, plan: StepPlan) -> AnsweredStep:
        time.sleep(0.02)
        return super().launch(plan)


class StuckWorker(NullWorker):
    def launch(self, plan: StepPlan) -> AnsweredStep:
        time.sleep(3600)
        return super().launch(plan)


class StubbornWorker(StuckWorker):
    """Ignores SIGTERM."""

    def load(self) -> WorkerReady:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return super().load()


class RaisingWorker(NullWorker):
    """The last rank raises in step 3."""

    def launch(self, plan: StepPlan) -> AnsweredStep:
        if plan.step_id == 3 and self._rank.tensor == self._config.layout.tensor - 1:
            raise ValueError("three is too much")
        return super().launch(plan)


class DistError(RuntimeError):
    """Of the name of torch.distributed's."""


class DistBackendError(DistError):
    pass


class LonelyWorker(NullWorker):
    """In step 3, the first rank misses another one, as gloo says. The second rank is ending then, and takes a while."""

    def launch(self, plan: StepPlan) -> AnsweredStep:
        if plan.step_id == 3:
            if self._rank.tensor == 0:
                time.sleep(0.2)
                raise RuntimeError(
                    "[/src/gloo/transport/tcp/pair.cc:537] Connection closed by peer [::1]:7. See the log."
                )
            threading.Thread(target=end_process, args=(1.0, 7)).start()
            ctypes.CDLL(None).syscall(SYS_EXIT, 0)  # of the main thread alone
        return super().launch(plan)


SYS_EXIT = {"x86_64": 60, "aarch64": 93}[platform.machine()]


def end_process(seconds: float, code: int) -> None:
    time.sleep(seconds)
    os._exit(code)


class SometimesLonelyWorker(NullWorker):
    """Engine 1 misses another worker, as NCCL says, when there is the file `LOST_PEER`, which it removes."""

    def launch(self, plan: StepPlan) -> AnsweredStep:
        sign = Path(os.environ["LOST_PEER"])
        if self._rank.data == 1 and sign.exists():
            sign.unlink()
            raise DistBackendError("NCCL error: remote process exited or there was a network error")
        return super().launch(plan)


class PoisonWorker(NullWorker):
    """Fails in a step with a request whose prompt begins with `POISON`, as the variable POISON says."""

    def __init__(self, config: EngineConfig, rank: Rank, init_method: str) -> None:
        super().__init__(config, rank, init_method)
        self._poisoned: set[int] = set()  # slots

    def launch(self, plan: StepPlan) -> AnsweredStep:
        self._poisoned.difference_update(plan.released)
        self._poisoned.update(new.slot for new in plan.admitted if new.token_ids[0] == POISON)
        if self._poisoned.intersection(plan.slots):
            match os.environ["POISON"]:
                case "raise":
                    raise MemoryError("this rank has no memory for the step")
                case "crash":
                    os.kill(os.getpid(), signal.SIGSEGV)
                case "hang":
                    time.sleep(1000)
        time.sleep(0.002)
        return super().launch(plan)


class UnusableWorker(NullWorker):
    """Has NaN for the request in its first row in some steps, as the variable UNUSABLE lists."""

    def launch(self, plan: StepPlan) -> AnsweredStep:
        step = super().launch(plan)
        if str(plan.step_id) in os.environ["UNUSABLE"].split():
            step.result.outputs.append((0, RequestFailure("internal", "NaN", may_pass=True)))
        return step


class OverflowingWorker(NullWorker):
    """Has NaN for requests whose prompts begin with `POISON`."""

    def __init__(self, config: EngineConfig, rank: Rank, init_method: str) -> None:
        super().__init__(config, rank, init_method)
        self._poisoned: set[int] = set()  # slots

    def launch(self, plan: StepPlan) -> AnsweredStep:
        self._poisoned.difference_update(plan.released)
        self._poisoned.update(new.slot for new in plan.admitted if new.token_ids[0] == POISON)
        step = super().launch(plan)
        rows = [row for row, slot in enumerate(plan.slots) if slot in self._poisoned]
        step.result.outputs += [(row, RequestFailure("internal", "NaN", may_pass=True)) for row in rows]
        return step


class DeadDeviceWorker(NullWorker):
    """Computes nothing but NaN from its twentieth step on, unless another engine has, as the file DEAD_DEVICE says. If
    that is "always", each engine does, from its first step on."""

    def load(self) -> WorkerReady:
        place = os.environ["DEAD_DEVICE"]
        self._dies_at = 0 if place == "always" else None if Path(place).exists() else 20
        return super().load()

    def launch(self, plan: StepPlan) -> AnsweredStep:
        step = super().launch(plan)
        if self._dies_at is not None and plan.step_id >= self._dies_at:
            if self._dies_at:
                Path(os.environ["DEAD_DEVICE"]).touch()
            failure = RequestFailure("internal", "NaN", may_pass=True)
            step.result.outputs += [(row, failure) for row, wanted in enumerate(plan.num_wanted) if wanted]
        return step


class ShortRankWorker(PoisonWorker):
    """The rank that reports, and it alone, has too little memory for a request whose prompt begins with `POISON`."""

    def launch(self, plan: StepPlan) -> AnsweredStep:
        return NullWorker.launch(self, plan) if self._rank.tensor else super().launch(plan)


class HangingWorker(NullWorker):
    """Hangs in its hundredth step, unless another engine has."""

    def launch(self, plan: StepPlan) -> AnsweredStep:
        sign = Path(os.environ["HANGS_ONCE"])
        if plan.step_id == 100 and not sign.exists():
            sign.touch()
            self.hang_here()
        return super().launch(plan)

    def hang_here(self) -> None:
        time.sleep(1000)


class UnloadableWorker(NullWorker):
    def load(self) -> WorkerReady:
        raise ModelLoadError("weights.safetensors is cut short; download it again.")


class NoRoomWorker(NullWorker):
    """Finds too little memory on the second of two hosts."""

    def load(self) -> WorkerReady:
        if self._rank.tensor >= 2:
            raise ModelLoadError("the weights take 16 GiB, and 12 GiB are free; use another host.")
        return super().load()


class ExitingWorker(NullWorker):
    def load(self) -> WorkerReady:
        os._exit(7)


class CoreWorker(NullWorker):
    """Answers with its process's settings: threads for OpenMP, and whether the process ignores SIGINT."""

    def launch(self, plan: StepPlan) -> AnsweredStep:
        ignores = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        return AnsweredStep(StepResult(plan.step_id, [[int(os.environ["OMP_NUM_THREADS"]), int(ignores)]]))


class OnceStuckWorker(NullWorker):
    """Hangs for a second in each step. `began` is set when one begins."""

    began = threading.Event()

    def launch(self, plan: StepPlan) -> AnsweredStep:
        self.began.set()
        time.sleep(1.0)
        return super().launch(plan)


class NotingWorker(NullWorker):
    """Answers a call with its rank, the call's payload, and the steps launched and collected before."""

    def load(self) -> WorkerReady:
        self._seen: list[str] = []
        return super().load()

    def launch(self, plan: StepPlan) -> AnsweredStep:
        self._seen.append(f"launch {plan.step_id}")
        return super().launch(plan)

    def collect(self, step: AnsweredStep) -> StepResult:
        self._seen.append(f"collect {step.step_id}")
        return super().collect(step)

    def call(self, call: WorkerCall, answer: Callable[[WorkerAnswer], None]) -> None:
        if call.name == "fail":
            answer(WorkerAnswer(call.call_id, self._rank, error="it was told to"))
            return
        text = " ".join([str(self._rank), call.payload.decode(), *self._seen])
        answer(WorkerAnswer(call.call_id, self._rank, text.encode()))


class FreezeCountingWorker(NullWorker):
    """Answers a call with the number of objects that the garbage collector had frozen before the worker was made."""

    def __init__(self, *arguments: Any) -> None:
        self._num_frozen = gc.get_freeze_count()
        super().__init__(*arguments)

    def call(self, call: WorkerCall, answer: Callable[[WorkerAnswer], None]) -> None:
        answer(WorkerAnswer(call.call_id, self._rank, str(self._num_frozen).encode()))


class MeetingWorker(NullWorker):
    """A pipeline stage that ends no step before the stage beside it works on the one that it should have then.

    Stages tell each other what they do by files in the folder `MEETING`.
    """

    def launch(self, plan: StepPlan) -> AnsweredStep:
        step = plan.step_id
        if self._rank.pipeline == 0:
            self._tell(f"first began {step}")
            if step > 0:
                self._wait_for(f"last began {step - 1}")
            self._tell(f"first did {step}")
        else:
            self._wait_for(f"first did {step}")
            self._tell(f"last began {step}")
            self._wait_for(f"first began {step + 1}")
        return super().launch(plan)

    def _tell(self, what: str) -> None:
        (Path(os.environ["MEETING"]) / what).touch()

    def _wait_for(self, what: str) -> None:
        deadline = time.monotonic() + 30
        while not (Path(os.environ["MEETING"]) / what).exists():
            assert time.monotonic() < deadline, f"stage {self._rank.pipeline} waited in vain: {what}"
            time.sleep(0.001)


class GrammarWorker(NullWorker):
    """Answers with the bytes of the new slots' grammars instead of tokens."""

    def launch(self, plan: StepPlan) -> AnsweredStep:
        sizes = [[len(new.grammar.data) if new.grammar is not None else 0] for new in plan.admitted]
        return AnsweredStep(StepResult(plan.step_id, sizes))
