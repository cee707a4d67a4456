"""A server with files of a few repositories, which answers as the Hugging Face hub does."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub(repositories: Mapping[str, Mapping[str, bytes]], asked: list[str] | None = None) -> Iterator[str]:
    """The address of a hub with the files of `repositories`, each by name and path; `asked` gets requests' paths."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

        def _answer(self, *, with_body: bool) -> None:
            path = self.path.partition("?")[0].strip("/")
            if asked is not None:
                asked.append(path)
            for name, files in repositories.items():
                if f"{path}/".startswith(f"api/models/{name}/"):
                    content: object = [
                        {"type": "file", "path": each, "size": len(data), "oid": _etag(data)}
                        for each, data in files.items()
                    ]
                    if "/tree/" not in path:
                        listed = [{"rfilename": each} for each in files]
                        content = {"id": name, "sha": COMMIT, "siblings": listed, "private": False, "gated": False}
                    self._send(json.dumps(content).encode(), with_body, "application/json")
                    return
                wanted = path.removeprefix(f"{name}/resolve/{COMMIT}/")
                if wanted in files:
                    self._send(files[wanted], with_body, "application/octet-stream")
                    return
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _send(self, body: bytes, with_body: bool, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{_etag(body)}"')
            self.end_headers()
            if with_body:
                self.wfile.write(body)

    def _etag(data: bytes) -> str:
        return hashlib.sha1(data).hexdigest()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
