"""Steps launched before the last is collected, on a device that finishes steps only when the test lets it.

The device is a CPU whose values reach the host late. Model, runner, sampler, grammars and scheduler are the real ones.
"""

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from torch import Tensor

from quire.core.scheduling.scheduler import Scheduler
from quire.core.wire.kv_groups import KVGroupSpec
from quire.core.wire.protocol import (
    EngineRequest,
    Grammar,
    RequestDelta,
    StepPlan,
    StepResult,
    Vocabulary,
    WorkerAnswer,
)
from quire.core.wire.rank import Rank
from quire.core.wire.sampling_params import ThinkingMarks
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.processes.step_loop import StepLoop
from quire.executor.step.speculator import Speculator
from quire.executor.worker import Worker
from tests.checkpoints import VOCAB_SIZE
from tests.core.scheduling.fake_worker import start_of
from tests.executor.step.test_model_runner import (
    LIMITS,
    MAX_MODEL_LEN,
    engine_config,
    generate,
    mixed_requests,
    prompt_of,
    request,
    start_worker,
)

END = 2


class LateTransfer:
    """Holds zeros on the host until the device has finished the work launched before the transfer."""

    def __init__(self, device: "LateDevice", tensors: Sequence[Tensor]) -> None:
        self._device = device
        self.step_id = device.launching
        self._made = [tensor.clone() for tensor in tensors]
        self._arrived = [torch.zeros_like(tensor) for tensor in tensors]
        self.is_end_of_step = not tensors
        self.is_done = False

    @torch.inference_mode()
    def arrive(self) -> None:
        for arrived, made in zip(self._arrived, self._made, strict=True):
            arrived.copy_(made)
        self.is_done = True

    def values(self) -> list[Tensor]:
        if not self.is_done:
            self._device.wait_for(self)
        return self._arrived


class LateDevice:
    """Starts transfers, which arrive in order. `waits`: pairs of (launched step, step that it waits for)."""

    are_free = False

    def __init__(self) -> None:
        self.num_finished = 0
        self.launching = -1
        self.waits: list[tuple[int, int]] = []
        self._under_way: list[LateTransfer] = []

    def to_host(self, tensors: Sequence[Tensor]) -> LateTransfer:
        self._under_way.append(LateTransfer(self, tensors))
        return self._under_way[-1]

    def wait_for(self, transfer: LateTransfer) -> None:
        self.waits.append((self.launching, transfer.step_id))
        while not transfer.is_done:
            self._finish_one()

    def finish_step(self) -> None:
        before = self.num_finished
        while self.num_finished == before:
            self._finish_one()

    def _finish_one(self) -> None:
        transfer = self._under_way.pop(0)
        transfer.arrive()
        self.num_finished += transfer.is_end_of_step


class AllDone(Exception):
    pass


class Event(NamedTuple):
    what: str
    step_id: int


class Drive:
    """Scheduler and device around a `StepLoop`: the device finishes a step when there is nothing left to launch."""

    def __init__(
        self,
        device: LateDevice,
        requests: list[EngineRequest],
        *,
        kv_groups: Sequence[KVGroupSpec],
        depth: int,
        num_pages: int = 600,
        **limits: Any,
    ) -> None:
        self._device = device
        self._depth = depth
        self.scheduler = Scheduler(
            msgspec.structs.replace(LIMITS, **limits),
            kv_groups=kv_groups,
            num_pages=num_pages,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=[END],
        )
        for one in requests:
            assert self.scheduler.add(one) == []
        self.deltas: dict[str, list[RequestDelta]] = {start_of(one).request_id: [] for one in requests}
        self.events: list[Event] = []
        self._num_in_flight = 0

    def wait(self) -> StepPlan:
        if (plan := self._next()) is None:
            raise AllDone
        return plan

    def poll(self) -> StepPlan | None:
        if (plan := self._next()) is None:
            self._device.finish_step()
        return plan

    def report(self, result: StepResult) -> None:
        assert self._device.num_finished > result.step_id
        self.events.append(Event("result", result.step_id))
        self._num_in_flight -= 1
        for delta in self.scheduler.update(result):
            self.deltas[delta.request_id].append(delta)

    def _next(self) -> StepPlan | None:
        if self._num_in_flight == self._depth or (plan := self.scheduler.schedule()) is None:
            return None
        self._num_in_flight += 1
        self._device.launching = plan.step_id
        self.events.append(Event("launch", plan.step_id))
        return plan


def run_late(
    folder: Path, requests: list[EngineRequest], *, speculator: Speculator | None = None, **options: Any
) -> tuple[Drive, LateDevice]:
    device = LateDevice()
    worker = Worker(engine_config(folder), Rank(), ParallelGroup(), device, speculator)
    ready = worker.load()
    worker.allocate(ready.num_pages, ready.max_model_len)
    drive = Drive(device, requests, kv_groups=ready.kv_groups, **options)
    answers: list[WorkerAnswer] = []
    with pytest.raises(AllDone):
        StepLoop(worker, drive, drive.report, answers.append).run()
    assert answers == []
    assert not drive.scheduler.has_unfinished()
    drive.scheduler.check_invariants()
    return drive, device


