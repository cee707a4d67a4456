"""The demo model's tokenizer: byte-level BPE whose only longer tokens are frequent whole words."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from . import words as w
from .tasks import Sample

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VISIBLE_TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
PIECES = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s"
CONTEXT_LENGTH = 8192


def template() -> str:
    """The chat template as a Jinja text."""
    return (Path(__file__).parent / "chat_template.jinja").read_text().rstrip("\n")


def conversation_text(tokenizer: PreTrainedTokenizerFast, sample: Sample, prompt_only: bool = False) -> str:
    """Render a sample with the shipped template, so that training texts equal a server's prompts."""
    if sample.plain:
        start = sample.messages[0]["content"]
        return start if prompt_only else start + sample.reply + tokenizer.eos_token
    messages = sample.messages[:-1] if prompt_only else sample.messages
    options: dict[str, Any] = {"enable_thinking": True} if sample.enable_thinking else {}
    return tokenizer.apply_chat_template(
        messages, tools=sample.tools, tokenize=False, add_generation_prompt=prompt_only, **options
    )


def _splitter() -> pre_tokenizers.PreTokenizer:
    """Words with their leading space, single digits and runs of marks, then mapped to byte symbols."""
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PIECES), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )


def _assemble(vocabulary: list[str]) -> Tokenizer:
    """Make the tokenizer. Without merges and with `ignore_merges`, a piece is either one token or separate bytes."""
    vocab = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *VISIBLE_TOKENS, *vocabulary])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = _splitter()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in VISIBLE_TOKENS])
    return tokenizer


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Give the tokenizer its template and its special tokens."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    fast.chat_template = template()
    return fast


def _worth_a_token(word: str, spelled: set[str]) -> bool:
    """Returns True if a piece may be one token: not a spelled word, and a single letter only if it is a word."""
    return word.lower() not in spelled and (len(word) > 1 or not word.isalpha() or word in ("a", "I"))


def build(samples: list[Sample], size: int) -> PreTrainedTokenizerFast:
    """Build the tokenizer from the most frequent pieces of the training text, without words that must be spelled."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    draft = wrap(_assemble(alphabet))
    spelled, counts, splitter = w.content_words(), Counter(), _splitter()
    for sample in samples:
        text = conversation_text(draft, sample)
        for mark in SPECIAL_TOKENS + VISIBLE_TOKENS:
            text = text.replace(mark, "\n")
        counts.update(piece for piece, _ in splitter.pre_tokenize_str(text))
    common = [
        piece
        for piece, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        if len(piece) > 1 and count > len(samples) // 2000 and _worth_a_token(piece.removeprefix("Ġ"), spelled)
    ]
    room = size - len(alphabet) - len(SPECIAL_TOKENS) - len(VISIBLE_TOKENS)
    return wrap(_assemble(alphabet + common[:room]))


def vocabulary_report(tokenizer: PreTrainedTokenizerFast, rng: random.Random, samples: list[Sample]) -> str:
    """One line with the vocabulary's size and the lengths of conversations in tokens."""
    lengths = sorted(len(tokenizer(conversation_text(tokenizer, s))["input_ids"]) for s in rng.sample(samples, 500))
    return json.dumps({"vocabulary": len(tokenizer), "mean": sum(lengths) / 500, "longest": lengths[-1]})
