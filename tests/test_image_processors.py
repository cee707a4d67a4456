"""Conversations with images, read by a processor that writes into texts: answers are those of Transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from tests.image_checkpoints import make_image, write_checkpoint
from tests.test_images import Reference

torch.set_num_threads(1)

IMAGES = [make_image(70, 45), make_image(37, 91, 1), make_image(120, 33, 2)]
NUM_TOKENS = 5


@pytest.mark.turns(4)
@pytest.mark.parametrize("family", ["paligemma"])
def test_answers_are_those_of_generate(family: str, tmp_path: Path) -> None:
    """Several images of odd sizes, in a conversation and in token ids, beside a text alone."""
    folder = write_checkpoint(tmp_path, family)
    reference = Reference(folder, family)
    parts: list[Any] = [{"type": "image_pil", "image_pil": image} for image in IMAGES]
    parts = [{"type": "text", "text": "See "}, *parts[:2], {"type": "text", "text": " and "}, parts[2]]
    talks: list[Any] = [[{"role": "user", "content": parts}], [{"role": "user", "content": "Hi"}]]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, skip_special_tokens=False)
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 300, "num_gpu_blocks_override": 60}
    with LLM(str(folder), max_num_seqs=4, **options) as llm:
        read, _ = llm.chat(talks, params, use_tqdm=False)
        inputs = reference.inputs(read.prompt or "", IMAGES)
        ids = llm.get_tokenizer().encode(read.prompt, add_special_tokens=False)
        prompt: Any = {"prompt_token_ids": ids, "multi_modal_data": {"image": IMAGES}}
        [again] = llm.generate(prompt, params, use_tqdm=False)
    inputs.pop("labels", None)
    token_ids = inputs["input_ids"][0].tolist()
    assert read.prompt_token_ids == token_ids
    with torch.inference_mode():
        expected = reference._model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)
    answer = expected[0, len(token_ids) :].tolist()
    assert list(read.outputs[0].token_ids) == answer
    assert again.prompt_token_ids == token_ids
    assert list(again.outputs[0].token_ids) == answer
