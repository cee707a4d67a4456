"""The pages about the server's API: its OpenAPI document, and two ways to read it in a browser.

Swagger UI and Redoc come from a package and are served here, so the pages work where no other host can be reached.
"""

from typing import Any

import msgspec
from litestar import Litestar, Request, Router, get
from litestar.datastructures import ResponseHeader
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin, RedocRenderPlugin, SwaggerRenderPlugin
from litestar.openapi.spec import Server
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp
from openapi_ui_bundles import redoc, swagger_ui

import quire
from quire.core.errors import NotFoundError
from quire.frontend.http.json_request import JsonRequest
from quire.frontend.http.pages.openapi_document import openapi_document

_SWAGGER_SCRIPT, _SWAGGER_STYLE = "swagger-ui-bundle.js", "swagger-ui.css"
_SWAGGER_PRESET, _REDOC_SCRIPT = "swagger-ui-standalone-preset.js", "redoc.standalone.js"
_REDOC_LOGO, _REDOC_LOGO_HOST = "logo-mini.svg", b"https://cdn.redoc.ly/redoc/"
_ASSETS = {
    _SWAGGER_SCRIPT: (swagger_ui.static_path, "text/javascript"),
    _SWAGGER_PRESET: (swagger_ui.static_path, "text/javascript"),
    _SWAGGER_STYLE: (swagger_ui.static_path, "text/css"),
    _REDOC_SCRIPT: (redoc.static_path, "text/javascript"),
    _REDOC_LOGO: (redoc.static_path, "image/svg+xml"),
}
"""Files that the pages load: the folder of each, and its media type."""

_NO_ICON = '<link rel="icon" href="data:,">'
_POLICY = ResponseHeader(
    name="Content-Security-Policy",
    value="default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self' data:; worker-src 'self' blob:",
)
"""Holds a browser to this host, whatever the scripts of a later version would load."""


class Documentation:
    """Serves /openapi.json, /docs and /redoc of one application. The document is made when it is first asked for.

    Args:
        root_path: prefix of the server's paths, as clients see them.
        strict_fields: the server refuses unknown fields of bodies.
    """

    def __init__(self, root_path: str, *, strict_fields: bool) -> None:
        self._root_path = root_path
        self._strict_fields = strict_fields
        self._document: dict[str, Any] | None = None

    def config(self) -> OpenAPIConfig:
        """Swagger's page at /docs. Litestar answers every unknown path below its root, so that cannot be /."""
        swagger = _Swagger(
            self,
            path="/",
            js_url=self._url(_SWAGGER_SCRIPT),
            css_url=self._url(_SWAGGER_STYLE),
            standalone_preset_js_url=self._url(_SWAGGER_PRESET),
            favicon=_NO_ICON,
        )
        return OpenAPIConfig(
            title="Quire",
            version=quire.__version__,
            description="OpenAI- and Anthropic-compatible API of a Quire server.",
            servers=[Server(url=self._root_path or "/")],
            openapi_router=Router("/docs", route_handlers=[], include_in_schema=False, response_headers=[_POLICY]),
            render_plugins=[swagger, _Json(self)],
        )

    def routes(self) -> list[Any]:
        """The other pages, and the files that they load."""
        redoc_page = RedocRenderPlugin(js_url=self._url(_REDOC_SCRIPT), google_fonts=False, favicon=_NO_ICON)

        @get("/openapi.json", include_in_schema=False, media_type="application/json")
        async def schema(request: JsonRequest) -> bytes:
            """The API's description, where clients look for it."""
            return msgspec.json.encode(self.document(request.app))

        @get("/redoc", include_in_schema=False, media_type="text/html", response_headers=[_POLICY])
        async def redoc(request: JsonRequest) -> bytes:
            """The API's description on Redoc's page."""
            return redoc_page.render(request, self.document(request.app))

        @get("/static/{name:str}", include_in_schema=False)
        async def asset(name: str) -> ASGIApp:
            """A file of Swagger UI's or Redoc's."""
            return self._asset(name)

        return [schema, redoc, asset]

    def document(self, app: Litestar) -> dict[str, Any]:
        """The OpenAPI document of `app`, whose documentation this is."""
        if self._document is None:
            self._document = openapi_document(app, strict_fields=self._strict_fields)
        return self._document

    def _url(self, asset: str) -> str:
        return f"{self._root_path}/static/{asset}"

    def _asset(self, name: str) -> ASGIApp:
        if name not in _ASSETS:
            raise NotFoundError(f"There is no file {name!r} here; the documentation is at /docs and /redoc.")
        folder, media_type = _ASSETS[name]
        body = (folder / name).read_bytes()
        if name == _REDOC_SCRIPT:
            body = body.replace(_REDOC_LOGO_HOST, self._url("").encode())
        return ASGIResponse(body=body, media_type=media_type, headers={"cache-control": "max-age=86400"})


class _Swagger(SwaggerRenderPlugin):
    def __init__(self, documentation: Documentation, **options: Any) -> None:
        super().__init__(**options)
        self._documentation = documentation

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        return super().render(request, self._documentation.document(request.app))


class _Json(JsonRenderPlugin):
    def __init__(self, documentation: Documentation) -> None:
        super().__init__()
        self._documentation = documentation

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        return super().render(request, self._documentation.document(request.app))
