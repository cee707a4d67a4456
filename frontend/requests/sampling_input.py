"""Sampling parameters of one model: defaults, limits, ids within the vocabulary, words as token ids."""

from collections.abc import Iterable
from typing import Any

from quire.core.errors import ParameterError
from quire.core.wire.sampling_params import SamplingParams, ThinkingMarks
from quire.frontend.checkpoint.encoder_decoders import DecoderRules
from quire.frontend.checkpoint.served_model import ServedModel
from quire.frontend.text.tokenizer import Tokenizer


class SamplingInput:
    """Defaults and limits of sampling parameters for one model, and the form in which the engine gets them.

    Args:
        model: default parameters and limits.
        tokenizer: None when the server runs on token ids alone.
        vocab_size: rows of the model's embedding.
    """

    def __init__(self, model: ServedModel, tokenizer: Tokenizer | None, *, vocab_size: int) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    @property
    def decoder(self) -> DecoderRules | None:
        """What the checkpoint demands of outputs of its decoder; None for a model without an encoder."""
        return self._model.decoder

    @property
    def defaults(self) -> dict[str, Any]:
        """SamplingParams keywords for the parameters that a request does not name."""
        return dict(self._model.default_sampling)

    def default_params(self) -> SamplingParams:
        """The parameters of a request that names none."""
        return SamplingParams(**self._model.default_sampling)

    def limit_output(self, max_tokens: int | None) -> int | None:
        """The request's `max_tokens`, at most the server's limit."""
        limit = self._model.max_output_tokens
        return max_tokens if limit is None else min(limit, limit if max_tokens is None else max_tokens)

    def changes(self, sampling: SamplingParams, *, limit_logprobs: bool = True) -> dict[str, Any]:
        """SamplingParams keywords that the engine gets in another form: words become token ids.

        Raises:
            ParameterError: a parameter that this model cannot honour, by name.
        """
        if limit_logprobs:
            self._check_count("logprobs", sampling.logprobs)
            self._check_count("prompt_logprobs", sampling.prompt_logprobs)
        for row in sampling.prompt_logprob_token_ids or ():
            if limit_logprobs:
                self._check_count("prompt_logprob_token_ids", len(row))
            self._check_ids("prompt_logprob_token_ids", [token_id for token_id in row if token_id != -1])
        self._check_ids("logprob_token_ids", sampling.logprob_token_ids or ())
        self._check_ids("stop_token_ids", sampling.stop_token_ids or ())
        if sampling.detokenize and self._tokenizer is None:
            raise ParameterError(
                "This server runs with --skip-tokenizer-init, so it can give token ids only: set detokenize=False.",
                param="detokenize",
            )
        if sampling.extra_args and not self._model.has_logits_processors:
            raise ParameterError(
                "vllm_xargs (extra_args) are read by logits processors, and this server has none; "
                "--logits-processors loads them.",
                param="vllm_xargs",
            )
        changes: dict[str, Any] = {}
        if sampling.thinking_token_budget == -1:
            changes["thinking_token_budget"] = None
        elif sampling.thinking_token_budget is not None:
            self._check_thinking(sampling.thinking)
        forbidden = sampling.bad_words_token_ids or []
        for sequence in forbidden:
            if not sequence:
                raise ParameterError("bad_words_token_ids holds an empty sequence.", param="bad_words_token_ids")
            self._check_ids("bad_words_token_ids", sequence)
        if sampling.bad_words:
            forbidden = self._tokenize_words(sampling.bad_words)
            changes |= {"bad_words": None, "bad_words_token_ids": forbidden}
        if sampling.logit_bias or sampling.allowed_token_ids or forbidden:
            self._check_lists(sampling, forbidden)
        return changes

    def _check_count(self, name: str, asked: int | None) -> None:
        """Refuses a count over the server's limit. In both, -1 means the size of the vocabulary."""
        if asked is None:
            return
        limit = self._vocab_size if self._model.max_logprobs < 0 else self._model.max_logprobs
        wanted = self._vocab_size if asked < 0 else asked
        if wanted > limit:
            raise ParameterError(
                f"{name} asks for {wanted}, but at most {limit} are allowed; the server's --max-logprobs raises it.",
                param=name,
            )

    def _check_ids(self, name: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise ParameterError(
                    f"{name} holds {token_id}, outside the vocabulary (0 to {self._vocab_size - 1}).", param=name
                )

    def _check_thinking(self, marks: ThinkingMarks | None) -> None:
        if marks is None:
            raise ParameterError(
                "thinking_token_budget needs to know how reasoning is set apart: start the server with "
                "--reasoning-parser, or give SamplingParams the marks (thinking).",
                param="thinking_token_budget",
            )
        for mark in marks.begin + marks.end:
            self._check_ids("thinking", mark)

    def _check_lists(self, sampling: SamplingParams, sequences: list[list[int]]) -> None:
        bias, allowed = sampling.logit_bias or {}, sampling.allowed_token_ids or []
        self._check_ids("logit_bias", bias)
        self._check_ids("allowed_token_ids", allowed)
        if allowed:
            forbidden = {sequence[0] for sequence in sequences if len(sequence) == 1}
            if forbidden.issuperset(allowed):
                raise ParameterError(
                    "bad_words forbid every one of allowed_token_ids: nothing could be sampled.", param="bad_words"
                )

    def _tokenize_words(self, words: list[str]) -> list[list[int]]:
        """Token ids of each word, as at the start of a text and as after a space.

        The second form is left out where it is a space and then the first form, which forbids it already.
        """
        if self._tokenizer is None:
            raise ParameterError(
                "bad_words are text, and this server runs with --skip-tokenizer-init; use logit_bias with token ids.",
                param="bad_words",
            )
        words = [word.lstrip() for word in dict.fromkeys(words)]
        bare = self._tokenizer.encode_batch(words, add_special_tokens=False)
        spaced = self._tokenizer.encode_batch([" " + word for word in words], add_special_tokens=False)
        sequences = []
        for word, at_start, inside in zip(words, bare, spaced, strict=True):
            if not at_start:
                raise ParameterError(f"bad_words: {word!r} has no tokens.", param="bad_words")
            sequences.append(at_start)
            if inside[-len(at_start) :] != at_start:
                sequences.append(inside)
        return sequences


def check_id_rows(sampling: SamplingParams, num_prompt_tokens: int) -> None:
    """Refuses `prompt_logprob_token_ids` with more or fewer rows than the prompt has positions to score.

    Raises:
        ParameterError: the row counts differ.
    """
    rows, start = sampling.prompt_logprob_token_ids, sampling.prompt_logprob_start or 0
    if rows is not None and len(rows) != (num_scored := max(num_prompt_tokens - 1 - start, 0)):
        raise ParameterError(
            f"prompt_logprob_token_ids has {len(rows)} rows, but {num_scored} positions of the prompt are scored: its "
            f"{num_prompt_tokens} tokens without the last, from prompt_logprob_start ({start}) on.",
            param="prompt_logprob_token_ids",
        )
