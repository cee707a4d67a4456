"""`system_fingerprint`: a name for the version, the model and the options that an answer came from."""

import hashlib

import msgspec

import quire
from quire.core.config.resolved import EngineConfig
from quire.frontend.http.server_config import ServerConfig

_NUM_DIGITS = 8


def fingerprint(server: ServerConfig, config: EngineConfig) -> str | None:
    """The fingerprint of this server's answers, in the form that `--fingerprint-mode` chooses; None without one."""
    match server.fingerprint_mode:
        case "none":
            return None
        case "custom":
            return server.fingerprint_value
        case "hash":
            parts = []
        case "full":
            sizes = (("tp", config.layout.tensor), ("pp", config.layout.pipeline))
            parts = [f"{name}{size}" for name, size in sizes if size > 1]
    return "-".join([f"quire-{quire.__version__}", *parts, _digest(config)])


def _digest(config: EngineConfig) -> str:
    """Hexadecimal digits of a hash over the model and the options of its computation."""
    spec = msgspec.structs.replace(config.spec, path="")  # replicas may keep the checkpoint in different folders
    facts: list[object] = [spec, config.device, config.quantization, config.layout, config.logprobs_mode]
    facts.append(config.expert_placement)
    facts += [config.max_model_len, config.limits, config.cache, config.logits_processors]
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:_NUM_DIGITS]
