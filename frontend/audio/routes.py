"""The routes of sounds."""

from typing import Any

from litestar import Router, post
from litestar.openapi.datastructures import ResponseSpec
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp

from quire.core import envs
from quire.frontend.audio.answers import Transcription, VerboseTranscription
from quire.frontend.audio.schema import SpeechRequest, TranscriptionRequest, TranslationRequest
from quire.frontend.audio.service import SpeechToText
from quire.frontend.chat.client_headers import ClientHeaders
from quire.frontend.http.answers import HttpAnswers, documented, json_answer
from quire.frontend.http.errors import ErrorBody
from quire.frontend.http.form_request import MAX_FIELDS_BYTES, read_form
from quire.frontend.http.json_request import JsonRequest
from quire.frontend.http.pages.openapi_document import FORM

_SIZE_LIMIT = "QUIRE_MAX_AUDIO_CLIP_FILESIZE_MB"
_TEXT_TYPES = {"srt": "application/x-subrip", "vtt": "text/vtt"}


def audio_routes(service: SpeechToText, answers: HttpAnswers) -> Router:
    """Handlers for /v1/audio."""
    max_file_bytes = int(envs.read_float("MAX_AUDIO_CLIP_FILESIZE_MB") * 2**20)
    limits: dict[str, Any] = {"request_max_body_size": 2 * max_file_bytes + 2 * MAX_FIELDS_BYTES}

    async def answer(request: JsonRequest, kind: type[SpeechRequest]) -> ASGIApp:
        answers.check_ready()
        body, file = await read_form(request, kind, max_file_bytes=max_file_bytes, limit=_SIZE_LIMIT)
        headers = ClientHeaders.read(request.headers)
        if body.stream:
            return answers.stream(service.stream(body, file.data, headers))
        found = await answers.result(service.complete(body, file.data, headers), request)
        if not isinstance(found, str):
            return json_answer(found)
        media_type = _TEXT_TYPES.get(body.response_format, "text/plain")
        return ASGIResponse(body=found.encode(), media_type=f"{media_type}; charset=utf-8")

    responses = documented(Transcription | VerboseTranscription) | {
        404: ResponseSpec(ErrorBody, description="The model hears nothing.", generate_examples=False),
        415: ResponseSpec(ErrorBody, description="The body is no form.", generate_examples=False),
    }

    @post(
        "/transcriptions",
        status_code=200,
        opt={FORM: TranscriptionRequest},
        responses=responses,
        summary="Transcribe",
        **limits,
    )
    async def create_transcription(request: JsonRequest) -> ASGIApp:
        """Writes what is said in a sound. The body is a form with the `file` and fields; a stream of events with
        `stream`.
        """
        return await answer(request, TranscriptionRequest)

    @post(
        "/translations",
        status_code=200,
        opt={FORM: TranslationRequest},
        responses=responses,
        summary="Translate speech",
        **limits,
    )
    async def create_translation(request: JsonRequest) -> ASGIApp:
        """Writes in English what is said in a sound. The body is that of a transcription."""
        return await answer(request, TranslationRequest)

    return Router("/v1/audio", route_handlers=[create_transcription, create_translation])
