"""A configuration file that has an option twice."""

from pathlib import Path

import pytest

from quire.core.errors import ConfigError
from quire.frontend.flags.config_file import _load


@pytest.mark.parametrize("second", ["max-num-seqs", "max_num_seqs"])
def test_an_option_given_twice_is_refused(tmp_path: Path, second: str) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(f"max-num-seqs: 4\nport: 5\n{second}: 6\n")
    with pytest.raises(ConfigError, match=r"twice \(line 3\)"):
        _load(str(path))
    path.write_text("max-num-seqs: 4\nport: 5\n")
    assert _load(str(path))[0] == {"max-num-seqs": 4, "port": 5}


@pytest.mark.parametrize(
    "text",
    [
        "hf-overrides:\n  rope_theta: 1\n  rope_theta: 2\n",
        "hf-overrides: {a: {b: [1, {c: 1, d: 2, c: 3}]}}\n",
        "hf-overrides: &x\n  a: 1\n  a: 2\nchat-template-kwargs: *x\n",
    ],
)
def test_a_key_within_a_value_given_twice_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"has '(rope_theta|c|a)' twice \(line"):
        _load(str(path))


def test_keys_that_only_look_alike_are_different(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("hf-overrides: {a-b: 1, a_b: 2, c: {a-b: 3}}\nlogits-processors: &l [x]\nmodel: *l\n")
    assert _load(str(path))[0]["hf-overrides"] == {"a-b": 1, "a_b": 2, "c": {"a-b": 3}}
