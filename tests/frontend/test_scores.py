"""Log-probabilities in vLLM's less common forms, and the parameter that has a whole prompt computed."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from quire import LLM, FlatLogprobs, Logprob, SamplingParams
from quire.core.errors import ParameterError

OPTIONS = {"max_model_len": 256, "num_gpu_blocks_override": 256, "max_num_seqs": 32, "device": "cpu"}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPT = [5 + 7 * place % 90 for place in range(50)]


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[..., Path]) -> Iterator[LLM]:
    with LLM(
        str(checkpoint("llama")), max_logprobs=-1, max_num_batched_tokens=16, **OPTIONS
    ) as llm:  # prompts in parts
        yield llm


def test_named_ids_of_a_prompt_are_those_of_the_whole_distribution(llm: LLM) -> None:
    [output] = llm.generate(PROMPT, GREEDY.replace(prompt_logprobs=-1))
    whole = output.prompt_logprobs
    start = 3
    rows = [[place, 2 * place + 1, 7][: 1 + place % 3] for place in range(len(PROMPT) - 1 - start)]
    named = GREEDY.replace(prompt_logprob_token_ids=rows, prompt_logprob_start=start)
    [output] = llm.generate(PROMPT, named)
    assert output.prompt_logprobs is None
    scores = output.prompt_token_id_logprobs
    assert (scores.shape, scores.dtype) == ((len(rows), 3), np.float32)
    for index, row in enumerate(rows):
        expected = [whole[start + index + 1][token_id].logprob for token_id in row]
        assert scores[index, : len(row)] == pytest.approx(expected, abs=1e-5)
        assert np.isneginf(scores[index, len(row) :]).all()
    [both] = llm.generate(PROMPT, named.replace(prompt_logprobs=2, n=2, temperature=1.0))
    assert (both.prompt_token_id_logprobs == scores).all()
    assert [len(row) <= 3 for row in both.prompt_logprobs[1:]] == [True] * (len(PROMPT) - 1)
    assert both.prompt_logprobs[9][PROMPT[9]].logprob == pytest.approx(whole[9][PROMPT[9]].logprob, abs=1e-5)


def test_an_array_of_ids_with_padding(llm: LLM) -> None:
    ids = np.array([[4, -1], [-1, 9], [3, 2]])
    scores = llm.generate(PROMPT[:4], GREEDY.replace(prompt_logprob_token_ids=ids))[0].prompt_token_id_logprobs
    assert np.isneginf(scores).tolist() == [[False, True], [True, False], [False, False]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_logprob_token_ids": [[1]]}, "has 1 rows, but 49 positions"),
        ({"prompt_logprob_token_ids": [[1]], "prompt_logprob_start": 47}, "has 1 rows, but 2 positions"),
        ({"prompt_logprob_token_ids": [[100_000]] * 49}, "outside the vocabulary"),
    ],
)
def test_named_ids_that_do_not_fit_are_refused(llm: LLM, changes: dict, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        llm.generate(PROMPT, GREEDY.replace(**changes))


def test_flat_logprobs_read_like_the_others(llm: LLM) -> None:
    asked = GREEDY.replace(logprobs=3, prompt_logprobs=2)
    [plain] = llm.generate(PROMPT, asked)
    [output] = llm.generate(PROMPT, asked.replace(flat_logprobs=True))
    flat = output.outputs[0].logprobs
    assert isinstance(flat, FlatLogprobs)
    assert list(flat) == plain.outputs[0].logprobs
    assert [flat[place] for place in range(len(flat))] == plain.outputs[0].logprobs
    assert list(flat[1:3]) == plain.outputs[0].logprobs[1:3]
    assert (flat[-1], len(flat), len(flat.token_ids)) == (plain.outputs[0].logprobs[-1], 4, 12)
    assert isinstance(output.prompt_logprobs, FlatLogprobs)
    assert [row or None for row in output.prompt_logprobs] == plain.prompt_logprobs


def test_flat_logprobs_grow_at_their_end_alone() -> None:
    flat = FlatLogprobs.of([None, {5: Logprob(-1.0, 1, "a"), 6: Logprob(-2.0, 2)}])
    flat.append({7: Logprob(-3.0)})
    assert (flat.start_indices, flat.end_indices, flat.token_ids) == ([0, 0, 2], [0, 2, 3], [5, 6, 7])
    assert flat.copy() == flat
    assert next(reversed(flat)) == {7: Logprob(-3.0)}
    for change in (lambda: flat.insert(0, None), lambda: flat.__setitem__(0, {}), lambda: flat.__delitem__(0)):
        with pytest.raises(TypeError, match="grow at the end alone"):
            change()


def test_a_request_may_have_its_whole_prompt_computed(llm: LLM) -> None:
    [first] = llm.generate(PROMPT, GREEDY)
    [found] = llm.generate(PROMPT, GREEDY)
    [computed] = llm.generate(PROMPT, GREEDY.replace(skip_reading_prefix_cache=True))
    assert (found.num_cached_tokens, computed.num_cached_tokens) == (48, 0)
    assert computed.outputs[0].token_ids == found.outputs[0].token_ids == first.outputs[0].token_ids
    assert llm.generate(PROMPT, GREEDY)[0].num_cached_tokens == 48  # what it computed is in the cache all the same
