"""Rows yield the same tokens with drafts as without: a real model, and randomly right or wrong drafts."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.core.config.model import ModelConfig
from quire.core.wire.protocol import EngineRequest, NewSlot, RequestDelta, StepPlan
from quire.core.wire.rank import Layout, Rank
from quire.core.wire.sampling_params import ThinkingMarks
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.sampling.sampler import Sampled
from quire.executor.step.drafts import Proposal, num_accepted
from quire.executor.step.input_batch import InputBatch
from quire.executor.step.request_table import RequestTable
from quire.executor.step.speculator import ForwardPass, ForwardReads, SampledTokens
from quire.executor.transfers import HostTransfers
from quire.executor.worker import Worker
from quire.frontend.checkpoint.model_spec import read_model_spec
from tests.checkpoints import VOCAB_SIZE
from tests.core.scheduling.fake_worker import start_of
from tests.executor.step.test_launch import run_late
from tests.executor.step.test_model_runner import (
    engine_config,
    execute,
    generate,
    mixed_requests,
    prompt_of,
    request,
    start_worker,
    tokens_of,
)
from tests.executor.thread_group import on_every_rank

MOST_DRAFTS = 5


class ToldDrafter:
    """Knows each request's output, and proposes the right tokens most of the time."""

    reads = ForwardReads()
    sees_all_steps = False

    def __init__(self, outputs: dict[tuple[int, ...], list[int]], seed: int = 0) -> None:
        """`outputs` by prompt."""
        self._outputs = outputs
        self._seed = seed
        self.start_again()
        self._requests: dict[int, NewSlot] = {}
        self.asked: list[NewSlot] = []
        self.num_proposed = 0

    def start_again(self) -> None:
        """Draws the same numbers again."""
        self._rng = random.Random(self._seed)
        self._wrong = torch.Generator().manual_seed(self._seed)

    def know(self, outputs: dict[tuple[int, ...], list[int]]) -> None:
        """Adds outputs by prompt."""
        self._outputs |= outputs

    def admit(self, request: NewSlot) -> None:
        self._requests[request.slot] = request

    def release(self, slots: list[int]) -> None:
        for slot in slots:
            self._requests.pop(slot, None)

    def propose(self, forward: ForwardPass, sampled: SampledTokens, table: RequestTable) -> Proposal:
        slots = sampled.slots[sampled.wants_drafts]
        num_known = sampled.num_known[torch.from_numpy(sampled.wants_drafts)]
        token_ids = torch.randint(0, VOCAB_SIZE, (len(slots), MOST_DRAFTS), generator=self._wrong)
        counts = torch.zeros(len(slots), dtype=torch.int64)
        for row, (slot, known) in enumerate(zip(slots.tolist(), num_known.tolist(), strict=True)):
            one = self._requests[slot]
            self.asked.append(one)
            prompt = one.token_ids[: one.num_prompt_tokens]
            output = self._outputs[tuple(prompt)]
            done = known - len(prompt)
            before = table.token_ids[slot, len(prompt) : known].tolist()[: len(output)]  # it may have overrun its end
            assert before == output[:done], "a draft is among the known tokens"
            counts[row] = self._rng.choice([0, 1, 2, 3, MOST_DRAFTS])
            for place, right in enumerate(output[done : done + MOST_DRAFTS]):
                if self._rng.random() < 0.8:
                    token_ids[row, place] = right
        self.num_proposed += int(counts.sum())
        return Proposal(token_ids, counts)


def requests_of_all_kinds() -> list[EngineRequest]:
    return [
        *mixed_requests(),
        request("bad words", prompt_of(60, 30), bad_words_token_ids=[[7], [8, 9]], temperature=0.9, seed=4),
        request("masks", prompt_of(61, 20), allowed_token_ids=list(range(3, 40)), min_tokens=9, stop_token_ids=[5, 6]),
        request("stops", prompt_of(62, 20), stop_token_ids=list(range(3, 60)), temperature=1.5, seed=1, logprobs=0),
        request("bias", prompt_of(63, 11), logit_bias={11: 3.0}, logprobs=3, frequency_penalty=0.5),
        request("scored", prompt_of(64, 50), prompt_logprobs=2, logprobs=1, temperature=0.5, seed=9),
    ]


def told(without: dict[str, list[RequestDelta]], requests: list[EngineRequest], seed: int = 0) -> ToldDrafter:
    return ToldDrafter(
        {
            tuple(one.prompt_token_ids): [t for d in without[start_of(one).request_id] for t in d.token_ids]
            for one in requests
        },
        seed,
    )


def serve(
    folder: Path, drafter: ToldDrafter | None = None, **changes: Any
) -> Callable[..., dict[str, list[RequestDelta]]]:
    """`generate` on a worker of its own."""
    worker = Worker(engine_config(folder, **changes), Rank(), ParallelGroup(), speculator=drafter)
    ready = worker.load()
    worker.allocate(ready.num_pages, ready.max_model_len)
    return partial(generate, worker, kv_groups=ready.kv_groups)


