"""Programs of classes of Transformers: what they consist of, what they compute, and which code has none."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire import ops
from quire.core.config.model import ModelConfig
from quire.executor.models.transformers import TransformersModel
from quire.executor.models.transformers.programs.program import Program, Runner
from quire.executor.models.transformers.programs.rewriting import Rewriter
from quire.executor.models.transformers.programs.tracing import Untraceable, trace
from quire.executor.models.transformers.small_sequences import SmallSequences
from quire.frontend.checkpoint.model_spec import read_model_spec
from quire.ops.cpu.native import NativeBackend
from tests.executor.models.test_models import VARIANTS, prompts
from tests.executor.models.tiny_models import Reference, write_checkpoint
from tests.executor.paged_driver import (
    Checkpoints,
    PagedDriver,
    batch_tolerance,
    load_model,
    read_spec,
    transformers_spec,
)
from tests.executor.pretend_device import DEVICE, IS_ACCELERATED

torch.set_num_threads(1)

VIEWS = {"chunk", "unsqueeze", "permute", "reshape", "narrow", "transpose", "view", "__getitem__"}


def programs_of(model: object) -> tuple[Runner, Runner]:
    assert isinstance(model, TransformersModel)
    assert model.fast_path is not None
    assert model.fast_path.programs is not None
    return model.fast_path.programs


@pytest.mark.parametrize("variant", ["llama-tied", "llama-yarn-rope", "llama-biases", "mistral-window", "qwen3-window"])
def test_steps_are_those_of_our_own_files(variant: str, checkpoint: Checkpoints) -> None:
    """The same operations in the same order give the same bits."""
    family, options = VARIANTS[variant]
    folder = checkpoint(family, **options)
    model, native = load_model(transformers_spec(folder)), load_model(read_spec(folder))
    together = {0: prompts(1, 300)[0], 1: [5, 6, 7]}
    drivers = [PagedDriver(each, 2, 100) for each in (model, native)]
    for feed in (together, {0: [8], 1: [9]}):
        got, expected = (driver.step(feed, only_last=True) for driver in drivers)
        for row in feed:
            torch.testing.assert_close(got[row], expected[row], atol=1e-4 if IS_ACCELERATED else 0, rtol=0)
    programs = programs_of(model)
    assert set().union(*(program.foreign() for program in programs)) <= VIEWS
    assert programs[0].selects


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    "model_type",
    [
        *("afmoe", "bitnet", "bloom", "ernie4_5", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_neox", "gptj"),
        *(
            "granite",
            "helium",
            "hunyuan_v1_dense",
            "laguna",
            "modernbert-decoder",
            "mpt",
            "nanochat",
            "nemotron",
            "olmo2",
        ),
        *("opt", "persimmon", "phi", "phi3", "qwen2_moe", "starcoder2", "stablelm"),
    ],
)
def test_steps_use_our_operations_alone(model_type: str, tmp_path: Path) -> None:
    """So decode steps are recorded. A row's logits are the same in any batch."""
    write_checkpoint(tmp_path, model_type)
    spec = read_model_spec(tmp_path, ModelConfig(model=str(tmp_path), model_impl="transformers", dtype="float32"))
    model = load_model(spec)
    token_ids = prompts(1, spec.vocab_size)[0]
    alone = PagedDriver(model, 1, 100).step({0: token_ids})[0]
    beside = PagedDriver(model, 2, 100).step({1: token_ids[::-1], 0: token_ids})[0]
    torch.testing.assert_close(alone, beside, atol=batch_tolerance(ops.bind(DEVICE)), rtol=0)
    expected = Reference(tmp_path).logprobs(token_ids)
    torch.testing.assert_close(alone.log_softmax(-1), expected, atol=1e-4, rtol=0)
    assert isinstance(model, TransformersModel)
    assert model.fast_path is not None
    assert model.fast_path.programs is not None
    context = model.fast_path._context
    if not isinstance(context.ops, NativeBackend):
        return  # plain torch records nothing
    decode = SmallSequences(model, model._part, context, spec.vocab_size, 2, 4).step({0: 1, 1: 1})
    _, recording = context.ops.record(lambda: model.compute_logits(model.forward(*decode)))
    assert recording is not None


def test_attention_that_a_table_hides_is_the_classs_own(tmp_path: Path) -> None:
    """GPT Neo has a window in a table of all pairs of positions, which a comparison of a few tokens would not show."""
    write_checkpoint(tmp_path, "gpt_neo")
    model = load_model(
        read_model_spec(tmp_path, ModelConfig(model=str(tmp_path), model_impl="transformers", dtype="float32"))
    )
    assert isinstance(model, TransformersModel)
    assert model.fast_path is not None
    assert model.fast_path.programs is None


