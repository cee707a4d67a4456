"""The join token: who may have one, and what comes of it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from quire.core.cluster.join_token import JoinToken
from quire.core.errors import ConfigError


def test_equal_tokens_give_equal_keys_and_others_give_others() -> None:
    one, same, other = (JoinToken(secret * 32).keys() for secret in "aab")
    assert one == same
    assert not {one.server_public, one.client_public} & {other.server_public, other.client_public}
    assert len({one.server_secret, one.client_secret}) == 2


def test_a_short_token_is_refused_without_repeating_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_JOIN_TOKEN", "x1y2z3")
    with pytest.raises(ConfigError, match="QUIRE_JOIN_TOKEN has 6 characters and needs 32 or more") as caught:
        JoinToken.from_environment()
    assert "x1y2z3" not in str(caught.value)


def test_a_token_of_node_0s_own_is_kept_where_nobody_else_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "token"
    first = JoinToken.from_file(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert JoinToken.from_file(path).keys() == first.keys()
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="Others may read the join token"):
        JoinToken.from_file(path)


def test_servers_that_start_at_once_have_one_token(tmp_path: Path) -> None:
    """A file that one of them has made, and not yet written, would have no characters."""
    with ThreadPoolExecutor(4) as pool:
        for number in range(100):
            together = Barrier(4)

            def read(path: Path = tmp_path / str(number), together: Barrier = together) -> bytes:
                together.wait()
                return JoinToken.from_file(path).keys().server_public

            assert len({each.result() for each in [pool.submit(read) for _ in range(4)]}) == 1
    assert len(list(tmp_path.iterdir())) == 100
