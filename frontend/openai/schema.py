"""Bodies of requests, with the field names of OpenAI's API and of vLLM's additions to it.

Every field is honoured, or refused by name with a reason, or known to be without effect on a server of one's own:
see `refused_fields.py`. Anything else is an unknown field. `null` means unset.
"""

import functools
from typing import Any, Literal

from msgspec import Struct

from quire.core.errors import ParameterError
from quire.core.wire.repetition import RepetitionDetection
from quire.core.wire.sampling_lists import check_extra_args
from quire.core.wire.sampling_params import MAX_COMPLETIONS, RequestOutputKind, SamplingParams
from quire.frontend.chat.tool_fields import check_messages, read_tool_choice, read_tools
from quire.frontend.openai.list_price import check_lists
from quire.frontend.openai.output_format import OutputFields
from quire.frontend.openai.refused_fields import UNSUPPORTED
from quire.frontend.requests.prompt import MAX_EMBEDS_BYTES, PromptLike
from quire.frontend.text.truncation import Side, Truncation

MAX_SALT_CHARACTERS = 1024

_SAMPLING_FIELDS = (
    *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p"),
    *("seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "allowed_token_ids", "bad_words"),
    *("prompt_logprobs", "logprob_token_ids", "repetition_detection", "stream_interval", "thinking_token_budget"),
    *("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
)

_NOT_WITH_EMBEDS = {
    "echo": False,
    "suffix": "",
    "prompt_logprobs": None,
    "truncate_prompt_tokens": None,
    "use_beam_search": False,
}
"""Fields that need the prompt's words or ids, and the values that ask for nothing."""


class StreamOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    """What a stream carries besides text. `include_obfuscation` pads nothing here, so only false is accepted."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(OutputFields, forbid_unknown_fields=True, kw_only=True):
    """Fields that chat and text completions share."""

    model: str | None = None
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
    prompt_cache_retention: Any = None
    prediction: Any = None
    # Not supported yet.
    best_of: Any = None
    ec_transfer_params: Any = None
    kv_transfer_params: Any = None
    mm_payload: Any = None
    return_mm_kwargs: Any = None
    return_token_offsets: Any = None
    routed_experts_prompt_start: Any = None
    watermarking: Any = None

    def check(self) -> None:
        """Refuses what this server cannot honour.

        Raises:
            ParameterError: the field, by name.
        """
        for name in _unsupported_fields(type(self)):
            value = getattr(self, name)
            if value is not None and value not in UNSUPPORTED[name].nothing:
                raise ParameterError(f"{name} is refused: {UNSUPPORTED[name].reason}.", param=name)
        if self.stream_options is not None:
            if not self.stream:
                raise ParameterError("stream_options needs stream=true.", param="stream_options")
            if self.stream_options.include_obfuscation:
                raise ParameterError("include_obfuscation is not supported yet.", param="stream_options")
        if self.priority is not None and not -(2**63) <= self.priority < 2**63:
            raise ParameterError("priority must fit in 64 bits.", param="priority")
        if self.cache_salt == "":
            raise ParameterError("cache_salt must not be empty; leave it out instead.", param="cache_salt")
        if self.cache_salt is not None and len(self.cache_salt) > MAX_SALT_CHARACTERS:
            raise ParameterError(f"cache_salt must have at most {MAX_SALT_CHARACTERS} characters.", param="cache_salt")
        if self.prompt_logprobs is not None and self.stream:
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
        """How a prompt that is too long is cut, if the request asks for it."""
        if self.truncate_prompt_tokens is None:
            return None
        return Truncation(self.truncate_prompt_tokens, self.truncation_side)

    def make_sampling(
        self, defaults: dict[str, Any], *, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """Sampling parameters: the request's own fields, then the model's `defaults`, then ours.

        Raises:
            ParameterError: a value out of range, by name.
        """
        chosen = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        if self.logit_bias is not None:
            chosen["logit_bias"] = _ids_as_numbers(self.logit_bias)
        if self.vllm_xargs:
            check_extra_args(self.vllm_xargs, "vllm_xargs")
            chosen["extra_args"] = self.vllm_xargs
        if self.logprob_token_ids:
            logprobs = None  # instead of the likeliest
        chosen["structured_outputs"] = self.read_format()
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        return SamplingParams(
            **{**defaults, **chosen, "max_tokens": max_tokens, "logprobs": logprobs, "output_kind": kind}
        )


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
    # Not supported yet.
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None
    modalities: Any = None
    return_prompt_text: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    def check(self) -> None:
        """As for all requests, and what only a conversation can get wrong."""
        super().check()
        if self.top_logprobs is not None and self.top_logprobs != 0 and not self.logprobs:
            raise ParameterError("top_logprobs needs logprobs=true.", param="top_logprobs")
        if self.logprob_token_ids and not self.logprobs:
            raise ParameterError("logprob_token_ids needs logprobs=true.", param="logprob_token_ids")
        check_lists(self, self.n or 1)
        check_messages(self.messages)
        choice = read_tool_choice(self.tool_choice, read_tools(self.tools))
        if choice.mode != "none" and (field := self.format_field) is not None:
            raise ParameterError(
                f"tools and {field} contradict each other: an answer is either a call or has that format. "
                "Leave one out, or set tool_choice to none.",
                param=field,
            )

    def format_names(self) -> dict[str, str]:
        """As for all requests; without a format, what an answer is held to are the calls of its tools."""
        if self.format_field is None:
            return {f"structured_outputs.{kind}": "tools" for kind in ("json", "structural_tag")}
        return super().format_names()

    def make_sampling(
        self, defaults: dict[str, Any], *, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """As for all requests; an echo with logprobs comes with the prompt's, too, unless it is streamed."""
        sampling = super().make_sampling(defaults, max_tokens=max_tokens, logprobs=logprobs)
        scores_prompt = self.echo and self.logprobs and not (self.stream or self.use_beam_search)
        if scores_prompt and sampling.prompt_logprobs is None:
            sampling = sampling.replace(prompt_logprobs=self.top_logprobs or 0)
        return sampling

    def echoed(self, role: str) -> str:
        """With `echo`, the last message's text, where the answer goes on in the same role; else nothing."""
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


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[int | str | list[int]] | None = None
    logprobs: int | None = None
    suffix: str | None = None
    prompt_embeds: str | list[str] | None = None  # safetensors files in base64, for servers with --enable-prompt-embeds

    def check(self) -> None:
        """As for all requests, and what only a text completion can get wrong."""
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
        if self.prompt_embeds:
            for name, nothing in _NOT_WITH_EMBEDS.items():
                if getattr(self, name) not in (None, nothing):
                    raise ParameterError(f"{name} needs a prompt of text or token ids, not prompt_embeds.", param=name)

    @property
    def is_echo_alone(self) -> bool:
        """Whether the prompt is to be given back, perhaps with its log-probabilities, and nothing generated."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def scores_echo(self) -> bool:
        """Whether the echoed prompt comes with log-probabilities."""
        return bool(self.echo) and self.logprobs is not None

    def prompts(self) -> list[PromptLike]:
        """The prompts one by one: those that are embeddings, then those of `prompt`.

        Raises:
            ParameterError: no prompt, an empty list, a mixture, or too many.
        """
        given = [self.prompt_embeds] if isinstance(self.prompt_embeds, str) else self.prompt_embeds or []
        prompts: list[PromptLike] = [{"prompt_embeds": each} for each in given]
        if not given or self.prompt:  # clients that must send a prompt send an empty one beside embeddings
            prompts += self._worded_prompts()
        num_completions = len(prompts) * (self.n or 1)
        if len(prompts) > 1 and num_completions > MAX_COMPLETIONS:
            raise ParameterError(
                f"{len(prompts)} prompts with n={self.n or 1} make {num_completions} completions, but one request "
                f"may ask for {MAX_COMPLETIONS}; send several requests.",
                param="prompt_embeds" if given else "prompt",
            )
        check_lists(self, num_completions)
        if sum(map(len, given)) * 3 // 4 > MAX_EMBEDS_BYTES:
            raise ParameterError(
                f"prompt_embeds are more than {MAX_EMBEDS_BYTES} bytes in all; send several requests.",
                param="prompt_embeds",
            )
        return prompts

    def _worded_prompts(self) -> list[str | list[int]]:
        """`prompt`: a string, token ids, or a list of either."""
        prompt = self.prompt
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


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /tokenize: either `prompt`, or `messages` and what goes with a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None  # true for a prompt, false for messages
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None  # for servers with --trust-request-chat-template
    # Not supported yet.
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None

    def check(self) -> None:
        """Refuses fields that are not supported, and both or neither of prompt and messages."""
        for name in ("media_io_kwargs", "mm_processor_kwargs"):
            value = getattr(self, name)
            if value is not None and value not in UNSUPPORTED[name].nothing:
                raise ParameterError(f"{name} is refused: {UNSUPPORTED[name].reason}.", param=name)
        if (self.prompt is None) == (self.messages is None):
            raise ParameterError("Give either prompt or messages.", param="prompt")
        if self.prompt is not None:
            for name in ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs"):
                if getattr(self, name) is not None:
                    raise ParameterError(f"{name} goes with messages, not with prompt.", param=name)
        read_tools(self.tools)


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


@functools.cache
def _unsupported_fields(kind: type[GenerationRequest]) -> list[str]:
    return [name for name in kind.__struct_fields__ if name in UNSUPPORTED]


def _ids_as_numbers(logit_bias: dict[str, float]) -> dict[int, float]:
    """JSON's keys are strings."""
    if not all(len(token_id) < 16 and token_id.isascii() and token_id.isdigit() for token_id in logit_bias):
        raise ParameterError("logit_bias must map token ids to numbers.", param="logit_bias")
    return {int(token_id): bias for token_id, bias in logit_bias.items()}
