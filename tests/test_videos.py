"""Models that read videos, in real engines: log-probabilities are those of Transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText
from transformers.video_utils import VideoMetadata

from quire import LLM, SamplingParams
from quire.frontend.media.videos.reader import VideoReader
from tests.image_checkpoints import FAMILIES, make_frames, make_image, write_checkpoint

torch.set_num_threads(1)

TOLERANCE = 1e-4
GENERATED: dict[str, Any] = {"ignore_eos": True, "allowed_token_ids": list(range(3, 200))}
"""No placeholder, of which the library would want a video."""
IMAGE = make_image(70, 45)
VIDEOS = [make_frames(4, 64, 90), make_frames(7, 120, 40, 3)]
"""Of odd sizes, and one of an odd number of frames."""
ALIKE = ("llava_onevision",)
"""Families whose processor of the library takes several videos of as many frames alone."""
METADATA: list[dict[str, Any]] = [
    {"total_num_frames": 40, "fps": 8.0, "frames_indices": [0, 13, 26, 39]},
    {"total_num_frames": 7, "fps": 2.0, "frames_indices": list(range(7))},
]


@torch.inference_mode()
def reference(
    processor: Any, model: Any, text: str, images: Sequence[Any], videos: Sequence[int]
) -> tuple[list[int], torch.Tensor, list[int], torch.Tensor]:
    """Token ids of the prompt, log-probabilities [num_tokens, vocab] after each, and five tokens of output, with those
    before each."""
    beside: dict[str, Any] = {}
    if videos:
        beside = {
            "videos": [VIDEOS[each] for each in videos],
            "video_metadata": [VideoMetadata(**METADATA[each]) for each in videos],
            "do_sample_frames": False,
        }
    inputs = dict(processor(images=list(images) or None, text=[text], return_tensors="pt", **beside))
    inputs.pop("video_metadata", None)
    token_ids = inputs["input_ids"][0].tolist()
    logits = model(**inputs).logits[0]
    made = model.generate(
        **inputs, max_new_tokens=5, do_sample=False, output_logits=True, return_dict_in_generate=True,
        prefix_allowed_tokens_fn=lambda *_: GENERATED["allowed_token_ids"],
    )  # fmt: skip
    output = made.sequences[0, len(token_ids) :].tolist()
    return token_ids, logits.log_softmax(dim=-1), output, torch.cat(made.logits).log_softmax(dim=-1)


@pytest.mark.turns(4)
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_onevision", "qwen3_5"])
def test_logprobs_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Videos beside images and text, in chunks that end inside frames; one that comes again is not encoded again."""
    folder = write_checkpoint(tmp_path / family, family)
    processor = VideoReader(str(folder)).processor
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    image, video = (FAMILIES[family][each] for each in ("placeholder", "video_placeholder"))
    cases: list[tuple[str, list[Any], list[int]]] = [
        (f"What happens? {video} Tell me.", [], [0]),
        (f"First {image}, then {video} and {video}.", [IMAGE], [0, 0 if family in ALIKE else 1]),
        ("The quick brown fox jumps over the lazy dog.", [], []),
        (f"What happens? {video} Tell me more.", [], [0]),
    ]
    prompts: list[Any] = []
    for text, images, videos in cases:
        data: dict[str, Any] = {"video": [(VIDEOS[each], METADATA[each]) for each in videos]} if videos else {}
        if images:
            data["image"] = images
        prompts.append({"prompt": text, "multi_modal_data": data} if data else text)
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=0, prompt_logprobs=0, **GENERATED)
    with LLM(
        str(folder), dtype="float32", max_model_len=600, num_gpu_blocks_override=80, max_num_batched_tokens=40,
        max_num_seqs=4,
    ) as llm:  # fmt: skip
        outputs = llm.generate(prompts, params, use_tqdm=False)
        params = SamplingParams(temperature=0, max_tokens=5, logprobs=0, **GENERATED)
        again = llm.generate(prompts[1], params, use_tqdm=False)[0]
    assert list(again.outputs[0].token_ids) == list(outputs[1].outputs[0].token_ids)
    for (text, images, videos), output in zip(cases, outputs, strict=True):
        token_ids, expected, tokens, later = reference(processor, model, text, images, videos)
        assert list(output.prompt_token_ids or ()) == token_ids
        assert list(output.outputs[0].token_ids) == tokens
        for row, token, found in zip(later, tokens, output.outputs[0].logprobs or (), strict=True):
            assert found[token].logprob == pytest.approx(float(row[token]), abs=TOLERANCE)
        for row, token, scored in zip(expected, token_ids[1:], (output.prompt_logprobs or ())[1:], strict=False):
            assert scored is not None
            assert scored[token].logprob == pytest.approx(float(row[token]), abs=TOLERANCE)
