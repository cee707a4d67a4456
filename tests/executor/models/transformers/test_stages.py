"""Classes of Transformers whose layers are divided among pipeline stages, against the library itself."""

from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.core.config.model import ModelConfig
from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.memory.dry_build import dry_build, held_bytes
from quire.executor.models.base import InputEmbeds, StagedModel, StepContext
from quire.executor.models.transformers import TransformersModel
from quire.executor.parallel.groups import ParallelGroup
from quire.frontend.checkpoint.model_spec import read_model_spec
from tests.executor.models.test_models import prompts
from tests.executor.models.tiny_models import Reference, write_checkpoint
from tests.executor.models.transformers.test_model import feed_in_chunks
from tests.executor.paged_driver import PagedDriver, load_model, model_context
from tests.executor.pretend_device import IS_ACCELERATED
from tests.executor.thread_group import on_every_rank

torch.set_num_threads(1)

LOADING = Lock()
"""A class is built with torch's modules changed, for the whole process."""


class Chain:
    """See `Model`: stages one after another.

    Attributes:
        parts: the stages.
    """

    def __init__(self, stages: Sequence[StagedModel], hidden_size: int) -> None:
        self.parts = stages
        self._hidden_size = hidden_size
        self.kv_layers = [layer for stage in stages for layer in stage.kv_layers]
        self.state_layers = [layer for stage in stages for layer in stage.state_layers]
        self.compute_logits = stages[-1].compute_logits

    def forward(self, token_ids: Tensor, step: StepContext) -> Tensor:
        out, caches, states = None, list(step.caches), list(step.states)
        for stage in self.parts:
            is_last = stage is self.parts[-1]
            num_kv, num_states = len(stage.kv_layers), len(stage.state_layers)
            out = stage.forward(
                token_ids,
                StepContext(
                    step.positions, caches[:num_kv], step.attention, states=states[:num_states], rows=step.rows,
                    input_embeds=step.input_embeds, wanted=step.wanted if is_last else None, received=out,
                    hands_over=not is_last,
                ),
            )  # fmt: skip
            assert is_last or out.shape == (len(token_ids) * stage.handover_size(self._hidden_size),)
            del caches[:num_kv], states[:num_states]
        assert out is not None
        return out


def spec_of(folder: Path, model_type: str, **options: Any) -> ModelSpec:
    write_checkpoint(folder, model_type)
    return read_model_spec(folder, ModelConfig(model=str(folder), model_impl="transformers", dtype="float32"))


def chain(spec: ModelSpec, borders: Sequence[int], group: ParallelGroup | None = None) -> Chain:
    """The model in stages that end at `borders`."""
    ranges = [range(*pair) for pair in zip((0, *borders), (*borders, spec.num_layers), strict=True)]
    with LOADING:
        stages = [load_model(spec, layers=layers, group=group) for layers in ranges]
    assert all(isinstance(stage, TransformersModel) for stage in stages)
    return Chain(stages, spec.hidden_size)  # type: ignore[arg-type]


def greedy(model: Any, many: list[list[int]]) -> list[list[int]]:
    return PagedDriver(model, len(many), 128).greedy(many, 8)


@pytest.mark.parametrize(
    ("model_type", "is_recorded"),
    [
        ("gpt2", True),  # learned positions; the head is the embedding
        ("gemma3_text", True),  # windows; embeddings are scaled
        ("mixtral", True),
        ("bloom", True),  # adds its biases itself
        ("qwen3_next", False),  # states in every second layer
    ],
)
def test_stages_together_are_the_class(model_type: str, is_recorded: bool, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, model_type)
    stages = chain(spec, [1, 3])
    token_ids = prompts(1, spec.vocab_size)[0] + list(range(5, 40))
    got = feed_in_chunks(PagedDriver(stages, 2, 128), token_ids).log_softmax(-1)  # type: ignore[arg-type]
    torch.testing.assert_close(got, Reference(tmp_path).logprobs(token_ids), atol=1e-4, rtol=0)
    for stage in stages.parts:
        assert isinstance(stage, TransformersModel)
        assert is_recorded == (stage.fast_path is not None and stage.fast_path.programs is not None)

    whole = load_model(spec)
    many = prompts(3, spec.vocab_size)
    assert greedy(stages, many) == greedy(whole, many)
    rows = InputEmbeds(torch.tensor([1, 3]), torch.randn(2, spec.hidden_size))
    first, second = (
        PagedDriver(each, 1, 64).step({0: [3, 4, 5, 6, 7]}, input_embeds=rows)[0] for each in (stages, whole)
    )
    torch.testing.assert_close(first, second, atol=1e-4, rtol=0)


@pytest.mark.parametrize("model_type", ["gemma3_text", "mixtral"])
def test_stages_of_several_ranks(model_type: str, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, model_type)
    many = prompts(3, spec.vocab_size)
    expected = greedy(load_model(spec), many)
    assert on_every_rank(2, lambda group: greedy(chain(spec, [2], group), many)) == [expected, expected]


def test_a_stage_has_its_own_weights_alone(tmp_path: Path) -> None:
    """A tied head reads the embedding's weight on a stage without the embedding."""
    spec = spec_of(tmp_path, "gpt2")
    dry = [dry_build(spec, model_context(spec, layers=layers)) for layers in (range(1), range(1, 3), range(3, 4))]
    stages = chain(spec, [1, 3]).parts
    sizes = [held_bytes(stage) for stage in stages]
    assert [held_bytes(stage) for stage in dry] == sizes
    whole = held_bytes(load_model(spec))
    if not IS_ACCELERATED:  # where the head is packed, beside the rows of the embedding
        assert sum(sizes) == pytest.approx(whole, rel=0.01)
    assert sizes[1] < whole / 2


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [("gemma3n_text", "hidden states of one size"), ("glm_moe_dsa", "top-k indices from a previous full")],
)
def test_layers_that_read_more_are_not_parted(model_type: str, reason: str, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, model_type)
    with pytest.raises(ModelLoadError, match=f"into pipeline stages, because .*{reason}.* use --tensor-parallel-size"):
        dry_build(spec, model_context(spec, layers=range(1, 4)))
