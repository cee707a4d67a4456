"""Turns one completion's token ids into text as they arrive, and finds stop strings."""

from collections.abc import Sequence

from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.text.stop_strings import StopScanner
from quire.frontend.text.token_stream import open_stream
from quire.frontend.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one completion.

    Text that may be the beginning of a stop string is held back until that is decided.

    Args:
        prompt_token_ids: the tokens that the completion continues. They decide about leading spaces, and about a
            character that begins in the prompt.
    """

    __slots__ = ("_held", "_include_stop", "_min_tokens", "_num_tokens", "_scanner", "_stream", "stop")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None:
        self._stream = open_stream(
            tokenizer,
            prompt_token_ids,
            skip_special_tokens=sampling.skip_special_tokens,
            shown_special_token_ids=sampling.shown_special_token_ids or (),
            spaces_between_special_tokens=sampling.spaces_between_special_tokens,
        )
        stops = sampling.stop_strings
        self._scanner = StopScanner(stops) if stops else None
        self._include_stop = sampling.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        self._num_tokens = 0
        self._held = ""  # decoded text that may be the beginning of a stop string
        self.stop: str | None = None

    def push(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Takes the next tokens. Returns new text, and the number of tokens that count.

        All tokens count, unless one completes a stop string, which `stop` then is; later tokens do not count.
        """
        if self._scanner is None:
            if len(token_ids) == 1:  # nearly always
                return self._stream.push(token_ids[0]), 1
            return "".join(map(self._stream.push, token_ids)), len(token_ids)
        released = []
        for count, token_id in enumerate(token_ids, start=1):
            self._num_tokens += 1
            released.append(self._scan(self._stream.push(token_id), may_stop=self._num_tokens > self._min_tokens))
            if self.stop is not None:
                return "".join(released), count
        return "".join(released), len(token_ids)

    def finish(self) -> str:
        """Returns the rest of the text, if no stop string ended the completion. May find a stop string in the rest."""
        rest = self._stream.flush()
        if self._scanner is None:
            return rest
        released = self._scan(rest, may_stop=self._num_tokens > self._min_tokens)
        if self.stop is None:
            released += self._held
            self._held = ""
        return released

    def _scan(self, text: str, *, may_stop: bool) -> str:
        """Appends decoded text; returns the text that is certain by now."""
        assert self._scanner is not None
        if not text:
            return ""
        pending = self._held + text
        if not may_stop:
            self._scanner.advance(text)
        elif (match := self._scanner.scan(text)) is not None:
            self.stop = match.stop
            end = len(self._held) + match.end
            self._held = ""
            return pending[: end if self._include_stop else end - len(match.stop)]
        cut = len(pending) - (0 if self._include_stop else self._scanner.held)
        self._held = pending[cut:]
        return pending[:cut]
