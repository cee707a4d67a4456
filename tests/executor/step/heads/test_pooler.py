"""Rows whose output is hidden states, through scheduler, runner and worker: the values are Transformers' own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModel

from quire.core.wire.pooling import Pooling, PoolingMethod
from quire.core.wire.protocol import (
    EngineRequest,
    FinishReason,
    NewSlot,
    SequenceStart,
    StepPlan,
    StepResult,
)
from quire.core.wire.rank import Rank
from quire.core.wire.row_outputs import HiddenStates, OutputKind, PooledVector, PromptLogprobs, PromptOutput
from quire.core.wire.sampling_params import SamplingParams
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.worker import Worker
from tests.executor.step.test_model_runner import (
    MAX_MODEL_LEN,
    engine_config,
    execute,
    generate,
    mixed_requests,
    prompt_of,
    request,
    tokens_of,
)

PROMPTS = [prompt_of(3, 1), prompt_of(4, 16), prompt_of(5, 75), prompt_of(5, 80)]  # the last two begin alike


def pool(name: str, prompt: list[int], method: PoolingMethod, **wanted: Any) -> EngineRequest:
    return EngineRequest([SequenceStart(name, 0)], prompt, SamplingParams(), pooling=Pooling(method, **wanted))


def vectors_of(outputs: list[PromptOutput | None]) -> np.ndarray:
    """[num_vectors, hidden]: a pooled vector, or the hidden states of all parts, which must follow one another."""
    rows: list[np.ndarray] = []
    num_seen = 0
    for output in outputs:
        match output:
            case PooledVector(values=values):
                rows.append(np.frombuffer(values, "<f4")[None])
            case HiddenStates(start=start, num_tokens=num_tokens, width=width, values=values):
                assert start == num_seen
                num_seen += num_tokens
                rows.append(np.frombuffer(values, "<f4").reshape(-1, width))
            case _:
                raise AssertionError(output)
    return np.concatenate(rows)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def folder(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(request.param)


@pytest.fixture(scope="module")
def served(folder: Path) -> tuple[Worker, dict[str, Any]]:
    worker = Worker(engine_config(folder), Rank(), ParallelGroup())
    ready = worker.load()
    worker.allocate(ready.num_pages, ready.max_model_len)
    return worker, {"kv_groups": ready.kv_groups}


@pytest.fixture(scope="module")
def hidden(folder: Path) -> list[np.ndarray]:
    """Transformers' last hidden states of each prompt, [num_tokens, hidden] float32."""
    reference = AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return [reference(torch.tensor([prompt])).last_hidden_state[0].numpy() for prompt in PROMPTS]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16, "depth": 3},
        {"num_pages": 30, "max_num_seqs": 6, "max_num_batched_tokens": 40},
    ],
    ids=str,
)
def test_hidden_states_are_those_of_transformers(
    served: tuple[Worker, dict[str, Any]], hidden: list[np.ndarray], options: dict[str, Any]
) -> None:
    """Requests for vectors beside requests for tokens and for the log-probabilities of prompts, in chunks."""
    worker, groups = served
    ways: list[PoolingMethod] = ["cls", "last", "mean", "all"]
    pooled = [pool(f"{way} {index}", prompt, way) for way in ways for index, prompt in enumerate(PROMPTS)]
    others = [*mixed_requests()[:4], request("scored", prompt_of(64, 50), prompt_logprobs=2)]
    got = generate(worker, [*pooled[::2], *others, *pooled[1::2]], **groups, **options)
    for index, states in enumerate(hidden):
        expected = {"cls": states[:1], "last": states[-1:], "mean": states.mean(0, keepdims=True), "all": states}
        for way in ways:
            deltas = got[f"{way} {index}"]
            np.testing.assert_allclose(vectors_of([each.output for each in deltas]), expected[way], atol=2e-5)
            assert [each.token_ids for each in deltas] == [[]] * len(deltas)
            assert [each.finish_reason for each in deltas] == [None] * (len(deltas) - 1) + [FinishReason.STOP]
    alone = tokens_of(generate(worker, others, **groups))
    assert tokens_of({each.sequences[0].request_id: got[each.sequences[0].request_id] for each in others}) == alone


