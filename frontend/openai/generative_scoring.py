"""POST /generative_scoring: the probabilities that chosen tokens follow a query with each of several items."""

import math
import time

from msgspec import Struct

from quire.core.errors import ParameterError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.client_headers import ClientHeaders
from quire.frontend.openai.answers import CompletionUsage
from quire.frontend.openai.first_tokens import FirstTokens, logprobs_of
from quire.frontend.outputs import RequestOutput
from quire.frontend.requests.time_slices import in_time_slices
from quire.frontend.text.tokenizer import needed


class ScoringRequest(Struct, kw_only=True):
    """Body of POST /generative_scoring. Texts may be token ids."""

    query: str | list[int]
    items: list[str | list[int]]  # all texts, or all token ids
    label_token_ids: list[int]
    apply_softmax: bool = True  # among the labels; else their probabilities among all tokens
    item_first: bool = False
    add_special_tokens: bool = True  # to the query
    model: str | None = None
    timeout: float | None = None  # seconds; see `requests/deadline.py`
    cache_salt: str | None = None
    priority: int = 0
    request_id: str | None = None
    user: str | None = None

    def check(self) -> None:
        """Raises ParameterError for a field that cannot be honoured."""
        for name in ("label_token_ids", "items"):
            if not getattr(self, name):
                raise ParameterError(f"{name} must not be empty.", param=name)
        if len(set(map(type, self.items))) > 1:
            raise ParameterError("items must be all texts, or all lists of token ids.", param="items")


class Score(Struct, kw_only=True):
    """The probability of the first label after one item."""

    index: int
    object: str = "score"
    score: float


class ScoringResponse(Struct, kw_only=True):
    """Answer of POST /generative_scoring."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    usage: CompletionUsage


class GenerativeScoring:
    """Answers requests for scores."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self._first_tokens = FirstTokens(engine)

    async def score(self, request: ScoringRequest, headers: ClientHeaders = ClientHeaders()) -> ScoringResponse:
        """A score for each item; cancelling aborts them in the engine. Raises RequestError and EngineError."""
        request.check()
        self._engine.model.choose(request.model)
        reply_id = f"generative-scoring-{headers.choose_id(request.request_id)}"
        prompts = await self._prompts(request)
        outputs = await self._first_tokens.read(
            [(ids, request.label_token_ids) for ids in prompts],
            reply_id,
            priority=request.priority,
            cache_salt=request.cache_salt,
            data_parallel_rank=headers.data_parallel_rank,
        )
        num_prompt, num_generated = sum(map(len, prompts)), len(outputs)
        return ScoringResponse(
            id=reply_id,
            created=int(time.time()),
            model=self._engine.model.chosen_name,
            data=[Score(index=i, score=_score(request, output)) for i, output in enumerate(outputs)],
            usage=CompletionUsage(
                prompt_tokens=num_prompt, completion_tokens=num_generated, total_tokens=num_prompt + num_generated
            ),
        )

    async def _prompts(self, request: ScoringRequest) -> list[list[int]]:
        """Token ids of the query with each item, cut to leave room for a token."""
        query = await self._ids(request.query, special=request.add_special_tokens)
        prompts = []
        async for item in in_time_slices(request.items):
            ids = await self._ids(item, special=False)
            both = ids + query if request.item_first else query + ids
            prompts.append(both[: self._engine.max_model_len - 1])
        return prompts

    async def _ids(self, text: str | list[int], *, special: bool) -> list[int]:
        if isinstance(text, list):
            return text
        needed(self._engine.tokenizer)
        return (await self._engine.prompts.read(text, add_special_tokens=special)).token_ids if text else []


def _score(request: ScoringRequest, output: RequestOutput) -> float:
    labels = logprobs_of(output, request.label_token_ids)
    if not request.apply_softmax:
        return math.exp(labels[0])
    highest = max(labels)
    odds = {label: math.exp(each - highest) for label, each in zip(request.label_token_ids, labels, strict=True)}
    return odds[request.label_token_ids[0]] / sum(odds.values())
