"""Classes of Transformers with latent attention: what they keep of a token, what they compute, and what is not ours."""

from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.models.axk1.modeling_axk1 import AXK1Attention

from quire.core.config.model import ModelConfig
from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.layer_kv import LatentKV, LayerKV
from quire.executor.memory.dry_build import dry_build, held_bytes
from quire.executor.models.transformers import TransformersModel
from quire.executor.models.transformers.latents import RotatedLatentAttention
from quire.executor.models.transformers.row_by_row import _Pages, read_plan
from quire.executor.parallel.groups import ParallelGroup
from quire.frontend.checkpoint.model_spec import read_model_spec
from quire.ops import bind
from tests.executor.models.coverage import measure
from tests.executor.models.test_models import prompts
from tests.executor.models.tiny_models import Reference, write_checkpoint
from tests.executor.models.transformers.test_programs import VIEWS
from tests.executor.paged_driver import PagedDriver, load_model, model_context
from tests.executor.thread_group import on_every_rank

torch.set_num_threads(1)

LATENT = LatentKV((24, 16))
"""`kv_lora_rank` and `qk_rope_head_dim` of tiny checkpoints, in numbers a token."""


def spec_of(folder: Path, model_type: str) -> ModelSpec:
    write_checkpoint(folder, model_type)
    return read_model_spec(folder, ModelConfig(model=str(folder), model_impl="transformers", dtype="float32"))


@pytest.mark.parametrize(
    ("model_type", "is_recorded"),
    [
        ("axk1", True),  # pairs are neighbours
        ("deepseek_v2", True),  # complex numbers
        ("minicpm3", True),  # pairs are halves
        ("longcat_flash", False),  # latents and queries are scaled; two attentions a layer; its experts are a loop
    ],
)
def test_latents_are_kept_instead_of_heads(model_type: str, is_recorded: bool, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, model_type)
    model = load_model(spec)
    assert isinstance(model, TransformersModel)
    assert set(model.kv_layers) == {LATENT}
    assert measure(tmp_path, Reference(tmp_path), "transformers").holds
    assert held_bytes(dry_build(spec, model_context(spec))) == held_bytes(model)
    many = prompts(5, spec.vocab_size)
    together = PagedDriver(model, len(many), 128).greedy(many, 4)
    assert together[3] == PagedDriver(model, 1, 128).greedy([many[3]], 4)[0]
    last, whole = (PagedDriver(model, 2, 64).step({0: [5, 6, 7], 1: [8, 9]}, only_last=only) for only in (True, False))
    torch.testing.assert_close(last[0], whole[0][-1:], atol=1e-5, rtol=0)

    assert model.fast_path is not None
    assert is_recorded == (model.fast_path.programs is not None)
    if model.fast_path.programs is not None:
        ours = [each for each in model.fast_path.programs[0].functions if isinstance(each, RotatedLatentAttention)]
        assert len(ours) == len(model.kv_layers)
        assert model.fast_path.programs[0].foreign() <= VIEWS


def test_each_rank_has_some_heads_and_all_latents(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "axk1")
    token_ids = prompts(1, spec.vocab_size)[0]
    building = Lock()

    def run(group: ParallelGroup) -> tuple[Tensor, Any]:
        with building:  # ranks are processes, and do not share Transformers' tables
            model = load_model(spec, group=group)
        return PagedDriver(model, 1, 100).step({0: token_ids})[0].log_softmax(-1), model.kv_layers

    for logprobs, kept in on_every_rank(2, run):
        torch.testing.assert_close(logprobs, Reference(tmp_path).logprobs(token_ids), atol=1e-4, rtol=0)
        assert set(kept) == {LATENT}


def test_rows_of_a_class_that_chooses_tokens_hold_latents(tmp_path: Path) -> None:
    """It runs row by row, and stores latents itself: of one head, without numbers that stand for nothing."""
    model = load_model(spec_of(tmp_path, "axk2"))
    assert set(model.kv_layers[::2]) == {LATENT}
    assert measure(tmp_path, Reference(tmp_path), "transformers").holds


def test_keys_that_are_read_elsewhere_are_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class may make more of what it expands than keys and values; then it keeps them for each head."""
    expand = AXK1Attention.expand_kv

    def expand_and_note(module: nn.Module, latents: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = expand(module, latents, shared)
        module.noted = values.mean(dim=1)
        return keys, values

    forward = AXK1Attention.forward

    def add_noted(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        out, *rest = forward(module, *args, **kwargs)
        return out + module.noted.mean(-1, keepdim=True), *rest

    monkeypatch.setattr(AXK1Attention, "expand_kv", expand_and_note)
    monkeypatch.setattr(AXK1Attention, "forward", add_noted)
    model = load_model(spec_of(tmp_path, "axk1"))
    assert all(isinstance(kept, LayerKV) for kept in model.kv_layers)
    assert measure(tmp_path, Reference(tmp_path), "transformers").holds


def test_a_layer_that_keeps_keys_alone_takes_codes() -> None:
    """Values of no numbers have neither codes nor a scale."""
    kept, ops = DynamicCache(), bind("cuda")
    keys, no_values = torch.randn(1, 1, 3, 8), torch.empty(1, 1, 3, 0)
    kept.update(keys, no_values, 0)
    plan = read_plan(kept, gives_positions=False)
    assert plan.kv == [LatentKV((8,))]
    view: Any = _Pages()
    view.ops, view.layer, view.past, view.slots = ops, plan.layers[0], 0, torch.tensor([5, 1, 6])
    view.pages = torch.zeros(plan.kv[0].cache_shape(ops, 2, 4, torch.int8), dtype=torch.int8)
    got, values = view.update(keys, no_values)
    torch.testing.assert_close(got, keys, rtol=0, atol=0.02)
    assert values.shape == no_values.shape
