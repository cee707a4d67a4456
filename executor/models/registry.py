"""Architecture names of checkpoints, and the files that implement them."""

import importlib

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.models.base import Model, ModelContext
from quire.executor.models.decoder import check_supported
from quire.executor.models.unknown import explain_unknown

ARCHITECTURES: dict[str, tuple[str, str]] = {
    "Gemma3ForCausalLM": ("gemma3", "Gemma3ForCausalLM"),
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "MistralForCausalLM": ("llama", "MistralForCausalLM"),
    "Qwen2ForCausalLM": ("qwen2", "Qwen2ForCausalLM"),
    "Qwen3ForCausalLM": ("qwen3", "Qwen3ForCausalLM"),
    "YoutuForCausalLM": ("deepseek", "YoutuForCausalLM"),
}
"""config.json's architecture → (module of this folder, class)."""


def build_model(spec: ModelSpec, context: ModelContext) -> Model:
    """The model of `spec.architecture` with its weights loaded.

    Raises:
        ModelLoadError: an architecture without a file here, or a checkpoint that does not fit it.
    """
    if spec.architecture not in ARCHITECTURES:
        raise ModelLoadError(explain_unknown(spec, ARCHITECTURES))
    check_supported(spec)
    module_name, class_name = ARCHITECTURES[spec.architecture]
    module = importlib.import_module(f"quire.executor.models.{module_name}")  # on demand: only one family is needed
    return getattr(module, class_name)(spec, context)
