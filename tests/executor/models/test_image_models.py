"""A cut of `scripts/model_coverage.py`: models that read images, each in the implementation that `auto` takes."""

from pathlib import Path

import pytest
import torch

from quire.executor.models.reading import ReadingDecoder
from tests.executor.models.any_image_model import logprobs, make_prompt, measure, write_checkpoint
from tests.executor.paged_driver import load_model, read_spec

torch.set_num_threads(1)

CUT = {
    "aria": False,
    "blip-2": False,  # its class computes nothing without an image
    "glm5_next": False,  # row by row, and reads the keys that it has stored
    "gemma4": True,  # per-layer embeddings, and images that see themselves in windows alone
    "lfm2_vl": False,  # row by row
    "llama4": True,
    "nemotron_h_omni": True,
    "paligemma": False,  # whole prompts see themselves
    "qwen3_5": True,  # places in time, height and width
    "qwen3_vl_moe": False,
}
"""Model types, and whether a file here has their decoder."""


@pytest.mark.turns(4)
@pytest.mark.parametrize("model_type", CUT)
def test_a_model_computes_what_transformers_does(model_type: str, tmp_path: Path) -> None:
    reference = write_checkpoint(tmp_path, model_type)
    prompt = make_prompt(reference)
    agreement = measure(tmp_path, prompt, logprobs(reference, prompt), "auto")
    assert agreement.holds, agreement


def test_a_decoder_without_its_towers_is_itself(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_5")
    spec = read_spec(tmp_path)
    assert isinstance(load_model(spec, reads_media=True), ReadingDecoder)
    assert not isinstance(load_model(spec), ReadingDecoder)


def test_a_decoder_that_rotates_tokens_together_has_no_towers(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen4_exp")
    assert not isinstance(load_model(read_spec(tmp_path), reads_media=True), ReadingDecoder)
