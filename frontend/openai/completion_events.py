"""The outputs of text completions as the chunks of a stream."""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from quire.frontend.http.event_stream import DONE
from quire.frontend.openai.answers import (
    CompletionChunk,
    CompletionChunkChoice,
    CompletionUsage,
)
from quire.frontend.openai.generation import Reply, TextEvent, event
from quire.frontend.openai.logprobs import LogprobFormatter
from quire.frontend.openai.schema import CompletionRequest
from quire.frontend.outputs import CompletionOutput, Logprob, RequestOutput
from quire.frontend.parsing.events import Usage
from quire.frontend.text.tokenizer import Tokenizer


class _Sent(msgspec.Struct):
    """The part of one choice that the stream has sent."""

    text_event: TextEvent | None = None
    num_tokens: int = 0
    num_characters: int = 0  # of the tokens with log-probabilities, and of the echo
    begun: bool = False  # an event with more than text was sent


class CompletionChunks:
    """Turns the outputs of one request's prompts into events, and counts tokens on the way."""

    __slots__ = (
        *(
            "_request",
            "_reply",
            "_formatter",
            "_encoder",
            "_tokenizer",
            "_echo",
            "_scores_echo",
            "_return_token_ids",
            "_n",
        ),
        *("_prompts", "_sent", "_text_only"),
    )

    def __init__(
        self,
        request: CompletionRequest,
        reply: Reply,
        formatter: LogprobFormatter,
        encoder: msgspec.json.Encoder,
        tokenizer: Tokenizer | None,
    ) -> None:
        self._request = request
        self._reply = reply
        self._formatter = formatter
        self._encoder = encoder
        self._tokenizer = tokenizer
        self._echo = bool(request.echo)
        self._scores_echo = request.scores_echo
        self._return_token_ids = bool(request.return_token_ids)
        self._n = request.n or 1
        self._prompts: dict[int, tuple[int, int]] = {}  # prompt index -> (prompt tokens, cached tokens)
        self._sent: dict[int, _Sent] = {}  # by choice
        self._text_only = not (self._return_token_ids or self._echo or reply.continuous_usage)

    def add(self, prompt_index: int, output: RequestOutput) -> bytes:
        """Events for the new part of a prompt's texts; empty without one."""
        self._prompts[prompt_index] = (output.num_prompt_tokens, output.num_cached_tokens or 0)
        frames = []
        for each in output.outputs:
            index = prompt_index * self._n + each.index
            sent = self._sent.get(index) or self._sent.setdefault(index, _Sent())
            sent.num_tokens += len(each.token_ids)
            if self._text_only and each.text and each.finish_reason is None and not each.logprobs:
                text_event = sent.text_event or self._start_text(index, sent)
                frames.append(text_event.fill(each.text))
            elif each.text or each.finish_reason or each.logprobs or (self._return_token_ids and each.token_ids):
                frames.append(self._frame([self._choice(index, each, output)]))
        return b"".join(frames)

    def end(self) -> bytes:
        """Usage, when asked for, and the end mark."""
        if not self._reply.include_usage:
            return DONE
        return self._frame([], usage=self._usage()) + DONE

    def _start_text(self, index: int, sent: _Sent) -> TextEvent:
        empty = CompletionChunkChoice(index=index, text="")
        sent.text_event = TextEvent(self._frame([empty]), "text", self._encoder)
        return sent.text_event

    def _choice(self, index: int, each: CompletionOutput, output: RequestOutput) -> CompletionChunkChoice:
        sent = self._sent[index]
        first = not sent.begun
        echoed = prompt_text(output, self._tokenizer) if first and self._echo else ""
        offset = sent.num_characters + len(echoed)
        rows: Sequence[dict[int, Logprob] | None] = each.logprobs or []
        if first and self._scores_echo:
            offset, rows = 0, [*(output.prompt_logprobs or []), *rows]
        first_id = output.prompt_token_ids[0]
        logprobs = self._formatter.completion(rows, offset, first_id=first_id) if rows else None
        sent.num_characters = offset + (sum(map(len, logprobs.tokens)) if logprobs is not None else 0)
        sent.begun = True
        return CompletionChunkChoice(
            index=index,
            text=echoed + each.text,
            logprobs=logprobs,
            finish_reason=each.finish_reason,
            stop_reason=each.stop_reason,
            token_ids=each.token_ids if self._return_token_ids else UNSET,
            prompt_token_ids=output.prompt_token_ids if self._return_token_ids and first else UNSET,
            weight_versions=self._request.weight_versions(sent.num_tokens) if each.finish_reason else UNSET,
        )

    def _frame(self, choices: list[CompletionChunkChoice], *, usage: CompletionUsage | None = None) -> bytes:
        reply = self._reply
        if usage is None and reply.continuous_usage:
            [choice] = choices
            prompt_tokens, cached_tokens = self._prompts[choice.index // self._n]
            usage = reply.usage(Usage(prompt_tokens, self._sent[choice.index].num_tokens, cached_tokens))
        chunk = CompletionChunk(
            id=reply.id,
            created=reply.created,
            model=reply.model,
            choices=choices,
            system_fingerprint=reply.fingerprint_of(choices),
            usage=usage if reply.include_usage else UNSET,
        )
        return event(chunk, self._encoder)

    def _usage(self) -> CompletionUsage:
        prompt_tokens, cached_tokens = (sum(column) for column in zip(*self._prompts.values(), strict=True))
        num_tokens = sum(sent.num_tokens for sent in self._sent.values())
        return self._reply.usage(Usage(prompt_tokens, num_tokens, cached_tokens))


def prompt_text(output: RequestOutput, tokenizer: Tokenizer | None) -> str:
    """The prompt as text, for `echo`."""
    return output.prompt if output.prompt is not None else text_of(output.prompt_token_ids, tokenizer)


def text_of(token_ids: list[int], tokenizer: Tokenizer | None) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=False) if tokenizer is not None else ""
