"""Train the demo model, which `quire serve` serves by default, or evaluate the shipped one.

The script generates all text itself and needs no download. A run is a pure function of its options: data is drawn in
numbered pools, each with its own seed, and the learning rate depends only on the pool. So a run resumed from a
checkpoint continues exactly as if it had never stopped.

    python scripts/train_demo_model.py              # train, evaluate and write quire/demo_model
    python scripts/train_demo_model.py --evaluate   # evaluate quire/demo_model; fails if a category is below 95 %
    python scripts/train_demo_model.py --held-out items.jsonl   # write what `--evaluate` asks, with the answers
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from demo_model import mixture
from demo_model import tokenizer as tok
from demo_model.tasks import Sample
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from quire import LLM, SamplingParams

SHIPPED = Path(__file__).resolve().parent.parent / "quire" / "demo_model"
GOAL = 0.95
MAX_REPLY = 160
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

RATE_POINTS = [(0, 1.0), (15, 1.0), (30, 0.21), (30, 0.35), (40, 0.0)]


@dataclass
class Recipe:
    """All options that decide the result of a run."""

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


class Encoder:
    """Turns samples into token ids and a mask of the tokens that the model learns to generate."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.header = tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]

    def encode(self, samples: list[Sample]) -> list[tuple[list[int], list[bool]]]:
        """Encode samples; with `enable_thinking`, only the last reply has a thought."""
        texts = [tok.conversation_text(self.tokenizer, sample) for sample in samples]
        rows = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [(ids, self._mask(ids, sample.enable_thinking)) for ids, sample in zip(rows, samples, strict=True)]

    def _mask(self, ids: list[int], last_only: bool) -> list[bool]:
        """Mark assistant tokens, including the closing mark; with `last_only`, only those of the last reply."""
        mask, size, inside = [False] * len(ids), len(self.header), False
        for index, token in enumerate(ids):
            if inside:
                mask[index] = True
                inside = token != self.end
            elif ids[index + 1 - size : index + 1] == self.header:
                inside = True
                if last_only:
                    mask = [False] * len(ids)
        return mask


def pool_rows(recipe: Recipe, encoder: Encoder, number: int) -> list[tuple[list[int], list[bool]]]:
    """The encoded samples of one numbered pool."""
    rng = random.Random(f"{recipe.seed} pool {number}")
    phase = mixture.phase_of_pool(number)
    rows = encoder.encode([mixture.training_sample(rng, phase) for _ in range(recipe.pool_size)])
    return [row for row in rows if len(row[0]) <= 1600]


def micro_batches(recipe: Recipe, encoder: Encoder, number: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of (ids, labels) in random order, each of rows with similar lengths to reduce padding."""
    rows = sorted(pool_rows(recipe, encoder, number), key=lambda row: len(row[0]))
    groups: list[list[tuple[list[int], list[bool]]]] = [[]]
    for row in rows:
        if (len(groups[-1]) + 1) * len(row[0]) > recipe.micro_tokens and groups[-1]:
            groups.append([])
        groups[-1].append(row)
    random.Random(f"{recipe.seed} order {number}").shuffle(groups)
    for group in groups:
        width = max(len(ids) for ids, _ in group)
        ids = torch.zeros(len(group), width, dtype=torch.long)
        labels = torch.full((len(group), width), -100)
        for index, (tokens, mask) in enumerate(group):
            line = torch.tensor(tokens)
            ids[index, : len(tokens)] = line
            labels[index, : len(tokens)] = torch.where(torch.tensor(mask), line, -100)
        yield ids, labels


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


def loss_sum(model: LlamaForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed cross entropy of the assistant's tokens; only these go through the output layer."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        wanted = labels[:, 1:] != -100
        logits = model.lm_head(hidden[wanted])
    return torch.nn.functional.cross_entropy(logits.float(), labels[:, 1:][wanted], reduction="sum")


@dataclass
class Progress:
    """The progress of a run."""

    pool: int = 0
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


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
    batches, losses = list(micro_batches(recipe, encoder, at.pool)), []
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


def save_checkpoint(path: Path, model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer], at: Progress) -> None:
    """Write the state that a resumed run needs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "progress": vars(at)}
    torch.save(state, path)


# --- evaluation -----------------------------------------------------------------------------------------------------


def is_right(sample: Sample, reply: str) -> bool:
    """Returns True if a greedy reply is the expected one. JSON and tool calls are compared by value; thoughts may
    differ."""
    if sample.category == "thinking":
        thought, mark, answer = reply.partition("</think>")
        wanted = sample.reply.split("</think>")[1].strip()
        return bool(mark) and thought.startswith("<think>") and answer.strip() == wanted
    if sample.category == "json":
        return _same_json(reply, sample.reply)
    calls = sample.messages[-1].get("tool_calls")
    if calls:
        function = dict(calls[0]["function"])
        if isinstance(function["arguments"], str):
            function["arguments"] = json.loads(function["arguments"])
        inner = reply.strip().removeprefix("<tool_call>").removesuffix("</tool_call>")
        return reply.strip() != inner and _same_json(inner, json.dumps(function))
    return reply.strip() == sample.reply.strip()


