"""A cut of `scripts/model_coverage.py`: decoders of Transformers, each in the implementation that `auto` takes."""

import random
from pathlib import Path

import pytest
import torch

from tests.executor.models.coverage import measure
from tests.executor.models.tiny_models import MODEL_TYPES, Reference, write_checkpoint

torch.set_num_threads(1)

UNSERVED = frozenset(
    [
        "prophetnet",
        "reformer",
        "xlnet",
    ]
)
"""docs/models.md says why."""
_ALWAYS = {"deepseek_v4", "hy_v4", "minimax_m3_vl_text", "qwen4_exp_text"}
"""They keep keys of indexers, which have pages of their own."""

CUT = sorted(_ALWAYS | {*random.Random(7).sample([name for name in MODEL_TYPES if name not in UNSERVED], 24)})


@pytest.mark.turns(4)
@pytest.mark.parametrize("model_type", CUT)
def test_a_decoder_computes_what_transformers_does(model_type: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, model_type)
    agreement = measure(tmp_path, Reference(tmp_path), "auto")
    assert agreement.holds, agreement
