"""What a checkpoint demands of its decoder's outputs, as parts of a request."""

from typing import Any

from quire.core.wire.output_rules import OutputRules
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.checkpoint.encoder_decoders import DecoderRules


def output_rules(
    rules: DecoderRules, prompt: list[int], sampling: SamplingParams, max_tokens: int
) -> OutputRules | None:
    """Rules about the ends and the timestamps of an output of up to `max_tokens` tokens after the decoder's `prompt`.

    A request that ignores EOS is not ended by it.
    """
    last = [] if sampling.ignore_eos else rules.forced_eos_token_id
    timestamps = None if rules.speech is None else rules.speech.timestamp_rules(prompt)
    if not rules.begin_suppress_tokens and not last and timestamps is None:
        return None
    return OutputRules(rules.begin_suppress_tokens, last, max_tokens, timestamps)


def rule_changes(
    rules: DecoderRules, changes: dict[str, Any], sampling: SamplingParams, num_prompt_tokens: int, max_tokens: int
) -> dict[str, Any]:
    """SamplingParams keywords by which a request heeds `rules`, beside its own `changes`.

    Args:
        num_prompt_tokens: of the decoder's prompt.
    """
    found: dict[str, Any] = {}
    if rules.bad_words_ids:
        own = changes.get("bad_words_token_ids", sampling.bad_words_token_ids) or []
        found["bad_words_token_ids"] = [*own, *rules.bad_words_ids]
    least = min(rules.min_length - num_prompt_tokens, max_tokens)
    if least > sampling.min_tokens:
        found["min_tokens"] = least
    return found
