"""Prompts that come as embeddings: files, arrays and tensors, what is refused, and answers over HTTP and `LLM`."""

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from safetensors.torch import load_file, save

from quire import LLM, BeamSearchParams, SamplingParams
from quire.core.errors import ParameterError
from quire.core.wire.protocol import ROW_DIGEST_BYTES
from quire.core.wire.sampling_params import MAX_COMPLETIONS
from quire.frontend.requests.prompt_embeds import EmbedsReader

HIDDEN_SIZE = 64
LIMIT = 256


def rows_of(length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(length, HIDDEN_SIZE, generator=torch.Generator().manual_seed(length)).to(dtype)


def encoded(*tensors: torch.Tensor) -> str:
    return base64.b64encode(save({f"t{i}": each for i, each in enumerate(tensors)})).decode()


def file_with(header: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


# --------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_form_is_read_to_the_same_rows(dtype: torch.dtype) -> None:
    rows = rows_of(7, dtype)
    read = EmbedsReader(HIDDEN_SIZE).read
    embeds, num_tokens = read(rows, LIMIT)
    assert num_tokens == 7
    assert torch.equal(torch.frombuffer(bytearray(embeds.rows), dtype=dtype).view(7, HIDDEN_SIZE), rows)
    assert len(embeds.row_digests) == 7 * ROW_DIGEST_BYTES
    forms: list[Any] = [encoded(rows), save({"any": rows}), rows[None], rows.T.contiguous().T, rows.requires_grad_()]
    if dtype != torch.bfloat16:
        array = rows.detach().numpy()
        forms += [array, np.asfortranarray(array), array.astype(array.dtype.newbyteorder(">"))]
    for form in forms:
        assert read(form, LIMIT) == (embeds, 7)


def test_digests_tell_rows_and_types_apart() -> None:
    def digests(rows: torch.Tensor) -> list[bytes]:
        whole = EmbedsReader(HIDDEN_SIZE).read(rows, LIMIT)[0].row_digests
        return [whole[start : start + ROW_DIGEST_BYTES] for start in range(0, len(whole), ROW_DIGEST_BYTES)]

    rows = rows_of(3, torch.float16)
    changed = rows.clone()
    changed[1, 5] += 1
    before, after = digests(rows), digests(changed)
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False, True]
    assert not set(before) & set(digests(rows.view(torch.bfloat16)))


def with_value(value: float) -> torch.Tensor:
    rows = rows_of(3)
    rows[2, 63] = value
    return rows


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("no base64!", "is not base64"),
        ("é" * 8, "is not base64"),
        (base64.b64encode(b"\x80\x04K\x01.").decode(), "no safetensors file"),  # a pickle
        (b"", "no safetensors file"),
        (b"\xff" * 100, "header of more than"),
        (file_with({"a": {"dtype": "F32", "shape": [10**9, 64], "data_offsets": [0, 256 * 10**9]}}), "no safetensors"),
        (file_with({"a": {"dtype": "F32", "shape": [2, 64], "data_offsets": [0, 8]}}, b"12345678"), "no safetensors"),
        (save({"a": rows_of(2), "b": rows_of(2)}), "holds 2; send a list"),
        (save({"a": torch.zeros(2, HIDDEN_SIZE, dtype=torch.int32)}), "is of type I32; send float16, bfloat16 or"),
        (torch.zeros(2, HIDDEN_SIZE, dtype=torch.float64), "is of type float64; convert"),
        (np.zeros((2, HIDDEN_SIZE)), "is of type float64; convert"),
        (torch.zeros(2, 65), r"shape \[2, 65\]; this model takes \[number of tokens, 64\]"),
        (torch.zeros(HIDDEN_SIZE), r"shape \[64\]"),
        (torch.zeros(2, 3, HIDDEN_SIZE), r"shape \[2, 3, 64\]"),
        (torch.zeros(0, HIDDEN_SIZE), "has 0 tokens"),
        (torch.zeros(LIMIT, HIDDEN_SIZE), "at most 255 leave room"),
        ("A" * 400_000, r"has 29\d+ bytes"),
        (save({"a": torch.zeros(3 * LIMIT, HIDDEN_SIZE)}), r"send fewer tokens"),
        (with_value(float("nan")), "NaN or infinity"),
        (with_value(float("-inf")).half(), "NaN or infinity"),
        (with_value(float("inf")).bfloat16(), "NaN or infinity"),
        ([[0.0] * HIDDEN_SIZE], "not list"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 60 else "",
)
def test_what_is_wrong_is_refused(value: Any, said: str) -> None:
    with pytest.raises(ParameterError, match=rf"^prompt_embeds .*{said}") as caught:
        EmbedsReader(HIDDEN_SIZE).read(value, LIMIT)
    assert caught.value.param == "prompt_embeds"


def test_the_largest_values_are_finite() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        rows = torch.full((2, HIDDEN_SIZE), torch.finfo(dtype).max, dtype=dtype)
        assert EmbedsReader(HIDDEN_SIZE).read(-rows, LIMIT)[1] == 2


# --------------------------------------------------------------------------------------------------------- answers


@pytest.fixture(scope="module")
def table(checkpoint: Callable[..., Path]) -> torch.Tensor:
    """The model's own embeddings: a prompt of its rows is answered as one of their ids."""
    return load_file(checkpoint("llama") / "model.safetensors")["model.embed_tokens.weight"]


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client: openai.OpenAI, text: Any, **extra: Any) -> Any:
    extra = {"ignore_eos": True, **extra}
    return client.completions.create(model="tiny", prompt=text, max_tokens=8, temperature=0, extra_body=extra)


