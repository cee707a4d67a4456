"""Turns what a caller asks for into requests that the engine can run, or says what is wrong with it.

It owns templates and token ids; it knows nothing of HTTP and sends nothing anywhere.
"""

import asyncio
import functools
import hashlib
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from quire.core.errors import ParameterError
from quire.core.wire.protocol import EngineRequest, Grammar
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.checkpoint.served_model import ServedModel
from quire.frontend.requests.prompt import Prompt, PromptLike, ReadEmbeds, check_embeds, split_prompt
from quire.frontend.requests.sampling_input import SamplingInput
from quire.frontend.text.chat_template import ChatTemplate, Message
from quire.frontend.text.tokenizer import Tokenizer
from quire.frontend.text.truncation import Truncation

INLINE_CHARACTERS = 4096
"""Longer texts are tokenized in a thread (about a millisecond for this many); shorter ones cost less than the hop."""

LARGE_CHARACTERS = 2**18
"""Longer texts are tokenized in another thread, so that shorter ones need not wait for them."""

MAX_CHARACTERS_PER_TOKEN = 16
LEAST_TEXT_LIMIT = 2**20
"""A text that is longer than both this and the context at so many characters a token is refused. Prose, code and data
have far fewer characters a token on average. A tokenizer cannot be interrupted, and takes up to two microseconds and
400 bytes a character: those of a text that is all spaces, where each is a piece by itself."""

MAX_GRAMMAR_BYTES = 2**26
"""Of compiled grammars that one request may bring: each of its n sequences carries its own copy."""


