"""Small tokenizers that exist in Python alone, as files in folders like those of checkpoints."""

import base64
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.frontend.text.test_conversion import ranks, sentence_pieces

_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789,.!?'\"-():你好привет"
_MERGES = [
    ("t", "h"),
    ("th", "e</w>"),
    ("q", "u"),
    ("f", "o"),
    ("fo", "x</w>"),
    ("l", "o</w>"),
    ("h", "e"),
    ("'", "s</w>"),
]


def _merged(folder: Path, model_type: str, first: Iterable[str], end: str = "</w>", joint: str = "") -> None:
    """vocab.json and merges.txt; a token that ends a word has `end`, one that does not has `joint`."""
    parts = [*_LETTERS, *(letter + "</w>" for letter in _LETTERS), *(a + b for a, b in _MERGES)]
    spelled = [part.removesuffix("</w>") + (end if part.endswith("</w>") else joint) for part in parts]
    tokens = dict.fromkeys([*first, *spelled])
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *(f"{a} {b} 1" for a, b in _MERGES)]) + "\n")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))


def ctrl(folder: Path) -> None:
    _merged(folder, "ctrl", ["<unk>"], end="", joint="@@")
    merges = "\n".join(["#version: 0.2", *map(" ".join, _MERGES)]) + "\n"
    (folder / "merges.txt").write_text(merges)


def blenderbot_small(folder: Path) -> None:
    _merged(
        folder, "blenderbot-small", ["__null__", "__start__", "__end__", "__unk__", "__newln__"], end="", joint="@@"
    )
    merges = "\n".join(["#version: 0.2", *map(" ".join, _MERGES)]) + "\n"
    (folder / "merges.txt").write_text(merges)


def biogpt(folder: Path) -> None:
    pytest.importorskip("sacremoses")
    _merged(folder, "biogpt", ["<s>", "<pad>", "</s>", "<unk>", "&apos;s</w>", "&quot;</w>", "@-@</w>"])


def xlm(folder: Path) -> None:
    pytest.importorskip("sacremoses")
    specials = [f"<special{i}>" for i in range(10)]
    _merged(folder, "xlm", ["<s>", "</s>", "<pad>", "<unk>", *specials, "&apos;s</w>"])


def _words(folder: Path, name: str, model_type: str, special: Iterable[str]) -> None:
    """A vocabulary of WordPiece, a line a token."""
    letters = [*_LETTERS, *("##" + letter for letter in _LETTERS)]
    (folder / name).write_text("\n".join([*special, *letters, "the", "quick", "fox", "##es"]))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))


def prophetnet(folder: Path) -> None:
    _words(folder, "prophetnet.tokenizer", "prophetnet", ["[PAD]", "[UNK]", "[SEP]", "[X_SEP]", "[MASK]"])


def roc_bert(folder: Path) -> None:
    _words(folder, "vocab.txt", "roc_bert", ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    tokens = (folder / "vocab.txt").read_text().split("\n")
    for name in ("word_shape.json", "word_pronunciation.json"):
        (folder / name).write_text(json.dumps({token: i for i, token in enumerate(tokens)}))


def cpmant(folder: Path) -> None:
    pytest.importorskip("rjieba")
    special = ["<pad>", "<unk>", "<s>", "</s>", "<d>", "</d>", "</n>", "</_>"]
    _words(folder, "vocab.txt", "cpmant", special)


def gpt_neox_japanese(folder: Path) -> None:
    special = ["<SP>", "<BR>", "<TAB>", "<KIGOU>", "<U2000U2BFF>", *(f"<|byte{byte}|>" for byte in range(256))]
    words = ["the", "你好", "ñ,n", *(letter for letter in _LETTERS if letter != ",")]
    lines = [*words, *special, "<|emoji1|>", "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.txt").write_text("\n".join(lines) + "\n")
    (folder / "emoji.json").write_text(json.dumps({"emoji": {"🙂": "<|emoji1|>"}, "emoji_inv": {"<|emoji1|>": "🙂"}}))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt_neox_japanese"}))


def _pieces(file: str, class_name: str, **options: object) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        sentence_pieces(folder / file, model_type="unigram", vocab_size=340, **options)
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": class_name}))

    return make


def marian(folder: Path) -> None:
    for name in ("source.spm", "target.spm"):
        sentence_pieces(folder / name, model_type="unigram", vocab_size=120)
    import sentencepiece

    library = sentencepiece.SentencePieceProcessor(model_file=str(folder / "source.spm"))
    pieces = [library.id_to_piece(i) for i in range(library.get_piece_size())]
    tokens = dict.fromkeys(["</s>", "<unk>", *pieces, "<pad>"])
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "config.json").write_text(json.dumps({"model_type": "marian"}))