@pytest.mark.parametrize("num_lead_tokens", [3, 40, 75, 90])
def test_a_mean_may_leave_the_first_tokens_out(
    served: tuple[Worker, dict[str, Any]], hidden: list[np.ndarray], num_lead_tokens: int
) -> None:
    """The prompt takes several steps; a mean of nothing is zeros, as in sentence-transformers."""
    worker, groups = served
    [deltas] = generate(worker, [pool("a", PROMPTS[2], "mean", num_lead_tokens=num_lead_tokens)], **groups).values()
    states = hidden[2][num_lead_tokens:]
    expected = states.mean(0, keepdims=True) if len(states) else np.zeros_like(hidden[2][:1])
    np.testing.assert_allclose(vectors_of([each.output for each in deltas]), expected, atol=2e-5)


def test_a_prompt_may_be_as_long_as_the_model_computes(served: tuple[Worker, dict[str, Any]]) -> None:
    worker, groups = served
    prompt = prompt_of(8, MAX_MODEL_LEN)
    [deltas] = generate(worker, [pool("a", prompt, "last")], **groups).values()
    assert isinstance(deltas[-1].output, PooledVector)


def test_hidden_states_that_are_not_numbers_fail_their_request_alone(served: tuple[Worker, dict[str, Any]]) -> None:
    worker, groups = served
    bad, good = prompt_of(1, 5), prompt_of(2, 5)
    model = worker.get_model()
    forward, calls = model.forward, []

    def broken(token_ids: torch.Tensor, step: Any) -> torch.Tensor:
        calls.append(len(token_ids))
        states = forward(token_ids, step)
        states[2] = torch.nan  # a token of the first row
        return states

    model.forward = broken  # type: ignore[method-assign]
    try:
        got = generate(worker, [pool("bad", bad, "mean"), pool("good", good, "mean")], **groups)
    finally:
        model.forward = forward  # type: ignore[method-assign]
    assert calls == [10]
    [failed], [done] = got["bad"], got["good"]
    assert (failed.finish_reason, done.finish_reason) == (FinishReason.ERROR, FinishReason.STOP)
    assert failed.failure is not None
    assert (failed.failure.kind, failed.output) == ("internal", None)


def test_every_kind_has_a_head_and_a_form_on_the_wire(served: tuple[Worker, dict[str, Any]]) -> None:
    """One step whose rows want one kind each; the values survive the wire."""
    worker, options = served
    prompt, tables = prompt_of(1, 6), len(options["kv_groups"])
    kinds: dict[OutputKind, tuple[type, dict[str, Any], Pooling | None]] = {
        OutputKind.PROMPT_LOGPROBS: (PromptLogprobs, {"prompt_logprobs": 1}, None),
        OutputKind.HIDDEN_STATES: (HiddenStates, {}, Pooling("all")),
        OutputKind.POOLED: (PooledVector, {}, Pooling("last")),
    }
    others = {OutputKind.ALIGNMENT}  # of models with an encoder: tests/frontend/audio/test_words.py
    assert kinds.keys() | others == set(OutputKind), "a kind is not tested here"
    admitted = [
        NewSlot(slot, prompt, 6, [[slot]] * tables, SamplingParams(seed=0, **sampling), pooling=pooling)
        for slot, (_, sampling, pooling) in enumerate(kinds.values())
    ]
    rows = list(range(len(kinds)))
    plan = StepPlan(0, [], admitted, rows, [0] * 3, [6] * 3, [0] * 3, [], outputs=[*enumerate(kinds)])
    result = execute(worker, plan)
    assert result.token_ids == []
    assert [(row, type(value)) for row, value in result.outputs] == [*enumerate(form for form, _, _ in kinds.values())]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=StepResult) == result
    execute(worker, StepPlan(1, rows, [], [], [], [], [], []))


def test_rows_of_sampled_tokens_pay_a_byte_for_all_kinds_together() -> None:
    step = StepPlan(1, [], [], [0, 1], [5, 6], [1, 1], [1, 1], [])
    wanting = msgspec.structs.replace(step, outputs=[(0, OutputKind.POOLED)])
    assert len(msgspec.msgpack.encode(wanting)) == len(msgspec.msgpack.encode(step)) + 3
    answer = StepResult(1, [[7], [8]])
    failing = msgspec.structs.replace(answer, outputs=[(0, PromptLogprobs(1, []))])
    tag, place = len("prompt_logprobs") + 1, 3  # an array of the row and of the value: its tag, start and positions
    assert len(msgspec.msgpack.encode(failing)) == len(msgspec.msgpack.encode(answer)) + place + tag + 2
