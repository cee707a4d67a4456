"""Lines of a batch that transcribe or translate a sound, by a tiny Whisper."""

import asyncio
import json
import threading
from base64 import b64encode
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.batch.batch_server import BatchServer
from quire.frontend.http.server_config import ServerConfig
from tests.tiny_whisper import reference_tokens, sound, tokenizer, wav, write_whisper

NUM_TOKENS = 8
GREEDY = {"language": "en", "temperature": 0, "max_completion_tokens": NUM_TOKENS}


class _Sounds(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = self.path == "/a.wav"
        self.send_response(200 if found else 404)
        self.end_headers()
        if found:
            self.wfile.write(wav(sound()))

    def log_message(self, *args: Any) -> None:
        """Says nothing."""


def test_lines_name_sounds_by_urls(tmp_path: Path) -> None:
    reference = write_whisper(tmp_path)
    web = HTTPServer(("127.0.0.1", 0), _Sounds)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    data = "data:audio/wav;base64," + b64encode(wav(sound())).decode()
    host = f"http://127.0.0.1:{web.server_port}"

    async def run(*bodies: dict[str, Any], url: str = "/v1/audio/transcriptions") -> list[dict[str, Any]]:
        engine = AsyncLLM.from_engine_args(
            model=str(tmp_path), num_gpu_blocks_override=100, max_num_seqs=4, device="cpu", dtype="float32"
        )
        async with engine:
            server = BatchServer(engine, ServerConfig())
            lines = [{"custom_id": str(number), "url": url, "body": body} for number, body in enumerate(bodies)]
            lines.append({"custom_id": "en", "url": "/v1/audio/translations", "body": bodies[0]})
            answers = [await server.answer(number, json.dumps(line).encode()) for number, line in enumerate(lines)]
        return [{"status": each.response.status_code, "body": each.response.body} for each in answers]

    try:
        by_data, by_web, missing, torn, streamed, subtitles, translated = asyncio.run(
            run(
                {"file_url": data, **GREEDY},
                {"file_url": f"{host}/a.wav", **GREEDY},
                {"file_url": f"{host}/b.wav", **GREEDY},
                {"file_url": "data:audio/wav;base64,!", **GREEDY},
                {"file_url": data, "stream": True},
                {"file_url": data, "response_format": "srt"},
            )
        )
    finally:
        web.shutdown()
    for answer, task in ((by_data, "transcribe"), (by_web, "transcribe"), (translated, "translate")):
        assert answer["status"] == 200
        tokens = reference_tokens(reference, sound(), NUM_TOKENS, language="en", task=task)
        assert answer["body"].text == str(tokenizer().decode(tokens)).strip()
    for answer, param in (
        (missing, "file_url"),
        (torn, "file_url"),
        (streamed, "stream"),
        (subtitles, "response_format"),
    ):
        assert answer["status"] == 400
        assert json.loads(bytes(answer["body"]))["error"]["param"] == param
