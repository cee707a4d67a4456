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
