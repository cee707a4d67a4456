"""Reads prompts of models with an encoder and a decoder."""

from typing import Any

from quire.core.config.resolved import EncoderSpec
from quire.core.errors import ParameterError
from quire.frontend.checkpoint.encoder_decoders import DecoderRules
from quire.frontend.requests.async_tokenizer import AsyncTokenizer
from quire.frontend.requests.context_limit import ContextLimit
from quire.frontend.requests.prompt import (
    EncoderPrompt,
    Prompt,
    PromptLike,
    is_explicit,
    refuse_kwargs,
    split_prompt,
    split_sides,
)
from quire.frontend.requests.prompt_reader import PromptReader, check_ids
from quire.frontend.requests.request_fields import check_salt
from quire.frontend.text.truncation import AddedTokens, Truncation


class EncoderDecoderReader(PromptReader):
    """Reads prompts of both sides. A plain prompt is the encoder's; the decoder's begins as the checkpoint says.

    Args:
        vocab_size: of the decoder.
        encoder: limits of the other side.
        rules: what the decoder's prompts begin with.
    """

    def __init__(
        self,
        tokenizer: AsyncTokenizer,
        limit: ContextLimit,
        *,
        vocab_size: int,
        encoder: EncoderSpec,
        rules: DecoderRules,
    ) -> None:
        super().__init__(tokenizer, limit, vocab_size=vocab_size)
        self._encoder = encoder
        self._rules = rules

    async def read(
        self, prompt: PromptLike | Prompt, *, add_special_tokens: bool = True, must_fit: bool = True
    ) -> Prompt:
        """Reads a prompt of the encoder, in any form but embeddings, or of both sides.

        The decoder's text gets no special tokens, whatever `add_special_tokens` is.

        Raises:
            ParameterError: a side has none of the forms of a prompt, is empty or too long, or has ids outside its
                vocabulary.
        """
        if isinstance(prompt, Prompt):  # of a text that is tokenized already
            encoder, decoder, salt = EncoderPrompt(prompt.text, prompt.token_ids), Prompt(None, []), prompt.cache_salt
            if prompt.encoder is not None:
                encoder, decoder = prompt.encoder, prompt
        else:
            of_encoder, of_decoder = split_sides(prompt)
            read = await self._side(of_encoder, "encoder_prompt", add_special_tokens=add_special_tokens)
            encoder, salt = EncoderPrompt(read.text, read.token_ids), read.cache_salt
            decoder = Prompt(None, [])
            if of_decoder is not None:
                decoder = await self._side(of_decoder, "decoder_prompt", add_special_tokens=False)
        self._check_encoder(encoder, must_fit=must_fit)
        token_ids = self._rules.begin(decoder.token_ids)
        if len(token_ids) > self._limit.longest_prompt:
            raise self._limit.too_long(len(token_ids))
        checked = Prompt(decoder.text, token_ids, salt or decoder.cache_salt, encoder=encoder)
        return self._checked(checked)

    async def _side(self, prompt: Any, param: str, *, add_special_tokens: bool) -> Prompt:
        """Reads the prompt of one side; `param` names it."""
        if isinstance(prompt, dict) and prompt.get("prompt_embeds") is not None:
            raise ParameterError(
                "prompt_embeds are not for models with an encoder; give text or token ids.", param="prompt_embeds"
            )
        if is_explicit(prompt):
            raise ParameterError(f"{param} is the prompt of one side: a text or token ids.", param=param)
        refuse_kwargs(prompt)
        text, token_ids, salt = split_prompt(prompt)
        check_salt(salt)
        if token_ids is None:
            assert text is not None
            token_ids = await self._tokenizer.tokenize(text, add_special_tokens=add_special_tokens, must_fit=False)
        return Prompt(text, token_ids, salt)

    def _check_encoder(self, prompt: EncoderPrompt, *, must_fit: bool) -> None:
        check_ids(prompt.token_ids, self._encoder.vocab_size, "encoder_prompt")
        if must_fit and len(prompt.token_ids) > self._encoder.max_rows:
            raise ParameterError(
                f"The encoder's prompt has {len(prompt.token_ids)} tokens, but it reads at most "
                f"{self._encoder.max_rows}; shorten it.",
                param="encoder_prompt",
            )

    def truncate(
        self,
        prompt: Prompt,
        truncation: Truncation,
        max_tokens: int | None,
        *,
        has_special_tokens: bool,
        num_before: int = 0,
    ) -> Prompt:
        """The part of the encoder's prompt that `truncation` keeps; one that was cut has no text."""
        encoder = prompt.encoder
        assert encoder is not None
        added = AddedTokens()
        if encoder.text is not None and has_special_tokens:
            added = self._tokenizer.added_tokens(encoder.token_ids)
        room, rule = self._encoder.max_rows, "the most tokens that the encoder reads"
        kept = truncation.apply(encoder.token_ids, room=room, rule=rule, added=added)
        return prompt if kept is encoder.token_ids else prompt._replace(encoder=EncoderPrompt(None, kept))
