"""The tokens by which a decoder is told what to write of a sound: languages, tasks, timestamps."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from quire.core.errors import ConfigError
from quire.core.wire.output_rules import TimestampRules

SECONDS_PER_TIMESTAMP = 0.02
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_PREVIOUS, _NO_TIMESTAMPS = "<|startofprev|>", "<|notimestamps|>"
_TASKS = ("transcribe", "translate")
_NO_SPEECH = ("<|nospeech|>", "<|nocaptions|>")


class SpeechTokens(Struct, frozen=True, kw_only=True):
    """Ids of special tokens of a model that writes what it hears."""

    start: int  # the first token of the decoder's prompt, but for a text that goes before
    end: int
    languages: dict[str, int] = {}  # by code; empty: the model knows one language
    tasks: dict[str, int] = {}  # "transcribe" and "translate"; empty: it only transcribes
    previous: int | None = None  # begins a text that goes before
    no_timestamps: int | None = None  # timestamps are the tokens behind it; None: the model has none
    no_speech: int | None = None  # how likely it is after `start`, a sound holds no speech
    latest_first: int | None = None  # the latest timestamp that an output may begin with, in steps of 0.02 s
    alignment_heads: list[tuple[int, int]] = []  # layers and heads that tell when a token was said; empty: nobody knows
    default: list[int] = []  # what follows `start` where a request says nothing

    def prompt(
        self, *, language: str | None, task: str, timestamps: bool, before: list[int] | None = None
    ) -> list[int]:
        """The decoder's prompt for a language and a task, both of which the model has if it has several.

        Args:
            before: token ids of a text that goes before.
        """
        lead = [] if not before or self.previous is None else [self.previous, *before]
        asked = [self.languages[language]] if language in self.languages else []
        asked += [self.tasks[task]] if task in self.tasks else []
        if not timestamps and self.no_timestamps is not None:
            asked.append(self.no_timestamps)
        return [*lead, self.start, *asked]

    def begin(self, token_ids: list[int]) -> list[int]:
        """The decoder's prompt, of the token ids that a request gives for it."""
        if not token_ids:
            return [self.start, *self.default]
        return token_ids if self.start in token_ids else [self.start, *token_ids]

    def timestamp_rules(self, prompt: list[int]) -> TimestampRules | None:
        """The rules of an output after `prompt`; None where it has no timestamps, or where the prompt has the first."""
        if self.no_timestamps is None or self.no_timestamps in prompt:
            return None
        ends = {*self.languages.values(), *self.tasks.values()} or {self.start}
        if prompt[-1] not in ends:
            return None
        first = self.no_timestamps + 1
        latest = None if self.latest_first is None else first + self.latest_first
        return TimestampRules(first, self.end, self.no_timestamps, latest)

    def seconds(self, token_id: int) -> float | None:
        """The time that a token stands for; None for all others."""
        if self.no_timestamps is None or token_id <= self.no_timestamps:
            return None
        return (token_id - self.no_timestamps - 1) * SECONDS_PER_TIMESTAMP


def read_speech_tokens(
    generation: Mapping[str, Any], start: int, end_token_ids: list[int], folder: Path
) -> SpeechTokens:
    """The tokens of a checkpoint: by generation_config.json, and by the tokenizer where that says nothing.

    Raises:
        ConfigError: a field has another form, or nothing says what ends an output.
    """
    known = _added_tokens(folder)
    try:
        languages = msgspec.convert(generation.get("lang_to_id") or {}, dict[str, int])
        tasks = msgspec.convert(generation.get("task_to_id") or {}, dict[str, int])
        latest = msgspec.convert(generation.get("max_initial_timestamp_index"), int | None)
        no_timestamps = msgspec.convert(generation.get("no_timestamps_token_id"), int | None)
        heads = msgspec.convert(generation.get("alignment_heads") or [], list[tuple[int, int]])
        previous = msgspec.convert(generation.get("prev_sot_token_id"), int | None)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{folder}/generation_config.json: {error}.") from None
    if not languages and generation.get("is_multilingual") is not False:
        languages = {name: token_id for name, token_id in known.items() if _LANGUAGE.fullmatch(name)}
    if not tasks and languages:
        tasks = {name: known[f"<|{name}|>"] for name in _TASKS if f"<|{name}|>" in known}
    end = end_token_ids[0] if end_token_ids else known.get("<|endoftext|>")
    if end is None:
        raise ConfigError(
            f"{folder}: nothing says what ends a transcript. Add it with --hf-overrides '{{\"eos_token_id\": ID}}'."
        )
    tokens = SpeechTokens(
        start=start,
        end=end,
        languages={name.strip("<|>"): token_id for name, token_id in languages.items()},
        tasks=tasks,
        previous=known.get(_PREVIOUS) if previous is None else previous,
        no_timestamps=known.get(_NO_TIMESTAMPS) if no_timestamps is None else no_timestamps,
        no_speech=next((known[name] for name in _NO_SPEECH if name in known), None),
        latest_first=latest,
        alignment_heads=heads,
    )
    return msgspec.structs.replace(tokens, default=_default(tokens, generation))


def _default(tokens: SpeechTokens, generation: Mapping[str, Any]) -> list[int]:
    """What follows the start: the checkpoint's own language and task, or all that a model of one language needs."""
    language, task = generation.get("language"), generation.get("task")
    timestamps = bool(generation.get("return_timestamps"))
    forced = generation.get("forced_decoder_ids")
    if tokens.languages and language is None and isinstance(forced, list):
        ids = [pair[1] for pair in forced if isinstance(pair, list) and len(pair) == 2]
        return ids if ids and all(type(token_id) is int for token_id in ids) else []
    code = str(language).strip("<|>").lower()
    if tokens.languages and code not in tokens.languages:
        return []  # the model writes the language first
    return tokens.prompt(language=code, task=task or "transcribe", timestamps=timestamps)[1:]


class _AddedToken(Struct):
    id: int
    content: str


class _TokenizerFile(Struct):
    added_tokens: list[_AddedToken] = []


def _added_tokens(folder: Path) -> dict[str, int]:
    """Ids of the tokenizer's special tokens by their texts."""
    found: dict[str, int] = {}
    try:
        if (path := folder / "added_tokens.json").is_file():
            found |= msgspec.json.decode(path.read_bytes(), type=dict[str, int])
        if (path := folder / "tokenizer.json").is_file():
            file = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile)
            found |= {each.content: each.id for each in file.added_tokens}
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is damaged ({error}); download it again.") from None
    return found
