"""One request, as an entrance hands it in and as the engine's request is built of it."""

from collections.abc import Mapping, Sequence
from typing import Any, Generic, Self, TypeVar, cast

from msgspec import Struct, field
from msgspec.structs import replace

from quire.core.wire.adapters import Adapter
from quire.core.wire.pooling_params import PoolingParams
from quire.core.wire.protocol import PromptEmbeds, Tenant
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.checkpoint.adapters import AdapterChoice, FoundAdapter, LoRARequest, chosen_adapter
from quire.frontend.keys.caller import Caller, current_caller
from quire.frontend.requests.beam_params import BeamSearchParams
from quire.frontend.requests.deadline import Deadline, current_deadline
from quire.frontend.requests.prompt import Prompt, PromptLike
from quire.frontend.requests.request_fields import check_arrival_time, check_id, check_priority, check_salt
from quire.frontend.requests.tokenization import Tokenization
from quire.frontend.text.truncation import Truncation

AnyPrompt = TypeVar("AnyPrompt", bound=PromptLike | Prompt, covariant=True)
AnyParams = TypeVar("AnyParams", bound=SamplingParams | BeamSearchParams | PoolingParams | None, covariant=True)


class Submission(Struct, Generic[AnyPrompt, AnyParams], frozen=True):
    """A new aspect of a request is a field here: entrances set it, and what uses it reads it.

    Attributes:
        prompt: text, token ids, `{"prompt": ...}` / `{"prompt_token_ids": ...}` / `{"prompt_embeds": ...}`, or a text
            with the token ids that our tokenizer made of it.
        params: None for the checkpoint's defaults.
        request_id: unique among running requests.
        priority: lower runs first, with `--scheduling-policy priority`.
        cache_salt: only requests with the same salt share pages in the prefix cache.
        truncation: cuts a prompt that is too long; None refuses it.
        fit_context: lower a `max_tokens` that does not fit the context, instead of refusing it.
        grammar_is_whole: the constraint describes the whole output, reasoning included.
        arrival_time: Unix seconds, from which latencies count; None for now.
        data_parallel_rank: the engine that shall have the request; None for the one that the router chooses.
        caller: the holder of the API key; None for a program, and on a server without keys.
        deadline: when the request ends, finished or not; None: it takes its time.
        adapter: what is added to the model; None: nothing is. A request of HTTP has the one that it names as its model.
        prediction: tokens of the output that the client expects.
        adapter_start: the first token of the prompt that has the adapter.
        soft_prompt: embeddings before the prompt; None: there are none.
        lora_request: the `adapter` as a program gave it, for the outputs to show; set when it has been found.
    """

    prompt: AnyPrompt
    params: AnyParams
    request_id: str
    priority: int = 0
    cache_salt: str | None = None
    add_special_tokens: bool = True
    truncation: Truncation | None = None
    fit_context: bool = False
    grammar_is_whole: bool = False
    arrival_time: float | None = None
    data_parallel_rank: int | None = None
    caller: Caller | None = field(default_factory=current_caller)
    deadline: Deadline | None = field(default_factory=current_deadline)
    adapter: AdapterChoice = field(default_factory=chosen_adapter)
    prediction: list[int] = []
    adapter_start: int = 0
    soft_prompt: PromptEmbeds | None = None
    lora_request: LoRARequest | None = None

    @classmethod
    def of_call(
        cls, prompt: Any, params: Any, request_id: str, tokenization_kwargs: Mapping[str, Any] | None, **fields: Any
    ) -> "Submission[Any, Any]":
        """The submission of a call in Python.

        Args:
            tokenization_kwargs: see `Tokenization.read`.
            fields: further ones, by name.

        Raises:
            ParameterError: an option of the tokenization has no effect here.
        """
        tokenization = Tokenization.read(tokenization_kwargs)
        return cls(
            prompt,
            params,
            request_id,
            add_special_tokens=tokenization.add_special_tokens,
            truncation=tokenization.truncation,
            **fields,
        )

    def check(self) -> None:
        """Checks the fields that need no model.

        Raises:
            ParameterError: a field is wrong, by name.
        """
        check_id(self.request_id)
        check_priority(self.priority)
        check_salt(self.cache_salt)
        check_arrival_time(self.arrival_time)

    def salted(self, prompt: Prompt) -> str | None:
        """The salt of the prompt's pages in the prefix cache."""
        salt = self.cache_salt if self.cache_salt is not None else prompt.cache_salt
        return salt if self.caller is None else self.caller.salted(salt)

    def with_adapter(self, found: FoundAdapter | None) -> Self:
        """The submission with the adapter that its choice has led to."""
        given = self.adapter if isinstance(self.adapter, LoRARequest) else None
        soft_prompt = None if found is None else found.soft_prompt
        adapter = None if found is None or soft_prompt is not None else found.adapter
        return replace(self, adapter=adapter, soft_prompt=soft_prompt, lora_request=given)

    def invoked_by(self, token_ids: Sequence[int]) -> Self:
        """The submission whose adapter, which has been found, begins where a prompt invokes it, or is None."""
        adapter = self.found_adapter
        start = None if adapter is None else adapter.start_in(token_ids)
        return replace(self, adapter=None if start is None else adapter, adapter_start=start or 0)

    @property
    def num_before(self) -> int:
        """Rows of the soft prompt, which stand before the prompt."""
        return 0 if self.soft_prompt is None else self.soft_prompt.num_rows

    @property
    def found_adapter(self) -> Adapter | None:
        """The adapter, which has been found."""
        assert self.adapter is None or isinstance(self.adapter, Adapter), "see Adapters.resolve"
        return self.adapter

    @property
    def tenant(self) -> Tenant:
        """The share of the engine that the request belongs to."""
        return Tenant() if self.caller is None else Tenant(self.caller.name, self.caller.weight)

    def resolved(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None
    ) -> "Submission[Prompt, SamplingParams]":
        """Replaces the prompt by what was read of it, and the parameters by complete ones."""
        return cast(Any, replace(self, prompt=prompt, params=params, request_id=request_id or self.request_id))


GivenSubmission = Submission[PromptLike | Prompt, SamplingParams | None]
BeamSubmission = Submission[PromptLike | Prompt, BeamSearchParams]
PoolingSubmission = Submission[PromptLike | Prompt, PoolingParams | None]
ResolvedSubmission = Submission[Prompt, SamplingParams]
