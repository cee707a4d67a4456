"""Models in Transformers' implementation with our parts: against the library itself, and against our own files."""

from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from quire.core.config.load import LoadConfig
from quire.core.config.model import ModelConfig
from quire.executor.memory.dry_build import dry_build, held_bytes
from quire.executor.models.base import InputEmbeds
from quire.executor.models.transformers import TransformersModel
from quire.executor.models.transformers.attention import PagedAttention
from quire.executor.models.transformers.layer_modules import MLP, FusedPart, RMSNorm
from quire.executor.models.transformers.probe import AttentionCall
from quire.executor.models.transformers.row_by_row import RowByRow
from quire.executor.parallel.context.divided import DividedContext
from quire.executor.parallel.groups import ParallelGroup
from quire.frontend.checkpoint.model_spec import read_model_spec
from tests.executor.models.coverage import measure
from tests.executor.models.test_models import VARIANTS, expected_logprobs, prompts
from tests.executor.models.tiny_models import VOCAB_SIZE, Reference, write_checkpoint
from tests.executor.paged_driver import (
    Checkpoints,
    PagedDriver,
    load_model,
    model_context,
    read_spec,
    transformers_spec,
)
from tests.executor.thread_group import on_every_rank

torch.set_num_threads(1)


def feed_in_chunks(driver: PagedDriver, token_ids: list[int]) -> Tensor:
    """Logits at all positions of request 0, in chunks of odd sizes, some beside another request."""
    got, position = [], 0
    for size in [16, 1, 30, 20, *[1] * len(token_ids)]:
        part = token_ids[position : position + size]
        if part:
            got.append(driver.step({1: [7, 8, 9, 10], 0: part} if position % 3 == 0 else {0: part})[0])
        position += size
    return torch.cat(got)


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    "variant",
    [
        *("gemma3-window", "gemma3-pattern-window", "llama-tied", "llama-biases", "llama-multi-query"),
        *("llama-shards", "llama-yarn-rope", "mistral-window", "qwen2-window", "qwen3-window"),
    ],
)
def test_log_probabilities_are_those_of_transformers(variant: str, checkpoint: Checkpoints) -> None:
    family, options = VARIANTS[variant]
    folder = checkpoint(family, **options)
    spec = transformers_spec(folder)
    model = load_model(spec)
    assert isinstance(model, TransformersModel)
    token_ids = prompts(1, spec.vocab_size)[0] + list(range(5, 70))
    driver = PagedDriver(model, 2, 200, block_size=4 if "window" in variant else 16)
    got = feed_in_chunks(driver, token_ids).log_softmax(dim=-1)
    torch.testing.assert_close(got, expected_logprobs(folder, token_ids), atol=1e-4, rtol=0)
    assert model.kv_layers == load_model(read_spec(folder)).kv_layers

    many = prompts(5, spec.vocab_size)
    together = PagedDriver(model, len(many), 128).greedy(many, 8)
    assert together[3] == PagedDriver(model, 1, 128).greedy([many[3]], 8)[0]


def test_the_parts_of_a_dense_model_are_ours(checkpoint: Checkpoints) -> None:
    model = load_model(transformers_spec(checkpoint("qwen3")))
    assert isinstance(model, TransformersModel)
    layer = model._backbone.layers[0]
    assert isinstance(layer.mlp, MLP)
    assert isinstance(layer.input_layernorm, RMSNorm)
    assert isinstance(layer.self_attn.q_norm, RMSNorm)
    projections = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
    assert all(isinstance(part, FusedPart) for part in projections)
    assert len({id(part.fused) for part in projections}) == 1
    assert not list(model._backbone.parameters()), "a weight is in the original's form"


def test_last_tokens_alone_and_given_rows(checkpoint: Checkpoints) -> None:
    spec = transformers_spec(checkpoint("gemma3"))
    model = load_model(spec)
    whole, last = PagedDriver(model, 2, 64), PagedDriver(model, 2, 64)
    feed = {0: [3, 4, 5, 6], 1: [9, 8]}
    expected, got = whole.step(feed), last.step(feed, only_last=True)
    for row in feed:
        torch.testing.assert_close(got[row], expected[row][-1:], atol=1e-5, rtol=0)

    native = load_model(read_spec(checkpoint("gemma3")))
    rows = InputEmbeds(torch.tensor([1, 3]), torch.randn(2, spec.hidden_size))
    results = [
        PagedDriver(each, 1, 64).step({0: [3, 4, 5, 6, 7]}, input_embeds=rows)[0] for each in (model, native)
    ]  # fmt: skip
    torch.testing.assert_close(results[0], results[1], atol=1e-4, rtol=0)
    assert not torch.allclose(results[0], PagedDriver(model, 1, 64).step({0: [3, 4, 5, 6, 7]})[0])


@pytest.mark.parametrize(("family", "options"), [("llama", {"tie": True}), ("qwen3", {"vocab_size": 321})])
def test_two_ranks_compute_what_one_does(family: str, options: dict[str, Any], checkpoint: Checkpoints) -> None:
    folder = checkpoint(family, **options)
    spec = transformers_spec(folder)
    token_ids = prompts(1, spec.vocab_size)[0]
    building = Lock()

    def run(group: ParallelGroup) -> tuple[Tensor, int, list[int]]:
        with building:  # ranks are processes, and do not share Transformers' tables
            model = load_model(spec, group=group)
            num_bytes = held_bytes(dry_build(spec, model_context(spec, group=group)))
        heads = [layer.num_kv_heads for layer in model.kv_layers]
        return PagedDriver(model, 1, 100).step({0: token_ids})[0].log_softmax(-1), num_bytes, heads

    ranks = on_every_rank(2, run)
    for logprobs, _, heads in ranks:
        torch.testing.assert_close(logprobs, expected_logprobs(folder, token_ids), atol=1e-4, rtol=0)
        assert heads == [1, 1]
    assert ranks[0][1] < 0.6 * held_bytes(dry_build(spec, model_context(spec)))