class InputProcessor:
    """Checks and completes requests for one model.

    Args:
        model: names, default sampling parameters and limits.
        tokenizer: None when the server runs on token ids alone.
        vocab_size: rows of the model's embedding; ids at and above it are refused.
        max_model_len: prompt and output together, in tokens.
        seed: start of the stream from which requests without a seed draw theirs.
        read_embeds: reads prompts that are embeddings; None refuses them.
    """

    def __init__(
        self,
        model: ServedModel,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
        seed: int,
        read_embeds: ReadEmbeds | None = None,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._sampling_input = SamplingInput(
            tokenizer,
            vocab_size=vocab_size,
            max_logprobs=model.max_logprobs,
            has_processors=model.has_logits_processors,
        )
        self.max_model_len = max_model_len
        self._read_embeds = read_embeds
        self._seeds = random.Random(seed)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._large_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize-large")
        self._chat_template = functools.lru_cache(maxsize=16)(self._compile_template)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ParameterError: the server runs without one.
        """
        if self._tokenizer is None:
            raise ParameterError(
                "This server runs with --skip-tokenizer-init: send token ids instead of text, with detokenize=False.",
                param="prompt",
            )
        return self._tokenizer

    def close(self) -> None:
        """Ends the tokenizing threads."""
        for thread in (self._thread, self._large_thread):
            thread.shutdown(wait=False, cancel_futures=True)

    # --------------------------------------------------------------------------------------------------------- text

    async def tokenize(self, text: str, *, add_special_tokens: bool = True, must_fit: bool = True) -> list[int]:
        """Token ids of a text, without stopping the event loop for a long one. A text that just does not fit into the
        context is tokenized all the same.

        Args:
            must_fit: as for `check_length`.

        Raises:
            ParameterError: the text is far too long, or no valid Unicode.
        """
        if len(text) <= INLINE_CHARACTERS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        await self.check_length(text, must_fit=must_fit)
        thread = self._thread if len(text) <= LARGE_CHARACTERS else self._large_thread
        [token_ids] = await self._tokenize_in(thread, [text], add_special_tokens)
        return token_ids

    async def tokenize_batch(self, texts: list[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of many texts, on all cores."""
        return await self._tokenize_in(self._thread, texts, add_special_tokens)

    async def _tokenize_in(
        self, thread: ThreadPoolExecutor, texts: list[str], add_special_tokens: bool
    ) -> list[list[int]]:
        encode = functools.partial(self.tokenizer.encode_batch, add_special_tokens=add_special_tokens)
        return await asyncio.get_running_loop().run_in_executor(thread, encode, texts)

    @property
    def max_text_length(self) -> int:
        """The most characters that are tokenized at once, and the most token ids that are made text of."""
        return max(LEAST_TEXT_LIMIT, MAX_CHARACTERS_PER_TOKEN * self.max_model_len)

    async def check_length(self, text: str, param: str = "prompt", *, must_fit: bool = True) -> None:
        """Refuses a text that is far too long, before anybody looks for its tokens.

        Args:
            must_fit: refuse what is longer than the context whatever its tokens are; not for a text that is to be cut.

        Raises:
            ParameterError: it is too long; `param` names the field.
        """
        num_characters = len(text)
        if must_fit and num_characters >= self.max_model_len:
            least = await asyncio.to_thread(self.tokenizer.least_tokens, text)
            if least >= self.max_model_len:
                raise ParameterError(
                    f"{param} has {num_characters} characters, which are at least {least} tokens; prompt and output "
                    f"together are limited to {self.max_model_len} (max_model_len); shorten it.",
                    param=param,
                )
        if num_characters > self.max_text_length:
            raise ParameterError(
                f"{param} has {num_characters} characters; at most {self.max_text_length} are tokenized where "
                f"max_model_len is {self.max_model_len}; shorten it.",
                param=param,
            )

    def render_chat(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        content_format: Literal["auto", "string", "openai"] = "auto",
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt for a conversation; tokenize it with `add_special_tokens=False`, the template writes its own.

        Args:
            chat_template: Jinja text to use instead of the checkpoint's, or the name of one of its several.

        Raises:
            ParameterError: there is no template, or it refuses the messages.
        """
        if not messages:
            raise ParameterError("messages must not be empty.", param="messages")
        template = self._chat_template(self._find_template(chat_template, with_tools=bool(tools)))
        return template.render(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            content_format=content_format,
            variables=chat_template_kwargs,
        )

    def _find_template(self, chosen: str | None, *, with_tools: bool) -> str:
        own = self.tokenizer.chat_templates
        if chosen is not None:
            return own.get(chosen, chosen)
        name = "tool_use" if with_tools and "tool_use" in own else "default"
        if name not in own:
            names = f" Its templates are called {', '.join(sorted(own))}." if own else ""
            raise ParameterError(
                f"The model {self._model.name!r} has no chat template: start the server with --chat-template FILE, "
                f"or use the completions endpoint with a prompt of your own.{names}",
                param="messages",
            )
        return own[name]

    def _compile_template(self, source: str) -> ChatTemplate:
        return ChatTemplate(source, self.tokenizer.special_tokens)

    # ------------------------------------------------------------------------------------------------------ requests

    async def read_prompt(
        self, prompt: PromptLike, *, add_special_tokens: bool = True, must_fit: bool = True
    ) -> Prompt:
        """A prompt in any of its forms: text, token ids, or a dictionary.

        Args:
            must_fit: refuse a prompt that is longer than the context; not one that is to be cut.

        Raises:
            ParameterError: it is none of these, is empty, is far too long, or holds ids outside the vocabulary.
        """
        if must_fit and isinstance(prompt, list) and len(prompt) >= self.max_model_len:
            raise self._too_long(len(prompt))
        text, token_ids, cache_salt = split_prompt(prompt)
        if isinstance(prompt, dict) and prompt.get("prompt_embeds") is not None:
            return await self._embedded(prompt["prompt_embeds"], Prompt(text, [], cache_salt))
        if token_ids is None:
            assert text is not None
            token_ids = await self.tokenize(text, add_special_tokens=add_special_tokens, must_fit=must_fit)
        return self._check_prompt(Prompt(text, token_ids, cache_salt))

    async def _embedded(self, value: Any, prompt: Prompt) -> Prompt:
        if self._read_embeds is None:
            raise ParameterError(
                "prompt_embeds are not taken here: start the server with --enable-prompt-embeds (LLM with "
                "enable_prompt_embeds=True), or send text or token ids.",
                param="prompt_embeds",
            )
        read, limit = self._read_embeds, self.max_model_len
        embeds, num_tokens = await asyncio.get_running_loop().run_in_executor(self._thread, read, value, limit)
        return prompt._replace(token_ids=[0] * num_tokens, embeds=embeds)

    def _check_prompt(self, prompt: Prompt) -> Prompt:
        token_ids = prompt.token_ids
        if not token_ids:
            raise ParameterError("The prompt is empty; it needs at least one token.", param="prompt")
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self._vocab_size:
            wrong = low if low < 0 else high
            raise ParameterError(
                f"Token id {wrong} in the prompt is outside the model's vocabulary (0 to {self._vocab_size - 1}).",
                param="prompt",
            )
        return prompt

    def truncate(self, prompt: Prompt, truncation: Truncation, max_tokens: int | None) -> Prompt:
        """The part of a prompt that `truncation` keeps; it has no text of its own when something was cut off.

        Raises:
            ParameterError: more is to be kept than there is room for.
        """
        if prompt.embeds is not None:
            raise ParameterError(
                "truncate_prompt_tokens cuts text and token ids; send as many rows of prompt_embeds as are wanted.",
                param="truncate_prompt_tokens",
            )
        room = self.max_model_len - (max_tokens or 1)
        side = "right" if self._tokenizer is None else self._tokenizer.truncation_side
        kept = truncation.apply(prompt.token_ids, room=room, tokenizer_side=side)
        return prompt if kept is prompt.token_ids else prompt._replace(text=None, token_ids=kept)

    def build(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        fit_context: bool = False,
        limit_logprobs: bool = True,
        grammar: Grammar | None = None,
    ) -> Iterator[EngineRequest]:
        """The `n` engine requests for one prompt, with every default filled in: checked now, made one by one.

        The first keeps the request's seed, the others derive theirs from it; one without a seed draws it here.

        Args:
            fit_context: lower a `max_tokens` that the context has no room for, instead of refusing it.
            limit_logprobs: refuse more logprobs than the server allows.
            grammar: `sampling.structured_outputs`, compiled.

        Raises:
            ParameterError: lengths or parameters that this model cannot serve, by name.
        """
        sampling = self._sampling_input.complete(sampling, limit_logprobs=limit_logprobs)
        max_tokens = self._max_tokens(len(prompt.token_ids), sampling, fit_context)
        seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
        if grammar is not None and len(grammar.data) * sampling.n > MAX_GRAMMAR_BYTES:
            raise ParameterError(
                f"n={sampling.n} times a compiled grammar of {len(grammar.data)} bytes is more than "
                f"{MAX_GRAMMAR_BYTES}; lower n or make structured_outputs simpler.",
                param="n",
            )
        if prompt.embeds is not None:
            check_embeds(prompt.embeds, sampling)
        return (
            EngineRequest(
                request_id=request_id if sampling.n == 1 else f"{request_id}_{index}",
                prompt_token_ids=prompt.token_ids,
                sampling=sampling.replace(
                    n=1,
                    max_tokens=max_tokens,
                    seed=child_seed(seed, index),
                    stop=None,
                    structured_outputs=None,
                    prompt_logprobs=None if index else sampling.prompt_logprobs,  # the same for all
                ),
                priority=priority,
                cache_salt=cache_salt if cache_salt is not None else prompt.cache_salt,
                grammar=grammar,
                prompt_embeds=prompt.embeds,
            )
            for index in range(sampling.n)
        )

    def _max_tokens(self, num_prompt_tokens: int, sampling: SamplingParams, fit_context: bool) -> int:
        room = self.max_model_len - num_prompt_tokens
        asked = sampling.max_tokens
        if room < 1:
            raise self._too_long(num_prompt_tokens)
        if asked is None or (asked > room and fit_context):
            return room
        if asked > room:
            raise ParameterError(
                f"The prompt has {num_prompt_tokens} tokens and max_tokens asks for {asked} more, which is over the "
                f"limit of {self.max_model_len} (max_model_len); shorten the prompt or lower max_tokens to {room}.",
                param="max_tokens",
            )
        return asked

    def _too_long(self, num_prompt_tokens: int) -> ParameterError:
        return ParameterError(
            f"The prompt has {num_prompt_tokens} tokens, but prompt and output together are limited to "
            f"{self.max_model_len} (max_model_len); shorten the prompt to at most {self.max_model_len - 1} tokens.",
            param="prompt",
        )

    # ------------------------------------------------------------------------------------------------------ defaults

    @property
    def default_sampling(self) -> dict[str, Any]:
        """SamplingParams keywords that a request which does not name them gets."""
        return dict(self._model.default_sampling)

    def limit_output(self, max_tokens: int | None) -> int | None:
        """`max_tokens` of a request to a server, or the most that the server's owner allows."""
        limit = self._model.max_output_tokens
        return max_tokens if limit is None else min(limit, limit if max_tokens is None else max_tokens)

    def default_sampling_params(self) -> SamplingParams:
        """The parameters of a request that names none."""
        return SamplingParams(**self._model.default_sampling)


def child_seed(seed: int, index: int) -> int:
    """Seed of the `index`-th of n completions: the first keeps the request's own."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
