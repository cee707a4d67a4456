"""Small tokenizers of every kind that the frontend distinguishes, in folders like those of checkpoints."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and runs to the river in the evening.",
    "Naïve café, Grüße aus Köln, 你好，世界, привет, мир 🙂🙂 👩‍👩‍👧",
    "def stop(x): return x + 1\n\n\tEND",
]
SPECIAL = ["<s>", "</s>", "<pad>"]


def byte_level() -> Tokenizer:
    """GPT-2, Llama 3, Qwen: every token is bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("ünd so", special=False, normalized=False)])
    return tokenizer


def _sentence_pieces() -> dict[str, int]:
    words = ["▁", "▁the", "▁quick", "fox", "s", "e", "▁▁", "é", "你", "\n", "END", "▁a▁b"]
    return {piece: i for i, piece in enumerate([*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words])}


def byte_fallback(strip: bool = True) -> Tokenizer:
    """Llama 2 (with `strip`), Gemma (without): pieces of text, and single bytes for the rest."""
    tokenizer = Tokenizer(models.BPE(_sentence_pieces(), [], unk_token="<pad>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def metaspace() -> Tokenizer:
    """T5-like: no bytes, words begin with a mark."""
    vocab = [(piece, 0.0) for piece in SPECIAL] + [("▁", -1.0), ("▁the", -2.0), ("fox", -2.0), ("s", -3.0), ("é", -3.0)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def word_piece() -> Tokenizer:
    """BERT-like: words are separated, continuations begin with ##."""
    words = [*SPECIAL, "the", "quick", "##s", "fox", ".", "'", "n't"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


ALL = {
    "byte-level": byte_level,
    "llama-2": byte_fallback,
    "gemma": lambda: byte_fallback(strip=False),
    "metaspace": metaspace,
    "word-piece": word_piece,
}


def save(tokenizer: Tokenizer, folder: Path, **config: Any) -> Path:
    """Writes tokenizer.json and tokenizer_config.json; `config` goes into the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, **config}))
    return folder
