"""Medusa and MLP speculators: drafts equal those of the published formulas, and change no token."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from quire.core.wire.rank import Layout, Rank
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.step.drafting.last_state_drafts import LastStateDrafts
from quire.executor.worker import Worker
from tests.executor.step.drafting.head_references import (
    HIDDEN,
    NUM_DRAFTS,
    Target,
    check_drafts,
    rms_norm,
    serve,
    some_requests,
    watched,
    with_heads,
)
from tests.executor.step.test_drafts import check_same
from tests.executor.step.test_model_runner import engine_config
from tests.executor.thread_group import on_every_rank

torch.set_num_threads(1)

VOCAB = 320
INNER = 40

Rule = Callable[[int, Tensor], list[int]]
"""Maps a newest token and the hidden state that made it to drafts."""


def noise(*shape: int) -> Tensor:
    return torch.randn(shape) * (1.5 / shape[-1] ** 0.5)


def medusa(names: str) -> tuple[dict[str, Any], dict[str, Tensor], Rule]:
    torch.manual_seed(7)
    blocks = [[(noise(HIDDEN, HIDDEN), 0.2 * torch.randn(HIDDEN)) for _ in range(2)] for _ in range(4)]
    lasts = [noise(VOCAB, HIDDEN) for _ in range(4)]
    tensors: dict[str, Tensor] = {}
    for head, pairs in enumerate(blocks):
        for block, (weight, bias) in enumerate(pairs):
            name = f"{head}.{block}.linear" if names == "authors" else f"blocks.{head}.layers.{block}"
            tensors |= {f"{name}.weight": weight, f"{name}.bias": bias}
        tensors[f"{head}.2.weight" if names == "authors" else f"lm_heads.{head}.weight"] = lasts[head]
    sizes = {"medusa_num_heads": 4, "medusa_num_layers": 2}
    if names != "authors":
        sizes = {"num_heads": 4, "num_hidden_layers": 2, "hidden_size": HIDDEN, "vocab_size": VOCAB}

    def rule(token: int, hidden: Tensor) -> list[int]:
        drafts = []
        for pairs, last in zip(blocks[:NUM_DRAFTS], lasts, strict=False):
            x = hidden
            for weight, bias in pairs:
                x = x + F.silu(weight @ x + bias)
            drafts.append(int((last @ x).argmax()))
        return drafts

    return {"model_type": "medusa", "architectures": ["MedusaModel"], **sizes}, tensors, rule


def mlp_speculator(names: str) -> tuple[dict[str, Any], dict[str, Tensor], Rule]:
    torch.manual_seed(8)
    is_tied, number = names == "tied", 4
    own = {
        index: {
            "emb": torch.randn(VOCAB, INNER) * 0.4,
            "head": noise(VOCAB, INNER),
            "scale": 1 + 0.2 * torch.randn(INNER),
            "shift": 0.2 * torch.randn(INNER),
        }
        for index in range(1 if is_tied else number)
    }
    projections = [noise(INNER, HIDDEN if index == 0 else INNER) for index in range(2 if is_tied else number)]
    prefix = "" if is_tied else "speculator."
    tensors = {f"{prefix}proj.{index}.weight": each for index, each in enumerate(projections)}
    for index, parts in own.items():
        tensors |= {
            f"{prefix}emb.{index}.weight": parts["emb"],
            f"{prefix}head.{index}.weight": parts["head"],
            f"{prefix}ln.{index}.weight": parts["scale"],
            f"{prefix}ln.{index}.bias": parts["shift"],
        }
    config = {
        "model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"], "emb_dim": HIDDEN,
        "inner_dim": INNER, "n_predict": number, "vocab_size": VOCAB, "tie_weights": is_tied, "scale_input": is_tied,
    }  # fmt: skip
    state_weight = 0.5 ** (0.5 / number)
    token_weight = math.sqrt((1 - state_weight**2) * (INNER / 2))

    def rule(token: int, hidden: Tensor) -> list[int]:
        drafts, x = [], hidden
        if is_tied:
            x = rms_norm(torch.ones(HIDDEN))(x) / 2**0.5
        for index in range(NUM_DRAFTS):
            parts = own[0 if is_tied else index]
            x = projections[min(index, len(projections) - 1)] @ x
            x = x + parts["emb"][token] * (token_weight / state_weight)
            x = F.gelu(rms_norm(parts["scale"])(x) + parts["shift"])
            token = int((parts["head"] @ x).argmax())
            drafts.append(token)
        return drafts

    return config, tensors, rule


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


KINDS = [
    pytest.param("medusa", medusa, "authors", id="medusa-authors"),
    pytest.param("medusa", medusa, "named", id="medusa-named"),
    pytest.param("mlp_speculator", mlp_speculator, "whole", id="mlp"),
    pytest.param("mlp_speculator", mlp_speculator, "tied", id="mlp-tied"),
]


@pytest.mark.parametrize(("method", "make", "names"), KINDS)
def test_drafts_are_those_of_the_formulas(
    method: Any, make: Any, names: str, checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("llama")
    config, tensors, rule = make(names)
    heads = write(tmp_path / "heads", config, tensors)
    without = serve(engine_config(folder))(some_requests())
    generate = serve(with_heads(folder, method, heads))
    with watched(monkeypatch, LastStateDrafts) as drafted:
        check_same(generate(some_requests(), long_prefill_token_threshold=20), without)
        check_same(generate(some_requests(), depth=1), without)  # on the pages that the prefix cache found
    target = Target(folder, 2)
    with torch.inference_mode():
        check_drafts(drafted, lambda known: rule(known[-1], target.states(known[:-1])[-1]))


@pytest.mark.parametrize(("method", "make", "names"), KINDS[1:3])
def test_two_ranks_and_the_memory_plan(
    method: Any, make: Any, names: str, checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("llama")
    config, tensors, _ = make(names)
    heads = write(tmp_path / "heads", config, tensors)
    alone = Worker(engine_config(folder), Rank(), ParallelGroup()).load()
    both = Worker(with_heads(folder, method, heads), Rank(), ParallelGroup()).load()
    assert both.weights_bytes - alone.weights_bytes == pytest.approx(
        sum(each.nbytes for each in tensors.values()), rel=0.1
    )
    assert both.kv_groups == alone.kv_groups
    without = serve(engine_config(folder))(some_requests())
    with watched(monkeypatch, LastStateDrafts) as one:
        serve(with_heads(folder, method, heads))(some_requests(), depth=1)
    divided = with_heads(folder, method, heads, layout=Layout(tensor=2), executor="mp")
    with watched(monkeypatch, LastStateDrafts) as two:
        first, second = on_every_rank(2, lambda group: serve(divided, group)(some_requests(), depth=1))
    check_same(first, without)
    check_same(second, without)
    assert {(*known, *drafts) for known, drafts in two} == {(*known, *drafts) for known, drafts in one}
