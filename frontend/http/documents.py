"""The pages about the server's API: its OpenAPI document, and two ways to read it in a browser."""

from typing import Any

import msgspec
from litestar import Litestar, Request, get
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin, RedocRenderPlugin, SwaggerRenderPlugin
from litestar.openapi.spec import Server

import quire
from quire.frontend.http.json_request import JsonRequest
from quire.frontend.http.openapi_document import openapi_document


class Documentation:
    """Serves /openapi.json, /docs and /redoc of one application. The document is made when it is first asked for."""

    def __init__(self, root_path: str | None) -> None:
        self._root_path = root_path
        self._document: dict[str, Any] | None = None

    def config(self) -> OpenAPIConfig:
        """Swagger's page at /docs. Litestar answers every unknown path below its root, so that cannot be /."""
        return OpenAPIConfig(
            title="Quire",
            version=quire.__version__,
            description="OpenAI- and Anthropic-compatible API of a Quire server.",
            servers=[Server(url=self._root_path or "/")],
            path="/docs",
            render_plugins=[_Swagger(self, path="/"), _Json(self)],
        )

    def routes(self) -> list[Any]:
        """The other pages."""

        @get("/openapi.json", include_in_schema=False, media_type="application/json")
        async def schema(request: JsonRequest) -> bytes:
            """The API's description, where clients look for it."""
            return msgspec.json.encode(self.document(request.app))

        @get("/redoc", include_in_schema=False, media_type="text/html")
        async def redoc(request: JsonRequest) -> bytes:
            """The API's description on Redoc's page."""
            return RedocRenderPlugin().render(request, self.document(request.app))

        return [schema, redoc]

    def document(self, app: Litestar) -> dict[str, Any]:
        """The OpenAPI document of `app`, whose documentation this is."""
        if self._document is None:
            self._document = openapi_document(app)
        return self._document


class _Swagger(SwaggerRenderPlugin):
    def __init__(self, documentation: Documentation, *, path: str) -> None:
        super().__init__(path=path)
        self._documentation = documentation

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        return super().render(request, self._documentation.document(request.app))


class _Json(JsonRenderPlugin):
    def __init__(self, documentation: Documentation) -> None:
        super().__init__()
        self._documentation = documentation

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        return super().render(request, self._documentation.document(request.app))
