"""Train the demo model, which `quire serve` serves by default, or evaluate the shipped one.

The script generates all text itself and needs no download. A run is a pure function of its options: data is drawn in
numbered pools, each with its own seed, and the learning rate depends only on the pool. So a run resumed from a
checkpoint continues exactly as if it had never stopped. The first stage starts from nothing; the second one goes on
from the first one's saved weights, with loose phrasings, enforced answers, two tool calls and plain text.

    python scripts/train_demo_model.py              # train both stages, evaluate and write quire/demo_model
    python scripts/train_demo_model.py --first DIR  # train only the second stage, from the model in DIR
    python scripts/train_demo_model.py --evaluate   # evaluate quire/demo_model; fails if a first task is below 95 %
    python scripts/train_demo_model.py --held-out items.jsonl   # write what `--evaluate` asks, with the answers
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from demo_model import mixture
from demo_model import tokenizer as tok
from demo_model.scoring import evaluate, evaluate_everyday, format_scores, greedy, served
from demo_model.second_stage import SecondRecipe, train_further
from demo_model.training import Encoder, Progress, Row, loss_sum, micro_batches, save_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from quire import LLM

SHIPPED = Path(__file__).resolve().parent.parent / "quire" / "demo_model"
GOAL = 0.95
ROPE_BASE = 10000.0
TRAINED_LENGTH = 2048
STRETCH = {
    "factor": tok.CONTEXT_LENGTH / TRAINED_LENGTH,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": TRAINED_LENGTH,
    "rope_theta": ROPE_BASE,
    "rope_type": "llama3",
}
STRETCHED = {"max_position_embeddings": tok.CONTEXT_LENGTH, "rope_parameters": STRETCH}
"""The shipped config: trained on short texts, then read with longer waves, see the limits in the model's README."""

SHARPNESS = 4.0
"""The factor of the shipped logits, in the last norm: temperature 1 then samples as 1/4 would as trained."""

RATE_POINTS = [(0, 1.0), (15, 1.0), (30, 0.21), (30, 0.35), (40, 0.0)]


@dataclass
class Recipe:
    """All options that decide the result of the first stage."""

    seed: int = 7
    pools: int = 40
    pool_size: int = 4096
    micro_tokens: int = 4096
    micro_batches: int = 1
    warmup_steps: int = 50
    muon_rate: float = 0.015
    adam_rate: float = 0.004
    weight_decay: float = 0.05
    vocabulary: int = 880
    hidden: int = 192
    layers: int = 6
    heads: int = 6
    inner: int = 512


# --- data -----------------------------------------------------------------------------------------------------------


def pool_rows(recipe: Recipe, encoder: Encoder, number: int) -> list[Row]:
    """The encoded samples of one numbered pool."""
    rng = random.Random(f"{recipe.seed} pool {number}")
    phase = mixture.phase_of_pool(number)
    rows = encoder.encode([mixture.training_sample(rng, phase) for _ in range(recipe.pool_size)])
    return [row for row in rows if len(row[0]) <= 1600]


# --- training -------------------------------------------------------------------------------------------------------


