"""Layers that read the keys and values of another one, and embeddings of each layer."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire.core.errors import ModelLoadError
from quire.executor.models.base import InputEmbeds
from tests.executor.models.test_dense_models import VARIANTS
from tests.executor.paged_driver import Checkpoints, PagedDriver, load_model, read_spec

torch.set_num_threads(1)


@pytest.fixture(params=["gemma3n", "gemma4"])
def folder(request: pytest.FixtureRequest, checkpoint: Checkpoints) -> Path:
    """Six layers, the last two of which share keys and values."""
    family, options = VARIANTS[request.param]
    return checkpoint(family, **options)


def test_a_layer_that_shares_owns_no_bytes(folder: Path) -> None:
    spec = read_spec(folder)
    driver = PagedDriver(load_model(spec), 1, 64)
    assert [layer.window for layer in driver.model.kv_layers] == [12, None] * 2
    assert sum(len(group.layers) for group in driver.groups) == len(driver.caches) == 4


def test_types_without_a_source_are_refused(folder: Path) -> None:
    types = ["sliding_attention"] * 4 + ["full_attention"] * 2
    with pytest.raises(ModelLoadError, match="no layer before them is of type full_attention"):
        load_model(read_spec(folder, layer_types=types))


@torch.inference_mode()
def test_given_rows_have_no_embedding_of_a_layer(checkpoint: Checkpoints) -> None:
    """As in Transformers, which computes the layers' inputs from the given rows alone."""
    family, options = VARIANTS["gemma3n"]
    folder = checkpoint(family, **options)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    rows = torch.randn(20, reference.config.hidden_size, generator=torch.Generator().manual_seed(0))
    expected = reference(inputs_embeds=rows[None]).logits[0]
    driver = PagedDriver(load_model(read_spec(folder)), 1, 64)
    given = InputEmbeds(torch.arange(20), rows)
    torch.testing.assert_close(driver.step({0: [3] * 20}, input_embeds=given)[0], expected, atol=1e-4, rtol=1e-4)
