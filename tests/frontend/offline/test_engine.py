"""`LLMEngine`: a program adds requests and takes their outputs step by step."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from quire import LLM, EngineArgs, LLMEngine, LoRARequest, RequestOutput, RequestOutputKind, SamplingParams
from quire.core.errors import ConfigError, ParameterError
from tests.checkpoints import VOCAB_SIZE

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def options(checkpoint: Callable[..., Path]) -> EngineArgs:
    return EngineArgs(
        str(checkpoint("llama")), max_model_len=256, num_gpu_blocks_override=256, max_num_seqs=8, device="cpu"
    )


@pytest.fixture(scope="module")
def engine(options: EngineArgs) -> Iterator[LLMEngine]:
    engine = LLMEngine.from_engine_args(options)
    yield engine
    engine.shutdown()


def drive(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    """Outputs by request, until none is unfinished."""
    seen: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen.setdefault(output.request_id, []).append(output)
    return seen


def test_requests_run_together_and_each_ends_with_its_whole_output(engine: LLMEngine) -> None:
    lengths = {"a": 3, "b": 12, "c": 7}
    for request_id, length in lengths.items():
        assert engine.add_request(request_id, "Hello " + request_id, GREEDY.replace(max_tokens=length)) == request_id
    assert engine.get_num_unfinished_requests() == 3
    seen = drive(engine)
    assert {request_id: len(outputs[-1].outputs[0].token_ids) for request_id, outputs in seen.items()} == lengths
    for outputs in seen.values():
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        counts = [len(output.outputs[0].token_ids) for output in outputs]
        assert counts == sorted(counts)
    assert engine.get_num_unfinished_requests() == 0
    assert engine.step() == []


def test_the_options_have_vllms_names(engine: LLMEngine, options: EngineArgs) -> None:
    """As vLLM's own benchmarks and the scripts of others read them."""
    told, stored = engine.vllm_config, AutoConfig.from_pretrained(options.model)
    model = told.model_config
    assert model is engine.model_config
    assert (model.model, model.tokenizer, model.max_model_len) == (options.model, options.model, 256)
    assert model.dtype is torch.float32
    assert model.hf_config.to_dict() == stored.to_dict()
    assert model.hf_text_config.hidden_size == model.get_hidden_size() == stored.hidden_size
    assert model.get_vocab_size() == VOCAB_SIZE
    assert model.architectures == stored.architectures
    assert model.get_head_size() == stored.hidden_size // stored.num_attention_heads
    parallel = told.parallel_config
    assert model.get_num_kv_heads(parallel) == model.get_total_num_kv_heads() == stored.num_key_value_heads
    assert model.get_num_attention_heads(parallel) == stored.num_attention_heads
    assert model.get_num_layers(parallel) == model.get_total_num_hidden_layers() == stored.num_hidden_layers
    assert (parallel.world_size, parallel.world_size_across_dp) == (1, 1)
    assert (told.scheduler_config.max_num_seqs, told.scheduler_config.max_model_len) == (8, 256)
    assert (told.cache_config.num_gpu_blocks, told.cache_config.block_size) == (256, 16)
    assert (model.quantization, told.lora_config, model.get_sliding_window()) == (None, None, None)
    assert not hasattr(told, "compilation_config")
    with pytest.raises(AttributeError, match="'enforce_eager': Quire's resolved options are in `config`"):
        _ = model.enforce_eager


def test_parts_of_an_output_add_up(engine: LLMEngine) -> None:
    engine.add_request("whole", "Hello", GREEDY)
    engine.add_request("parts", "Hello", GREEDY.replace(output_kind=RequestOutputKind.DELTA))
    engine.add_request("last", "Hello", GREEDY.replace(output_kind=RequestOutputKind.FINAL_ONLY))
    seen = drive(engine)
    whole = seen["whole"][-1].outputs[0]
    assert "".join(output.outputs[0].text for output in seen["parts"]) == whole.text
    assert [output.outputs[0].text for output in seen["last"]] == [whole.text]


def test_an_aborted_request_has_no_more_outputs(engine: LLMEngine) -> None:
    engine.add_request("long", "Hello", GREEDY.replace(max_tokens=200))
    engine.add_request("short", "Hello", GREEDY)
    engine.step()
    engine.abort_request(["long", "unknown"])
    assert engine.get_num_unfinished_requests() <= 1
    assert set(drive(engine)) <= {"short"}
    engine.add_request("long", "Hello", GREEDY)  # the id is free
    assert drive(engine)["long"][-1].finished


def test_wrong_requests_are_refused_as_they_are_added(engine: LLMEngine) -> None:
    engine.add_request("first", "Hello", GREEDY)
    for arguments, message in (
        (("first", "Hello", GREEDY), "'first' is in use"),
        (("second", [VOCAB_SIZE], GREEDY), "outside the model's vocabulary"),
        (("second", "Hello", GREEDY, None, LoRARequest("a", 1, "/a")), "start it with enable_lora"),
    ):
        with pytest.raises(ParameterError, match=message):
            engine.add_request(*arguments)
    with pytest.raises(ParameterError, match="request_id must be a string"):
        engine.add_request(5, "Hello", GREEDY)
    assert list(drive(engine)) == ["first"]


def test_arrival_text_and_tokenization(engine: LLMEngine) -> None:
    arrived = time.time() - 5
    engine.add_request("ids", [5, 9], GREEDY, arrival_time=arrived, prompt_text="shown")
    engine.add_request("cut", "a b c d e f g h", GREEDY, tokenization_kwargs={"truncate_prompt_tokens": 3})
    seen = drive(engine)
    [output] = seen["ids"][-1:]
    assert (output.prompt, output.prompt_token_ids) == ("shown", [5, 9])
    assert output.metrics.arrival_time == arrived
    assert output.metrics.first_token_latency > 5
    assert len(seen["cut"][-1].prompt_token_ids) == 3


def test_options_are_one_object_for_all_classes(options: EngineArgs) -> None:
    assert (options.max_num_seqs, options.block_size) == (8, None)
    with pytest.raises(ConfigError, match="max_num_seq"):
        EngineArgs(max_num_seq=3)
    changed = EngineArgs(**vars(options))
    changed.max_num_seqs = "many"
    with pytest.raises(ConfigError, match="max_num_seqs"):
        LLMEngine.from_engine_args(changed)
    changed.max_num_seqs = 4
    with LLM.from_engine_args(changed) as llm:
        assert llm.config.limits.max_num_seqs == 4
        assert llm.llm_engine.get_supported_tasks() == ("generate",)


def test_what_vllms_engine_has_beside_is_explained(engine: LLMEngine) -> None:
    assert not hasattr(engine, "pin_lora")
    with pytest.raises(AttributeError, match="max_cpu_loras bounds"):
        engine.pin_lora(1)
    with pytest.raises(AttributeError, match="LLMEngine has no 'no_such_thing'"):
        engine.no_such_thing()
