"""The arguments of `LLM` that vLLM's programs give: each has its effect, or is refused by name."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from quire import LLM, AsyncLLM, RequestOutput, SamplingParams, TextPrompt, TokensPrompt
from quire.core.errors import ConfigError, ParameterError
from quire.frontend.metrics.reader import Counter, Gauge, Histogram
from tests.checkpoints import VOCAB_SIZE

OPTIONS = {"max_model_len": 256, "num_gpu_blocks_override": 256, "max_num_seqs": 32, "device": "cpu"}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
CONVERSATION = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> str:
    return str(checkpoint("llama"))


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    template = "{{ x }}{% for message in messages %}<{{ message.content }}>{% endfor %}"
    with LLM(folder, chat_template=template, scheduling_policy="priority", disable_log_stats=False, **OPTIONS) as llm:
        yield llm


class Bar:
    """A progress bar with tqdm's interface, as far as it is used."""

    made: ClassVar[list["Bar"]] = []

    def __init__(self, total: int, desc: str, **others: Any) -> None:
        self.total, self.desc, self.count, self.closed = total, desc, 0, False
        self.made.append(self)

    def update(self, count: int) -> None:
        self.count += count

    def close(self) -> None:
        self.closed = True


def test_prompts_as_typed_dictionaries(llm: LLM) -> None:
    [first, second] = llm.generate(
        [TextPrompt(prompt="Hello"), TokensPrompt(prompt_token_ids=[5, 9], prompt="shown", multi_modal_data=None)],
        GREEDY,
    )
    assert first.prompt == "Hello"
    assert (second.prompt, second.prompt_token_ids) == ("shown", [5, 9])
    with pytest.raises(ParameterError, match=r"multi_modal_data\.image\[0\] must be an image"):
        llm.generate({"prompt": "Hello", "multi_modal_data": {"image": 1}}, GREEDY)


def test_one_priority_for_all_and_a_list_with_gaps_of_parameters(llm: LLM) -> None:
    assert len(llm.generate(["a", "b"], GREEDY, priority=3)) == 2
    [first, second] = llm.generate(["a", "b"], [GREEDY.replace(max_tokens=2), None])
    assert len(first.outputs[0].token_ids) == 2
    assert len(second.outputs[0].token_ids) == SamplingParams().max_tokens


def test_tokenization_options(llm: LLM) -> None:
    def ids(**options: Any) -> list[int]:
        return llm.generate("a b c d e f", GREEDY, tokenization_kwargs=options)[0].prompt_token_ids

    whole = ids()
    assert ids(truncate_prompt_tokens=4) == ids(truncation=True, max_length=4) == whole[-4:]
    assert ids(truncation=True, max_length=4, truncation_side="left") == whole[-4:]
    assert ids(truncation=True, max_length=4, truncation_side="right") == whole[:4]
    assert ids(truncate_prompt_tokens=4, add_special_tokens=False) == whole[-4:]
    assert ids(truncation=False, padding=False) == whole
    assert len(llm.generate([5] * 400, GREEDY, tokenization_kwargs={"truncation": True})[0].prompt_token_ids) == 248
    bos = llm.get_tokenizer().bos_token_id
    assert ids(add_special_tokens=False) == [each for each in whole if each != bos]
    for options, message in (
        ({"stride": 3}, "not 'stride'"),
        ({"max_length": 3}, "max_length needs truncation=True"),
        ({"truncation": "only_first"}, "True or False"),
    ):
        with pytest.raises(ParameterError, match=message):
            ids(**options)


def test_a_progress_bar_of_the_programs_own(llm: LLM) -> None:
    Bar.made.clear()
    llm.generate(["a", "b", "c"], GREEDY, use_tqdm=Bar)
    llm.enqueue(["a", "b"], GREEDY, use_tqdm=Bar)
    llm.wait_for_completion(use_tqdm=Bar)
    assert [(bar.total, bar.count, bar.closed) for bar in Bar.made] == [(3, 3, True), (2, 2, True), (2, 2, True)]


def test_enqueued_requests_run_and_come_back_in_order(llm: LLM) -> None:
    prompts = [[5 + index, 9] for index in range(40)]
    expected = [output.outputs[0].text for output in llm.generate(prompts, GREEDY)]
    first = llm.enqueue(prompts[:25], GREEDY)
    [between] = llm.generate("Hello", GREEDY)
    ids = first + llm.enqueue(prompts[25:], GREEDY) + llm.enqueue_chat(CONVERSATION, GREEDY)
    outputs = llm.wait_for_completion(RequestOutput)
    assert [output.request_id for output in outputs] == ids
    assert [output.outputs[0].text for output in outputs[:-1]] == expected
    assert outputs[-1].prompt == "<Hi>"
    assert between.prompt == "Hello"
    assert int(ids[0]) < int(between.request_id) < int(ids[25])
    assert llm.wait_for_completion() == []
    with pytest.raises(TypeError, match="Outputs are RequestOutput"):
        llm.wait_for_completion(int)


def test_a_wrong_prompt_is_refused_as_it_is_enqueued(llm: LLM) -> None:
    with pytest.raises(ParameterError, match="outside the model's vocabulary"):
        llm.enqueue([[5], [VOCAB_SIZE]], GREEDY)
    assert llm.wait_for_completion() == []
    assert llm.llm_engine.async_llm.num_unfinished == 0