def test_what_ranks_exchange_is_counted_of_the_largest_layer(checkpoint: Checkpoints) -> None:
    """Layers may have different numbers of heads, as OpenELM's."""
    sequences = DividedContext(ParallelGroup(0, 2), num_parts=2, run=1)
    context = replace(model_context(transformers_spec(checkpoint("llama"))), sequences=sequences)

    def exchanged_size(*head_counts: int) -> int:
        calls = [AttentionCall(nn.Identity(), count, 2, 16, 16, None, {}) for count in head_counts]
        return PagedAttention(context, calls, {}).exchanged_size

    assert exchanged_size(4, 12, 8) == exchanged_size(12) > exchanged_size(8)


@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_a_dry_build_counts_what_is_held(family: str, checkpoint: Checkpoints) -> None:
    spec = transformers_spec(checkpoint(family), dtype="bfloat16")
    counted = held_bytes(dry_build(spec, model_context(spec)))
    assert counted == held_bytes(load_model(spec))


def test_random_weights(checkpoint: Checkpoints) -> None:
    spec = transformers_spec(checkpoint("llama"))
    logits = [
        PagedDriver(load_model(each, load=LoadConfig(load_format="dummy")), 1, 64).step({0: [3, 4, 5]})[0]
        for each in (spec, read_spec(checkpoint("llama")))
    ]
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        ("bloom", RowByRow),  # attends itself, with biases
        ("mpt", RowByRow),  # likewise
        ("opt", PagedAttention),  # learned positions
        ("roberta", PagedAttention),  # positions from behind that of padding
        ("doge", RowByRow),  # masks of its own
        ("gpt2", PagedAttention),  # weights are [in, out]
        ("mixtral", PagedAttention),  # experts are fused when they are read
    ],
)
def test_how_a_class_runs(model_type: str, kind: type, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, model_type)
    spec = read_model_spec(tmp_path, ModelConfig(model=str(tmp_path), model_impl="transformers"))
    model = load_model(spec)
    assert isinstance(model, TransformersModel)
    assert type(model._sequences) is kind
    assert measure(tmp_path, Reference(tmp_path), "transformers").holds


def test_padding_is_a_token_like_any_other_to_a_class_that_counts_positions(tmp_path: Path) -> None:
    """RoBERTa counts the tokens of a step that are no padding, so that its own positions depend on the steps."""
    write_checkpoint(tmp_path, "roberta")
    model = load_model(read_model_spec(tmp_path, ModelConfig(model=str(tmp_path), dtype="float32")))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    padding = theirs.config.pad_token_id
    token_ids = [5, 6, padding, 9, 10, padding, 12, 13]
    positions = torch.arange(len(token_ids)).unsqueeze(0) + padding + 1
    with torch.inference_mode():
        expected = theirs(input_ids=torch.tensor([token_ids]), position_ids=positions).logits[0]
    for cuts in ([8], [3, 4, 1], [1] * 8):
        driver = PagedDriver(model, 1, 16)
        parts = [driver.step({0: chunk.tolist()})[0] for chunk in torch.tensor(token_ids).split(cuts)]
        torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=0)


def test_a_state_is_that_of_its_slot(tmp_path: Path) -> None:
    """A row goes on from its own state, and a new request in the slot begins with zeros."""
    write_checkpoint(tmp_path, "qwen3_next")
    spec = read_model_spec(tmp_path, ModelConfig(model=str(tmp_path), model_impl="transformers"))
    model = load_model(spec)
    assert len(model.state_layers) == len(model.kv_layers) == 2
    assert measure(tmp_path, Reference(tmp_path), "transformers").holds
    driver = PagedDriver(model, 2, 64)
    first = driver.step({0: [3, 4, 5, 6], 1: [9, 8]})[0]
    driver.tokens[0] = []
    torch.testing.assert_close(driver.step({0: [3, 4, 5, 6], 1: [7]})[0], first, atol=1e-5, rtol=0)


def test_positions_are_told_to_a_class_that_counts_from_zero(tmp_path: Path) -> None:
    """Bamba counts the tokens of a step, whatever came before, and attends with rotated keys."""
    write_checkpoint(tmp_path, "bamba")
    assert measure(tmp_path, Reference(tmp_path), "transformers").holds


def test_a_head_that_lacks_tokens_gives_them_no_probability(tmp_path: Path) -> None:
    """Requests name tokens by the rows of the embedding."""
    write_checkpoint(tmp_path, "inkling2_text", unpadded_vocab_size=VOCAB_SIZE - 10)
    model = load_model(read_model_spec(tmp_path, ModelConfig(model=str(tmp_path), dtype="float32")))
    logits = PagedDriver(model, 1, 16).step({0: [5, 6]})[0]
    assert logits.shape == (2, VOCAB_SIZE)
    assert bool((logits[:, -10:] == -torch.inf).all())
    assert bool(logits[:, :-10].isfinite().all())
