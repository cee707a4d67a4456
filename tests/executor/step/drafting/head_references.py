"""Checkpoints with layers that draft, and what these should draft: computed from whole sequences, without a cache."""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from quire.core.config.model import ModelConfig
from quire.core.config.resolved import DraftMethod, DraftModelConfig, EngineConfig
from quire.core.config.speculative import DraftSampling, Speculation
from quire.core.wire.protocol import RequestDelta
from quire.core.wire.rank import Rank
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.step.drafting.head_drafts import HeadDrafts
from quire.executor.step.drafts import Proposal
from quire.executor.step.request_table import RequestTable
from quire.executor.step.speculator import ForwardPass, SampledTokens
from quire.executor.worker import Worker
from quire.frontend.checkpoint.draft_heads import own_heads, read_heads
from tests.executor.step.test_model_runner import LIMITS, engine_config, generate, prompt_of, request

NUM_DRAFTS = 3
HIDDEN = 64


def with_heads(
    folder: Path,
    method: DraftMethod,
    heads: Path | None = None,
    *,
    sampling: DraftSampling = "greedy",
    **changes: Any,
) -> EngineConfig:
    """Returns the configuration of a worker that serves `folder` with the layers in `heads`, or with its own."""
    config = engine_config(folder, limits=replace(LIMITS, num_lookahead_tokens=NUM_DRAFTS), **changes)
    if heads is None:
        spec = own_heads(config.spec, method)
    else:
        spec = read_heads(heads, ModelConfig(model=str(heads)), method, config.spec)
    return replace(
        config,
        draft_model=DraftModelConfig(spec=spec, num_tokens=NUM_DRAFTS),
        speculation=Speculation(method=method, num_tokens=NUM_DRAFTS, draft_sampling=sampling),
    )


def serve(config: EngineConfig, group: ParallelGroup | None = None) -> Callable[..., dict[str, list[RequestDelta]]]:
    """Starts a worker; returns what generates with it."""
    group = group or ParallelGroup()
    worker = Worker(config, Rank(tensor=group.rank), group)
    ready = worker.load()
    worker.allocate(ready.num_pages, ready.max_model_len)

    def run(requests: list[Any], **options: Any) -> dict[str, list[RequestDelta]]:
        limits = {"num_lookahead_tokens": config.limits.num_lookahead_tokens, **options}
        return generate(worker, requests, kv_groups=ready.kv_groups, **limits)

    return run


def some_requests() -> list[Any]:
    """Greedy and sampled requests: prompts within a page, of several pages, and of several chunks."""
    sampled = [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}]
    lengths = (2, 16, 33, 50)
    return [
        request(f"r{index}", prompt_of(index, length), seed=index, max_tokens=14, **sampled[index % 2])
        for index, length in enumerate(lengths)
    ]


Drafted = list[tuple[list[int], list[int]]]
"""(The known tokens of a request, the drafts that followed)."""


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch, kind: type[Any] = HeadDrafts) -> Iterator[Drafted]:
    """Collects all drafts of a kind of speculator."""
    drafted: Drafted = []
    propose = kind.propose

    def watch(self: Any, forward: ForwardPass, sampled: SampledTokens, table: RequestTable) -> Proposal:
        proposal = propose(self, forward, sampled, table)
        slots = [forward.plan.slots[row] for row in sampled.rows[sampled.wants_drafts]]
        known = sampled.num_known[torch.from_numpy(sampled.wants_drafts)].tolist()
        for slot, count, ids, num in zip(slots, known, proposal.token_ids, proposal.num_drafts.tolist(), strict=True):
            drafted.append((table.token_ids[slot, :count].tolist(), ids[:num].tolist()))
        return proposal

    with monkeypatch.context() as patch:
        patch.setattr(kind, "propose", watch)
        yield drafted