def test_a_message_alone_is_a_conversation(llm: LLM) -> None:
    assert llm.chat(CONVERSATION[0], GREEDY)[0].prompt_token_ids == llm.chat(CONVERSATION, GREEDY)[0].prompt_token_ids


def test_a_chat_template_of_the_model_and_of_a_call(llm: LLM, tmp_path: Path) -> None:
    assert llm.chat(CONVERSATION, GREEDY, chat_template_kwargs={"x": "so"})[0].prompt == "so<Hi>"
    assert llm.chat(CONVERSATION, GREEDY, chat_template="other")[0].prompt == "other"
    with pytest.raises(ConfigError, match=r"--chat-template: cannot read '.*none\.jinja'"):
        LLM(chat_template=tmp_path / "none.jinja")


@pytest.mark.parametrize("name", ["mm_processor_kwargs"])
def test_arguments_that_ask_for_what_there_is_not_are_refused_by_name(llm: LLM, name: str) -> None:
    for method, given in ((llm.generate, "a"), (llm.enqueue, "a"), (llm.chat, CONVERSATION)):
        with pytest.raises(ParameterError, match=f"^{name} are for models that read images") as caught:
            method(given, GREEDY, **{name: {"x": 1}})
        assert caught.value.param == name
        if method != llm.enqueue:
            assert method(given, GREEDY, **{name: None})


def test_metrics_as_objects(llm: LLM) -> None:
    def read() -> dict[str, Any]:
        return {metric.name: metric for metric in llm.get_metrics()}

    before = read()
    llm.generate(["Hello", "there"], GREEDY)
    after = read()
    grown = after["vllm:generation_tokens"].value - before["vllm:generation_tokens"].value
    assert isinstance(after["vllm:generation_tokens"], Counter)
    assert grown == 16
    assert isinstance(after["vllm:num_requests_running"], Gauge)
    histogram = after["vllm:request_generation_tokens"]
    assert isinstance(histogram, Histogram)
    assert histogram.count == histogram.buckets["+Inf"] == before[histogram.name].count + 2
    assert histogram.sum == before[histogram.name].sum + 16
    assert histogram.labels == {"model_name": llm.llm_engine.async_llm.model.name, "engine": "0"}
    assert histogram.buckets["10.0"] - histogram.buckets["5.0"] >= 2


def test_caches_profiles_and_sizes(llm: LLM) -> None:
    prompt = list(range(5, 69))
    llm.generate(prompt, GREEDY)
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 48
    assert llm.reset_prefix_cache() is True
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0
    with pytest.raises(ParameterError, match="profile_prefix is not supported"):
        llm.start_profile("name")
    with pytest.raises(ConfigError, match="--profiler-config"):
        llm.start_profile()
    assert llm.get_world_size() == llm.get_world_size(include_dp=False) == 1
    assert llm.supported_tasks == ("generate",)


def test_statistics_are_counted_and_requests_logged_where_asked_for(
    folder: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "quire")
    monkeypatch.setenv("QUIRE_LOG_STATS_INTERVAL", "0.05")
    with LLM(folder, **OPTIONS) as silent:
        silent.generate("a", GREEDY)
        with pytest.raises(ConfigError, match="disable_log_stats=False"):
            silent.get_metrics()
    assert not [record for record in caplog.records if "output tokens" in record.getMessage()]
    with LLM(folder, enable_log_requests=True, disable_log_stats=False, **OPTIONS) as telling:
        telling.generate("a", GREEDY.replace(max_tokens=100))
        telling.llm_engine.do_log_stats()
    lines = [record.getMessage() for record in caplog.records]
    assert any("8 output tokens" in line or "100 output tokens" in line for line in lines), lines
    assert any("KV cache" in line and "tokens/s" in line for line in lines), lines


def test_the_asynchronous_class_takes_the_same_arguments(folder: str) -> None:
    async def run() -> None:
        async with AsyncLLM.from_engine_args(model=folder, **OPTIONS) as llm:
            stream = llm.generate(
                [5, 9], GREEDY, "a", prompt_text="shown", tokenization_kwargs={"truncate_prompt_tokens": 1}
            )
            [*_, last] = [output async for output in stream]
            assert last.prompt_token_ids == [9]
            with pytest.raises(ParameterError, match="kv_hints is not supported"):
                await anext(llm.generate("a", GREEDY, "b", kv_hints={"x": 1}))
            with pytest.raises(AttributeError, match="Quire's scheduler does not pause"):
                await llm.pause_generation()
            assert (llm.is_running, llm.is_stopped, llm.errored, llm.dead_error) == (True, False, False, None)
            assert llm.get_num_unfinished_requests() == 0
            assert await llm.reset_prefix_cache()
        assert (llm.is_running, llm.is_stopped) == (False, True)
        assert "shut down" in str(llm.dead_error)

    asyncio.run(run())


def test_methods_for_other_kinds_of_models_say_why_they_are_missing(llm: LLM) -> None:
    name = "sleep"
    assert not hasattr(llm, name)
    with pytest.raises(AttributeError, match=r"LLM has no 'sleep': .*end the engine"):
        getattr(llm, name)
    with pytest.raises(ParameterError, match="serves generate, and not embed; start it with --convert embed"):
        llm.embed("a")
