"""`LLM` and the server with models that have an encoder and a decoder: forms of prompts, usage, beams, errors."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import processors
from transformers import PreTrainedModel

from quire import LLM, BeamSearchParams, SamplingParams
from quire.core.config.engine_args import EngineArgs
from quire.core.errors import ParameterError
from quire.frontend.cli.plan import as_json, as_text
from quire.frontend.launch.inspection import plan_load
from tests.checkpoints import VOCAB_SIZE, make_tokenizer
from tests.executor.models.tiny_encoder_decoders import reference_tokens, write_encoder_decoder
from tests.servers import ServerProcess

EOS, FORCED = 2, 7
TEXT = "The quick brown fox"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
OPTIONS: dict[str, Any] = {"num_gpu_blocks_override": 200, "max_num_seqs": 8, "device": "cpu"}


def write(folder: Path, name: str, **settings: Any) -> PreTrainedModel:
    """A checkpoint whose tokenizer ends texts as those of such models do."""
    model = write_encoder_decoder(folder, name, vocab_size=VOCAB_SIZE, **settings)
    tokenizer = make_tokenizer(model_max_length=130)
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", EOS)]
    )
    tokenizer.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bart")


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return write(folder, "bart", generation={"forced_bos_token_id": FORCED})


@pytest.fixture(scope="module")
def llm(folder: Path, reference: PreTrainedModel) -> Iterator[LLM]:
    with LLM(str(folder), **OPTIONS) as llm:
        yield llm


def ids_of(llm: LLM, text: str) -> list[int]:
    return [*llm.get_tokenizer().encode(text, add_special_tokens=False), EOS]


def test_forms_of_prompts(llm: LLM, reference: PreTrainedModel) -> None:
    """A plain prompt is the encoder's; the decoder's begins with the start, and the forced token."""
    encoder = ids_of(llm, TEXT)
    expected = reference_tokens(reference, encoder, 9)
    assert expected[0] == FORCED
    forms = [
        TEXT,
        encoder,
        {"prompt": TEXT},
        {"prompt_token_ids": encoder},
        {"encoder_prompt": TEXT, "decoder_prompt": None},
        {"encoder_prompt": {"prompt_token_ids": encoder}, "decoder_prompt": [EOS, FORCED]},
    ]
    for output in llm.generate(forms, GREEDY):
        assert output.encoder_prompt_token_ids == encoder
        assert output.prompt_token_ids == [EOS, FORCED]
        assert output.outputs[0].token_ids == expected[1:]
    [output] = llm.generate([{"encoder_prompt": TEXT, "decoder_prompt": "and"}], GREEDY.replace(prompt_logprobs=0))
    assert output.encoder_prompt == TEXT
    assert output.prompt == "and"
    begun = [EOS, *llm.get_tokenizer().encode("and", add_special_tokens=False)]
    assert output.prompt_token_ids == begun
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(begun)
    whole = reference.generate(
        torch.tensor([encoder]), decoder_input_ids=torch.tensor([begun]), do_sample=False, max_new_tokens=8,
        eos_token_id=None,
    )  # fmt: skip
    assert output.outputs[0].token_ids == whole[0, len(begun) :].tolist()


def test_sequences_of_one_prompt_share_what_is_encoded(llm: LLM) -> None:
    [several] = llm.generate(TEXT, GREEDY.replace(n=3, temperature=1.0, seed=4))
    assert len({tuple(each.token_ids) for each in several.outputs}) > 1
    [one] = llm.generate(TEXT, GREEDY.replace(temperature=1.0, seed=4))
    assert several.outputs[0].token_ids == one.outputs[0].token_ids


def test_beams_are_those_of_transformers(llm: LLM, reference: PreTrainedModel) -> None:
    """Without a penalty of length, where the library does not count the prompt and vLLM does."""
    encoder = ids_of(llm, TEXT)
    [found] = llm.beam_search([TEXT], BeamSearchParams(beam_width=3, max_tokens=6, length_penalty=0, ignore_eos=True))
    expected = reference.generate(
        torch.tensor([encoder]), num_beams=3, num_return_sequences=3, do_sample=False, max_new_tokens=7,
        length_penalty=0.0, eos_token_id=None,
    )  # fmt: skip
    assert [each.tokens for each in found.sequences] == expected.tolist()


def test_rules_of_generation_config(tmp_path: Path) -> None:
    """The library obeys them; they hold for samples and beams, and not where a request ignores EOS."""
    rules = {"forced_eos_token_id": EOS, "min_length": 4, "bad_words_ids": [[26], [9, 11]], "suppress_tokens": [30]}
    reference = write(tmp_path, "t5", eos_token_id=EOS, decoder_start_token_id=0)
    encoder = [5, 9, 77, 140, EOS]

    def expected(num_tokens: int, **options: Any) -> list[list[int]]:
        ids = torch.tensor([encoder])
        found = reference.generate(ids, do_sample=False, max_new_tokens=num_tokens, max_length=None, **options)
        return [row[1:].tolist() for row in found]

    [free] = expected(6, eos_token_id=EOS)
    rules["begin_suppress_tokens"] = [free[0]]
    rules["bad_words_ids"].append([free[-2]])
    reference.generation_config.update(eos_token_id=EOS, **rules)
    reference.save_pretrained(tmp_path)
    sampling = SamplingParams(temperature=0, max_tokens=6)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        [ruled], [ignoring] = (
            llm.generate([encoder], params)[0].outputs for params in (sampling, sampling.replace(ignore_eos=True))
        )
        [found] = llm.beam_search([encoder], BeamSearchParams(beam_width=3, max_tokens=6, length_penalty=0))
    assert [ruled.token_ids] == expected(6)
    assert ruled.token_ids != free
    assert ruled.token_ids[-1] == EOS
    assert ruled.finish_reason == "stop"
    assert ignoring.token_ids[:5] == ruled.token_ids[:5]
    assert ignoring.token_ids[5] != EOS
    beams = expected(6, num_beams=3, num_return_sequences=3, length_penalty=0.0)
    assert [[*each.tokens[1:], EOS] for each in found.sequences] == beams


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"decoder_prompt": "a"}, "needs an encoder_prompt"),
        ({"encoder_prompt": "a", "prompt": "b"}, "cannot hold 'prompt'"),
        ({"encoder_prompt": []}, "encoder_prompt is empty"),
        ({"encoder_prompt": [VOCAB_SIZE]}, "outside the model's vocabulary"),
        ({"encoder_prompt": [5] * 131}, "131 tokens, but it reads at most 130"),
        ({"encoder_prompt": {"prompt_embeds": b""}}, "prompt_embeds are not for models with an encoder"),
        ({"encoder_prompt": {"encoder_prompt": "a"}}, "encoder_prompt is the prompt of one side"),
        ({"encoder_prompt": "a", "decoder_prompt": [5] * 130}, "prompt and output together are limited to 130"),
    ],
    ids=str,
)
def test_wrong_prompts(llm: LLM, prompt: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        llm.generate([prompt], GREEDY)


def test_completions(folder: Path, reference: PreTrainedModel, llm: LLM, tmp_path: Path) -> None:
    """Both names of the prompt, the decoder's prompt, usage of both sides, and errors with the field's name."""
    encoder = ids_of(llm, TEXT)
    options = ("--num-gpu-blocks-override", "200", "--max-num-seqs", "8", "--device", "cpu")
    server = ServerProcess(tmp_path, str(folder), *options)
    body = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    try:
        server.wait_until_ready()
        with httpx.Client(base_url=server.base_url, timeout=60) as client:
            expected = reference_tokens(reference, encoder, 9)[1:]
            for prompt in ({"prompt": TEXT}, {"encoder_prompt": TEXT}, {"prompt": encoder, "decoder_prompt": [EOS]}):
                answer = client.post("/v1/completions", json=body | prompt).json()
                assert answer["choices"][0]["token_ids"] == expected
                assert answer["usage"]["prompt_tokens"] == len(encoder) + 2
            refused = client.post("/v1/completions", json=body | {"encoder_prompt": "a", "prompt": "b"})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "encoder_prompt")
            long = client.post("/v1/completions", json=body | {"prompt": [5] * 131})
            assert (long.status_code, long.json()["error"]["param"]) == (400, "encoder_prompt")
            cut = client.post("/v1/completions", json=body | {"prompt": [5] * 131, "truncate_prompt_tokens": 20}).json()
            assert cut["usage"]["prompt_tokens"] == 22
            rendered = client.post("/v1/completions/render", json=body | {"prompt": TEXT})
            assert (rendered.status_code, rendered.json()["error"]["param"]) == (400, "prompt")
            chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
            assert client.post("/v1/chat/completions", json=chat).json()["usage"]["prompt_tokens"] > 10

    finally:
        server.stop()


def test_a_model_without_an_encoder_refuses_both(checkpoint: Callable[..., Path]) -> None:
    with LLM(str(checkpoint("llama")), **OPTIONS, max_model_len=128) as llm:
        for prompt in ({"encoder_prompt": "a"}, {"encoder_prompt": "a", "decoder_prompt": "b"}):
            with pytest.raises(ParameterError, match="this one has none"):
                llm.generate([prompt], GREEDY)


def test_a_plan_counts_both_kinds_of_layers(folder: Path, reference: PreTrainedModel) -> None:
    config, plan = plan_load(EngineArgs.from_flat(model=str(folder), device="cpu"))
    groups = as_json(config, plan)["kv_groups"]
    assert [(group["kind"], group["encoder_tokens"]) for group in groups] == [("full", None), ("cross", 130)]
    assert any("attention to the encoder" in line for line in as_text(config, plan))
