"""Logs requests and their outputs, where the options for it are set, in the words of vLLM's log.

The parameters of a request are logged at level INFO; its prompt and all token ids only at level DEBUG. Outputs are
logged only with their own option.
"""

from typing import Any

from quire.core.logging import get_logger
from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.frontend.requests.pooling_stream import PoolingStream
from quire.frontend.requests.prompt import Prompt
from quire.frontend.requests.request_stream import RequestStream

logger = get_logger(__name__)


class RequestLog:
    """Logs requests.

    Args:
        max_length: characters of a text, or token ids, that a line shows at most; None shows all.
        outputs: log outputs too.
        deltas: of a streamed output, log each part too.
    """

    def __init__(self, *, max_length: int | None = None, outputs: bool = False, deltas: bool = False) -> None:
        self._max_length = max_length
        self.outputs = outputs
        self._deltas = deltas

    def add(self, request_id: str, prompt: Prompt, params: object) -> None:
        """Logs a new request; `params` are those of its sampling or beam search."""
        num_tokens = prompt.num_tokens
        logger.info("Received request %s: params: %s, prompt tokens: %d.", request_id, params, num_tokens)
        if prompt.embeds is None:  # embeddings in a log are of no use
            logger.debug(
                "Request %s details: prompt: %r, prompt_token_ids: %s.",
                *(request_id, self._cut(prompt.text), self._cut(prompt.token_ids)),
            )

    def add_summary(self, stream: RequestStream | PoolingStream) -> None:
        """Logs the token counts and times of a request that has ended."""
        logger.info("%s", stream.summary())

    def add_delta(self, request_id: str, delta: CompletionOutput) -> None:
        """Logs a part of a streamed output."""
        if self._deltas:
            self._add_output(request_id, " (streaming delta)", delta.text, delta)

    def add_output(self, request_id: str, text: str, output: CompletionOutput, *, is_streamed: bool) -> None:
        """Logs a whole output; `output` is the last part of it."""
        self._add_output(request_id, " (streaming complete)" if is_streamed else "", text, output)

    def _add_output(self, request_id: str, kind: str, text: str, output: CompletionOutput) -> None:
        logger.debug(
            "Generated response %s%s details: output_token_ids: %s", request_id, kind, self._cut(output.token_ids)
        )
        logger.info(
            "Generated response %s%s: output: %r, finish_reason: %s",
            *(request_id, kind, self._cut(text), output.finish_reason),
        )

    def _cut(self, text: Any) -> Any:
        return text if text is None or self._max_length is None else text[: self._max_length]


class LoggedStream(RequestStream):
    """A request's outputs, which are logged as the reader takes them."""

    __slots__ = ("_log", "_texts")

    def __init__(self, log: RequestLog, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._log = log
        self._texts: dict[int, list[str]] = {}  # texts of a stream, by the index of the sequence

    def _take(self) -> RequestOutput:
        output = super()._take()
        for each in output.outputs:
            self._add(each)
        return output

    def _add(self, part: CompletionOutput) -> None:
        text = part.text
        if self._only_news:
            self._log.add_delta(self.request_id, part)
            texts = self._texts.setdefault(part.index, [])
            texts.append(text)
            text = "".join(texts)
        if part.finish_reason is not None:
            self._log.add_output(self.request_id, text, part, is_streamed=self._only_news)
