"""All engine options as a user wrote them.

Command-line flags, YAML keys, Python keywords, the documentation and validation all derive from the groups.
"""

from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct

from quire.core.config.cache import CacheConfig
from quire.core.config.device import DeviceConfig
from quire.core.config.load import LoadConfig
from quire.core.config.lora import LoRAConfig
from quire.core.config.model import ModelConfig
from quire.core.config.multimodal import MultimodalConfig
from quire.core.config.observability import ObservabilityConfig
from quire.core.config.parallel import ParallelConfig
from quire.core.config.reasoning import ReasoningConfig
from quire.core.config.recovery import RecoveryConfig
from quire.core.config.scheduler import SchedulerConfig
from quire.core.config.speculative import SpeculativeConfig
from quire.core.config.structured_outputs import StructuredOutputsConfig
from quire.core.errors import ConfigError


class EngineArgs(Struct, frozen=True, kw_only=True):
    """All engine options as a user wrote them, by group."""

    model: ModelConfig = ModelConfig()
    load: LoadConfig = LoadConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    device: DeviceConfig = DeviceConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    structured_outputs: StructuredOutputsConfig = StructuredOutputsConfig()
    reasoning: ReasoningConfig = ReasoningConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    multimodal: MultimodalConfig = MultimodalConfig()
    lora: LoRAConfig = LoRAConfig()
    speculative: SpeculativeConfig = SpeculativeConfig()

    @classmethod
    def from_flat(cls, **options: Any) -> "EngineArgs":
        """Builds the groups from keywords such as `model=`, `max_num_seqs=`, checked and converted by type.

        Raises:
            ConfigError: a keyword is unknown or its value out of range; the message names it.
        """
        if isinstance(options.get("served_model_name"), str):
            options["served_model_name"] = [options["served_model_name"]]
        groups = {}
        for group in msgspec.structs.fields(cls):
            names = {field.name for field in msgspec.structs.fields(group.type)}
            chosen = {name: options.pop(name) for name in list(options) if name in names}
            groups[group.name] = convert_group(group.type, chosen)
        if options:
            raise ConfigError(f"Unknown engine option {sorted(options)[0]!r}; `quire serve --help=all` lists them.")
        return cls(**groups)

    def flat(self) -> dict[str, Any]:
        """All options as keywords for `from_flat`."""
        groups = (getattr(self, group.name) for group in msgspec.structs.fields(self))
        return {name: value for group in groups for name, value in msgspec.structs.asdict(group).items()}


def keyword_aliases() -> dict[str, str]:
    """Keywords for the other long flags of an option: `device_memory_utilization`."""
    found = {}
    for group in msgspec.structs.fields(EngineArgs):
        for name, annotation in get_type_hints(group.type, include_extras=True).items():
            for meta in getattr(annotation, "__metadata__", ()):
                for alias in (meta.extra or {}).get("aliases", ()):
                    if alias.startswith("--"):
                        found[alias.removeprefix("--").replace("-", "_")] = name
    return found


def convert_group(kind: type, values: dict[str, Any]) -> Any:
    """Converts `values` to the options Struct `kind`. Raises ConfigError, which names the option, for a wrong value.

    The text "none" is read as None where no text is allowed.
    """
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        name = text.split("`$.")[-1].split("`")[0].split("[")[0] if "`$." in text else kind.__name__
        if str(values.get(name)).lower() == "none" and values.get(name) is not None:
            return convert_group(kind, {**values, name: None})
        choices = _choices(kind, name)
        otherwise = _otherwise(kind, name, values.get(name))
        remedy = f" Choose from {', '.join(choices)}. {otherwise}".rstrip() if choices else ""
        problem = "There is no such value" if choices else text.split(" - at")[0]
        raise ConfigError(f"{name}: {problem} (got {values.get(name)!r}).{remedy}") from None


def _choices(kind: type, name: str) -> list[str]:
    """The values that a field takes, if its type lists them."""
    annotation = get_type_hints(kind).get(name)
    members = [annotation, *get_args(annotation)]
    return [repr(value) for member in members if get_origin(member) is Literal for value in get_args(member)]


def _otherwise(kind: type, name: str, value: Any) -> str:
    """The field's own remark on a value that it does not take, or on all such values; empty without one."""
    annotation: Any = get_type_hints(kind, include_extras=True).get(name)  # None: a key of an option's own object
    if get_origin(annotation) is not Annotated:
        return ""
    for extra in (meta.extra or {} for meta in annotation.__metadata__):
        if text := extra.get("refused", {}).get(str(value)) or extra.get("otherwise"):
            return text
    return ""
