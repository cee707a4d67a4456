"""Drafts are drawn with the target's numbers: they agree far more often than the likeliest tokens, or free draws."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.core.config.resolved import EngineConfig
from tests.checkpoints import VOCAB_SIZE
from tests.executor.step.drafting.head_references import HIDDEN, serve, with_heads
from tests.executor.step.drafting.test_draft_model import with_draft_model
from tests.executor.step.drafting.test_eagle import SIZES, Layers, write
from tests.executor.step.test_model_runner import prompt_of, request

NUM_CONTEXTS = 600
SHARPNESS, NOISE = 3.0, 0.15
_ADDS = ("o_proj.weight", "down_proj.weight")


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


EMBEDDING = torch.nn.functional.normalize(draw(VOCAB_SIZE, HIDDEN, seed=1)) * HIDDEN**0.5
HEAD = draw(VOCAB_SIZE, HIDDEN, seed=2) * SHARPNESS / HIDDEN**0.5
NOISY_HEAD = HEAD + NOISE * SHARPNESS / HIDDEN**0.5 * draw(VOCAB_SIZE, HIDDEN, seed=3)
NOISY_JOIN = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], 1) + NOISE / 8 * draw(
    HIDDEN, 2 * HIDDEN, seed=4
)


def of_pairs(source: Path, folder: Path, head: Tensor) -> Path:
    """Copies a checkpoint; its layers add nothing, so that a token's successor depends on this token alone."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(_ADDS):
            tensor.zero_()
        elif name.endswith("norm.weight"):
            tensor.fill_(1.0)
    tensors |= {"model.embed_tokens.weight": EMBEDDING.clone(), "lm_head.weight": head.clone()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def draft_model(source: Path, folder: Path) -> tuple[EngineConfig, Callable[[Tensor, Tensor], Tensor]]:
    """Returns the configuration of a pair, and the draft's logits after two tokens [num_contexts]."""
    target, draft = of_pairs(source, folder / "target", HEAD), of_pairs(source, folder / "draft", NOISY_HEAD)
    return with_draft_model(target, draft), lambda before, last: EMBEDDING[last] @ NOISY_HEAD.T


def eagle(source: Path, folder: Path) -> tuple[EngineConfig, Callable[[Tensor, Tensor], Tensor]]:
    """As `draft_model`: a layer that adds nothing, behind a join that nearly passes the last token on."""
    sizes = {**SIZES, "model_type": "llama"}
    own = Layers(sizes, wide=False, seed=3).tensors()
    own = {name: torch.zeros_like(each) if name.endswith(_ADDS) else each for name, each in own.items()}
    del own["layers.0.input_layernorm.weight"]
    config = {**sizes, "architectures": ["LlamaForCausalLM"], "bias": False}
    heads = write(folder / "heads", config, own | {"fc.weight": NOISY_JOIN})
    target = of_pairs(source, folder / "target", HEAD)

    def logits(before: Tensor, last: Tensor) -> Tensor:
        return torch.cat([EMBEDDING[last], EMBEDDING[before]], 1) @ NOISY_JOIN.T @ HEAD.T

    return with_heads(target, "eagle", heads, sampling="probabilistic"), logits


def overlap(first: Tensor, second: Tensor) -> float:
    """The share of equal draws: of a number in [0, 1), where both distributions give it to the same token."""
    ends, others = first.cumsum(1), second.cumsum(1)
    shared = torch.minimum(ends, others) - torch.maximum(ends - first, others - second)
    return shared.clamp(min=0).sum(1).mean().item()


@pytest.mark.parametrize("method", [draft_model, eagle])
def test_drafts_are_drawn_with_the_numbers_of_the_target(
    method: Callable[..., tuple[EngineConfig, Callable[[Tensor, Tensor], Tensor]]],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
) -> None:
    config, draft_logits = method(checkpoint("llama"), tmp_path)
    generate = serve(config)
    prompts = [prompt_of(number, 2 + number % 9) for number in range(NUM_CONTEXTS)]
    for temperature in (1.0, 0.7):
        requests = [
            request(f"r{number}", prompt, temperature=temperature, seed=number, max_tokens=3, ignore_eos=True)
            for number, prompt in enumerate(prompts)
        ]
        deltas = generate(requests, depth=1)
        # The prompt's own token comes alone; if the draft after it is right, the other two come together.
        answers = [deltas[f"r{number}"] for number in range(NUM_CONTEXTS)]
        share = sum(len(answer[1].token_ids) == 2 for answer in answers) / NUM_CONTEXTS
        before = torch.tensor([prompt[-1] for prompt in prompts])
        last = torch.tensor([answer[0].token_ids[0] for answer in answers])
        target = (EMBEDDING[last].double() @ HEAD.T.double() / temperature).softmax(1)
        draft = (draft_logits(before, last).double() / temperature).softmax(1)
        likeliest = target.gather(1, draft.argmax(1, keepdim=True)).mean().item()
        independent = (target * draft).sum(1).mean().item()
        bound = torch.minimum(target, draft).sum(1).mean().item()
        assert share == pytest.approx(overlap(target, draft), abs=0.05), (share, bound)
        assert share > 1.15 * max(likeliest, independent)


def test_greedy_drafts_are_the_likeliest_tokens(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    config, draft_logits = draft_model(checkpoint("llama"), tmp_path)
    assert config.speculation is not None
    generate = serve(replace(config, speculation=replace(config.speculation, draft_sampling="greedy")))
    prompts = [prompt_of(number, 2 + number % 9) for number in range(50)]
    requests = [
        request(f"r{number}", prompt, temperature=1.0, seed=number, max_tokens=3, ignore_eos=True)
        for number, prompt in enumerate(prompts)
    ]
    for answer in generate(requests, depth=1).values():
        tokens = [token for delta in answer for token in delta.token_ids]
        likeliest = int(draft_logits(torch.tensor([0]), torch.tensor(tokens[:1])).argmax())
        assert (len(answer[1].token_ids) == 2) == (tokens[1] == likeliest)
