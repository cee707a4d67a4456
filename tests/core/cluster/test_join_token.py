"""The join token: who may have one, and what comes of it."""

from pathlib import Path

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
