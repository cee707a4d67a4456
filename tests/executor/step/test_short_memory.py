"""Steps whose memory does not suffice: they run in parts, with the tokens of whole steps; one request alone fails."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.core.config.model import ModelConfig
from quire.core.wire.protocol import FinishReason, RequestDelta
from quire.executor.layers.mlp import GatedMLP
from quire.executor.sampling.sampler import Sampler
from quire.executor.sampling.sampling_feature import SampleBatch
from quire.executor.sampling.token_table import TokenTable
from quire.executor.step.heads.head import HeadRow
from quire.executor.step.heads.prompt_scorer import PromptScorer
from quire.executor.step.short_memory import _halve, _num_wanted, _Span
from quire.executor.worker import Worker
from quire.frontend.checkpoint.model_spec import read_model_spec
from tests.executor.models.test_hybrid_models import folder as hybrid  # noqa: F401
from tests.executor.step.test_model_runner import (
    engine_config,
    generate,
    mixed_requests,
    prompt_of,
    request,
    start_worker,
    tokens_of,
)
from tests.executor.step.test_sameness import start


class Shortage:
    """A layer that raises what torch raises, for steps of more tokens than memory suffices for.

    Attributes:
        most: tokens of a step; None: any number.
        sizes: tokens of the steps that were computed.
    """

    def __init__(self) -> None:
        self.most: int | None = None
        self.sizes: list[int] = []
        self.num_raised = 0

    def check(self, x: Tensor) -> None:
        if self.most is not None and len(x) > self.most:
            self.num_raised += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.sizes.append(len(x))


@pytest.fixture
def shortage(monkeypatch: pytest.MonkeyPatch) -> Shortage:
    shortage, call = Shortage(), GatedMLP.__call__

    def checked(self: GatedMLP, x: Tensor) -> Tensor:
        shortage.check(x)
        return call(self, x)

    monkeypatch.setattr(GatedMLP, "__call__", checked)
    return shortage


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3")


@pytest.fixture
def worker(folder: Path) -> Worker:
    return start_worker(engine_config(folder))


@pytest.mark.parametrize("most", [40, 3])
def test_steps_in_parts_have_the_tokens_of_whole_steps(worker: Worker, shortage: Shortage, most: int) -> None:
    requests = mixed_requests()[:8]
    expected = tokens_of(generate(worker, requests))
    shortage.most, shortage.sizes = most, []
    assert tokens_of(generate(worker, requests, enable_prefix_caching=False)) == expected
    assert shortage.num_raised
    assert max(shortage.sizes) <= most


def test_memory_that_comes_back_is_used_again(worker: Worker, shortage: Shortage) -> None:
    shortage.most = 4
    one = [request("a", prompt_of(1, 30), max_tokens=4)]
    first = tokens_of(generate(worker, one, enable_prefix_caching=False))
    shortage.most, shortage.sizes = None, []
    assert tokens_of(generate(worker, one, enable_prefix_caching=False)) == first
    assert 30 in shortage.sizes


class Greedy:
    """Runs out of memory whenever one request takes part."""

    def __init__(self, worker: Worker, monkeypatch: pytest.MonkeyPatch, token: int) -> None:
        forward = worker._runner._forward
        for name in ("logits", "hidden"):
            monkeypatch.setattr(forward, name, self._guarded(getattr(forward, name), token))

    def _guarded(self, run: Callable[..., Tensor], token: int) -> Callable[..., Tensor]:
        def guarded(batch: Any, *arguments: Any) -> Tensor:
            if (batch.token_ids == token).any():
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return run(batch, *arguments)

        return guarded


def failures(deltas: list[RequestDelta]) -> list[str]:
    return [delta.failure.message for delta in deltas if delta.failure is not None]


@pytest.mark.parametrize("place", [0, 20, 39])
def test_one_request_fails_and_the_others_go_on(worker: Worker, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    token = 97
    prompts = [[each if each != token else 98 for each in prompt_of(number, 40)] for number in range(3)]
    others = [request(str(number), prompt) for number, prompt in enumerate(prompts)]
    expected = tokens_of(generate(worker, others))
    assert not any(token in tokens for tokens in expected.values())
    Greedy(worker, monkeypatch, token)
    offending = prompts[0].copy()
    offending[place] = token
    deltas = generate(worker, [*others[:1], request("bad", offending), *others[1:]], enable_prefix_caching=False)
    assert ["no memory left for this request" in message for message in failures(deltas["bad"])] == [True]
    assert deltas.pop("bad")[-1].finish_reason is FinishReason.ERROR
    assert tokens_of(deltas) == expected


class GreedySampler:
    """Runs out of memory for more than `most` rows, and for any with a prompt of `prompt_len` tokens.

    Logits in float32, which features change in place, are lost then.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most, self.prompt_len, self.num_raised = 100, 0, 0
        choose = Sampler._choose

        def guarded(sampler: Sampler, logits: Tensor, batch: SampleBatch, wanted: int) -> Any:
            if len(logits) > self.most or (batch.num_prompt_tokens == self.prompt_len).any():
                if logits.dtype == torch.float32:
                    logits.fill_(torch.nan)
                self.num_raised += 1
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return choose(sampler, logits, batch, wanted)

        monkeypatch.setattr(Sampler, "_choose", guarded)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_sampled_in_parts(folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    spec = read_model_spec(folder, ModelConfig(model=str(folder), dtype=dtype))
    worker = start_worker(engine_config(folder, spec=spec))
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 3, "top_k": 9}, {"logprobs": 2}]
    requests = [request(str(i), prompt_of(i, 5 + 2 * i), max_tokens=6, **kinds[i % 3]) for i in range(7)]
    whole = generate(worker, requests, enable_prefix_caching=False)
    sampler = GreedySampler(monkeypatch)
    sampler.most = 2
    parted = generate(worker, requests, enable_prefix_caching=False)
    assert sampler.num_raised
    assert tokens_of(parted) == tokens_of(whole)
    for name in ("2", "5"):
        assert [each.logprobs for each in parted[name]] == [each.logprobs for each in whole[name]]
    sampler.prompt_len = 13
    deltas = generate(worker, requests, enable_prefix_caching=False)
    assert ["no memory left for this request" in each for each in failures(deltas.pop("4"))] == [True]
    del whole["4"]
    assert tokens_of(deltas) == tokens_of(whole)