def what_came(deltas: dict[str, list[RequestDelta]]) -> dict[str, Any]:
    """Tokens, ends, failures, and log-probabilities to the fifth digit, by request."""

    def rounded(entries: list[Any] | None) -> Any:
        return [(e.token_ids, [round(v, 4) for v in e.logprobs], e.nth_likeliest) for e in entries or []]

    return {
        name: [
            [token for delta in entries for token in delta.token_ids],
            [delta.finish_reason for delta in entries if delta.finish_reason],
            [delta.failure.message for delta in entries if delta.failure],
            [entry for delta in entries for entry in rounded(delta.logprobs)],
            [entry for d in entries if d.output for entry in rounded(d.output.positions)],
        ]
        for name, entries in deltas.items()
    }


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def grammar(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Grammar]:
    """Compiled regular expressions; tokens 3 to 258 are the bytes."""
    import llguidance

    path = tmp_path_factory.mktemp("grammar") / "vocabulary"
    tokens = [b"", b"", b"", *(bytes([byte]) for byte in range(256))]
    path.write_bytes(msgspec.msgpack.encode(Vocabulary(tokens + [b""] * (VOCAB_SIZE - len(tokens)), [END])))

    def make(regex: str) -> Grammar:
        compiled = llguidance.LLMatcher.grammar_from_regex(regex).encode()
        return Grammar("guidance", regex.encode(), zlib.compress(compiled), str(path))

    return make


def plain_requests() -> list[EngineRequest]:
    """Requests that need no token on the host: features of all kinds, log-probabilities, scored prompts."""
    return [
        *mixed_requests()[:12],
        request("scored", prompt_of(50, 60), prompt_logprobs=3, logprobs=2),
        request("flat", prompt_of(51, 9), temperature=50.0, top_p=0.7, seed=3),  # more than the first look's tokens
        request("bad words", prompt_of(52, 9), bad_words_token_ids=[[5], [6, 7]], logit_bias={5: 5.0}),
    ]


def following_requests(grammar: Callable[[str], Grammar]) -> list[EngineRequest]:
    """Requests whose masks follow their output, among others; many end early, so slots change hands."""
    marks = ThinkingMarks(begin=[[3]], end=[[21, 22]], opened=True)
    ends = {"ignore_eos": False, "max_tokens": 30}
    return [
        *(
            msgspec.structs.replace(request(f"g{i}", prompt_of(i, 3 + 9 * i), seed=i, temperature=0.8, **ends),
                                    grammar=grammar(regex))
            for i, regex in enumerate(["[a-z]{3,9}", "(ab|cd)+e", "[0-9]{40}", "x{1,5}y", "[a-f]{12}"])
        ),
        *(request(f"t{i}", prompt_of(70 + i, 12), thinking_token_budget=4 * i, thinking=marks) for i in range(3)),
        msgspec.structs.replace(
            request("both", prompt_of(80, 20), thinking_token_budget=2, thinking=marks), grammar=grammar("[a-z]+")
        ),
        msgspec.structs.replace(request("unloadable", prompt_of(81, 8)), grammar=grammar("[")),
        *mixed_requests()[:6],
    ]  # fmt: skip


def launched_ahead(events: list[Event]) -> int:
    """How many steps were launched before the result of the one before them was given."""
    return sum(
        events.index(Event("launch", step_id + 1)) < events.index(Event("result", step_id))
        for what, step_id in events
        if what == "launch" and Event("launch", step_id + 1) in events
    )


OPTIONS: list[dict[str, Any]] = [
    {"depth": 1},
    {"depth": 2},
    {"depth": 3, "max_num_seqs": 4},
    {"depth": 2, "num_pages": 24, "max_num_batched_tokens": 40},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_nothing_is_read_while_the_device_works(folder: Path, options: dict[str, Any]) -> None:
    drive, device = run_late(folder, plain_requests(), **options)
    assert device.waits == []
    num_mtp = launched_ahead(drive.events)
    assert num_mtp > 20 if options["depth"] > 1 else num_mtp == 0
    assert what_came(drive.deltas) == what_came(generate(start_worker(engine_config(folder)), plain_requests()))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_masks_that_follow_outputs_wait_for_the_last_step_alone(
    folder: Path, grammar: Callable[[str], Grammar], options: dict[str, Any]
) -> None:
    requests = following_requests(grammar)
    drive, device = run_late(folder, requests, **options)
    waited_for = [before for _, before in device.waits]
    assert all(before < launching for launching, before in device.waits)
    assert sum(before == launching - 1 for launching, before in device.waits) >= 0.9 * len(device.waits)
    assert waited_for == sorted(set(waited_for))  # each at most once, in order
    num_mtp = launched_ahead(drive.events)
    assert len(device.waits) > 20 and num_mtp > 20 if options["depth"] > 1 else device.waits == []
    expected = what_came(generate(start_worker(engine_config(folder)), requests, depth=1))
    assert what_came(drive.deltas) == expected
    assert any(failures for _, _, failures, *_ in expected.values())