class Target:
    """A model of Transformers whose layers can be run apart.

    Args:
        folder: its checkpoint.
        num_layers: of the model; what comes after is a module's.
    """

    def __init__(self, folder: Path, num_layers: int) -> None:
        self.whole: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.whole.config._attn_implementation = "eager"
        self._body = self.whole.model
        self._norm_name = "norm" if hasattr(self._body, "norm") else "norm_f"
        self._layers, self._norm = list(self._body.layers), getattr(self._body, self._norm_name)
        self._types = getattr(self.whole.config, "layer_types", None)
        self.num_layers = num_layers

    def embed(self, token_ids: Sequence[int]) -> Tensor:
        return self._body.get_input_embeddings()(torch.tensor(token_ids))

    def states(self, token_ids: Sequence[int]) -> Tensor:
        """Returns the last hidden states [num_tokens, hidden]."""
        return self.run(range(self.num_layers), self._norm, self.embed(token_ids))

    def outputs(self, token_ids: Sequence[int], layers: Sequence[int]) -> Tensor:
        """Returns the outputs of layers, side by side."""
        x = self.embed(token_ids)
        return torch.cat([self.run(range(layer + 1), nn.Identity(), x) for layer in layers], 1)

    def run(self, layers: Sequence[int], norm: nn.Module, x: Tensor) -> Tensor:
        """Runs some layers and a norm on rows [num_tokens, hidden]."""
        config = self.whole.config
        self._body.layers = nn.ModuleList(self._layers[layer] for layer in layers)
        setattr(self._body, self._norm_name, norm)
        config.num_hidden_layers = len(layers)
        if self._types is not None:
            config.layer_types = [self._types[layer] for layer in layers]
        return self._body(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]

    def head(self, hidden: Tensor) -> Tensor:
        return self.whole.lm_head(hidden)


Pairs = Callable[[Sequence[int], Tensor], tuple[Tensor, Tensor]]
"""Maps a sequence's token ids and hidden states, one pair for each, to (hidden states for further drafts, logits)."""


@torch.inference_mode()
def drafts_after(known: Sequence[int], states: Tensor, run: Pairs, num_drafts: int = NUM_DRAFTS) -> list[int]:
    """Returns the drafts after the `known` tokens, whose target's states are `states`; the last one's is not used."""
    tokens, hidden = list(known[1:]), states[: len(known) - 1]
    drafts: list[int] = []
    for _ in range(num_drafts):
        out, logits = run(tokens, hidden)
        drafts.append(int(logits[-1].argmax()))
        tokens, hidden = [*tokens, drafts[-1]], torch.cat([hidden, out[-1:]])
    return drafts


def check_drafts(drafted: Drafted, expected: Callable[[list[int]], list[int]], most: int = 24) -> None:
    """Compares some of the drafts, of all requests and lengths, with `expected` of the known tokens."""
    full = [entry for entry in drafted if len(entry[1]) == NUM_DRAFTS]
    assert len(full) >= 20
    for known, drafts in full[:: max(1, len(full) // most)]:
        assert drafts == expected(known), f"after {len(known)} tokens"


def rms_norm(weight: Tensor, eps: float = 1e-6, offset: float = 0.0) -> Callable[[Tensor], Tensor]:
    return lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (weight + offset)


class Norm(nn.Module):
    """A norm in the place of a model's own."""

    def __init__(self, weight: Tensor, eps: float = 1e-6, offset: float = 0.0) -> None:
        super().__init__()
        self._run = rms_norm(weight, eps, offset)

    def forward(self, x: Tensor) -> Tensor:
        return self._run(x)


@dataclass(frozen=True)
class Module:
    """The names and the rule of a module for multi-token prediction, written down apart from the product's."""

    block: str
    token_norm: str
    hidden_norm: str
    join: str
    norm: str
    hidden_first: bool = False
    zero_first: bool = True
    offset: float = 0.0


def split_module(
    source: Path, folder: Path, module: Module, seed: int = 5, *, num_layers: int = 1, **config: Any
) -> dict[str, Tensor]:
    """Copies a checkpoint whose last layers become a module; returns the module's tensors outside the layers."""
    shutil.copytree(source, folder)
    settings = json.loads((folder / "config.json").read_text())
    last = settings["num_hidden_layers"] - num_layers
    settings |= {"num_hidden_layers": last, **config}
    for field in ("layer_types", "layers_block_type", "mlp_layer_types"):
        if settings.get(field):
            settings[field] = settings[field][:last]
    (folder / "config.json").write_text(json.dumps(settings))
    tensors = load_file(folder / "model.safetensors")
    for number in range(num_layers):
        place = re.compile(rf"^(model|backbone)\.layers\.{last + number}\.")
        block = module.block.format(number=number)
        tensors = {place.sub(f"{block}.", name): each for name, each in tensors.items()}
    named = tensors
    noise = torch.Generator().manual_seed(seed)
    own: dict[str, Tensor] = {}
    for name in (module.token_norm, module.hidden_norm, module.norm):
        own[f"{name}.weight"] = torch.randn(HIDDEN, generator=noise) * 0.2 + 1 - module.offset
    own[f"{module.join}.weight"] = torch.randn(HIDDEN, 2 * HIDDEN, generator=noise) * 0.12
    save_file({**own, **named}, folder / "model.safetensors", metadata={"format": "pt"})
    return {**own, **{name: named[name] for name in own if name in named}}
