"""Options: adapters that requests may use (LoRA)."""

from typing import Annotated, Any, Literal, get_args

from msgspec import Meta, Struct

from quire.core.config.types import NotNegative, Positive
from quire.core.errors import ConfigError
from quire.core.wire.media import Modality

AdapterDtype = Literal["float16", "bfloat16", "float32"]


class LoRAConfig(Struct, frozen=True, kw_only=True):
    """Whether requests may use adapters, and how many of which size."""

    enable_lora: Annotated[
        bool, Meta(description="Serve adapters (LoRA) of the model; a request names one as its model.")
    ] = False
    lora_modules: Annotated[
        list[str] | None,
        Meta(
            description="Adapters to serve from the start, each NAME=PATH, or a JSON object with name, path and "
            "perhaps base_model_name."
        ),
    ] = None
    max_loras: Annotated[Positive, Meta(description="Most adapters in one step; each has memory on the device.")] = 1
    max_lora_rank: Annotated[
        Positive,
        Meta(description="Largest rank of an adapter; the device's memory for adapters is in proportion to it."),
    ] = 16
    max_cpu_loras: Annotated[
        Positive | None,
        Meta(description="Most adapters in the host's memory, --max-loras or more; --max-loras when unset."),
    ] = None
    lora_dtype: Annotated[
        Literal["auto", "float16", "bfloat16", "float32"],
        Meta(description="Type to which weights of adapters are rounded; auto: the model's."),
    ] = "auto"
    lora_target_modules: Annotated[
        list[str] | None,
        Meta(
            description="Ends of the names of layers that take adapters, such as q_proj; all that can when unset. An "
            "adapter with weights for others is refused."
        ),
    ] = None
    default_mm_loras: Annotated[
        dict[str, Any] | None,
        Meta(
            description='Adapters of requests with images, videos or sounds that name none, as {"image": PATH}; '
            "requests with several kinds that have one use none.",
            extra={"parse": "json"},
        ),
    ] = None
    enable_prompt_adapter: Annotated[
        bool,
        Meta(
            description="Serve soft prompts (prompt tuning): embeddings before the prompt; a request names one as its "
            "model."
        ),
    ] = False
    prompt_adapters: Annotated[
        list[str] | None,
        Meta(description="Soft prompts to serve from the start, in the forms of --lora-modules."),
    ] = None
    max_prompt_adapter_token: Annotated[
        NotNegative, Meta(description="Most rows of a soft prompt; 0: as many as the context has room for.")
    ] = 0

    def media_paths(self) -> dict[str, str]:
        """The folders of `default_mm_loras`, by modality.

        Raises:
            ConfigError: a key or a value of another kind, or the server takes no adapters.
        """
        given, known = self.default_mm_loras or {}, get_args(Modality)
        wrong = [name for name, path in given.items() if name not in known or not isinstance(path, str) or not path]
        if wrong:
            raise ConfigError(
                f"--default-mm-loras: {wrong[0]!r} must be one of {', '.join(known)}, and its value a path."
            )
        if given and not self.enable_lora:
            raise ConfigError("--default-mm-loras needs --enable-lora.")
        return given


class AdapterOptions(Struct, frozen=True, kw_only=True):
    """`LoRAConfig` with every default filled in, of a model that takes adapters."""

    max_adapters: int  # in one step
    max_rank: int
    max_on_host: int
    dtype: AdapterDtype | None = None  # None: the model's
    targets: list[str] | None = None  # ends of layers' names; None: all layers

    @classmethod
    def of(cls, config: LoRAConfig) -> "AdapterOptions | None":
        """None if the model takes no adapters.

        Raises:
            ConfigError: limits that contradict each other.
        """
        if not config.enable_lora:
            return None
        on_host = config.max_loras if config.max_cpu_loras is None else config.max_cpu_loras
        if on_host < config.max_loras:
            raise ConfigError(
                f"--max-cpu-loras {on_host} is less than --max-loras {config.max_loras}: an adapter on the device is "
                "in the host's memory as well. Raise it, or leave it out."
            )
        return cls(
            max_adapters=config.max_loras,
            max_rank=config.max_lora_rank,
            max_on_host=on_host,
            dtype=None if config.lora_dtype == "auto" else config.lora_dtype,
            targets=config.lora_target_modules,
        )
