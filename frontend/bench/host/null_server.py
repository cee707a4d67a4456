"""`python -m quire.frontend.bench.host.null_server SETUP PORT`: the real HTTP server; its engine has no model."""

import sys

import msgspec
import uvloop

from quire.core.logging import LoggingConfig, configure
from quire.frontend.bench.host.null_engine import NullSetup
from quire.frontend.http.server import serve
from quire.frontend.http.server_config import ServerConfig


def main() -> None:
    """Serves until SIGTERM. SETUP is a `NullSetup` as JSON."""
    configure("serve", LoggingConfig())
    setup = msgspec.json.decode(sys.argv[1], type=NullSetup)
    uvloop.run(serve(setup.llm(), ServerConfig(host="127.0.0.1", port=int(sys.argv[2]))))


if __name__ == "__main__":
    main()
