"""The HTTP client of `quire chat` and `quire complete`, for any OpenAI-compatible server."""

import argparse
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx

from quire.core import envs
from quire.core.errors import QuireError
from quire.frontend.flags.parser import CommandParser

DEFAULT_URL = "http://localhost:8000/v1"
CONNECT_TIMEOUT_S = 5.0
MODELS_TIMEOUT_S = 10.0


def add_client_arguments(parser: CommandParser) -> None:
    """The flags that both commands share."""
    parser.add_argument("--url", default=DEFAULT_URL, metavar="URL", help="Where the server's API is.")
    parser.add_argument("--model-name", metavar="NAME", help="Model to ask for; the server's first one when unset.")
    parser.add_argument("--api-key", metavar="KEY", help="Key to send; $QUIRE_API_KEY or $OPENAI_API_KEY when unset.")
    parser.add_argument("--stats", action="store_true", help="Print tokens and times after each answer.")


def add_history_argument(parser: CommandParser) -> None:
    """Adds the last flag of both commands, after the flags of each one."""
    parser.add_argument(
        "--no-history", action="store_true", help="Keep what is typed out of the history in $XDG_STATE_HOME/quire."
    )


class ServerError(QuireError):
    """The server cannot be reached, refused the request, or broke off its answer."""


class ServerClient:
    """Streams events of one server. Close it, or use it as a context manager."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = _complete_url(url)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)  # the first token of a long prompt may take minutes
        self._http = httpx.Client(headers=headers, timeout=timeout)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "ServerClient":
        """The client that the flags of `add_client_arguments` describe."""
        return cls(args.url, args.api_key or envs.read("API_KEY") or os.environ.get("OPENAI_API_KEY"))

    def __enter__(self) -> "ServerClient":
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()

    def first_model(self) -> str:
        """The first model name that the server reports."""
        with self._explained():
            response = self._http.get(f"{self.url}/models", timeout=MODELS_TIMEOUT_S)
            _raise_for_status(response)
            try:
                return str(response.json()["data"][0]["id"])
            except (ValueError, KeyError, IndexError, TypeError):
                raise ServerError(f"{self.url}/models does not list a model; is --url right?") from None

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The JSON events of a streamed answer, until `[DONE]`. Closing the iterator makes the server stop."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with self._explained(), self._http.stream("POST", self.url + path, json=body) as response:
            if response.is_error:
                response.read()
            _raise_for_status(response)
            for line in response.iter_lines():
                name, _, data = line.partition(":")
                if name != "data":
                    continue
                if data.strip() == "[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise ServerError(_message_of(event) or "the server broke the answer off")
                yield event

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns failures of the connection into errors with a remedy."""
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            if "SSL" in str(error):  # a server is there; http:// for https://, or an unknown certificate
                raise ServerError(f"the connection to {self.url} failed: {error}") from None
            raise ServerError(
                f"no server answers at {self.url}. Start one with `quire serve`, or name yours with --url."
            ) from None
        except UnicodeEncodeError:
            raise ServerError("the text has bytes that are not UTF-8.") from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise ServerError(f"the connection to {self.url} failed: {error or type(error).__name__}") from None
        except json.JSONDecodeError as error:
            raise ServerError(f"{self.url} sent an event that is not JSON: {error}") from None


def _complete_url(url: str) -> str:
    """`localhost:8000` as `http://localhost:8000/v1`; a URL with a path keeps it."""
    if "://" not in url:
        url = f"http://{url}"
    url = url.rstrip("/")
    return url if urlsplit(url).path else f"{url}/v1"


def _raise_for_status(response: httpx.Response) -> None:
    if not response.is_error:
        return
    try:
        message = _message_of(response.json())
    except ValueError:
        message = None
    message = message or f"the server answered {response.status_code} {response.reason_phrase}"
    if response.status_code == httpx.codes.NOT_FOUND:  # of the model or the path, as the address shows
        message += f" ({response.url})"
    raise ServerError(message)


def _message_of(body: Any) -> str | None:
    """The text of an error in OpenAI's shape."""
    error = body.get("error", body) if isinstance(body, dict) else None
    return str(error["message"]) if isinstance(error, dict) and error.get("message") else None


class AnswerTimes:
    """Measures one streamed answer, for --stats."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._first: float | None = None
        self._usage: dict[str, Any] = {}
        self.finish_reason: str | None = None

    def saw(self, event: dict[str, Any], text: str) -> None:
        """Records one event and its text."""
        if text and self._first is None:
            self._first = time.perf_counter()
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices") or []:
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def summary(self) -> str:
        """One line: token counts, seconds to the first token, tokens per second after it."""
        seconds = time.perf_counter() - self._start
        first = (self._first - self._start) if self._first is not None else seconds
        prompt, output = self._usage.get("prompt_tokens", 0), self._usage.get("completion_tokens", 0)
        rate = f", {(output - 1) / (seconds - first):.1f} tokens/s" if output > 1 and seconds > first else ""
        return f"[{prompt} prompt + {output} output tokens, first after {first:.3f} s, {seconds:.3f} s in all{rate}]"
