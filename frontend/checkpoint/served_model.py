"""The frontend's facts about the served model, which the engine does not need."""

from pathlib import Path
from typing import Any

from msgspec import Struct

from quire.core import envs
from quire.core.config.engine_args import EngineArgs
from quire.core.config.multimodal import MultimodalConfig
from quire.core.config.reasoning import ReasoningConfig
from quire.core.config.structured_outputs import StructuredOutputsOptions
from quire.core.errors import ConfigError, NotFoundError, ParameterError
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.checkpoint.adapters import AdapterNames, choose_adapter, chosen_adapter
from quire.frontend.checkpoint.encoder_decoders import DecoderRules
from quire.frontend.checkpoint.model_source import DEMO_MODEL_NAME
from quire.frontend.checkpoint.model_spec import read_default_sampling, read_output_limit, read_rules_of_decoder


class ServedModel(Struct, frozen=True, kw_only=True):
    """Names and per-request defaults of the served model."""

    names: list[str]  # names for clients; responses give the first
    folder: str
    default_sampling: dict[str, Any] = {}  # defaults for requests, as SamplingParams keywords
    max_output_tokens: int | None = None  # limit for every request to a server
    max_logprobs: int = 20  # -1 for no limit
    stream_interval: int = 1  # tokens per output of a stream; a request may ask for more
    has_logits_processors: bool = False
    takes_embeds: bool = False  # prompts may be embeddings
    takes_adapters: bool = False  # that change the model's layers
    decoder: DecoderRules | None = None  # of a decoder that attends to an encoder; None: the model has no encoder
    structured_outputs: StructuredOutputsOptions = StructuredOutputsOptions()
    reasoning: ReasoningConfig = ReasoningConfig()
    multimodal: MultimodalConfig = MultimodalConfig()
    adapters: AdapterNames | None = None  # that requests may name; None: the model takes none

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def chosen_name(self) -> str:
        """The name for answers to the request of the running task: the adapter's, or the model's first."""
        return chosen_adapter() or self.name

    def choose(self, name: str | None) -> None:
        """Chooses the model, or one of its adapters, for the running task; None and "" mean the model.

        Raises:
            NotFoundError: nothing is served under this name.
        """
        choose_adapter(None)
        if not name or name in self.names:
            return
        if self.adapters is None or not self.adapters.may_be(name):
            raise self.not_found(name)
        choose_adapter(name)

    @property
    def served_names(self) -> list[str]:
        """The names of the model, then those of its adapters."""
        return [*self.names, *(self.adapters.served if self.adapters is not None else ())]

    def not_found(self, name: str) -> NotFoundError:
        """The error for a name under which nothing is served."""
        names = " or ".join(map(repr, self.served_names))
        return NotFoundError(f"The model {name!r} is not served here; use {names}.", param="model")

    @classmethod
    def from_args(cls, args: EngineArgs, folder: Path) -> "ServedModel":
        """Reads the defaults of the checkpoint in `folder`.

        Raises:
            ConfigError: the defaults are not valid sampling parameters.
        """
        names = args.model.served_model_name or [args.model.model or DEMO_MODEL_NAME]
        default_sampling = read_default_sampling(folder, args.model)
        try:
            SamplingParams(**default_sampling)
        except ParameterError as error:
            raise ConfigError(
                f"generation_config.json of {folder}, or --override-generation-config: {error} "
                "--generation-config vllm does without the file."
            ) from None
        return cls(
            names=names,
            folder=str(folder),
            default_sampling=default_sampling,
            max_output_tokens=read_output_limit(folder, args.model),
            max_logprobs=args.model.max_logprobs,
            stream_interval=args.scheduler.stream_interval,
            has_logits_processors=bool(args.model.logits_processors),
            takes_embeds=args.model.enable_prompt_embeds,
            decoder=read_rules_of_decoder(folder, args.model),
            structured_outputs=args.structured_outputs.structured_outputs_config or StructuredOutputsOptions(),
            reasoning=args.reasoning,
            multimodal=args.multimodal,
            adapters=_adapter_names(args, names),
            takes_adapters=args.lora.enable_lora,
        )


def _adapter_names(args: EngineArgs, names: list[str]) -> AdapterNames | None:
    if not args.lora.enable_lora and not args.lora.enable_prompt_adapter:
        return None
    return AdapterNames(names, resolves=envs.read_flag("ALLOW_RUNTIME_LORA_UPDATING"))
