"""The text of a sound as server-sent events, clip by clip."""

import msgspec
from msgspec import UNSET, UnsetType

from quire.frontend.audio.answers import ChunkChoice, DeltaText, DurationUsage, SpeechChunk, TokenUsage
from quire.frontend.audio.schema import SpeechRequest
from quire.frontend.http.event_stream import DONE, event_frame
from quire.frontend.outputs import RequestOutput

_encode = msgspec.json.Encoder().encode


class JoinedText:
    """The texts of clips as one, piece by piece, without spaces at their ends.

    Attributes:
        whole: all that was shown.
    """

    def __init__(self) -> None:
        self._separator = ""
        self._begins = True  # nothing of the clip's text was shown
        self._held = ""  # spaces, which are shown if text follows
        self.whole = ""

    def add(self, text: str) -> str:
        """What is to be shown, now that the clip's text goes on with `text`."""
        text = self._held + text
        shown = text.rstrip()
        self._held = text[len(shown) :]
        if self._begins:
            shown = shown.lstrip()
            if not shown:
                self._held = ""
                return ""
            self._begins = False
            shown = self._separator + shown if self.whole else shown
        self.whole += shown
        return shown

    def begin_clip(self, separator: str) -> None:
        """Tells that what comes next is the text of another clip, which `separator` divides from what was shown."""
        self._begins, self._held, self._separator = True, "", separator


class SpeechEvents:
    """Makes events of the outputs of clips, and counts tokens on the way.

    Args:
        separator: goes between the texts of clips.
    """

    def __init__(self, request: SpeechRequest, reply_id: str, model: str, created: int, separator: str) -> None:
        self._request = request
        self._fields = {"id": reply_id, "model": model, "created": created}
        self._object = "transcription.chunk" if request.task == "transcribe" else "translation.chunk"
        self._separator = separator
        self._text = JoinedText()
        self._text.begin_clip(separator)
        self._num_prompt_tokens = self._num_tokens = 0

    def add(self, output: RequestOutput) -> bytes:
        """The event of an output; empty if it brings nothing to show."""
        best = output.outputs[0]
        self._num_tokens += len(best.token_ids)
        if best.finish_reason is not None:
            self._num_prompt_tokens += output.num_prompt_tokens
        text = self._text.add(best.text)
        if not text and best.finish_reason is None:
            return b""
        choice = ChunkChoice(DeltaText(text), best.finish_reason, best.stop_reason)
        usage = self._usage() if self._request.stream_continuous_usage_stats else UNSET
        return self._event("transcript.text.delta", [choice], delta=text, usage=usage)

    def end_clip(self) -> None:
        """Tells that the next output is that of another clip."""
        self._text.begin_clip(self._separator)

    def end(self, num_seconds: float) -> bytes:
        """The last events: the whole text, and usage if the request asks for it."""
        usage: TokenUsage | DurationUsage | UnsetType = UNSET
        if self._request.stream_include_usage:
            usage = self._usage()
        elif self._request.task == "transcribe":
            usage = DurationUsage.of(num_seconds)
        return self._event("transcript.text.done", [], text=self._text.whole, usage=usage) + DONE

    def _usage(self) -> TokenUsage:
        prompt, output = self._num_prompt_tokens, self._num_tokens
        return TokenUsage(prompt, output, prompt + output)

    def _event(self, kind: str, choices: list[ChunkChoice], **fields: object) -> bytes:
        chunk = SpeechChunk(type=kind, object=self._object, choices=choices, **self._fields, **fields)  # type: ignore[arg-type]
        return event_frame(_encode(chunk))
