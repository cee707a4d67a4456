"""Prompts that come as embeddings, on a real worker: tokens against transformers' own from `inputs_embeds`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from quire.core.wire.protocol import EngineRequest, NewSlot, StepPlan
from quire.core.wire.sampling_params import SamplingParams
from quire.executor.sampling.penalties import Penalties
from quire.executor.sampling.sampling_feature import SampleBatch
from quire.executor.step.embedded_prompts import EmbeddedPrompts
from quire.executor.step.request_table import RequestTable
from quire.executor.worker import Worker
from quire.frontend.requests.prompt_embeds import EmbedsReader
from tests.core.scheduling.fake_worker import resumed_after
from tests.executor.step.test_model_runner import (
    MAX_MODEL_LEN,
    engine_config,
    generate,
    prompt_of,
    request,
    start_worker,
    tokens_of,
)

HIDDEN_SIZE = 64
LENGTHS = [1, 16, 33, 75]


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def worker(folder: Path) -> Worker:
    return start_worker(engine_config(folder))


def rows_of(number: int, length: int) -> torch.Tensor:
    """Embeddings of the same scale as the checkpoint's, but different from all of them."""
    return 0.3 * torch.randn(length, HIDDEN_SIZE, generator=torch.Generator().manual_seed(number))


def embedded(name: str, rows: torch.Tensor, **sampling: Any) -> EngineRequest:
    embeds, num_tokens = EmbedsReader(HIDDEN_SIZE).read(rows, MAX_MODEL_LEN)
    return msgspec.structs.replace(request(name, [0] * num_tokens, **sampling), prompt_embeds=embeds)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    """Transformers' output for a prompt of each of `LENGTHS`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    return {
        str(length): model.generate(inputs_embeds=rows_of(length, length)[None], **options)[0].tolist()
        for length in LENGTHS
    }


@pytest.mark.parametrize(
    "options",
    [
        {"depth": 1},
        {"depth": 2, "max_num_batched_tokens": 16},
        {"max_num_seqs": 2, "long_prefill_token_threshold": 7},
        {"num_pages": 9},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_tokens_are_transformers_in_any_company(
    worker: Worker, expected: dict[str, list[int]], options: dict[str, Any]
) -> None:
    """Prompts of ids run beside them. One has the placeholders' ids, and must not find the pages of embeddings."""
    ids = [request("zeros", [0] * 40), request("ids", prompt_of(3, 40))]
    alone = tokens_of(generate(worker, ids))
    embeds = [embedded(str(length), rows_of(length, length)) for length in LENGTHS]
    deltas = generate(worker, [ids[0], *embeds, ids[1]], **options)
    assert tokens_of(deltas) == alone | expected
    preempted = any(delta.num_preemptions for entries in deltas.values() for delta in entries)
    assert preempted == ("num_pages" in options)


def test_equal_rows_share_their_pages_and_others_do_not(worker: Worker, expected: dict[str, list[int]]) -> None:
    rows = rows_of(75, 75)
    other = rows.clone()
    other[40, 0] += 1
    deltas = generate(worker, [embedded("75", rows), embedded("same", rows), embedded("other", other)])
    assert {name: entries[0].num_cached_tokens for name, entries in deltas.items()} == {
        "75": 0, "same": 64, "other": 32,
    }  # fmt: skip
    tokens = tokens_of(deltas)
    assert tokens["75"] == tokens["same"] == expected["75"] != tokens["other"]


def test_a_request_resumes_after_the_tokens_already_delivered(worker: Worker, expected: dict[str, list[int]]) -> None:
    resumed = resumed_after(expected["33"][:7], embedded("33", rows_of(33, 33)))
    assert tokens_of(generate(worker, [resumed]))["33"] == expected["33"][7:]


@pytest.mark.parametrize("output", [[], [3, 4, 4]], ids=str)
def test_placeholders_count_for_no_penalty(output: list[int]) -> None:
    """The batch also has a row whose prompt does contain the placeholder's token."""
    table, penalties = RequestTable(2, 256, 16, torch.device("cpu")), Penalties(2)
    sampling = SamplingParams(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25)
    embeds, _ = EmbedsReader(HIDDEN_SIZE).read(rows_of(1, 5), MAX_MODEL_LEN)
    rows = [
        NewSlot(0, [0, 7, *output], 2, [[0]], sampling),
        NewSlot(1, [0] * 5 + output, 5, [[1]], sampling, None, embeds),
    ]
    for new in rows:
        table.admit(new)
        penalties.admit(new)
    logits = 1 + torch.rand(2, 10, generator=torch.Generator().manual_seed(0))
    expected = logits.clone()
    expected[0, [0, 7]] /= 1.5
    for token in set(output):
        expected[:, token] = expected[:, token] / 1.5 - 0.5 - 0.25 * output.count(token)
    batch = SampleBatch(np.arange(2), np.array([2, 5]) + len(output), table)
    torch.testing.assert_close(penalties.apply(logits, batch), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_are_converted_to_the_models_type(worker: Worker, dtype: torch.dtype) -> None:
    rows = rows_of(8, 30).to(dtype)
    tokens = tokens_of(generate(worker, [embedded("half", rows), embedded("whole", rows.float())]))
    assert tokens["half"] == tokens["whole"]


def test_rows_are_kept_until_the_prompt_is_computed_and_no_longer() -> None:
    table = EmbeddedPrompts(HIDDEN_SIZE, torch.float32, torch.device("cpu"))
    rows = rows_of(1, 10)
    embeds, _ = EmbedsReader(HIDDEN_SIZE).read(rows, MAX_MODEL_LEN)
    new = NewSlot(3, [0] * 10, 10, [[0]], SamplingParams(), None, embeds)

    def step(start: int, count: int) -> StepPlan:
        return StepPlan(0, [], [], [1, 3], [5, start], [1, count], [1, 0], [])

    table.admit(new)
    first = table.rows(step(0, 6))
    assert first is not None
    assert first.places.tolist() == [1, 2, 3, 4, 5, 6]
    assert torch.equal(first.rows, rows[:6])
    last = table.rows(step(6, 4))
    assert last is not None
    assert torch.equal(last.rows, rows[6:])
    assert not table.pending
    table.admit(new)
    assert table.rows(step(10, 1)) is None  # all found in the prefix cache, as after a preemption
    assert not table.pending
    table.admit(new)
    table.release([3])
    assert not table.pending
    table.admit(new)
    table.admit(NewSlot(3, [5], 1, [[0]], SamplingParams()))
    assert not table.pending