def test_a_prompt_without_memory_for_its_scores_fails_alone(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    scored = [request(str(i), prompt_of(i, 9 + i), max_tokens=3, prompt_logprobs=1) for i in range(3)]
    expected = generate(worker, scored)
    score = PromptScorer._score

    def guarded(self: PromptScorer, row: HeadRow, table: TokenTable) -> Any:
        if table.num_prompt_tokens[row.slot] == 10:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return score(self, row, table)

    monkeypatch.setattr(PromptScorer, "_score", guarded)
    deltas = generate(worker, scored)
    assert len(failures(deltas.pop("1"))) == 1
    del expected["1"]
    assert tokens_of(deltas) == tokens_of(expected)
    assert {name for name in deltas if any(each.output for each in deltas[name])} == {"0", "2"}


def test_values_of_whole_prompts_are_computed_in_parts(worker: Worker, shortage: Shortage) -> None:
    def scored() -> list[Any]:
        one = request("a", prompt_of(4, 50), max_tokens=3, prompt_logprobs=2)
        deltas = generate(worker, [one], enable_prefix_caching=False)["a"]
        return [(each.token_ids, each.output) for each in deltas]

    expected = scored()
    shortage.most = 7
    got = scored()
    assert shortage.num_raised
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
    for (_, one), (_, other) in zip(got, expected, strict=True):
        assert (one is None) == (other is None)


def test_a_part_is_halved_by_tokens() -> None:
    part = [_Span(0, 0, 5), _Span(2, 3, 4), _Span(3, 0, 1)]
    assert _halve(part) == [[_Span(0, 0, 5)], [_Span(2, 3, 4), _Span(3, 0, 1)]]
    assert _halve(part[1:2]) == [[_Span(2, 3, 2)], [_Span(2, 5, 2)]]
    assert _halve([_Span(1, 0, 1), _Span(2, 0, 2)]) == [[_Span(1, 0, 1)], [_Span(2, 0, 2)]]
    assert _halve([_Span(3, 7, 1)]) == []


def test_tokens_that_see_later_ones_stay_together() -> None:
    part = [_Span(0, 0, 50), _Span(1, 0, 4), _Span(3, 0, 1)]
    assert _halve(part, can_cut=False) == [part[:1], part[1:]]
    assert _halve(part[:1], can_cut=False) == []


def test_a_span_has_the_last_of_its_row_s_wanted_tokens() -> None:
    assert [_num_wanted(_Span(0, *span), 10, 3) for span in ((0, 10), (0, 8), (8, 2), (0, 7), (9, 1))] == [
        3,
        1,
        2,
        0,
        1,
    ]


def generate_again(served: Any, shortage: Shortage, most: int) -> tuple[dict[str, list[int]], ...]:
    """The tokens of requests with all memory, and with memory for `most` tokens of a step."""
    requests = [request(str(i), prompt_of(i, 5 + 9 * i), max_tokens=4 + i) for i in range(4)]
    expected = tokens_of(served.generate(requests))
    shortage.most, shortage.sizes = most, []
    return expected, tokens_of(served.generate(requests))


@pytest.mark.parametrize("kind", ["qwen3.5", "lfm2", "bailing-hybrid"])
@pytest.mark.parametrize("most", [30, 2])
def test_states_are_computed_again_from_the_first_token_on(
    hybrid: Callable[[str], Path],  # noqa: F811
    shortage: Shortage,
    kind: str,
    most: int,
) -> None:
    """The attempt that failed has changed states of the layers before."""
    expected, got = generate_again(start(hybrid(kind), caching=False), shortage, most)
    assert got == expected
    assert shortage.num_raised
    assert max(shortage.sizes) <= most


def test_a_request_with_states_fails_alone(
    hybrid: Callable[[str], Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = start(hybrid("lfm2"), caching=False)
    others = [request(str(i), [5, 6 + i], max_tokens=5) for i in range(2)]
    expected = tokens_of(served.generate(others))
    Greedy(served.worker, monkeypatch, 97)
    deltas = served.generate([others[0], request("bad", [97, 5]), others[1]])
    assert failures(deltas.pop("bad"))
    assert tokens_of(deltas) == expected


def test_states_beside_windows_cannot_be_computed_again(
    hybrid: Callable[[str], Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pages of the first tokens may serve others."""
    served = start(hybrid("recurrent-gemma"), caching=False)
    Greedy(served.worker, monkeypatch, 97)
    assert failures(served.generate([request("bad", [97, 5])])["bad"])
    good = served.generate([request("good", [5, 6], max_tokens=3)])
    assert len(tokens_of(good)["good"]) == 3
