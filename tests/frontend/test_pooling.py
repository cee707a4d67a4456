"""Vectors of a decoder through `AsyncLLM.encode` on a real engine: the values are Transformers' own."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from quire import LLM, AsyncLLM, PoolingParams, SamplingParams
from quire.core.errors import EngineError, ParameterError
from quire.frontend.launch.event_loop import EventLoopThread
from quire.frontend.outputs import PoolingOutput, PoolingRequestOutput

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_model_len": 64,
    "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 64,
}
PROMPTS = [[5], [7, 9, 11], [*range(20, 60)], [*range(20, 84)]]  # the last two begin alike, and need several steps
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    thread = EventLoopThread("tests")
    yield thread.run
    thread.close()


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[..., Path], run: Run) -> Iterator[AsyncLLM]:
    config = {"seq_pooling_type": "MEAN", "enable_chunked_processing": True, "max_embed_len": 150}
    llm = AsyncLLM.from_engine_args(model=str(checkpoint("llama")), runner="pooling", pooler_config=config, **OPTIONS)
    yield llm
    run(llm.aclose())
    llm.shutdown()


@pytest.fixture(scope="module")
def hidden(checkpoint: Callable[..., Path]) -> list[np.ndarray]:
    """Transformers' last hidden states of each prompt, [num_tokens, hidden] float32."""
    reference = AutoModel.from_pretrained(checkpoint("llama"), dtype=torch.float32)
    with torch.inference_mode():
        return [reference(torch.tensor([prompt])).last_hidden_state[0].numpy() for prompt in PROMPTS]


async def encode(
    llm: AsyncLLM, name: str, prompt: Any, params: PoolingParams | None = None, **options: Any
) -> PoolingRequestOutput[PoolingOutput]:
    [output] = [each async for each in llm.encode(prompt, params, name, **options)]
    return output


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def test_vectors_are_those_of_transformers(llm: AsyncLLM, run: Run, hidden: list[np.ndarray]) -> None:
    async def work() -> None:
        assert await llm.get_supported_tasks() == ("embed", "token_embed")
        raw, tokens = PoolingParams(use_activation=False), PoolingParams(task="token_embed")
        means = await asyncio.gather(*(encode(llm, f"mean {i}", prompt) for i, prompt in enumerate(PROMPTS)))
        plain = await asyncio.gather(*(encode(llm, f"raw {i}", prompt, raw) for i, prompt in enumerate(PROMPTS)))
        each = await asyncio.gather(*(encode(llm, f"all {i}", prompt, tokens) for i, prompt in enumerate(PROMPTS)))
        for index, states in enumerate(hidden):
            np.testing.assert_allclose(means[index].outputs.array, unit(states.mean(0)), atol=1e-5)
            np.testing.assert_allclose(plain[index].outputs.array, states.mean(0), atol=2e-5)
            np.testing.assert_allclose(each[index].outputs.data.numpy(), unit(states), atol=1e-5)
            assert means[index].outputs.data.shape == (states.shape[1],)
            assert means[index].prompt_token_ids == PROMPTS[index]

    run(work())


def test_a_text_is_tokenized_as_for_generation(llm: AsyncLLM, run: Run) -> None:
    async def work() -> None:
        by_text = await encode(llm, "text", "Hello there")
        by_ids = await encode(llm, "ids", by_text.prompt_token_ids)
        cut = await encode(llm, "cut", "Hello there", tokenization_kwargs={"truncate_prompt_tokens": 2})
        assert by_text.outputs == by_ids.outputs
        assert len(cut.prompt_token_ids) == 2

    run(work())


@pytest.mark.parametrize(
    ("prompt", "params", "text"),
    [
        ([5] * 151, None, r"The prompt has 151 tokens, but prompts are limited to 150 \(max_embed_len\)"),
        (
            [5] * 65,
            PoolingParams(task="token_embed"),
            "has 65 tokens, but prompts are limited to 64",
        ),
        (
            [5],
            PoolingParams(task="classify"),
            "serves embed, token_embed, and not classify; start it with --convert cl",
        ),
        ([5], PoolingParams(dimensions=8), "--hf-overrides"),
        ([5], PoolingParams(step_tag_id=8), "step_tag_id has no use for the task embed"),
        ([5], PoolingParams(task="token_embed", step_tag_id=8), "step_tag_id needs STEP pooling"),
        ([5], SamplingParams(), "The parameters must be PoolingParams"),
    ],
)
def test_a_wrong_request_is_refused(llm: AsyncLLM, run: Run, prompt: list[int], params: Any, text: str) -> None:
    with pytest.raises(ParameterError, match=text):
        run(encode(llm, "wrong", prompt, params))


