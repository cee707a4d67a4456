"""`ChatInput`: a conversation and its parameters, the one form that each protocol translates its requests into."""

from typing import Any, Self

from msgspec import Struct, field

from quire.frontend.chat.list_limits import check_lists
from quire.frontend.chat.tool_fields import ToolSet, check_messages
from quire.frontend.media.settings import Overrides
from quire.frontend.metrics.tool_calls import RequestType
from quire.frontend.parsing.call_ids import CHAT_PREFIX
from quire.frontend.text.truncation import Truncation


class ChatInput(Struct, frozen=True, kw_only=True):
    """A conversation, read from a client's request.

    Messages are as chat templates read them, which is the form of OpenAI's chat completions.
    """

    names: dict[str, str]  # the client's names of our fields, for errors
    messages: list[dict[str, Any]]
    tools: ToolSet = field(default_factory=ToolSet)
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False  # in addition to those that the template writes
    chat_template: str | None = None
    template_variables: dict[str, Any] = {}
    reasoning_effort: str | None = None
    response_format: dict[str, Any] | None = None  # as in OpenAI's chat completions, for templates that write it
    truncation: Truncation | None = None  # of a prompt that is too long; None refuses it
    include_reasoning: bool = True  # the client gets the reasoning
    sampling: dict[str, Any] = {}  # SamplingParams keywords without max_tokens
    max_tokens: int | None = None
    lowers_max_tokens: bool = False  # to what the prompt leaves room for, instead of refusing more
    beams: dict[str, Any] | None = None  # BeamSearchParams keywords without max_tokens; None samples
    call_prefix: str = CHAT_PREFIX  # prefix of the ids of calls
    request_type: RequestType = "chat_completions"  # in metrics
    streams: bool = False  # the client reads the answer while it grows
    priority: int = 0
    cache_salt: str | None = None
    media: Overrides = Overrides()  # how its images, videos and sounds are read
    prediction: str = ""  # of the answer's text; it is tried as drafts

    @property
    def num_choices(self) -> int:
        """Number of answers that the client wants."""
        return self.beams["beam_width"] if self.beams is not None else self.sampling.get("n", 1)

    @property
    def asks_to_think(self) -> bool:
        """True if the client wants reasoning."""
        return bool(self.template_variables.get("enable_thinking", self.reasoning_effort not in (None, "none")))

    @property
    def request_variables(self) -> dict[str, Any]:
        """`request`, a template variable: the tool_choice and the response_format of a request that has them."""
        mode = self.tools.choice.mode if self.tools.described else None
        fields = {"tool_choice": mode, "response_format": self.response_format}
        return {"request": {name: value for name, value in fields.items() if value is not None}}

    @property
    def num_characters(self) -> int:
        """Rough number of characters to render; each part of a content counts as 1000."""
        contents = (each.get("content") or "" for each in self.messages)
        total = sum(100 + (len(each) if isinstance(each, str) else 1000 * _num_parts(each)) for each in contents)
        return total + 500 * (len(self.tools.described or ()) + len(self.documents or ()))

    def checked(self) -> Self:
        """This input, once its fields are found not to contradict each other.

        Raises:
            ParameterError: the field, by name.
        """
        check_lists(self.sampling, self.num_choices)
        check_messages(self.messages)
        return self


def _num_parts(content: Any) -> int:
    return len(content) if isinstance(content, list) else 1
