"""POST /v1/decisions and /v1/systemone: questions in, probabilities of their answers out."""

import json
import time

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.client_headers import ClientHeaders
from quire.frontend.chat.conversation import Conversations
from quire.frontend.openai.decisions.label_reads import LabelReads
from quire.frontend.openai.decisions.questions import LabelRead, Option, Question, choice
from quire.frontend.openai.decisions.schema import (
    Choice,
    ChoiceAnswer,
    DecisionRequest,
    Decisions,
    Diagnostics,
    InputDetails,
    LevelProbability,
    Predicate,
    PredicateAnswer,
    Score,
    ScoreAnswer,
    SystemOneRequest,
    SystemOneResponse,
    SystemOneUsage,
    Usage,
    ValueProbability,
)
from quire.frontend.openai.decisions.system_one import read_question


class Deciding:
    """Answers both routes; cancelling aborts what runs in the engine."""

    def __init__(self, engine: AsyncLLM, conversations: Conversations) -> None:
        self._model = engine.model
        self._labels = LabelReads(engine, conversations)

    async def decide(self, request: DecisionRequest, headers: ClientHeaders = ClientHeaders()) -> Decisions:
        """An answer to each question. Raises RequestError and EngineError."""
        request.check()
        self._model.choose(request.model)
        questions = [_question(each, f"questions[{index}]") for index, each in enumerate(request.questions)]
        reply_id = f"decision-{headers.choose_id(None)}"
        reads = await self._labels.read(questions, request.text, reply_id, headers, cache_salt=request.cache_salt)
        num_input, num_output = sum(each.input_tokens for each in reads), sum(each.output_tokens for each in reads)
        return Decisions(
            model=self._model.chosen_name,
            answers=[_answer(asked, read) for asked, read in zip(request.questions, reads, strict=True)],
            usage=Usage(
                input_tokens=num_input,
                input_tokens_details=InputDetails(sum(each.cached_tokens for each in reads)),
                output_tokens=num_output,
                total_tokens=num_input + num_output,
            ),
        )

    async def system_one(
        self, request: SystemOneRequest, headers: ClientHeaders = ClientHeaders()
    ) -> SystemOneResponse:
        """An answer to each question by its name. Raises RequestError and EngineError."""
        request.check()
        self._model.choose(request.model)
        questions = {name: read_question(name, given) for name, given in request.questions.items()}
        reply_id = f"decision-{headers.choose_id(request.request_id)}"
        state = request.state if isinstance(request.state, str) else json.dumps(request.state, ensure_ascii=False)
        reads = await self._labels.read(
            [each.question for each in questions.values()],
            state,
            reply_id,
            headers,
            instructions=request.instructions,
            template_variables=request.chat_template_kwargs,
            priority=request.priority,
            cache_salt=request.cache_salt,
        )
        by_name = dict(zip(questions, reads, strict=True))
        return SystemOneResponse(
            id=reply_id,
            created=int(time.time()),
            model=self._model.chosen_name,
            answers={name: questions[name].answer(read) for name, read in by_name.items()},
            usage=SystemOneUsage(sum(each.input_tokens for each in reads), sum(each.output_tokens for each in reads)),
            diagnostics={name: Diagnostics(read.label_mass, read.argmax_is_label) for name, read in by_name.items()},
        )


def _question(asked: Predicate | Choice | Score, where: str) -> Question:
    match asked:
        case Choice():
            options = [Option(_spelt(each.value), each.description) for each in asked.choices]
        case Score():
            options = [Option(each.label, each.description) for each in asked.levels]
        case _:
            options = [Option("false"), Option("true")]
    return choice(asked.instructions, options, where)


def _spelt(value: str | bool) -> str:
    return json.dumps(value, ensure_ascii=False)


def _answer(asked: Predicate | Choice | Score, read: LabelRead) -> PredicateAnswer | ChoiceAnswer | ScoreAnswer:
    match asked:
        case Choice():
            values = [each.value for each in asked.choices]
            return ChoiceAnswer(
                name=asked.answer_name,
                choice=values[read.best],
                probabilities=list(map(ValueProbability, values, read.probabilities)),
                confidence=read.confidence,
            )
        case Score():
            labels = [each.label for each in asked.levels]
            return ScoreAnswer(
                name=asked.answer_name,
                score=read.mean,
                probabilities=list(map(LevelProbability, range(len(labels)), labels, read.probabilities)),
                confidence=read.confidence,
            )
        case _:
            return PredicateAnswer(name=asked.answer_name, probability=read.probabilities[1])