def test_a_long_prompt_gets_the_mean_of_its_parts(llm: AsyncLLM, run: Run, checkpoint: Callable[..., Path]) -> None:
    prompt = [20 + place % 70 for place in range(140)]
    reference = AutoModel.from_pretrained(checkpoint("llama"), dtype=torch.float32)
    with torch.inference_mode():
        parts = [reference(torch.tensor([prompt[at : at + 64]])).last_hidden_state[0] for at in (0, 64, 128)]
    states = torch.cat(parts).numpy()

    async def work() -> None:
        output = await encode(llm, "long", prompt)
        np.testing.assert_allclose(output.outputs.array, unit(states.mean(0)), atol=1e-5)
        assert (output.request_id, output.prompt_token_ids) == ("long", prompt)
        raw = await encode(llm, "long raw", prompt, PoolingParams(use_activation=False))
        np.testing.assert_allclose(raw.outputs.array, states.mean(0), atol=2e-5)
        assert not llm.num_unfinished

    run(work())


def test_text_is_refused_where_vectors_are_served(llm: AsyncLLM, run: Run) -> None:
    async def work() -> None:
        async for _ in llm.generate([5], SamplingParams(), "text"):
            pass

    with pytest.raises(ParameterError, match="serves embed, token_embed, and not generate; start it with --runner gen"):
        run(work())


def test_requests_are_counted_and_can_be_aborted(llm: AsyncLLM, run: Run) -> None:
    async def work() -> None:
        assert llm.metrics is not None
        metrics = llm.metrics.requests[0]
        before = metrics.prompt_tokens
        await encode(llm, "counted", [5, 6, 7])
        assert metrics.prompt_tokens == before + 3
        task = asyncio.create_task(encode(llm, "aborted", [*range(10, 70)]))
        while not llm.num_unfinished:
            await asyncio.sleep(0)
        await llm.abort("aborted")
        with pytest.raises(EngineError, match="aborted"):
            await task
        assert not llm.num_unfinished

    run(work())


def test_an_engine_that_dies_computes_unfinished_requests_again(
    llm: AsyncLLM, run: Run, hidden: list[np.ndarray]
) -> None:
    async def work() -> None:
        params = PoolingParams(task="token_embed")
        work = [asyncio.create_task(encode(llm, f"again {i}", prompt, params)) for i, prompt in enumerate(PROMPTS)]
        while llm.num_unfinished < len(PROMPTS):
            await asyncio.sleep(0)
        [pid] = llm.client.engine_pids
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        for output, states in zip(await asyncio.gather(*work), hidden, strict=True):
            np.testing.assert_allclose(output.outputs.array, unit(states), atol=1e-5)

    run(work())


def test_requests_of_higher_priority_come_first(checkpoint: Callable[..., Path], run: Run) -> None:
    """One at a time: the last of many that waits is the first that is served."""
    options = {**OPTIONS, "max_num_seqs": 1, "scheduling_policy": "priority"}
    llm = AsyncLLM.from_engine_args(model=str(checkpoint("llama")), convert="embed", **options)
    ended: list[str] = []

    async def ask(name: str, priority: int) -> None:
        await encode(llm, name, [5 + len(name), *range(20, 80)], priority=priority)
        ended.append(name)

    async def work() -> None:
        await llm.start()
        names = ["x" * length for length in range(1, 20)]
        await asyncio.gather(*(ask(name, 5) for name in names), ask("urgent" * 9, -1))

    try:
        run(work())
        assert ended.index("urgent" * 9) < 15
    finally:
        run(llm.aclose())
        llm.shutdown()