def check_same(got: dict[str, list[RequestDelta]], expected: dict[str, list[RequestDelta]]) -> None:
    """Compares tokens, ends and log-probabilities, however they are divided into deltas."""
    assert got.keys() == expected.keys()
    for name in expected:
        (tokens, reasons, entries), (other_tokens, other_reasons, other_entries) = (
            (
                [token for delta in deltas for token in delta.token_ids],
                [(delta.finish_reason, delta.stop_token_id) for delta in deltas if delta.finish_reason],
                [entry for d in deltas for entry in [*(d.logprobs or []), *_prompt_entries(d)]],
            )
            for deltas in (got[name], expected[name])
        )
        assert (tokens, reasons) == (other_tokens, other_reasons), name
        for entry, other in zip(entries, other_entries, strict=True):
            assert (entry.token_ids, entry.nth_likeliest) == (other.token_ids, other.nth_likeliest)
            np.testing.assert_allclose(entry.logprobs, other.logprobs, atol=1e-4)


def _prompt_entries(delta: RequestDelta) -> list[Any]:
    return [] if delta.output is None else delta.output.positions


@pytest.fixture(scope="module", params=["llama", "qwen3-window"])
def folder(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Path:
    if request.param == "llama":
        return checkpoint("llama")
    return checkpoint("qwen3", sliding_window=20, layer_types=["sliding_attention", "full_attention"])


@pytest.fixture(scope="module")
def without(folder: Path) -> dict[str, list[RequestDelta]]:
    """The deltas of each request alone, without drafts."""
    generate = serve(folder)
    deltas: dict[str, list[RequestDelta]] = {}
    for one in requests_of_all_kinds():
        deltas |= generate([one], depth=1, enable_prefix_caching=False)
    return deltas


@pytest.mark.parametrize(
    "options",
    [
        {"depth": 1},
        {"depth": 2},
        {"depth": 3, "max_num_seqs": 5, "long_prefill_token_threshold": 7},
        {"max_num_batched_tokens": 16},
        {"num_pages": 24, "depth": 2, "max_num_batched_tokens": 40},
    ],
    ids=str,
)
def test_tokens_are_those_without_drafts(
    folder: Path, without: dict[str, list[RequestDelta]], options: dict[str, Any]
) -> None:
    requests = requests_of_all_kinds()
    drafter = told(without, requests)
    generate = serve(folder, drafter)
    got = generate(requests, **options)
    check_same(got, without)
    lengths = [len(delta.token_ids) for deltas in got.values() for delta in deltas]
    assert max(lengths) > 3
    assert sum(length > 1 for length in lengths) > 50
    assert drafter.num_proposed > sum(lengths) - len(lengths)  # some were wrong
    if "num_pages" in options:
        assert any(delta.num_preemptions for deltas in got.values() for delta in deltas)
    check_same(generate(requests, **options), without)  # on the pages that the prefix cache found


@pytest.mark.parametrize("name", ["NeverTwice", "NeverTwiceOnce"])
def test_requests_with_a_processor_have_drafts_if_it_can_go_back(folder: Path, name: str) -> None:
    def run(drafter: ToldDrafter | None = None, *processors: str) -> dict[str, list[RequestDelta]]:
        return serve(folder, drafter, logits_processors=list(processors))(requests)

    requests = [
        request("greedy", prompt_of(3, 9), max_tokens=30),
        request("drawn", prompt_of(4, 9), temperature=1.0, max_tokens=30),
    ]
    without = run(None, f"tests.executor.processors:{name}")
    assert tokens_of(run()) != tokens_of(without)
    drafter = told(without, requests)
    check_same(run(drafter, f"tests.executor.processors:{name}"), without)
    assert bool(drafter.asked) == (name == "NeverTwice")


def test_steps_that_check_drafts_are_recorded(checkpoint: Callable[..., Path], launched: list[int]) -> None:
    folder = checkpoint("qwen3")
    config = engine_config(folder, spec=read_model_spec(folder, ModelConfig(model=str(folder), dtype="bfloat16")))
    one = request("a", [5, 6, 7], max_tokens=24)
    without = generate(start_worker(config), [one])
    drafter = told(without, [one])
    worker = Worker(config, Rank(), ParallelGroup(), speculator=drafter)
    ready = worker.load()
    worker.allocate(ready.num_pages, ready.max_model_len)
    for _ in range(4):
        drafter.start_again()  # the same numbers of drafts
        launched.clear()
        got = generate(worker, [one], depth=1, enable_prefix_caching=False, kv_groups=ready.kv_groups)
        check_same(got, without)
    assert any(len(delta.token_ids) > 2 for delta in got["a"])
    assert len(launched) == len(got["a"]) - 1, "all but the prompt's"


def test_a_device_that_is_late_changes_nothing(folder: Path, without: dict[str, list[RequestDelta]]) -> None:
    requests = requests_of_all_kinds()
    drive, device = run_late(folder, requests, depth=2, speculator=told(without, requests, seed=1))
    check_same(drive.deltas, without)
    assert device.waits == []
    assert any(len(delta.token_ids) > 1 for deltas in drive.deltas.values() for delta in deltas)


def test_two_ranks_accept_the_same_drafts(folder: Path, without: dict[str, list[RequestDelta]]) -> None:
    requests = requests_of_all_kinds()[::3]
    config = engine_config(folder, layout=Layout(tensor=2), executor="mp")

    def run(group: ParallelGroup) -> dict[str, list[RequestDelta]]:
        worker = Worker(config, Rank(tensor=group.rank), group, speculator=told(without, requests))
        ready = worker.load()
        worker.allocate(ready.num_pages, ready.max_model_len)
        return generate(worker, requests, kv_groups=ready.kv_groups, depth=2)

    for deltas in on_every_rank(2, run):
        check_same(deltas, {name: without[name] for name in deltas})
        assert any(len(delta.token_ids) > 2 for entries in deltas.values() for delta in entries)


def test_a_thinking_budget_walks_along_the_drafts(folder: Path) -> None:
    marks = ThinkingMarks(begin=[[3]], end=[[21, 22]], opened=True)
    requests = [
        *(
            request(f"thinks {n}", prompt_of(70 + n, 12), thinking_token_budget=4 + n, thinking=marks, temperature=0.9)
            for n in (0, 2, 4)
        ),
        request("plain", prompt_of(79, 12)),
    ]
    expected = serve(folder)(requests)
    drafter = told(expected, requests)
    got = serve(folder, drafter)(requests)
    check_same(got, expected)
    for name in ("thinks 0", "thinks 2", "thinks 4"):
        assert max(len(delta.token_ids) for delta in got[name]) > 2, name
    output = [token for delta in got["thinks 2"] for token in delta.token_ids]
    assert output[6:8] == [21, 22]  # the mark, after six tokens


def test_a_row_brings_drafts_up_to_the_first_wrong_one(checkpoint: Callable[..., Path]) -> None:
    worker = start_worker(engine_config(checkpoint("llama")))
    prompt = prompt_of(5, 9)
    [deltas] = generate(worker, [request("a", prompt)]).values()
    right = [token for delta in deltas for token in delta.token_ids]
    known = [*prompt, *right[:4], (right[4] + 1) % VOCAB_SIZE, right[5]]
    new = NewSlot(0, known, len(prompt), [[1, 2]], request("a", prompt).sampling)
    result = execute(worker, StepPlan(100, [], [new], [0], [0], [len(known)], [7], []))
    assert (result.token_ids, result.num_drafts) == ([right[:5]], [])


@pytest.mark.parametrize("seed", range(20))
def test_accepted_tokens_are_counted_as_by_a_loop(seed: int) -> None:
    """Rows of 0 to 6 wanted positions, with tokens before these; few token ids, and some that cannot be chosen."""
    rng = random.Random(seed)
    num_wanted = [rng.choice([0, 1, 2, 3, 6]) for _ in range(8)] + [rng.choice([1, 4])]
    token_ids: list[int] = []
    wanted: list[int] = []
    tokens: list[int] = []
    usable: list[bool] = []
    expected: list[int] = []
    for count in num_wanted:
        token_ids += [rng.randrange(2) for _ in range(rng.randrange(3) + (count == 0))]
        row = [rng.randrange(2) for _ in range(count)]
        wanted += range(len(token_ids), len(token_ids) + count)
        token_ids += row
        sampled = [row[i + 1] if i + 1 < count and rng.random() < 0.8 else rng.randrange(2) for i in range(count)]
        can_be_chosen = [rng.random() < 0.9 for _ in range(count)]
        tokens += sampled
        usable += can_be_chosen
        if count:
            brought = 0
            while brought < count and can_be_chosen[brought]:
                brought += 1
                if brought == count or sampled[brought - 1] != row[brought]:
                    break
            expected.append(max(1, brought))
    columns = torch.zeros(len(token_ids), dtype=torch.int64)
    counts = np.array(num_wanted)
    batch = InputBatch(
        torch.tensor(token_ids), columns, [], counts, counts, counts, torch.tensor(wanted), np.array(wanted), counts
    )
    chosen = torch.tensor(tokens), torch.tensor(usable)
    for on_host in (False, True):
        everything = Sampled(np.array(wanted), chosen, None, HostTransfers())
        assert num_accepted(everything, batch, counts, on_host=on_host).tolist() == expected
