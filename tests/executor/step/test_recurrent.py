"""Models with recurrent layers in a real worker, driven by the real scheduler: states in slots, snapshots in pages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.core.wire.protocol import EngineRequest
from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.linear import PlainLinear
from tests.core.scheduling.fake_worker import resumed_after, start_of
from tests.executor.models.test_hybrid_models import folder as hybrid  # noqa: F401
from tests.executor.step.test_drafts import ToldDrafter
from tests.executor.step.test_model_runner import mixed_requests, prompt_of, request, tokens_of
from tests.executor.step.test_sameness import Served, alone, start

torch.set_num_threads(1)


@pytest.fixture(scope="module", params=["kimi-linear", "lfm2", "mamba2", "qwen3.5"])
def served(request: pytest.FixtureRequest, hybrid: Callable[[str], Path]) -> Served:  # noqa: F811
    return start(hybrid(request.param))


def test_a_request_continues_from_a_snapshot_with_the_same_tokens(served: Served) -> None:
    """Of the prompt's last whole interval, and of an output that no prompt ever had."""
    shared = prompt_of(7, 100)

    def conversation(answer: list[int]) -> list[EngineRequest]:
        turns = [shared, [*shared, 5, 6, 7], [*shared, *answer, 9]]
        return [request(name, turn, max_tokens=40) for name, turn in zip("abc", turns, strict=True)]

    [answer] = alone(served, conversation([])[:1]).values()
    apart = alone(served, conversation(answer))
    deltas = served.generate(conversation(answer), max_num_seqs=1)
    assert tokens_of(deltas) == apart
    assert [deltas[name][0].num_cached_tokens for name in "abc"] == [0, 96, 128]


def test_a_request_resumes_after_the_tokens_already_delivered(served: Served) -> None:
    expected = alone(served, mixed_requests())
    requests = {start_of(one).request_id: one for one in mixed_requests()}
    resumed = {name: tokens for name, tokens in expected.items() if len(tokens) > 8}
    rest = tokens_of(served.generate([resumed_after(tokens[:7], requests[name]) for name, tokens in resumed.items()]))
    assert rest == {name: tokens[7:] for name, tokens in resumed.items()}


def test_pages_that_held_states_do_not_spoil_attention(
    hybrid: Callable[[str], Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A state's bytes, read as keys, may be NaN, and attention in plain torch multiplies what it masks by 0."""
    monkeypatch.setattr("quire.ops.bind", lambda *_, **__: EagerBackend(PlainLinear()))
    tokens = []
    for content in (0, 0xFF):  # zeros, and NaN in every type
        served = start(hybrid("lfm2"))
        pages = served.worker._runner._inputs._moves._cache  # type: ignore[union-attr]
        for tensor in pages._tensors:
            tensor.fill_(content)
        pages.mark(list(range(len(pages._tensors[0]))), True)
        tokens.append(tokens_of(served.generate(mixed_requests())))
    assert tokens[0] == tokens[1]


def test_without_the_prefix_cache_a_model_of_states_alone_has_no_pages(hybrid: Callable[[str], Path]) -> None:  # noqa: F811
    served = start(hybrid("mamba2"), caching=False)
    [group] = served.ready.kv_groups
    assert group.snapshot_pages == 0
    one = [request("a", prompt_of(1, 20))]
    tokens = tokens_of(served.generate(one, num_pages=0))
    assert len(tokens["a"]) == 24


@pytest.mark.parametrize("family", ["kimi-linear", "lfm2", "mamba2", "qwen3.5"])
def test_states_go_back_over_rejected_drafts(family: str, hybrid: Callable[[str], Path]) -> None:  # noqa: F811
    """Tokens are those without drafts, some right and some wrong, also from snapshots that were taken beside drafts."""
    plain = start(hybrid(family))
    prompts = [prompt_of(index, 5 + 9 * index) for index in range(6)]
    requests = [request(f"r{index}", prompt, max_tokens=40) for index, prompt in enumerate(prompts)]
    expected = alone(plain, requests)
    drafter = ToldDrafter({tuple(prompt): expected[f"r{index}"] for index, prompt in enumerate(prompts)})
    served = start(hybrid(family), speculator=drafter)
    deltas = served.generate(requests)
    assert tokens_of(deltas) == expected
    sizes = [len(delta.token_ids) for entries in deltas.values() for delta in entries]
    assert max(sizes) > 3
    assert drafter.num_proposed > sum(size - 1 for size in sizes), "some were wrong"
    turns = [[*prompt, *expected[f"r{index}"][:35]] for index, prompt in enumerate(prompts)]
    longer = [request(f"l{index}", turn) for index, turn in enumerate(turns)]
    apart = alone(plain, longer)
    drafter.know({tuple(turn): apart[f"l{index}"] for index, turn in enumerate(turns)})
    turn_by_turn = [each for turns_of_one in zip(requests, longer, strict=True) for each in turns_of_one]
    again = served.generate(turn_by_turn, max_num_seqs=1)
    assert tokens_of(again) == expected | apart
    found = [again[f"l{index}"][0].num_cached_tokens for index in range(6)]
    assert all(count >= len(prompt) for count, prompt in zip(found[1:], prompts[1:], strict=True)), found


def test_two_workers_find_snapshots_and_give_the_same_tokens(hybrid: Callable[[str], Path]) -> None:  # noqa: F811
    shared = prompt_of(7, 100)
    rows = [[*shared, *prompt_of(i, 5 + i)] for i in range(4)]
    expected = list(alone(start(hybrid("lfm2")), [request(str(i), row) for i, row in enumerate(rows)]).values())
    prompts: list[Any] = [{"prompt_token_ids": row} for row in rows]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    options = {"max_model_len": 256, "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 22, "mamba_block_size": 16}
    options |= {"tensor_parallel_size": 2, "skip_tokenizer_init": True}
    with LLM(str(hybrid("lfm2")), **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        again = llm.generate(prompts, params, use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [0, 96, 96, 96]
    assert [output.num_cached_tokens for output in again] == [96, 96, 96, 96]
    for each in (outputs, again):
        assert [output.outputs[0].token_ids for output in each] == expected
