"""GET /: describes this server and how to call it, as a page for browsers and as JSON for programs."""

from html import escape
from string import Template

from msgspec import UNSET, Struct, UnsetType

import quire
from quire.frontend.http.pages.greeting import curl_example

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>Quire</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 48rem; margin: 3rem auto; padding: 0 1rem; color: #222; }
pre { background: #f3f3f0; padding: 1rem; border-radius: 6px; overflow-x: auto; }
@media (prefers-color-scheme: dark) { body { background: #1b1b1b; color: #ddd; } pre { background: #2a2a2a; }
a { color: #8ab4f8; } }
</style>
</head>
<body>
<h1>Quire $version</h1>
<p>A server for large language models. It speaks OpenAI's and Anthropic's APIs.$models</p>
<pre>$example</pre>
<ul>
$links
</ul>
</body>
</html>
""")
_DOCUMENTATION = {"docs": "The API, to read and to try", "redoc": "The API, to read", "openapi.json": "for programs"}
_MONITORING = {"health": "whether requests are served", "metrics": "counters for Prometheus"}


class About(Struct, kw_only=True):
    """Answer of GET /: a description of this server."""

    name: str = "Quire"
    version: str = quire.__version__
    models: list[str] | UnsetType = UNSET  # absent where an API key is needed to know them
    documentation: str | UnsetType = UNSET  # path of the documentation, where there is one
    openapi: str | UnsetType = UNSET


class FrontPage:
    """Describes one server.

    Args:
        models: the names that the model goes by.
        needs_key: requests need an API key; then the models are not listed.
        has_documentation: the API's documentation is served.
        root_path: prefix of the server's paths, as clients see them.
    """

    def __init__(self, models: list[str], *, needs_key: bool, has_documentation: bool, root_path: str) -> None:
        self._models = [] if needs_key else models
        self._needs_key = needs_key
        self._has_documentation = has_documentation
        self._root_path = root_path

    def about(self) -> About:
        """The description as JSON."""
        return About(
            models=self._models or UNSET,
            documentation=f"{self._root_path}/docs" if self._has_documentation else UNSET,
            openapi=f"{self._root_path}/openapi.json" if self._has_documentation else UNSET,
        )

    def html(self, host_url: str) -> str:
        """The description as a page that loads nothing else.

        Args:
            host_url: the server's address as the client wrote it, without a path.
        """
        example = curl_example(
            host_url + self._root_path, self._models[0] if self._models else "MODEL", needs_key=self._needs_key
        )
        names = " or ".join(f"<b>{escape(name)}</b>" for name in self._models)
        pages = {**(_DOCUMENTATION if self._has_documentation else {}), **_MONITORING}
        return _PAGE.substitute(
            version=escape(quire.__version__),
            models=f" The model here is {names}." if names else "",
            example=escape(example),
            links="\n".join(
                f'<li><a href="{escape(self._root_path)}/{path}">/{path}</a>: {text}</li>'
                for path, text in pages.items()
            ),
        )
