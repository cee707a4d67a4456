"""A model that takes sounds in prompts, in a real engine: log-probabilities are those of Transformers."""

import io
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
import transformers

from quire import LLM, SamplingParams
from quire.core.errors import ParameterError
from quire.frontend.media.library_processor import load_processor
from tests.audio_checkpoints import FAMILIES, RATE, make_sound, write_checkpoint

pytestmark = pytest.mark.turns(4, among="whole systems")

torch.set_num_threads(1)

SOUNDS = [make_sound(2.3), make_sound(0.61, 1)]
MARK = FAMILIES["qwen2_audio"]["placeholder"]


@torch.inference_mode()
def expected_logprobs(folder: Path, text: str, output: list[int]) -> tuple[list[int], torch.Tensor]:
    """(token ids of the prompt, log-probabilities [num_tokens, vocab] of it and `output`)."""
    model = transformers.Qwen2AudioForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = dict(load_processor(str(folder)).processor(text=[text], audio=SOUNDS, return_tensors="pt"))
    prompt = inputs["input_ids"][0].tolist()
    for name, filler in (("input_ids", output), ("attention_mask", [1] * len(output))):
        inputs[name] = torch.cat((inputs[name], torch.tensor([filler])), dim=1)
    return prompt, model(**inputs).logits[0].log_softmax(dim=-1)


def test_sounds_in_chunks_and_from_the_prefix_cache(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "hears", "qwen2_audio")
    text = f"The first: {MARK} and then {MARK} which is more."
    wav = io.BytesIO()
    soundfile.write(wav, SOUNDS[1], RATE, format="WAV", subtype="FLOAT")
    forms: list[list[Any]] = [
        [(SOUNDS[0], RATE), (SOUNDS[1], RATE)],
        [SOUNDS[0], wav.getvalue()],
        [(torch.from_numpy(SOUNDS[0]), RATE), SOUNDS[1]],
    ]
    with LLM(
        str(folder), dtype="float32", max_model_len=400, num_gpu_blocks_override=40, max_num_batched_tokens=24,
        max_num_seqs=4, enable_prefix_caching=True,
    ) as llm:  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=4, logprobs=0, ignore_eos=True)
        outputs: list[Any] = []
        for number, form in enumerate(forms):
            prompts: list[Any] = [{"prompt": text, "multi_modal_data": {"audio": form}}]
            beside = ["The quick brown fox."] if not number else []
            outputs.append(llm.generate([*prompts, *beside], params, use_tqdm=False)[0])
        with pytest.raises(ParameterError, match="hears 3 s at once"):
            llm.generate([{"prompt": MARK, "multi_modal_data": {"audio": make_sound(3.2)}}], params, use_tqdm=False)
        with pytest.raises(ParameterError, match="must be samples from -1 to 1"):
            llm.generate([{"prompt": MARK, "multi_modal_data": {"audio": ("a", "b")}}], params, use_tqdm=False)
    tokens = list(outputs[0].outputs[0].token_ids)
    token_ids, expected = expected_logprobs(folder, text, tokens)
    for output in outputs:
        assert list(output.prompt_token_ids) == token_ids
        for position, found in enumerate(output.outputs[0].logprobs):
            wanted = float(expected[len(token_ids) - 1 + position, tokens[position]])
            assert found[tokens[position]].logprob == pytest.approx(wanted, abs=1e-4)
    assert outputs[1].num_cached_tokens >= len(token_ids) // 16 * 16 - 16
