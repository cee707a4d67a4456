"""Every flag of vLLM's is known here, and taken with the value that it has in vLLM when nobody gives it.

`vllm_flags.json` lists the flags of `vllm serve`, those of version 0.32, those that are new or have another default in
0.33, and those that only older versions have, each with its default; an object of a class of vLLM's that Quire has
nothing like is null.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.core.config.engine_args import EngineArgs, keyword_aliases
from quire.core.config.parallel import EplbConfig
from quire.core.errors import ConfigError
from quire.frontend.cli import serve
from quire.frontend.flags.parser import CommandParser
from quire.frontend.launch.keywords import read_keywords
from quire.frontend.refusals.unsupported_flags import unsupported

TABLES = json.loads(Path(__file__).with_name("vllm_flags.json").read_text())
NEWER: dict[str, Any] = TABLES["0.33"]
FLAGS: dict[str, Any] = NEWER | TABLES["0.32"] | TABLES["older"]


def parse(*words: str) -> Any:
    parser = CommandParser("quire serve", "Serve.")
    serve.add_arguments(parser)
    return parser.parse_args(words)


def words(flag: str, value: Any) -> list[str]:
    """A command line that gives `flag` this value."""
    if isinstance(value, bool):
        return [flag if value else "--no-" + flag.removeprefix("--")] if flag.startswith("--") else []
    return [flag, json.dumps(value) if isinstance(value, list | dict) else str(value)]


def switches() -> set[str]:
    parser = CommandParser("quire serve", "Serve.")
    serve.add_arguments(parser)
    taken = {flag for flag, action in parser.flags.items() if action.nargs == 0}
    refused = {
        flag for section in ("engine", "server") for flag, known in unsupported(section).items() if known.is_switch
    }
    return taken | refused


def test_every_flag_is_taken_or_refused_by_name() -> None:
    parser = CommandParser("quire serve", "Serve.")
    serve.add_arguments(parser)
    assert [flag for flag in FLAGS if flag not in parser.flags and parser.refusals.find(flag) is None] == []


def test_the_default_is_taken_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    no_value, refused = switches(), []
    for flag, value in [*FLAGS.items(), *NEWER.items()]:
        if value is None and flag in no_value:
            continue  # such a switch has no spelling for its default
        try:
            parse(*words(flag, value))
        except SystemExit:
            refused.append(capsys.readouterr().err)
    assert refused == []


def test_the_default_is_taken_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "vllm.yaml"
    for defaults in (FLAGS, FLAGS | NEWER):
        path.write_text(yaml.safe_dump({flag[2:]: value for flag, value in defaults.items() if flag.startswith("--")}))
        assert parse("--config", str(path)).server_config.port == FLAGS["--port"]


def test_the_default_is_taken_as_a_keyword() -> None:
    known = EngineArgs().flat() | keyword_aliases()
    names = {f"--{name.replace('_', '-')}" for name in known} | set(unsupported("engine"))
    refused = []
    for flag, value in [*FLAGS.items(), *NEWER.items()]:
        if flag.startswith("--") and flag in names:
            try:
                read_keywords({flag[2:].replace("-", "_"): value})
            except ConfigError as error:
                refused.append(str(error))
    assert refused == []


def test_an_option_has_vllms_older_name_too() -> None:
    parsed = parse("--dcp-kv-cache-interleave-size", "4").engine_args.parallel
    assert parsed == read_keywords({"dcp_kv_cache_interleave_size": 4, "cp_kv_cache_interleave_size": None}).parallel
    assert parsed.cp_kv_cache_interleave_size == 4
    with pytest.raises(ConfigError, match=r"'cp_kv_cache_interleave_size' and 'dcp_.*' are one option"):
        read_keywords({"dcp_kv_cache_interleave_size": 4, "cp_kv_cache_interleave_size": 2})


@pytest.mark.parametrize(
    "changed", [{"policy": "other"}, {"communicator": "nixl"}, {"enable_migration_batching": True}]
)
def test_eplb_is_refused_what_it_would_ignore(changed: dict[str, Any]) -> None:
    default = FLAGS["--eplb-config"]
    assert read_keywords({"eplb_config": default}).parallel.eplb_config == EplbConfig()
    assert read_keywords({"eplb_config": default | {"use_async": False}}).parallel.eplb_config is not None
    with pytest.raises(ConfigError, match=next(iter(changed))):
        read_keywords({"eplb_config": default | changed})