class TestLLM:
    """`LLM` on two ranks: the vectors are those of one."""

    @pytest.fixture(scope="class")
    def offline(self, checkpoint: Callable[..., Path]) -> Iterator[LLM]:
        with LLM(str(checkpoint("llama")), convert="embed", tensor_parallel_size=2, **OPTIONS) as llm:
            yield llm

    def test_vectors_in_the_order_of_prompts(self, offline: LLM, hidden: list[np.ndarray]) -> None:
        assert offline.supported_tasks == ("embed", "token_embed")
        outputs = offline.embed([PROMPTS[3], PROMPTS[1], PROMPTS[3]])
        assert [output.prompt_token_ids for output in outputs] == [PROMPTS[3], PROMPTS[1], PROMPTS[3]]
        for output, index in zip(outputs, (3, 1, 3), strict=True):
            np.testing.assert_allclose(output.outputs.embedding, unit(hidden[index][-1]), atol=1e-5)
            assert output.outputs.hidden_size == 64
        assert len({output.request_id for output in outputs}) == 3
        [tokens] = offline.encode(PROMPTS[1], pooling_task="token_embed")
        np.testing.assert_allclose(tokens.outputs.array, unit(hidden[1]), atol=1e-5)
        texts = offline.embed(["Hello there", "Hello there"])
        assert texts[0].outputs == texts[1].outputs

    def test_a_prefix_comes_from_the_cache(self, offline: LLM) -> None:
        before = [*range(90, 140)]
        offline.embed([[*before, 5]])
        [found] = offline.embed([[*before, 6, 7]])
        assert found.num_cached_tokens == 48  # whole pages
        [computed] = offline.embed([[*before, 6, 7]], pooling_params=PoolingParams(skip_reading_prefix_cache=True))
        assert computed.num_cached_tokens == 0
        np.testing.assert_allclose(found.outputs.embedding, computed.outputs.embedding, atol=1e-6)

    def test_scores_are_cosines(self, offline: LLM) -> None:
        first, *second = (np.array(each.outputs.embedding) for each in offline.embed(["a b", "c d", "Hello", "a b"]))
        scores = offline.score("a b", ["c d", "Hello", "a b"])
        np.testing.assert_allclose(
            [each.outputs.score for each in scores], [first @ each for each in second], atol=1e-6
        )
        assert scores[2].outputs.score == pytest.approx(1, abs=1e-6)

    def test_what_the_model_does_not_serve(self, offline: LLM) -> None:
        for call in (offline.classify, offline.reward, offline.generate):
            with pytest.raises(ParameterError, match="serves embed, token_embed, and not"):
                call("a")
        with pytest.raises(ParameterError, match="serves embed, token_embed, and not generate"):
            offline.chat([{"role": "user", "content": "a"}], chat_template="{{ raise_exception('no template') }}")
        with pytest.raises(ParameterError, match="data_1 has 2 texts and data_2 3"):
            offline.score(["a", "b"], ["c", "d", "e"])
        with pytest.raises(ParameterError, match="token_embed"):
            offline.encode("a", pooling_task="encode")  # type: ignore[arg-type]


class TestReranker:
    """A decoder that says yes or no, as a score of pairs."""

    NO, YES = "n", "y"

    @pytest.fixture(scope="class")
    def reranker(self, checkpoint: Callable[..., Path]) -> Iterator[LLM]:
        overrides = {"classifier_from_token": [self.NO, self.YES], "method": "from_2_way_softmax"}
        folder = str(checkpoint("llama"))
        with LLM(folder, convert="classify", hf_overrides=overrides, **OPTIONS) as llm:
            yield llm

    @pytest.fixture(scope="class")
    def expected(self, checkpoint: Callable[..., Path]) -> Callable[[str], float]:
        """The probability of yes after a text, by Transformers."""
        model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(checkpoint("llama"))
        no, yes = tokenizer.convert_tokens_to_ids([self.NO, self.YES])

        def score(text: str) -> float:
            with torch.inference_mode():
                logits = model(torch.tensor([tokenizer(text).input_ids])).logits[0, -1]
            return float(logits[[no, yes]].softmax(-1)[1])

        return score

    def test_scores(self, reranker: LLM, expected: Callable[[str], float]) -> None:
        assert reranker.supported_tasks == ("classify", "token_classify")
        documents = ["one", "two", "one"]
        scores = [each.outputs.score for each in reranker.score("which? ", documents)]
        np.testing.assert_allclose(scores, [expected(f"which? {each}") for each in documents], atol=1e-5)
        template = "{{ messages[0]['content'] }} -> {{ messages[1]['content'] }} !"
        written = reranker.score(["a", "b"], ["c", "d"], chat_template=template)
        found = [each.outputs.score for each in written]
        np.testing.assert_allclose(found, [expected("a -> c !"), expected("b -> d !")], atol=1e-5)
        cut = PoolingParams(extra_kwargs={"max_tokens_per_doc": 1})
        [short] = reranker.score("a", "c d e f", chat_template=template, pooling_params=cut)
        assert short.outputs.score == pytest.approx(written[0].outputs.score, abs=1e-6)
        [plain] = reranker.classify("which? two")
        assert plain.outputs.probs == pytest.approx([scores[1]], abs=1e-6)

    def test_raw_scores_and_rewards(self, reranker: LLM, expected: Callable[[str], float]) -> None:
        probability = expected("which? one")
        [raw] = reranker.score("which? ", "one", pooling_params=PoolingParams(use_activation=False))
        assert raw.outputs.score == pytest.approx(np.log(probability / (1 - probability)), abs=1e-4)
        [rewards] = reranker.reward("which? one")
        assert rewards.outputs.shape == (len(rewards.prompt_token_ids), 1)
        assert rewards.outputs.tolist()[-1] == pytest.approx(probability, abs=1e-5)
