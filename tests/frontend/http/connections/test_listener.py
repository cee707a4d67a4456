"""Listening sockets."""

import subprocess
import sys

LIMIT_AFTER_BINDING = """
import resource
from quire.frontend.http.connections.listener import bind
from quire.frontend.http.server_config import ServerConfig

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 2048))
bind(ServerConfig(host="127.0.0.1", port=0)).close()
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_a_server_takes_as_many_connections_as_the_system_allows_and_not_as_a_shell_suggests():
    done = subprocess.run([sys.executable, "-c", LIMIT_AFTER_BINDING], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(2048, 2048)"
