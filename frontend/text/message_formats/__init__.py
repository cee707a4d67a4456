"""Chat templates of models whose checkpoints bring none, because their makers describe the format in code.

A format is named as in `--tokenizer-mode`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple


class _Source(NamedTuple):
    file: str
    begin: str = ""
    spellings: dict[str, str] = {}  # noqa: RUF012  (of a NamedTuple, never changed)
    """Special tokens, with the names that some vocabularies have for them."""


_SOURCES = {
    "deepseek_v32": _Source("deepseek_v32.jinja"),
    "deepseek_v4": _Source("deepseek_v4.jinja"),
    "deepseek_v41": _Source("deepseek_v4.jinja", "{#- Calls stand in <｜DSML｜ calls>. -#}{%- set is_v41 = true %}"),
    "cohere": _Source("cohere.jinja"),
    "kimi_k3": _Source("kimi_k3.jinja"),
    "inkling": _Source("inkling.jinja", spellings={"<|content_xml|>": "<|unused_200024|>"}),
}
NAMES = frozenset(_SOURCES)

_OF_ARCHITECTURE = {
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "DeepseekV4ForConditionalGeneration": "deepseek_v4",
    "DeepseekV41ForCausalLM": "deepseek_v41",
    "InklingForCausalLM": "inkling",
    "InklingForConditionalGeneration": "inkling",
    "KimiK3ForConditionalGeneration": "kimi_k3",
}


def template_of(name: str, has_token: Callable[[str], bool] = lambda token: True) -> str:
    """The Jinja text of the format `name`, for a vocabulary that has the special tokens that `has_token` says."""
    source = _SOURCES[name]
    text = source.begin + Path(__file__).with_name(source.file).read_text(encoding="utf-8")
    for token, other in source.spellings.items():
        if not has_token(token) and has_token(other):
            text = text.replace(token, other)
    return text


def format_of(architectures: Sequence[str]) -> str | None:
    """The name of the format of a model with one of these architectures, as config.json lists them."""
    return next((_OF_ARCHITECTURE[each] for each in architectures if each in _OF_ARCHITECTURE), None)
