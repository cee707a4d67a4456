"""The tokens in a GGUF file's metadata: their texts, types and roles.

A role is named by the metadata, or known by the token's text, as in llama.cpp: many files name one end of several, and
type tokens as plain text that chat templates write.
"""

from collections.abc import Mapping
from typing import Any

from quire.core.errors import ConfigError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
"""Types of tokens, as `token_type` has them."""

_OF_SENTENCE_PIECE = {"unknown": 0, "bos": 1, "eos": 2}
_OF_FALCON = {"bos": 11, "eos": 11}
"""Ids of tokens that files of a kind may leave out."""

_ENDS = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
    "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
))  # fmt: skip
"""Texts of tokens that end an answer, whatever the metadata name."""

_KNOWN: Mapping[str, tuple[str, ...]] = {
    "fim_pre": (
        "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>",
        "<|prefix|>",
    ),
    "fim_suf": (
        "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>",
        "<|suffix|>",
    ),
    "fim_mid": (
        "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>",
        "<|middle|>",
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}  # fmt: skip
"""Texts of tokens around code to be filled in, by role."""
_ENDING_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")

_HARMONY = (
    ("<|return|>", "<|call|>"),
    ("<|return|>", "<|calls|>"),
    ("<|call|>", "<|flush|>"),
    ("<|calls|>", "<|flush|>"),
)
"""Ends of whole answers where `<|end|>` is only that of one message: gpt-oss' and Solar Open's."""


class Vocabulary:
    """The metadata below `tokenizer.ggml`.

    Attributes:
        kind: how texts are cut: `tokenizer.ggml.model`.
        pre: how texts are split into words before that.
        types: of each token; what has a role as a mark is of the type CONTROL.
        ends: ids of the tokens that end an answer.
    """

    def __init__(self, path: str, metadata: Mapping[str, Any]) -> None:
        self.path = path
        self._metadata = metadata
        self.kind: str = self.get("model", "none")
        self.pre: str = self.get("pre", "default")
        tokens: list[str] = self.get("tokens", [])
        self.tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
        self.types: list[int] = list(self.get("token_type", [NORMAL] * len(self.tokens)))
        self._ids: dict[str, int] = {}
        for index, token in enumerate(self.tokens):
            self._ids.setdefault(token, index)
        self._roles = self._find_roles()
        self.ends = self._find_ends()

    def get(self, name: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}", default)

    def need(self, name: str) -> Any:
        """Raises ConfigError for a value that is missing."""
        if (value := self.get(name)) is None:
            raise ConfigError(
                f"{self.path} lacks tokenizer.ggml.{name}. Name the tokenizer of the original checkpoint with "
                "--tokenizer."
            )
        return value

    def token(self, role: str) -> str | None:
        """The token of a role such as `bos`."""
        token_id = self._roles.get(role)
        return None if token_id is None else self.tokens[token_id]

    def of_type(self, *types: int) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in types]

    def _find_roles(self) -> dict[str, int]:
        """Ids by role; the tokens that are known by their texts become marks."""
        roles = self._defaults()
        for role in ("bos", "eos", "eot", "eom", "unknown", "padding", *_KNOWN):
            stated = self.get(f"{role}_token_id")
            if stated is not None and 0 <= stated < len(self.tokens):
                roles[role] = stated
        for role, texts in _KNOWN.items():
            found = next((self._ids[text] for text in texts if text in self._ids), None)
            if role not in roles and found is not None:
                roles[role] = found
                self._set_type(found, CONTROL)
        return roles

    def _defaults(self) -> dict[str, int]:
        if self.kind == "llama":
            return {role: index for role, index in _OF_SENTENCE_PIECE.items() if index < len(self.tokens)}
        if self.kind == "gpt2":  # llama.cpp takes the token whatever it is: of most vocabularies, a comma
            return {role: index for role, index in _OF_FALCON.items() if self.types[index : index + 1] == [CONTROL]}
        return {}

    def _find_ends(self) -> set[int]:
        ends = {self._roles[role] for role in _ENDING_ROLES if role in self._roles}
        by_text = {self._ids[text] for text in _ENDS if text in self._ids}
        exceptions = self._no_ends()
        for index in by_text - exceptions.keys():
            self._set_type(index, CONTROL)
        for index, kind in exceptions.items():
            self._set_type(index, kind)
        return (ends | by_text) - exceptions.keys()

    def _no_ends(self) -> dict[int, int]:
        """Tokens that end no answer, though their texts are those of ends, and their types."""
        found = {}
        if any(all(each in self._ids for each in pair) for pair in _HARMONY) and "<|end|>" in self._ids:
            index = self._ids["<|end|>"]
            found[index] = self.types[index]
        if "<|tool_response>" in self._ids and "</s>" in self._ids:  # of Gemma 4, where it is a tag of HTML
            found[self._ids["</s>"]] = NORMAL
        return found

    def _set_type(self, index: int, kind: int) -> None:
        if index < len(self.types):
            self.types[index] = kind