IDS = [[40 + 3 * i for i in range(20)], [90, 91, 92], [9] * 40]


def test_embeddings_over_http_are_answered_as_their_ids(client: openai.OpenAI, table: torch.Tensor) -> None:
    expected = [complete(client, ids).choices[0].text for ids in IDS]
    assert len(set(expected)) == 3
    first, second, _ = (encoded(table[ids]) for ids in IDS)
    answer = complete(client, "", prompt_embeds=first)
    assert answer.choices[0].text == expected[0]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (20, 8)
    several = complete(client, IDS[2], prompt_embeds=[first, second])
    assert [choice.text for choice in several.choices] == expected
    assert several.usage.prompt_tokens == 63
    stream = client.completions.create(
        model="tiny", prompt="", max_tokens=8, temperature=0, stream=True,
        extra_body={"ignore_eos": True, "prompt_embeds": second},
    )  # fmt: skip
    assert "".join(chunk.choices[0].text for chunk in stream) == expected[1]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt_embeds": "x"}, "prompt_embeds"),
        ({"prompt_embeds": 5}, "prompt_embeds"),
        ({"prompt_embeds": []}, "prompt"),
        ({"prompt_embeds": encoded(rows_of(2)), "echo": True}, "echo"),
        ({"prompt_embeds": encoded(rows_of(2)), "suffix": "x"}, "suffix"),
        ({"prompt_embeds": encoded(rows_of(2)), "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"prompt_embeds": encoded(rows_of(2)), "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"prompt_embeds": encoded(rows_of(2)), "use_beam_search": True}, "use_beam_search"),
        ({"prompt_embeds": [encoded(rows_of(1))] * 2, "n": MAX_COMPLETIONS}, "prompt_embeds"),
    ],
    ids=lambda value: next(reversed(value)) if isinstance(value, dict) else "",
)
def test_bad_requests_are_refused_by_field(base_url: str, body: dict[str, Any], param: str) -> None:
    answer = httpx.post(base_url + "/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"].split("[")[0]) == (400, param)


def test_rendering_refuses_them(base_url: str) -> None:
    answer = httpx.post(base_url + "/v1/completions/render", json={"prompt_embeds": encoded(rows_of(2))})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_embeds")


GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def test_llm_takes_tensors_and_refuses_what_needs_ids(checkpoint: Callable[..., Path], table: torch.Tensor) -> None:
    options = {"max_model_len": LIMIT, "num_gpu_blocks_override": 64, "max_num_seqs": 8, "device": "cpu"}
    with LLM(checkpoint("llama"), enable_prompt_embeds=True, **options) as llm:
        [expected] = llm.generate(IDS[0], GREEDY)
        rows = table[IDS[0]]
        outputs = llm.generate([{"prompt_embeds": rows, "prompt": "words"}, {"prompt_embeds": rows.numpy()}], GREEDY)
        assert [each.outputs[0].token_ids for each in outputs] == [expected.outputs[0].token_ids] * 2
        assert [each.prompt for each in outputs] == ["words", None]
        assert outputs[0].prompt_token_ids == [0] * 20
        [several] = llm.generate({"prompt_embeds": rows_of(40)}, GREEDY.replace(n=3, temperature=1, seed=1))
        assert len({tuple(each.token_ids) for each in several.outputs}) == 3
        given: Any = {"prompt_embeds": rows}
        with pytest.raises(ParameterError) as caught:
            llm.generate(given, GREEDY.replace(prompt_logprobs=1))
        assert caught.value.param == "prompt_logprobs"
        with pytest.raises(ParameterError, match="do not go with beam search"):
            llm.beam_search(given, BeamSearchParams(beam_width=2, max_tokens=3))
        with pytest.raises(ParameterError, match="either prompt_token_ids or prompt_embeds"):
            llm.generate({"prompt_embeds": rows, "prompt_token_ids": [1]}, GREEDY)