def _same_json(left: str, right: str) -> bool:
    try:
        return bool(json.loads(left) == json.loads(right))
    except ValueError:
        return False


@torch.no_grad()
def greedy(model: Any, tokenizer: PreTrainedTokenizerFast, prompts: list[str]) -> list[str]:
    """Greedy replies up to the closing mark; a reply that does not stop by itself gets a note at its end."""
    model.eval()
    tokenizer.padding_side = "left"
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    out = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        do_sample=False,
        max_new_tokens=MAX_REPLY,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    replies = []
    for ids in out[:, batch["input_ids"].shape[1] :].tolist():
        stopped = tokenizer.eos_token_id in ids
        text = tokenizer.decode(ids, skip_special_tokens=True)
        replies.append(text if stopped else text + " (did not stop)")
    return replies


def served(llm: LLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str]) -> list[str]:
    """The same from Quire."""
    greedily = SamplingParams(temperature=0, max_tokens=MAX_REPLY)
    ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    outputs = llm.generate([{"prompt_token_ids": each} for each in ids], greedily, use_tqdm=False)
    replies = [output.outputs[0] for output in outputs]
    return [reply.text + ("" if reply.finish_reason == "stop" else " (did not stop)") for reply in replies]


def evaluate(
    answer: Callable[[list[str]], list[str]],
    tokenizer: PreTrainedTokenizerFast,
    count: int,
    seed: int = 1,
    show: int = 0,
) -> dict[str, tuple[int, int]]:
    """Right answers and items per category, over held-out items; `answer` gives the replies to some prompts."""
    scores = {}
    for category in [*mixture.CATEGORIES, "conversations"]:
        samples = mixture.evaluation_set(category, count, seed)
        samples.sort(key=lambda sample: len(str(sample.messages) + str(sample.tools)))
        right, wrong = 0, []
        for first in range(0, len(samples), 50):
            part = samples[first : first + 50]
            replies = answer([tok.conversation_text(tokenizer, s, prompt_only=True) for s in part])
            for sample, reply in zip(part, replies, strict=True):
                right += is_right(sample, reply)
                if not is_right(sample, reply):
                    wrong.append((sample, reply))
        scores[category] = (right, len(samples))
        for sample, reply in wrong[:show]:
            wanted = sample.messages[-1]
            print(f"[{category}] {sample.messages[-2]['content']!r} -> {reply!r}, wanted {wanted}")
    return scores


def format_scores(scores: dict[str, tuple[int, int]]) -> str:
    """Scores on one line."""
    return ", ".join(f"{category} {right / count:.1%}" for category, (right, count) in scores.items())


# --- output ---------------------------------------------------------------------------------------------------------


def save_model(folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write the checkpoint in bfloat16, in Hugging Face's format."""
    folder.mkdir(parents=True, exist_ok=True)
    model = model.to(torch.bfloat16)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
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
    """Evaluate a written checkpoint and print a table; returns whether every category reaches the goal.

    Transformers answers, in float32; with options to be `served_with`, Quire does.
    """
    if not served_with:
        model, tokenizer = load_shipped(folder)
        scores = evaluate(partial(greedy, model, tokenizer), tokenizer, count, show=show)
    else:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        with LLM(str(folder), **served_with) as llm:
            scores = evaluate(partial(served, llm, tokenizer), tokenizer, count, show=show)
    print("| category | right | items | share |\n|---|---:|---:|---:|")
    for category, (right, items) in scores.items():
        print(f"| {category} | {right} | {items} | {right / items:.1%} |")
    return all(right / items >= GOAL for right, items in scores.values())


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
    parser.add_argument("--resume", type=Path, help="checkpoint to resume from")
    parser.add_argument("--probe-every", type=int, default=0, help="evaluate every so many pools")
    for name, value in vars(Recipe()).items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value)
    return parser.parse_args()


def main() -> int:
    """Train or evaluate; the exit status says whether the goal is reached."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    if options.held_out is not None:
        write_held_out(options.held_out, options.output, options.items)
        return 0
    if not options.evaluate:
        recipe = Recipe(**{name: getattr(options, name) for name in vars(Recipe())})
        model, tokenizer, at = train(recipe, options.work, options.resume, options.probe_every)
        save_model(options.output, model, tokenizer)
        print(f"trained on {at.tokens / 1e6:.1f}M tokens in {at.seconds / 60:.1f} minutes", flush=True)
    asked = {name: getattr(options, name) for name in ("quantization", "kv_cache_dtype")}
    served_with = {name: value for name, value in asked.items() if value is not None}
    return 0 if report(options.output, options.items, options.show, served_with) else 1


if __name__ == "__main__":
    sys.exit(main())
