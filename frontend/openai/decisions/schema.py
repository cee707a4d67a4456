"""Bodies and answers of /v1/decisions and /v1/systemone, with the names of OpenAI's API and of vLLM."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from quire.core.errors import ParameterError
from quire.frontend.openai.decisions.questions import MAX_QUESTIONS
from quire.frontend.requests.request_fields import check_priority, check_salt

ShortText = Annotated[str, Meta(max_length=1_048_576)]
InputText = Annotated[str, Meta(max_length=10_485_760)]


def check_joint(joint: bool) -> None:
    """Raises ParameterError for questions that are to be answered together."""
    if joint:
        raise ParameterError(
            "joint is for diffusion models: this one reads each question by itself; leave it out.", param="joint"
        )


def check_count(count: int) -> None:
    """Raises ParameterError for no question, or too many."""
    if not 1 <= count <= MAX_QUESTIONS:
        raise ParameterError(f"questions must be 1 to {MAX_QUESTIONS}; there are {count}.", param="questions")


# ----------------------------------------------------------------------------------------------------------- decisions


class InputPart(Struct, kw_only=True, forbid_unknown_fields=True):
    """A piece of a message. Models here read text alone."""

    type: Literal["input_text"]
    text: InputText


class InputMessage(Struct, kw_only=True, forbid_unknown_fields=True):
    """One message that the questions are about."""

    role: Literal["user"]
    content: InputText | list[InputPart]
    type: Literal["message"] = "message"

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


class Asked(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """The fields that all questions share."""

    instructions: ShortText
    name: ShortText | UnsetType = UNSET

    @property
    def answer_name(self) -> str | None:
        """The name in the answer; None without one."""
        return None if self.name is UNSET else self.name


class Predicate(Asked, kw_only=True, tag="predicate"):
    """A question that is true or false."""


class ChoiceOption(Struct, kw_only=True, forbid_unknown_fields=True):
    """One of the choices."""

    value: str | bool
    description: ShortText = ""


class Choice(Asked, kw_only=True, tag="choice"):
    """A question with several choices."""

    choices: Annotated[list[ChoiceOption], Meta(min_length=2, max_length=255)]


class Level(Struct, kw_only=True, forbid_unknown_fields=True):
    """One level of a scale."""

    label: ShortText
    description: ShortText = ""


class Score(Asked, kw_only=True, tag="score"):
    """A question about a degree. Levels go from the least to the most."""

    levels: Annotated[list[Level], Meta(min_length=2, max_length=10)]


class DecisionRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/decisions."""

    model: str
    input: InputText | list[InputMessage]
    questions: list[Predicate | Choice | Score]
    safety_identifier: Any = None  # without effect on a private server
    joint: bool = False
    cache_salt: str | None = None

    def check(self) -> None:
        """Raises ParameterError for a field that cannot be honoured."""
        check_count(len(self.questions))
        check_joint(self.joint)
        check_salt(self.cache_salt)
        for index, question in enumerate(self.questions):
            if isinstance(question, Choice):
                values = {(type(each.value), each.value) for each in question.choices}
                if len(values) < len(question.choices):
                    raise ParameterError(f"questions[{index}].choices must differ.", param="questions")

    @property
    def text(self) -> str:
        """The text that the questions are about."""
        return self.input if isinstance(self.input, str) else "\n\n".join(each.text for each in self.input)


class PredicateAnswer(Struct, kw_only=True, tag_field="type", tag="predicate"):
    """The probability that it is true."""

    name: str | None
    probability: float


class ValueProbability(Struct):
    """The probability of one choice."""

    value: str | bool
    probability: float


class ChoiceAnswer(Struct, kw_only=True, tag_field="type", tag="choice"):
    """The likeliest choice. `confidence` is its probability among all that the model might have said."""

    name: str | None
    choice: str | bool
    probabilities: list[ValueProbability]
    confidence: float


class LevelProbability(Struct):
    """The probability of one level; `value` is its index."""

    value: int
    label: str
    probability: float


class ScoreAnswer(Struct, kw_only=True, tag_field="type", tag="score"):
    """The expected place on the scale, from 0; `confidence` is of the likeliest level."""

    name: str | None
    score: float
    probabilities: list[LevelProbability]
    confidence: float


class InputDetails(Struct):
    """Prompt tokens that the prefix cache already held."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(Struct, frozen=True):
    """There is no reasoning before a decision."""

    reasoning_tokens: int = 0


class Usage(Struct, kw_only=True):
    """Tokens counted over all questions."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int


class Decisions(Struct, kw_only=True):
    """Answer of POST /v1/decisions, with one for each question."""

    model: str
    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer]
    usage: Usage


# ---------------------------------------------------------------------------------------------------------- system one


class SystemOneRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/systemone."""

    state: Any  # what the questions are about: text or JSON
    questions: dict[str, dict[str, Any]]  # by a name of the client's: type, instructions, criteria
    model: str | None = None
    instructions: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    joint: bool = False
    cache_salt: str | None = None
    priority: int = 0
    request_id: str | None = None
    # Models here read text alone.
    images: list[str] | None = None
    audio: list[str] | None = None
    videos: list[str] | None = None

    def check(self) -> None:
        """Raises ParameterError for a field that cannot be honoured."""
        check_count(len(self.questions))
        check_joint(self.joint)
        check_salt(self.cache_salt)
        check_priority(self.priority)
        for name in ("images", "audio", "videos"):
            if getattr(self, name):
                raise ParameterError(f"The models here read text alone; leave {name} out.", param=name)


class SystemOneUsage(Struct):
    """Tokens counted over all questions."""

    input_tokens: int
    output_tokens: int


class Diagnostics(Struct):
    """The model's use of labels: their share of all probability, and true if one of them was the likeliest token."""

    label_mass: float
    argmax_is_label: bool


class SystemOneResponse(Struct, kw_only=True):
    """Answer of POST /v1/systemone, with an answer and diagnostics for each question, by its name."""

    id: str
    object: Literal["structured_decision"] = "structured_decision"
    created: int
    model: str
    answers: dict[str, dict[str, Any]]
    usage: SystemOneUsage
    diagnostics: dict[str, Diagnostics]
    joint: None = None