def traced(code: Callable[[Tensor], Tensor]) -> Program:
    """The program of `code`, which gets [1, num_tokens, 4]."""

    def run(num_tokens: int) -> tuple[list[Tensor], Callable[[object], Tensor]]:
        x = torch.arange(4.0 * num_tokens).view(1, num_tokens, 4) - 9
        return [x], lambda _: code(x)

    return trace(run, (7, 12), [])


def check(code: Callable[[Tensor], Tensor]) -> Program:
    """`traced`, with a program that computes what the code does on another number of tokens, rewritten or not."""
    program, rewritten = traced(code), traced(code)
    Rewriter(rewritten, ops.bind("cpu")).run()
    x = torch.linspace(-3, 3, 20).view(1, 5, 4)
    for each in (program, rewritten):
        given = x.clone()
        torch.testing.assert_close(Runner(each, ops.bind("cpu")).run([given], 5), code(x.clone()), atol=1e-5, rtol=0)
        assert torch.equal(given, x), "the input was changed"
    return rewritten


def test_sizes_follow_the_number_of_tokens() -> None:
    def code(x: Tensor) -> Tensor:
        parts = x.view(1, x.shape[1], 2, 2).transpose(1, 2)
        counted = torch.arange(x.shape[1]).view(1, 1, -1, 1)
        return (parts * counted).reshape(1, 2 * x.shape[1] * 2)

    check(code)


def test_what_is_still_read_is_not_written_into() -> None:
    def code(x: Tensor) -> Tensor:
        first = F.layer_norm(x, (4,), torch.ones(4))
        doubled = first * 2
        third = doubled + first
        return F.silu(third) + third.view(1, -1, 4) * 0.5

    check(code)


def test_writing_into_a_tensor_makes_another_value() -> None:
    def code(x: Tensor) -> Tensor:
        shares = x.softmax(-1)
        shares /= shares.sum(-1, keepdim=True) + 1
        shares[:, :, 0] = 3.0
        return shares

    check(code)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (lambda x: x * 2 if x.sum() > 0 else x * 3, "numbers of a tensor"),
        (lambda x: torch.cat([x[:, i : i + 1] * i for i in range(x.shape[1])], dim=1), "number of tokens"),
        (lambda x: x.view(-1).add_(1).view(1, -1, 4), "was given"),
        (lambda x: x[:, : x.shape[1] // 2], "multiple"),
    ],
)
def test_code_without_a_program(code: Callable[[Tensor], Tensor], reason: str) -> None:
    with pytest.raises(Untraceable, match=reason):
        traced(code)


def test_writing_into_a_view_changes_what_it_is_a_view_of() -> None:
    def code(x: Tensor) -> Tensor:
        own = x.new_empty(*x.shape)
        first, rest = own[:, :, :1], own[:, :, 1:]
        rest.copy_(x[:, :, 1:])
        before = rest * 1
        first.copy_(x[:, :, :1]).mul_(5)
        return own + F.pad(before, (1, 0))

    check(code)


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    ("model_type", "per_layer"),
    [("mixtral", 1), ("qwen3_moe", 1), ("dots1", 0.75), ("gpt_oss", 1), ("deepseek_v3", 0.75), ("olmoe", 1)],
)
def test_experts_and_their_routers_are_ours(
    model_type: str, per_layer: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Log-probabilities are the library's, and a row's are the same in any batch."""
    folder = tmp_path_factory.mktemp("program") / model_type
    write_checkpoint(folder, model_type)
    spec = transformers_spec(folder)
    model = load_model(spec)
    token_ids = prompts(1, spec.vocab_size)[0]
    alone = PagedDriver(model, 1, 100).step({0: token_ids})[0]
    beside = PagedDriver(model, 2, 100).step({1: token_ids[::-1], 0: token_ids})[0]
    torch.testing.assert_close(alone, beside, atol=batch_tolerance(ops.bind(DEVICE)), rtol=0)
    expected = Reference(folder).logprobs(token_ids)
    torch.testing.assert_close(alone.log_softmax(-1), expected, atol=1e-4, rtol=0)
    names = [type(function).__name__ for function in programs_of(model)[0].functions]
    assert names.count("Experts") == names.count("Route") == per_layer * spec.num_layers


def test_queries_that_are_scaled_from_a_position_on(tmp_path: Path) -> None:
    """The formula of shorter contexts, in which nothing is scaled, is not taken for that of all."""
    rope = {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 222,
        "llama_4_scaling_beta": 0.5,
    }  # fmt: skip
    write_checkpoint(tmp_path, "ministral3", rope_parameters=rope)
    model = load_model(read_model_spec(tmp_path, ModelConfig(model=str(tmp_path), dtype="float32")))
    token_ids = [3 + number * 7 % 300 for number in range(240)]
    got = PagedDriver(model, 1, 256).step({0: token_ids})[0].log_softmax(-1)
    assert programs_of(model)
    torch.testing.assert_close(got, Reference(tmp_path).logprobs(token_ids), atol=1e-4, rtol=0)
