"""A program's functions on the workers: `collective_rpc` and `apply_model`, in the engine's process and out of it."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.core.errors import ConfigError, EngineError

OPTIONS = {"max_model_len": 256, "num_gpu_blocks_override": 64, "max_num_seqs": 8, "device": "cpu"}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module", params=[1, 2], ids=["uni", "mp"])
def llm(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Iterator[LLM]:
    folder = str(checkpoint("llama"))
    with LLM(folder, tensor_parallel_size=request.param, allow_insecure_serialization=True, **OPTIONS) as llm:
        yield llm


def num_workers(llm: LLM) -> int:
    return llm.config.layout.tensor


def pid_and_sum(worker: object, first: int, second: int = 0) -> tuple[int, int]:
    return os.getpid(), first + second


def test_a_function_runs_on_every_worker(llm: LLM) -> None:
    answers = llm.collective_rpc(pid_and_sum, args=(4,), kwargs={"second": 5})
    assert [total for _, total in answers] == [9] * num_workers(llm)
    pids = {pid for pid, _ in answers}
    assert len(pids) == num_workers(llm)
    assert os.getpid() not in pids


def test_apply_model_sees_the_weights_and_may_change_them(llm: LLM) -> None:
    def negate(model) -> str:
        import torch

        with torch.inference_mode():
            model._norm._weight.neg_()
        return type(model).__name__

    before = llm.generate("Hello", GREEDY)[0].outputs[0].token_ids
    assert llm.apply_model(negate) == ["LlamaForCausalLM"] * num_workers(llm)
    assert llm.generate("Hello", GREEDY)[0].outputs[0].token_ids != before
    llm.apply_model(negate)
    assert llm.generate("Hello", GREEDY)[0].outputs[0].token_ids == before


def test_a_method_of_the_worker_by_name(llm: LLM) -> None:
    assert llm.collective_rpc("apply_model", args=(lambda model: len(model.kv_layers),)) == [2] * num_workers(llm)


def test_a_failure_names_its_worker_and_harms_nothing(llm: LLM) -> None:
    def fail(worker: object) -> None:
        raise ValueError("no such thing")

    with pytest.raises(EngineError, match="Worker tp0: ValueError: no such thing"):
        llm.collective_rpc(fail)
    with pytest.raises(EngineError, match=r"AttributeError: .*no_such_method"):
        llm.collective_rpc("no_such_method")
    assert llm.generate("Hello", GREEDY)[0].finished


def test_a_timeout_ends_the_wait_alone(llm: LLM) -> None:
    with pytest.raises(TimeoutError):
        llm.collective_rpc(lambda worker: time.sleep(1), timeout=0.05)
    assert llm.collective_rpc(lambda worker: 1) == [1] * num_workers(llm)


def test_calls_wait_for_the_steps_before_and_delay_none_wrongly(llm: LLM) -> None:
    """Outputs are the same with calls between the steps as without."""
    prompts = [[5 + index, 9] for index in range(6)]
    long = GREEDY.replace(max_tokens=60)
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, long)]
    llm.enqueue(prompts, long, use_tqdm=False)
    for _ in range(10):
        llm.collective_rpc(lambda worker: None)
    assert [output.outputs[0].token_ids for output in llm.wait_for_completion(use_tqdm=False)] == expected


def test_without_permission_nothing_is_sent(checkpoint: Callable[..., Path]) -> None:
    with LLM(str(checkpoint("llama")), **OPTIONS) as llm:
        with pytest.raises(ConfigError, match="allow_insecure_serialization=True"):
            llm.collective_rpc(lambda worker: 1)
        with pytest.raises(EngineError, match="KeyError: 'function'"):  # the worker does not rely on the frontend
            llm.llm_engine.run(llm.llm_engine.async_llm.client.call_workers("function", b""))
