"""The second stage of the training: everyday use, from the saved weights of the first stage."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from . import mixture
from .training import Encoder, Progress, Row, loss_sum, micro_batches, save_checkpoint

Weights = dict[str, torch.Tensor]


MIXED_AT = mixture.LENGTHENED_FROM
"""The pool before which the running mean of the weights is mixed with the first stage."""

KEPT_AT = mixture.ONE_WORD_FROM
"""The pool before which the weights are kept: their mean with the last ones is what is returned."""

RATE_POINTS = [
    (0, 7e-4), (MIXED_AT, 7e-4), (MIXED_AT, 6e-4), (56, 5.4e-4), (56, 3.8e-4), (66, 0.0), (66, 6e-4), (71, 5.25e-4),
    (78, 3.1e-4), (83, 0.0), (83, 3.5e-4), (95, 0.0), (95, 3.5e-4), (104, 0.0),
]  # fmt: skip
"""The learning rate at some pools, linear between them."""


@dataclass
class SecondRecipe:
    """All options that decide the result of the second stage, which goes on from a saved first one."""

    seed: int = 8
    pools: int = 104
    pool_size: int = 256
    micro_tokens: int = 1536
    warmup_steps: int = 10
    mean_of: float = 0.97
    """The share of the running mean of the weights that each step keeps."""
    share: float = 0.85
    """The share of that mean in the mix; the rest is the first stage, lest its tasks suffer."""
    last_share: float = 0.8
    """The share of the trained weights in those that are returned; the rest is the first stage."""

    def rate_at(self, step: int, pool: float) -> float:
        """The learning rate at a pool and a part of it, after a short warm-up."""
        warm = min(1.0, step / self.warmup_steps)
        for (left, high), (right, low) in pairwise(RATE_POINTS):
            if left <= pool < right:
                return warm * (high + (low - high) * (pool - left) / (right - left))
        return 0.0

    def longest(self, pool: int) -> int:
        """The tokens of the longest conversation of a pool."""
        return 800 if pool < MIXED_AT else 1600 if pool < mixture.FINISH_FROM else 7000


def everyday_rows(recipe: SecondRecipe, encoder: Encoder, number: int) -> list[Row]:
    """The encoded samples of one numbered pool of the second stage."""
    rng = random.Random(f"{recipe.seed} pool {number}")
    rows = encoder.encode([mixture.everyday_sample(rng, number) for _ in range(recipe.pool_size)])
    return [row for row in rows if len(row[0]) <= recipe.longest(number)]


def train_further(
    recipe: SecondRecipe,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    work: Path | None,
    resume: Path | None,
) -> Progress:
    """Train a saved first stage on the second stage's samples."""
    encoder, at, optimizer = Encoder(tokenizer), Progress(), _optimizer(model)
    first = _copy(model.state_dict())
    mean, kept = _copy(first), first
    if resume:
        state = torch.load(resume, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizers"][0])
        mean, kept, at = state["mean"], state["kept"], Progress(**state["progress"])
    model.train()
    while at.pool < recipe.pools:
        start = time.monotonic()
        if at.pool == MIXED_AT:
            model.load_state_dict(_mixed(first, mean, recipe.share))
            optimizer = _optimizer(model)
        if at.pool == KEPT_AT:
            kept = _copy(model.state_dict())
        loss = _train_pool(recipe, model, optimizer, encoder, at, mean)
        at.seconds += time.monotonic() - start
        line = f"pool {at.pool}/{recipe.pools} step {at.step} tokens {at.tokens / 1e6:.2f}M loss {loss:.4f}"
        print(f"{line} minutes {at.seconds / 60:.1f}", flush=True)
        if work:
            save_checkpoint(work / "second.pt", model, [optimizer], at, {"mean": mean, "kept": kept})
    model.load_state_dict(_mixed(first, _mixed(kept, model.state_dict(), 0.5), recipe.last_share))
    return at


def _copy(weights: Weights) -> Weights:
    return {name: value.clone() for name, value in weights.items()}


def _mixed(first: Weights, second: Weights, share: float) -> Weights:
    return {name: first[name].lerp(value, share) for name, value in second.items()}


def _optimizer(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)


def _train_pool(
    recipe: SecondRecipe,
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    encoder: Encoder,
    at: Progress,
    mean: Weights,
) -> float:
    """Train on one pool, and update the progress and the mean of the weights; returns the mean loss."""
    order, losses = random.Random(f"{recipe.seed} order {at.pool}"), []
    batches = list(micro_batches(everyday_rows(recipe, encoder, at.pool), recipe.micro_tokens, order))
    for number, (ids, labels) in enumerate(batches):
        at.step += 1
        at.tokens += ids.numel()
        loss = loss_sum(model, ids, labels) / int((labels != -100).sum())
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = recipe.rate_at(at.step, at.pool + number / len(batches))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for name, value in model.state_dict().items():
            mean[name].lerp_(value, 1 - recipe.mean_of)
    at.pool += 1
    return sum(losses) / len(losses)
