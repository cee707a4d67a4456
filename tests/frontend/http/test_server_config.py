"""Options of the HTTP server that need more than their type."""

from pathlib import Path
from typing import Any

import pytest

from quire.core.config.engine_args import convert_group
from quire.core.errors import ConfigError
from quire.frontend.http.server_config import ServerConfig


def test_keys_come_from_the_flag_then_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert ServerConfig().accepted_api_keys == []
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    assert ServerConfig().accepted_api_keys == ["theirs"]
    monkeypatch.setenv("QUIRE_API_KEY", "ours")
    assert ServerConfig().accepted_api_keys == ["ours"]
    assert ServerConfig(api_key=["a", "b"]).accepted_api_keys == ["a", "b"]
    for keys in ([], [""], ["a", " "]):
        with pytest.raises(ConfigError, match="--api-key"):
            ServerConfig(api_key=keys)


@pytest.mark.parametrize("name", ["QUIRE_API_KEY", "VLLM_API_KEY"])
def test_an_empty_key_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    monkeypatch.setenv(name, "")
    with pytest.raises(ConfigError, match="API_KEY is empty"):
        ServerConfig().check_keys()
    ServerConfig(api_key=["a"]).check_keys()


def test_chat_template_is_a_file_or_text(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages }}")
    assert ServerConfig().read_chat_template() is None
    assert ServerConfig(chat_template=str(file)).read_chat_template() == "{{ messages }}"
    text = "{% for m in messages %}{% endfor %}"
    assert ServerConfig(chat_template=text).read_chat_template() == text
    with pytest.raises(ConfigError, match="--chat-template: The chat template is no valid Jinja"):
        ServerConfig(chat_template="{% for m in messages %}").read_chat_template()
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere"):
        ServerConfig(chat_template="nowhere.jinja").read_chat_template()


def test_tls_files_must_be_there(tmp_path: Path) -> None:
    file = tmp_path / "cert.pem"
    file.write_text("x")
    assert ServerConfig(ssl_certfile=str(file)).ssl_certfile == str(file)
    with pytest.raises(ConfigError, match=r"there is no file 'gone\.pem'"):
        ServerConfig(ssl_certfile="gone.pem")


@pytest.mark.parametrize("half", [{"fingerprint_mode": "custom"}, {"fingerprint_value": "mine"}])
def test_a_fingerprint_of_ones_own_needs_both_flags(half: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="need each other"):
        convert_group(ServerConfig, half)


@pytest.mark.parametrize(
    "options",
    [
        {"ssl_keyfile": "F"},
        {"ssl_ca_certs": "F"},
        {"ssl_cert_reqs": 2},
        {"ssl_ciphers": "x"},
        {"enable_ssl_refresh": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_tls_are_not_ignored_without_a_certificate(options: dict[str, Any]) -> None:
    flag = "--" + next(iter(options)).replace("_", "-")
    with pytest.raises(ConfigError, match=f"{flag} needs --ssl-certfile"):
        ServerConfig(**options)


def test_clients_certificates_are_checked_with_authorities_and_a_policy(tmp_path: Path) -> None:
    file = tmp_path / "cert.pem"
    file.write_text("x")
    with pytest.raises(ConfigError, match="--ssl-ca-certs FILE"):
        ServerConfig(ssl_certfile=str(file), ssl_cert_reqs=1)
    with pytest.raises(ConfigError, match="without --ssl-cert-reqs"):
        ServerConfig(ssl_certfile=str(file), ssl_ca_certs=str(file))


@pytest.mark.parametrize(
    ("name", "value"),
    [("port", 65536), ("ssl_cert_reqs", 3), ("max_request_body_bytes", 0), ("uvicorn_log_level", "x")],
)
def test_values_out_of_range_are_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        convert_group(ServerConfig, {name: value})