def new_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A randomly initialized Llama of the recipe's shape."""
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.inner,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        max_position_embeddings=TRAINED_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def make_optimizers(recipe: Recipe, model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embedding and norms. AdamW alone needs about twice the steps."""
    layers = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    known = {id(p) for p in layers}
    rest = [p for p in model.parameters() if id(p) not in known]
    return [
        torch.optim.Muon(layers, lr=recipe.muon_rate, weight_decay=recipe.weight_decay, momentum=0.95),
        torch.optim.AdamW(rest, lr=recipe.adam_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def rate_factor(recipe: Recipe, step: int, pool: float) -> float:
    """The learning rate's factor: a short warm-up, then linear between the schedule's points (pool, factor)."""
    warm = min(1.0, (step + 1) / recipe.warmup_steps)
    for (left, high), (right, low) in pairwise(RATE_POINTS):
        if left <= pool < right:
            return warm * (high + (low - high) * (pool - left) / (right - left))
    return 0.0


def train_step(
    recipe: Recipe,
    model: LlamaForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    factor: float,
) -> float:
    """One update from a few micro-batches; returns the mean loss per learned token."""
    learned = sum(int((labels != -100).sum()) for _, labels in batches)
    total = 0.0
    for ids, labels in batches:
        loss = loss_sum(model, ids, labels) / learned
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer, rate in zip(optimizers, (recipe.muon_rate, recipe.adam_rate), strict=True):
        optimizer.param_groups[0]["lr"] = rate * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return total


def train_pool(
    recipe: Recipe, model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer], encoder: Encoder, at: Progress
) -> float:
    """Train on one pool, and update the progress; returns the mean loss."""
    order = random.Random(f"{recipe.seed} order {at.pool}")
    batches = list(micro_batches(pool_rows(recipe, encoder, at.pool), recipe.micro_tokens, order))
    losses = []
    model.train()
    for first in range(0, len(batches), recipe.micro_batches):
        factor = rate_factor(recipe, at.step, at.pool + first / len(batches))
        group = batches[first : first + recipe.micro_batches]
        losses.append(train_step(recipe, model, optimizers, group, factor))
        at.step += 1
        at.tokens += sum(ids.numel() for ids, _ in group)
    at.pool += 1
    return sum(losses) / len(losses)


def train(recipe: Recipe, work: Path | None, resume: Path | None, probe_every: int) -> tuple[Any, Any, Progress]:
    """Train from the start or from a checkpoint; returns the model, its tokenizer and the progress."""
    rng = random.Random(f"{recipe.seed} vocabulary")
    tokenizer = tok.build([mixture.training_sample(rng, mixture.OPENING) for _ in range(20_000)], recipe.vocabulary)
    model, encoder, at = new_model(recipe, tokenizer), Encoder(tokenizer), Progress()
    optimizers = make_optimizers(recipe, model)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)
    if resume:
        state = torch.load(resume, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        at = Progress(**state["progress"])
    while at.pool < recipe.pools:
        start = time.monotonic()
        loss = train_pool(recipe, model, optimizers, encoder, at)
        at.seconds += time.monotonic() - start
        line = f"pool {at.pool}/{recipe.pools} step {at.step} tokens {at.tokens / 1e6:.2f}M loss {loss:.4f}"
        print(f"{line} minutes {at.seconds / 60:.1f}", flush=True)
        if probe_every and at.pool % probe_every == 0:
            print("  " + format_scores(evaluate(partial(greedy, model, tokenizer), tokenizer, 60)), flush=True)
        if work and at.pool % 5 == 0:
            save_checkpoint(work / f"pool{at.pool}.pt", model, optimizers, at)
    return model, tokenizer, at


# --- output ---------------------------------------------------------------------------------------------------------


def save_model(
    folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, sharpness: float = 1.0
) -> None:
    """Write the checkpoint in bfloat16, in Hugging Face's format, with all logits multiplied by `sharpness`."""
    folder.mkdir(parents=True, exist_ok=True)
    model = model.to(torch.bfloat16)
    with torch.no_grad():
        model.model.norm.weight *= sharpness
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
    for name in ("is_local", "local_files_only"):  # where it was loaded from
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    rewrite_json(folder / "config.json", {"rope_theta": ROPE_BASE, **STRETCHED})
    rewrite_json(folder / "generation_config.json", {"temperature": 0.0})  # servers read this, not do_sample
    rewrite_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


def rewrite_json(path: Path, changes: dict[str, Any]) -> None:
    """Add fields that other readers of the format need."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}, indent=2) + "\n")


def load_shipped(folder: Path) -> tuple[Any, PreTrainedTokenizerFast]:
    """Load a checkpoint with Transformers, and compute in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


def write_held_out(path: Path, folder: Path, count: int, seed: int = 1) -> None:
    """Write `count` held-out items of each category as lines of `prompt` and `completion`, as the model reads them."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with path.open("w") as file:
        for category in [*mixture.CATEGORIES, "conversations"]:
            for sample in mixture.evaluation_set(category, count, seed):
                prompt = tok.conversation_text(tokenizer, sample, prompt_only=True)
                rest = tok.conversation_text(tokenizer, sample).removeprefix(prompt)
                completion = rest[: rest.index(tokenizer.eos_token) + len(tokenizer.eos_token)]
                file.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")


def report(folder: Path, count: int, show: int, served_with: dict[str, str]) -> bool:
    """Evaluate a written checkpoint and print a table; returns whether the first stage's reach the goal.

    Transformers answers the first stage's categories, in float32; with options to be `served_with`, Quire does. Quire
    answers the others: they need its grammars.
    """
    if not served_with:
        model, tokenizer = load_shipped(folder)
        scores = evaluate(partial(greedy, model, tokenizer), tokenizer, count, show=show)
    else:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        scores = {}
    with LLM(str(folder), **served_with) as llm:
        if served_with:
            scores = evaluate(partial(served, llm, tokenizer), tokenizer, count, show=show)
        scores |= evaluate_everyday(llm, tokenizer, count, show=show)
    print("| category | right | items | share |\n|---|---:|---:|---:|")
    for category, (right, items) in scores.items():
        print(f"| {category} | {right} | {items} | {right / items:.1%} |")
    everyday = set(mixture.EVERYDAY_SCORES.values())
    return all(right / items >= GOAL for name, (right, items) in scores.items() if name not in everyday)


def parse_options() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=SHIPPED, help="folder of the checkpoint")
    parser.add_argument("--evaluate", action="store_true", help="only evaluate the checkpoint in the output folder")
    parser.add_argument("--held-out", type=Path, help="only write held-out items to this file")
    parser.add_argument("--quantization", help="evaluate what Quire serves with this option of it, such as int8")
    parser.add_argument("--kv-cache-dtype", help="likewise")
    parser.add_argument("--items", type=int, default=400, help="evaluation items per category")
    parser.add_argument("--show", type=int, default=0, help="wrong answers to show per category")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, help="folder for checkpoints to resume from")
    parser.add_argument("--resume", type=Path, help="checkpoint to resume from; with --first, one of the second stage")
    parser.add_argument("--first", type=Path, help="folder of a saved first stage, to train only the second one")
    parser.add_argument("--probe-every", type=int, default=0, help="evaluate every so many pools")
    for name, value in vars(Recipe()).items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value)
    for name, value in vars(SecondRecipe()).items():
        parser.add_argument("--second-" + name.replace("_", "-"), type=type(value), default=value)
    return parser.parse_args()


def train_stages(options: argparse.Namespace) -> None:
    """Train both stages, or the second one on a saved first one, and write the checkpoint."""
    with tempfile.TemporaryDirectory() as scratch:
        first = options.first or (options.work or Path(scratch)) / "first"
        if not options.first:
            recipe = Recipe(**{name: getattr(options, name) for name in vars(Recipe())})
            model, tokenizer, at = train(recipe, options.work, options.resume, options.probe_every)
            save_model(first, model, tokenizer)
            print(f"first stage: {at.tokens / 1e6:.1f}M tokens in {at.seconds / 60:.1f} minutes", flush=True)
        model, tokenizer = load_shipped(first)
    second = SecondRecipe(**{name: getattr(options, "second_" + name) for name in vars(SecondRecipe())})
    at = train_further(second, model, tokenizer, options.work, options.resume if options.first else None)
    save_model(options.output, model, tokenizer, SHARPNESS)
    print(f"second stage: {at.tokens / 1e6:.2f}M tokens in {at.seconds / 60:.1f} minutes", flush=True)


def main() -> int:
    """Train or evaluate; the exit status says whether the goal is reached."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    if options.held_out is not None:
        write_held_out(options.held_out, options.output, options.items)
        return 0
    if not options.evaluate:
        train_stages(options)
    asked = {name: getattr(options, name) for name in ("quantization", "kv_cache_dtype")}
    served_with = {name: value for name, value in asked.items() if value is not None}
    return 0 if report(options.output, options.items, options.show, served_with) else 1


if __name__ == "__main__":
    sys.exit(main())
