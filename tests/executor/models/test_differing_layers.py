"""Layers whose keys and values differ in size, in one model."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.grouped_query import Attention, LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.models.base import Model
from quire.executor.models.decoder import PreNormDecoder, attention_shape, norm_style
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.weights.rearranged import Piece, RearrangedWeights
from quire.ops.backend import AttentionForm
from tests.executor.models.test_models import expected_logprobs
from tests.executor.paged_driver import Checkpoints, PagedDriver, model_context, read_spec
from tests.executor.thread_group import on_every_rank

torch.set_num_threads(1)

TYPES = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
WINDOW = 12


@pytest.fixture
def folder(checkpoint: Checkpoints) -> Path:
    """A Qwen3 in which neighbouring KV heads of the layers with a window are alike, so that half of them suffice."""
    made = checkpoint(
        "qwen3", num_hidden_layers=5, num_key_value_heads=4, layer_types=TYPES, sliding_window=WINDOW, seed=7
    )
    tensors = load_file(made / "model.safetensors")
    for index, kind in enumerate(TYPES):
        for name in ("k_proj", "v_proj"):
            heads = tensors[f"model.layers.{index}.self_attn.{name}.weight"].unflatten(0, (2, 2, -1))
            if kind == "sliding_attention":
                heads[:, 1] = heads[:, 0]
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    return made


def build(spec: ModelSpec, context: ModelContext) -> Model:
    """The model with two KV heads in layers with a window, and four in the others."""
    shape, rotary = attention_shape(spec), RotaryEmbedding(context, spec.hf_config, spec.head_dim)
    size = spec.head_dim
    pieces = {f"self_attn.{name}": Piece(f"self_attn.{name}", 0, size, 2 * size, 2) for name in ("k_proj", "v_proj")}
    halved = replace(context, weights=RearrangedWeights(context.weights, pieces))

    def attention(place: LayerPlace) -> Attention:
        if TYPES[place.index] == "full_attention":
            return Attention(context, place, shape, rotary, qk_norm=norm_style(spec))
        form = AttentionForm(size**-0.5, WINDOW)
        return Attention(
            halved, place, replace(shape, num_kv_heads=2), rotary, qk_norm=norm_style(spec), form=form
        )  # fmt: skip

    with torch.inference_mode():
        return PreNormDecoder(spec, context, attention)


def test_log_probabilities_are_those_of_transformers(folder: Path) -> None:
    spec = read_spec(folder)
    driver = PagedDriver(build(spec, model_context(spec)), 2, 100, block_size=4)
    assert len({cache.pages.untyped_storage().data_ptr() for cache in driver.caches}) == 1
    assert {cache.pages.shape[2] for cache in driver.caches} == {2, 4}
    token_ids = list(range(7, 90))
    got = []
    for first, last in ((0, 16), (16, 17), (17, 60), *((i, i + 1) for i in range(60, 83))):
        feed = {0: token_ids[first:last]}
        got.append(driver.step(feed | {1: [5, 6]} if first % 3 == 0 else feed)[0])
    expected = expected_logprobs(folder, token_ids)
    torch.testing.assert_close(torch.cat(got).log_softmax(dim=-1), expected, atol=1e-4, rtol=0)


def test_ranks_together_are_the_whole_model(folder: Path) -> None:
    spec = read_spec(folder)

    def logits(group: ParallelGroup) -> Tensor:
        return PagedDriver(build(spec, model_context(spec, group=group)), 1, 64).step({0: list(range(40))})[0]

    whole = logits(ParallelGroup())
    for size in (2, 4):  # four ranks share the two KV heads, but not the four
        for got in on_every_rank(size, logits):
            torch.testing.assert_close(got, whole, atol=1e-4, rtol=1e-4)
