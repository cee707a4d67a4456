"""Bodies of requests, with the field names of OpenAI's API and of vLLM's additions to it.

Every known field is honoured, refused by name with a reason, or has no effect on a private server:
`frontend/refusals/fields.py` lists the reasons. All other fields are unknown. `null` means unset.
"""

from collections.abc import Iterator
from typing import Any, Literal

from msgspec import UNSET, UnsetType

from quire.core.errors import ParameterError
from quire.core.wire.repetition import RepetitionDetection
from quire.core.wire.sampling_params import MAX_COMPLETIONS
from quire.frontend.chat.body_fields import read_overrides, read_sampling, refuse_unsupported
from quire.frontend.chat.chat_input import ChatInput
from quire.frontend.chat.custom_tools import with_functions
from quire.frontend.chat.rendered import StreamOptions
from quire.frontend.chat.tool_fields import ignored_tools, read_tool_set
from quire.frontend.openai.answers import WeightVersionSpan
from quire.frontend.openai.beams import refuse_with_beams
from quire.frontend.openai.output_format import OutputFields
from quire.frontend.refusals.fields import is_usual_verbosity
from quire.frontend.requests.prompt import MAX_EMBEDS_BYTES, PromptLike
from quire.frontend.requests.request_fields import check_priority, check_salt
from quire.frontend.text.truncation import Side, Truncation

_NOT_WITH_EMBEDS = {
    "echo": False,
    "suffix": "",
    "prompt_logprobs": None,
    "truncate_prompt_tokens": None,
    "use_beam_search": False,
}
"""Fields that need the prompt's text or token ids, and their values without effect."""


class GenerationRequest(OutputFields, forbid_unknown_fields=True, kw_only=True):
    """Fields that chat and text completions share."""

    model: str | None = None
    timeout: float | None = None  # seconds; see `requests/deadline.py`
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    repetition_detection: RepetitionDetection | None = None
    vllm_xargs: dict[str, str | int | float | list[str | int | float]] | None = None  # for --logits-processors
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Side | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None
    thinking_token_budget: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    echo: bool | None = None
    # Harmless.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    session_id: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    # Not supported yet.
    best_of: Any = None
    ec_transfer_params: Any = None
    kv_transfer_params: Any = None
    mm_payload: Any = None
    return_mm_kwargs: Any = None
    return_token_offsets: Any = None
    routed_experts_prompt_start: Any = None
    watermarking: Any = None

    def weight_versions(self, num_tokens: int) -> list[WeightVersionSpan] | UnsetType:
        """The weights that made the tokens of a choice, if the client asks; never for beams, as in vLLM.

        Weights do not change while a server runs, so one version made all tokens.
        """
        if not self.return_weight_versions or self.use_beam_search:
            return UNSET
        return [WeightVersionSpan("default", 0, num_tokens)] if num_tokens else []

    def ignored_parts(self) -> Iterator[str]:
        """Yields the ignored fields of the answer's form, and padding of a stream's events."""
        yield from super().ignored_parts()
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            yield "stream_options.include_obfuscation"

    def check(self) -> None:
        """Refuses fields that this server cannot honour.

        Raises:
            ParameterError: the field, by name.
        """
        refuse_unsupported(self)
        check_priority(self.priority)
        check_salt(self.cache_salt)
        if self.stream_options is not None and not self.stream:
            raise ParameterError("stream_options needs stream=true.", param="stream_options")
        if self.prompt_logprobs and self.stream:
            raise ParameterError(
                "prompt_logprobs come with the whole answer; leave stream out, or use echo with logprobs.",
                param="prompt_logprobs",
            )
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise ParameterError("truncation_side needs truncate_prompt_tokens.", param="truncation_side")
        if not self.use_beam_search:
            if self.length_penalty not in (None, 1):
                raise ParameterError("length_penalty needs use_beam_search=true.", param="length_penalty")
            if self.early_stopping:
                raise ParameterError("early_stopping needs use_beam_search=true.", param="early_stopping")

    @property
    def truncation(self) -> Truncation | None:
        """The truncation of a prompt that is too long; None if the request asks for none."""
        if self.truncate_prompt_tokens is None:
            return None
        return Truncation(self.truncate_prompt_tokens, self.truncation_side)

    def sampling_fields(self, num_logprobs: int | None) -> dict[str, Any]:
        """The request's sampling fields, as SamplingParams keywords without max_tokens.

        Args:
            num_logprobs: likeliest tokens to return at each position; None returns no log-probabilities.

        Raises:
            ParameterError: a value that its field does not allow.
        """
        if self.logprob_token_ids:
            num_logprobs = None  # logprob_token_ids replace the likeliest tokens
        return {**read_sampling(self), "logprobs": num_logprobs, "structured_outputs": self.read_format()}

    def beam_fields(self) -> dict[str, Any]:
        """The request's beam search, as BeamSearchParams keywords without max_tokens.

        Raises:
            ParameterError: a field that contradicts a beam search.
        """
        refuse_with_beams(self)
        return {
            "beam_width": self.n or 1,
            "ignore_eos": bool(self.ignore_eos),
            "temperature": self.temperature or 0.0,
            "length_penalty": 1.0 if self.length_penalty is None else self.length_penalty,
            "early_stopping": self.early_stopping or False,
            "stop_token_ids": self.stop_token_ids or [],
            "include_stop_str_in_output": bool(self.include_stop_str_in_output),
            "skip_special_tokens": self.skip_special_tokens is not False,
        }


class ChatRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None  # for servers with --trust-request-chat-template
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Any = None  # ignored in plain sight
    media_io_kwargs: Any = None  # for servers with --trust-request-mm-kwargs, as the next one
    mm_processor_kwargs: Any = None
    # Not supported yet.
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    return_prompt_text: Any = None
    prediction: Any = None  # {"type": "content", "content": text or parts}
    web_search_options: Any = None

    def ignored_parts(self) -> Iterator[str]:
        """Yields the ignored fields of all requests, of the tools, and a `verbosity` that models here do not know."""
        yield from super().ignored_parts()
        if not is_usual_verbosity(self.verbosity):
            yield "verbosity"
        yield from ignored_tools(self.tools)

    def check(self) -> None:
        """As for all requests; also checks the fields that only a conversation has."""
        super().check()
        if self.top_logprobs is not None and self.top_logprobs != 0 and not self.logprobs:
            raise ParameterError("top_logprobs needs logprobs=true.", param="top_logprobs")
        if self.logprob_token_ids and not self.logprobs:
            raise ParameterError("logprob_token_ids needs logprobs=true.", param="logprob_token_ids")
        if self.tools is None and self.tool_choice == "auto":
            raise ParameterError("tool_choice is auto, but there are no tools.", param="tool_choice")
        if isinstance(self.tool_choice, dict) and self.format_field not in (None, "response_format"):
            raise ParameterError(
                f"{self.format_field} and a tool_choice that names a function contradict each other: the answer is a "
                "call. Leave one out.",
                param=self.format_field,
            )

    def to_chat_input(self) -> ChatInput:
        """The request in the form that all protocols share.

        Raises:
            ParameterError: a field that is malformed or contradicts another, by name.
        """
        sampling = self.sampling_fields((self.top_logprobs or 0) if self.logprobs else None)
        if self.echo and self.logprobs and not (self.stream or self.use_beam_search):
            sampling.setdefault("prompt_logprobs", self.top_logprobs or 0)  # an echo with logprobs has the prompt's too
        return ChatInput(
            names={
                "max_tokens": self.token_limit[0],
                "logprobs": "top_logprobs",
                "beam_width": "n",
                **self.chat_format_names(),
            },
            messages=with_functions(self.messages),
            tools=read_tool_set(
                self.tools, self.tool_choice, max_calls=1 if self.parallel_tool_calls is False else None
            ),
            documents=self.documents,
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            add_special_tokens=bool(self.add_special_tokens),
            chat_template=self.chat_template,
            template_variables=self.chat_template_kwargs or {},
            reasoning_effort=self.reasoning_effort,
            response_format=self.response_format,
            truncation=self.truncation,
            include_reasoning=self.include_reasoning is not False,
            sampling=sampling,
            max_tokens=self.token_limit[1],
            beams=self.beam_fields() if self.use_beam_search else None,
            streams=bool(self.stream),
            priority=self.priority or 0,
            cache_salt=self.cache_salt,
            media=read_overrides(self),
            prediction=predicted_text(self.prediction),
        ).checked()

    @property
    def names_call(self) -> bool:
        """True if the request names the function to call."""
        return isinstance(self.tool_choice, dict) and self.tool_choice.get("type") != "allowed_tools"

    def echoed(self, role: str) -> str:
        """With `echo`, the last message's text if the answer continues in the same role; else empty."""
        if not self.echo or self.messages[-1].get("role") != role:
            return ""
        content = self.messages[-1].get("content")
        if isinstance(content, str):
            return content
        parts = [part.get("text") for part in content or [] if isinstance(part, dict)]
        return "\n".join(text for text in parts if isinstance(text, str))

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """(field, value) of the limit on output tokens; OpenAI's newer name wins."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


def predicted_text(prediction: Any) -> str:
    """The text of OpenAI's `prediction`; empty if there is none.

    Raises:
        ParameterError: it is malformed.
    """
    if prediction is None:
        return ""
    content = (
        prediction.get("content") if isinstance(prediction, dict) and prediction.get("type") == "content" else None
    )
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if len(texts) < len(parts):
        raise ParameterError(
            'prediction must be {"type": "content", "content": ...} with a text, or a list of {"type": "text", "text": '
            "...}.",
            param="prediction",
        )
    return "".join(texts)


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[int | str | list[int]] | None = None
    logprobs: int | None = None
    suffix: str | None = None
    prompt_embeds: str | list[str] | None = None  # safetensors files in base64, for servers with --enable-prompt-embeds
    encoder_prompt: str | list[int] | None = None  # for models with an encoder, another name of prompt
    decoder_prompt: str | list[int] | None = None  # the beginning of what such a model's decoder writes

    def check(self) -> None:
        """As for all requests; also checks the fields that only a text completion has."""
        super().check()
        if self.logprob_token_ids and self.logprobs is None:
            raise ParameterError("logprob_token_ids needs logprobs, too.", param="logprob_token_ids")
        if self.use_beam_search and self.echo and self.logprobs is not None:
            raise ParameterError("echo with logprobs does not go with use_beam_search; leave one out.", param="echo")
        if self.logprob_token_ids and self.is_echo_alone:
            raise ParameterError(
                "logprob_token_ids are about the output, and with max_tokens=0 there is none.",
                param="logprob_token_ids",
            )
        if self.encoder_prompt is not None and (self.prompt or self.prompt_embeds):
            raise ParameterError("encoder_prompt is another name of prompt; give one of them.", param="encoder_prompt")
        if self.decoder_prompt is not None and self.prompt_embeds:
            raise ParameterError(
                "decoder_prompt does not go with prompt_embeds; give a prompt.", param="decoder_prompt"
            )
        if (self.encoder_prompt is not None or self.decoder_prompt is not None) and self.suffix:
            raise ParameterError(
                "suffix does not go with encoder_prompt and decoder_prompt; leave it out.", param="suffix"
            )
        if self.prompt_embeds:
            for name, nothing in _NOT_WITH_EMBEDS.items():
                if getattr(self, name) not in (None, nothing):
                    raise ParameterError(f"{name} needs a prompt of text or token ids, not prompt_embeds.", param=name)

    @property
    def is_echo_alone(self) -> bool:
        """True if the answer is the prompt alone, perhaps with its log-probabilities, and nothing is generated."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def scores_echo(self) -> bool:
        """True if the echoed prompt has log-probabilities."""
        return bool(self.echo) and self.logprobs is not None

    def prompts(self) -> list[PromptLike]:
        """The prompts one by one: first those of `prompt_embeds`, then those of `prompt`.

        Raises:
            ParameterError: no prompt, an empty list, a mixture, or too many.
        """
        given = [self.prompt_embeds] if isinstance(self.prompt_embeds, str) else self.prompt_embeds or []
        prompts: list[PromptLike] = [{"prompt_embeds": each} for each in given]
        if not given or self.prompt:  # clients that must send a prompt send an empty one with embeddings
            prompts += self._both_sides(self._worded_prompts())
        num_completions = len(prompts) * (self.n or 1)
        if len(prompts) > 1 and num_completions > MAX_COMPLETIONS:
            raise ParameterError(
                f"{len(prompts)} prompts with n={self.n or 1} make {num_completions} completions, but one request "
                f"may ask for {MAX_COMPLETIONS}; send several requests.",
                param="prompt_embeds" if given else "prompt",
            )
        if sum(map(len, given)) * 3 // 4 > MAX_EMBEDS_BYTES:
            raise ParameterError(
                f"prompt_embeds are more than {MAX_EMBEDS_BYTES} bytes in all; send several requests.",
                param="prompt_embeds",
            )
        return prompts

    def _both_sides(self, prompts: list[str | list[int]]) -> list[PromptLike]:
        """`prompts`, each with `decoder_prompt`, if one of the two sides is named."""
        if self.encoder_prompt is None and self.decoder_prompt is None:
            return list(prompts)
        return [{"encoder_prompt": prompt, "decoder_prompt": self.decoder_prompt} for prompt in prompts]

    def _worded_prompts(self) -> list[str | list[int]]:
        """`prompt`: a string, token ids, or a list of either."""
        prompt = self.prompt if self.encoder_prompt is None else self.encoder_prompt
        if prompt is None:
            raise ParameterError("The field 'prompt' is required.", param="prompt")
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise ParameterError("prompt must not be an empty list.", param="prompt")
        kinds = set(map(type, prompt))
        if kinds == {int}:
            return [prompt]  # type: ignore[list-item]
        if kinds in ({str}, {list}):
            return prompt  # type: ignore[return-value]
        raise ParameterError(
            "prompt must be a string, a list of strings, token ids, or a list of lists of token ids, not a mixture.",
            param="prompt",
        )
