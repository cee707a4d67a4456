"""What both stages of the training share: encoding, batches, the loss and checkpoints."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from . import tokenizer as tok
from .tasks import Sample

Row = tuple[list[int], list[bool]]
FAST_BF16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
"""Whether products in bfloat16 are faster than in float32 here."""


class Encoder:
    """Turns samples into token ids and a mask of the tokens that the model learns to generate."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.header = tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]

    def encode(self, samples: list[Sample]) -> list[Row]:
        """Encode samples; with `enable_thinking`, only the last reply has a thought."""
        texts = [tok.conversation_text(self.tokenizer, sample) for sample in samples]
        rows = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [(ids, self._mask(ids, sample)) for ids, sample in zip(rows, samples, strict=True)]

    def _mask(self, ids: list[int], sample: Sample) -> list[bool]:
        """Mark what the model learns of a sample: its replies, without the part of the last one that is given."""
        if sample.plain:
            start = len(self.tokenizer(sample.messages[0]["content"], add_special_tokens=False)["input_ids"])
            return [False] * start + [True] * (len(ids) - start)
        mask = self._replies(ids, sample.enable_thinking or sample.last_only)
        if sample.given:
            end = max(index for index, learned in enumerate(mask) if learned)
            first = max(index for index in range(end) if not mask[index]) + 1
            mask[first : first + sample.given] = [False] * sample.given
        return mask

    def _replies(self, ids: list[int], last_only: bool) -> list[bool]:
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


def micro_batches(rows: list[Row], tokens: int, order: random.Random) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of (ids, labels) in random order, each of rows with similar lengths to reduce padding."""
    groups: list[list[Row]] = [[]]
    for row in sorted(rows, key=lambda row: len(row[0])):
        if (len(groups[-1]) + 1) * len(row[0]) > tokens and groups[-1]:
            groups.append([])
        groups[-1].append(row)
    order.shuffle(groups)
    for group in groups:
        width = max(len(ids) for ids, _ in group)
        ids = torch.zeros(len(group), width, dtype=torch.long)
        labels = torch.full((len(group), width), -100)
        for index, (row, mask) in enumerate(group):
            line = torch.tensor(row)
            ids[index, : len(row)] = line
            labels[index, : len(row)] = torch.where(torch.tensor(mask), line, -100)
        yield ids, labels


def loss_sum(model: LlamaForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed cross entropy of the assistant's tokens; only these go through the output layer."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=FAST_BF16):
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


def save_checkpoint(
    path: Path,
    model: LlamaForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    at: Progress,
    others: dict[str, dict[str, torch.Tensor]] | None = None,
) -> None:
    """Write the state that a resumed run needs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "progress": vars(at)}
    torch.save(state | (others or {}), path)
