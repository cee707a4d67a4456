"""Reads the model's answers to a conversation, and gives sampling the parameters that this reading needs."""

import functools
from collections.abc import Callable
from typing import Any

from quire.core.wire.sampling_params import ThinkingMarks
from quire.core.wire.structured_outputs import StructuredOutputsParams
from quire.frontend.chat.answer_events import Choice
from quire.frontend.chat.chat_input import ChatInput
from quire.frontend.chat.custom_tools import CustomCalls
from quire.frontend.metrics.tool_calls import ToolCallSearches
from quire.frontend.parsing.answer_sink import Held
from quire.frontend.parsing.answers import constraints
from quire.frontend.parsing.answers.output_parser import OutputParser
from quire.frontend.parsing.answers.parsers import OutputParsers, ReasoningMarks
from quire.frontend.requests.time_slices import in_time_slices
from quire.frontend.text.tokenizer import Tokenizer


class AnswerReader:
    """Finds reasoning and calls in the answers of one model.

    Args:
        parsers: know the model's format.
        tokenizer: None when the server runs on token ids alone.
        may_think: the model may begin with reasoning by itself, before a required format or call.
        thinks_freely: a format that the client asks for begins after the reasoning.
        template_variables: the variables that the chat template gets for a conversation.
        searches: counts searches for calls; None counts nothing.
    """

    def __init__(
        self,
        parsers: OutputParsers,
        tokenizer: Tokenizer | None,
        *,
        may_think: bool,
        thinks_freely: bool = True,
        template_variables: Callable[[ChatInput], dict[str, Any]] = lambda chat: chat.template_variables,
        searches: ToolCallSearches | None = None,
    ) -> None:
        self._parsers = parsers
        self._tokenizer = tokenizer
        self._may_think = may_think
        self._thinks_freely = thinks_freely
        self._template_variables = template_variables
        self._searches = searches
        self._special_ids = functools.lru_cache(maxsize=16)(self._find_special_ids)

    @property
    def finds_calls(self) -> bool:
        """True if answers are searched for calls when the client leaves the choice to the model."""
        return self._parsers.finds_calls

    @property
    def reads_reasoning(self) -> bool:
        """True if reasoning is separated from the answer."""
        return self._parsers.reads_reasoning

    @property
    def parses(self) -> bool:
        """True if there is a parser of reasoning or calls."""
        return self._parsers.reads_reasoning or self._parsers.reads_calls

    def shows_tokens(self, chat: ChatInput) -> bool:
        """True if the client may see token ids and log-probabilities.

        False when it leaves reasoning out: parsers separate reasoning as text, so its tokens are not known."""
        return chat.include_reasoning or not self._parsers.reads_reasoning

    # ---------------------------------------------------------------------------------------------------- sampling

    def sampling_fields(self, chat: ChatInput, prompt_text: str) -> dict[str, Any]:
        """SamplingParams keywords that reading adds to the client's: a grammar for required calls, the special tokens
        that parsers look for, the marks of reasoning."""
        fields = self.rendered_fields(chat, prompt_text)
        if (asked := fields["structured_outputs"]) is not None:
            fields["structured_outputs"] = constraints.after_reasoning(asked, self._marks(chat, prompt_text))
        return fields

    def rendered_fields(self, chat: ChatInput, prompt_text: str) -> dict[str, Any]:
        """As `sampling_fields`, but the constraint is that of the answer alone, without the reasoning before it."""
        fields: dict[str, Any] = {"structured_outputs": self._constraint(chat)}
        if special_ids := self.shown_special_ids(chat):
            fields["shown_special_token_ids"] = special_ids
        if chat.sampling.get("thinking_token_budget") is not None:
            fields["thinking"] = self.thinking_marks(prompt_text)
        if not self.shows_tokens(chat):
            fields |= {"logprobs": None, "logprob_token_ids": None}
        return fields

    def shown_special_ids(self, chat: ChatInput) -> list[int]:
        """The special tokens that parsers look for; texts leave out all others."""
        return self._special_ids(self._parsers.markers(chat.tools.functions, chat.tools.choice))

    def thinking_marks(self, prompt_text: str) -> ThinkingMarks | None:
        """The marks around reasoning, for a request with a thinking budget and a prompt of any kind."""
        if self._tokenizer is None:
            return None
        encode = functools.partial(self._tokenizer.encode, add_special_tokens=False)
        return self._parsers.thinking_marks(prompt_text, encode)

    def reasoning_ended(self, chat: ChatInput, prompt_text: str) -> bool | None:
        """True if a constraint on the answer holds from the first token on; None without a parser of reasoning."""
        return self._marks(chat, prompt_text) is None if self.reads_reasoning else None

    def after_reasoning(
        self,
        asked: StructuredOutputsParams,
        prompt_text: str,
        *,
        template_variables: dict[str, Any] | None = None,
    ) -> StructuredOutputsParams:
        """A constraint on the answer as one on the whole output: the reasoning before it stays free.

        Args:
            template_variables: what the prompt was rendered with, which decide whether the model may think by itself;
                None if it may.
        """
        if template_variables is None:
            return constraints.after_reasoning(asked, self._parsers.reasoning_marks(prompt_text))
        chat = ChatInput(names={}, messages=[], template_variables=template_variables)
        return constraints.after_reasoning(asked, self._marks(chat, prompt_text))

    def _constraint(self, chat: ChatInput) -> StructuredOutputsParams | None:
        """The constraint on answers after the reasoning: the client's format, or calls, or either of the two."""
        asked = _asked(chat)
        functions, choice = chat.tools.functions, chat.tools.choice
        if asked is not None and choice.mode == "auto":
            if (tag := self._parsers.calls_alone(functions, choice)) is not None:
                asked = constraints.or_calls(asked, tag)
        elif functions and (calls := self._parsers.constraint(functions, choice)) is not None:
            asked = constraints.of_calls(calls)
        return asked

    def _marks(self, chat: ChatInput, prompt_text: str) -> ReasoningMarks | None:
        """The marks of the reasoning after which a format begins; None if it begins with the first token."""
        if not self._thinks_freely:
            return None
        marks = self._parsers.reasoning_marks(prompt_text)
        if marks is not None and marks.begin is not None and not (self._may_think or chat.asks_to_think):
            return None
        return marks

    def _always_answers(self, chat: ChatInput) -> bool:
        """True if reasoning is the answer when there is no other: the client asks for that, or wants no reasoning."""
        variables = self._template_variables(chat)
        return variables.get("force_nonempty_content") is True or variables.get("enable_thinking") is False

    def _held(self, chat: ChatInput, prompt_text: str) -> Held:
        """The part of the answer that the client's format holds for. A structural tag leaves the text between free."""
        asked = _asked(chat)
        forced = bool(chat.tools.functions) and chat.tools.choice.mode in ("required", "named")
        if asked is None or asked.kind == "structural_tag" or forced or not self._thinks_freely:
            return "nothing"
        return "whole" if self._marks(chat, prompt_text) is None else "answer"

    def _find_special_ids(self, markers: tuple[str, ...]) -> list[int]:
        """The special tokens in `markers`."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return []
        texts = {token_id: tokenizer.token(token_id) for token_id in tokenizer.special_token_ids}
        return sorted(token_id for token_id, text in texts.items() if text and any(text in mark for mark in markers))

    # ----------------------------------------------------------------------------------------------------- reading

    async def choices(self, chat: ChatInput, prompt_text: str) -> list[Choice] | None:
        """A reader for each sequence; None when every text is the answer unchanged."""

        functions, choice, held = chat.tools.functions, chat.tools.choice, self._held(chat, prompt_text)
        if held != "nothing" and self._parsers.calls_alone(functions, choice) is None:
            functions = []  # the format leaves no way to call them
        parser = self._parsers.opener(
            functions, choice, prompt_text=prompt_text, call_prefix=chat.call_prefix, held=held
        )
        first = parser()
        if first is None:
            return None
        parsers = [first, *[parser() async for _ in in_time_slices(range(1, chat.num_choices))]]
        always_answers = self._always_answers(chat)
        count_search = None
        if self._searches is not None and chat.tools.functions and chat.tools.choice.mode != "none":
            count_search = self._searches.counter(chat.request_type, streaming=chat.streams)

        def open_choice(parser: OutputParser | None) -> Choice:
            return Choice(
                parser,
                custom_calls=CustomCalls(chat.tools.custom) if chat.tools.custom else None,
                count_search=count_search,
                streaming=chat.streams,
                shows_reasoning=chat.include_reasoning,
                always_answers=always_answers,
            )

        return [open_choice(each) for each in parsers]


def _asked(chat: ChatInput) -> StructuredOutputsParams | None:
    """The client's format of the answer."""
    asked: StructuredOutputsParams | None = chat.sampling.get("structured_outputs")
    return asked