OF_TRANSFORMERS: dict[str, Callable[[Path], None]] = {
    "CTRLTokenizer": ctrl,
    "BlenderbotSmallTokenizer": blenderbot_small,
    "BioGptTokenizer": biogpt,
    "XLMTokenizer": xlm,
    "ProphetNetTokenizer": prophetnet,
    "RoCBertTokenizer": roc_bert,
    "CpmAntTokenizer": cpmant,
    "GPTNeoXJapaneseTokenizer": gpt_neox_japanese,
    "MarianTokenizer": marian,
    "PLBartTokenizer": _pieces("sentencepiece.bpe.model", "PLBartTokenizer"),
    "BertGenerationTokenizer": _pieces("spiece.model", "BertGenerationTokenizer"),
    "GPTSw3Tokenizer": _pieces("spiece.model", "GPTSw3Tokenizer", byte_fallback=True),
}
"""Makers of a folder with a tokenizer, by the class of Transformers that reads it."""

_OWN_CODE = """
import base64
from pathlib import Path

import tiktoken
from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode  # as of Transformers 4
from transformers.tokenization_utils import PreTrainedTokenizer

SPECIAL = ["<|end|>", "<|user|>"]

class OwnTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "own.tiktoken"}

    def __init__(self, vocab_file, **options):
        lines = Path(vocab_file).read_text().splitlines()
        self.ranks = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in lines}
        self.special = {token: len(self.ranks) + i for i, token in enumerate(SPECIAL)}
        self.model = tiktoken.Encoding(
            "own", pat_str=r"\\s?\\S+|\\s+", mergeable_ranks=self.ranks, special_tokens=self.special
        )
        self.by_id = {i: token for token, i in [*self.ranks.items(), *self.special.items()]}
        super().__init__(**options)

    def __len__(self):
        return self.model.n_vocab

    @property
    def vocab_size(self):
        return self.model.n_vocab

    def get_vocab(self):
        return dict(self.ranks)

    def _tokenize(self, text, **options):
        return [self.by_id[i] for i in self.model.encode(text, allowed_special="all")]

    def _convert_token_to_id(self, token):
        return self.special[token] if isinstance(token, str) else self.ranks[token]

    def convert_tokens_to_ids(self, tokens):
        return [self._convert_token_to_id(token) for token in tokens]

    def _convert_id_to_token(self, index):
        return self.by_id[index]

    def _decode(self, token_ids, skip_special_tokens=False, **options):
        return self.model.decode([i for i in token_ids if not skip_special_tokens or i < len(self.ranks)])

    def _pad(self, encoded_inputs, max_length=None, padding_strategy=None, pad_to_multiple_of=None):
        raise TypeError("as Transformers 4 called it")
"""


def own_code(folder: Path) -> None:
    """A checkpoint's own class over a tiktoken file, as Qwen's first models have it: tokens are bytes, special ones
    are known to nobody else, and padding is of an older Transformers."""
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks()))
    (folder / "own.tiktoken").write_text("".join(lines))
    (folder / "tokenization_own.py").write_text(_OWN_CODE)
    names = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "OwnTokenizer", "auto_map": names}))
