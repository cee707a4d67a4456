"""A cut of `scripts/model_coverage.py`: models that hear, whose towers are given arrays."""

from pathlib import Path

import pytest
import torch

from tests.executor.models.any_audio_model import Prompt, measure, write_checkpoint

torch.set_num_threads(1)

CUT = (
    "moss_transcribe_diarize",  # hands positions on to the language model without naming them
    "omniasr",  # the same, and reads waves
)


@pytest.mark.parametrize("model_type", CUT)
def test_a_model_computes_what_transformers_does(model_type: str, tmp_path: Path) -> None:
    prompt = Prompt(write_checkpoint(tmp_path, model_type))
    agreement = measure(tmp_path, prompt)
    assert agreement.holds, agreement
