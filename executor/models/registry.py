"""Architecture names of checkpoints, and the files that implement them."""

import importlib
from collections.abc import Callable

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.core.logging import get_logger
from quire.executor.layers.context_parallel import ContextParallel
from quire.executor.layers.layer_kv import LatentKV
from quire.executor.models.base import Model, ModelContext, StagedModel
from quire.executor.models.decoder import SIZES, SettingError, check_supported
from quire.executor.models.unknown import explain_unknown
from quire.executor.weights.readers import MissingTensorError

logger = get_logger(__name__)

ARCHITECTURES: dict[str, tuple[str, str]] = {
    "BailingHybridForCausalLM": ("bailing_hybrid", "BailingHybridForCausalLM"),
    "BambaForCausalLM": ("bamba", "BambaForCausalLM"),
    "Cohere2ForCausalLM": ("cohere", "Cohere2ForCausalLM"),
    "CohereForCausalLM": ("cohere", "CohereForCausalLM"),
    "CpmAntForCausalLM": ("cpmant", "CpmAntForCausalLM"),
    "DeepseekForCausalLM": ("deepseek_moe", "DeepseekForCausalLM"),
    "DeepseekV2ForCausalLM": ("deepseek", "DeepseekV2ForCausalLM"),
    "DeepseekV32ForCausalLM": ("deepseek_sparse", "DeepseekV32ForCausalLM"),
    "DeepseekV3ForCausalLM": ("deepseek", "DeepseekV3ForCausalLM"),
    "DeepseekV4ForCausalLM": ("deepseek_v4", "DeepseekV4ForCausalLM"),
    "Ernie4_5_MoeForCausalLM": ("ernie4_5_moe", "Ernie4_5_MoeForCausalLM"),
    "ExaoneForCausalLM": ("exaone", "ExaoneForCausalLM"),
    "FalconForCausalLM": ("falcon", "FalconForCausalLM"),
    "FalconH1ForCausalLM": ("falcon_h1", "FalconH1ForCausalLM"),
    "FalconMambaForCausalLM": ("mamba", "FalconMambaForCausalLM"),
    "GPT2LMHeadModel": ("gpt2", "GPT2LMHeadModel"),
    "GPTNeoXForCausalLM": ("gpt_neox", "GPTNeoXForCausalLM"),
    "Gemma2ForCausalLM": ("gemma2", "Gemma2ForCausalLM"),
    "Gemma3ForCausalLM": ("gemma3", "Gemma3ForCausalLM"),
    "Gemma3nForCausalLM": ("gemma3n", "Gemma3nForCausalLM"),
    "Gemma3nForConditionalGeneration": ("gemma3n", "Gemma3nForCausalLM"),
    "Gemma4ForCausalLM": ("gemma4", "Gemma4ForCausalLM"),
    "Gemma4ForConditionalGeneration": ("gemma4", "Gemma4ForCausalLM"),
    "Gemma4UnifiedForCausalLM": ("gemma4", "Gemma4ForCausalLM"),
    "Gemma4UnifiedForConditionalGeneration": ("gemma4", "Gemma4ForCausalLM"),
    "GemmaForCausalLM": ("gemma2", "GemmaForCausalLM"),
    "Glm4ForCausalLM": ("glm", "Glm4ForCausalLM"),
    "Glm4MoeForCausalLM": ("glm4_moe", "Glm4MoeForCausalLM"),
    "Glm4MoeLiteForCausalLM": ("deepseek", "Glm4MoeLiteForCausalLM"),
    "GlmForCausalLM": ("glm", "GlmForCausalLM"),
    "GlmMoeDsaForCausalLM": ("deepseek_sparse", "GlmMoeDsaForCausalLM"),
    "GptOssForCausalLM": ("gpt_oss", "GptOssForCausalLM"),
    "GraniteForCausalLM": ("granite", "GraniteForCausalLM"),
    "GraniteMoeForCausalLM": ("granite_moe", "GraniteMoeForCausalLM"),
    "GraniteMoeHybridForCausalLM": ("granite_hybrid", "GraniteMoeHybridForCausalLM"),
    "JambaForCausalLM": ("jamba", "JambaForCausalLM"),
    "KimiLinearForCausalLM": ("kimi_linear", "KimiLinearForCausalLM"),
    "Lfm2ForCausalLM": ("lfm2", "Lfm2ForCausalLM"),
    "Lfm2MoeForCausalLM": ("lfm2", "Lfm2MoeForCausalLM"),
    "Lfm3ForCausalLM": ("lfm2", "Lfm3ForCausalLM"),
    "Llama4ForCausalLM": ("llama4", "Llama4ForCausalLM"),
    "Llama4ForConditionalGeneration": ("llama4", "Llama4ForCausalLM"),
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "Mamba2ForCausalLM": ("mamba2", "Mamba2ForCausalLM"),
    "MambaForCausalLM": ("mamba", "MambaForCausalLM"),
    "MiniCPM3ForCausalLM": ("minicpm3", "MiniCPM3ForCausalLM"),
    "MiniMaxForCausalLM": ("minimax", "MiniMaxForCausalLM"),
    "MiniMaxM2ForCausalLM": ("minimax_m2", "MiniMaxM2ForCausalLM"),
    "MistralForCausalLM": ("llama", "MistralForCausalLM"),
    "Mistral4ForCausalLM": ("deepseek", "Mistral4ForCausalLM"),
    "MixtralForCausalLM": ("mixtral", "MixtralForCausalLM"),
    "NemotronHForCausalLM": ("nemotron_h", "NemotronHForCausalLM"),
    "OPTForCausalLM": ("opt", "OPTForCausalLM"),
    "Olmo2ForCausalLM": ("olmo2", "Olmo2ForCausalLM"),
    "Olmo3ForCausalLM": ("olmo2", "Olmo3ForCausalLM"),
    "OlmoHybridForCausalLM": ("olmo_hybrid", "OlmoHybridForCausalLM"),
    "OlmoeForCausalLM": ("olmoe", "OlmoeForCausalLM"),
    "OpenAIGPTLMHeadModel": ("openai_gpt", "OpenAIGPTLMHeadModel"),
    "Phi3ForCausalLM": ("phi3", "Phi3ForCausalLM"),
    "PhimoeForCausalLM": ("phimoe", "PhimoeForCausalLM"),
    "PhiMoEForCausalLM": ("phimoe", "PhimoeForCausalLM"),
    "Qwen2ForCausalLM": ("qwen2", "Qwen2ForCausalLM"),
    "Qwen2MoeForCausalLM": ("qwen2_moe", "Qwen2MoeForCausalLM"),
    "Qwen3ForCausalLM": ("qwen3", "Qwen3ForCausalLM"),
    "Qwen3MoeForCausalLM": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "Qwen3NextForCausalLM": ("qwen3_next", "Qwen3NextForCausalLM"),
    "Qwen3_5ForConditionalGeneration": ("qwen3_next", "Qwen3_5ForCausalLM"),
    "Qwen3_5MoeForCausalLM": ("qwen3_next", "Qwen3_5MoeForCausalLM"),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_next", "Qwen3_5MoeForCausalLM"),
    "Qwen3_5ForCausalLM": ("qwen3_next", "Qwen3_5ForCausalLM"),
    "Qwen4ExpForCausalLM": ("qwen4_exp", "Qwen4ExpForCausalLM"),
    "Qwen4ExpForConditionalGeneration": ("qwen4_exp", "Qwen4ExpForCausalLM"),
    "RwkvForCausalLM": ("rwkv", "RwkvForCausalLM"),
    "RecurrentGemmaForCausalLM": ("recurrent_gemma", "RecurrentGemmaForCausalLM"),
    "SarvamMoEForCausalLM": ("sarvam_moe", "SarvamMoEForCausalLM"),
    "Starcoder2ForCausalLM": ("starcoder2", "Starcoder2ForCausalLM"),
    "XLMWithLMHeadModel": ("xlm", "XLMWithLMHeadModel"),
    "YoutuForCausalLM": ("deepseek", "YoutuForCausalLM"),
    "Zamba2ForCausalLM": ("zamba2", "Zamba2ForCausalLM"),
    "xLSTMForCausalLM": ("xlstm", "xLSTMForCausalLM"),
}
"""config.json's architecture → (module of this folder, class)."""

_UNDER_OTHER_NAMES = {"exaone": "ExaoneForCausalLM", "sarvam_moe": "SarvamMoEForCausalLM"}
"""Model types whose config.json, as Transformers writes it, names the class of another family, with other names of
tensors: model type → architecture above."""


def is_native(model: Model) -> bool:
    """Whether a file here implements the model, and not Transformers' class."""
    return not type(model).__module__.startswith(f"{__package__}.transformers.")


def build_model(spec: ModelSpec, context: ModelContext) -> Model:
    """The model of `spec.architecture` with its weights loaded, in the implementation that `spec` asks for.

    Raises:
        ModelLoadError: an architecture that neither a file here nor Transformers has, a checkpoint that does not fit
            it, a class without pipeline stages that is to build one, or experts that are to be divided where there are
            none.
    """
    model = _build(spec, context)
    if len(context.layers) < spec.num_layers and not isinstance(model, StagedModel):
        raise ModelLoadError(
            f"{spec.name}: the class of {spec.architecture} cannot be divided into pipeline stages; use "
            "--tensor-parallel-size instead of --pipeline-parallel-size."
        )
    if context.sequences is not None:
        _check_divided(spec, model, context.sequences)
    if context.experts is not None and not context.experts.layers and len(context.layers) == spec.num_layers:
        raise ModelLoadError(
            f"{spec.name} has no experts that could be divided over ranks; start without --enable-expert-parallel."
        )
    return model


def _check_divided(spec: ModelSpec, model: Model, sequences: ContextParallel) -> None:
    if any(isinstance(kv, LatentKV) and (kv.window is not None or kv.rate > 1) for kv in model.kv_layers):
        raise ModelLoadError(
            f"{spec.name}: {sequences.flag} is not there for attention to rows of several tokens, or to a choice of "
            "them; use --tensor-parallel-size alone."
        )
    if any(kv.sees_prompt for kv in model.kv_layers):
        raise ModelLoadError(
            f"{spec.name}: {sequences.flag} is not there for models whose prompts' tokens see each other; use "
            "--tensor-parallel-size alone."
        )
    if sequences.divides_tokens and model.state_layers:
        raise ModelLoadError(
            f"{spec.name}: {sequences.flag} is not there for recurrent layers, which need each token after the one "
            "before; use --tensor-parallel-size alone."
        )


def _build(spec: ModelSpec, context: ModelContext) -> Model:
    if spec.model_class is not None and spec.implementation == "auto":
        return _registered_class(spec)(spec, context)
    has_file = spec.architecture in ARCHITECTURES
    if spec.implementation == "transformers" or (spec.implementation == "auto" and not has_file):
        return _transformers_model(spec, context)
    if not has_file:
        raise ModelLoadError(explain_unknown(spec, ARCHITECTURES))
    module_name, class_name = ARCHITECTURES[_own_architecture(spec)]
    module = importlib.import_module(f"quire.executor.models.{module_name}")  # on demand: only one family is needed
    model_class = getattr(module, class_name)
    check_supported(spec, getattr(model_class, "SIZES", SIZES))
    try:
        return model_class(spec, context)
    except (SettingError, MissingTensorError) as refusal:
        is_divided = len(context.layers) < spec.num_layers  # then other stages may have found their tensors
        if spec.implementation == "quire" or (isinstance(refusal, MissingTensorError) and is_divided):
            raise
        try:
            model = _transformers_model(spec, context)
        except MissingTensorError:
            raise refusal from None
        except ModelLoadError as error:
            raise ModelLoadError(f"{refusal} Nor does its class of Transformers serve it: {error}") from error
        logger.info("%s Its class of Transformers is served instead.", refusal)
        return model


def _own_architecture(spec: ModelSpec) -> str:
    """The architecture whose file here reads the checkpoint."""
    return _UNDER_OTHER_NAMES.get(str(spec.hf_config.get("model_type")), spec.architecture)


def _transformers_model(spec: ModelSpec, context: ModelContext) -> Model:
    # Imported here: it takes a second, for these models only.
    from quire.executor.models.transformers.model import UnknownModelError, build_transformers_model

    if context.experts is not None and context.experts.num_engines > 1:
        raise ModelLoadError(
            f"{spec.name}: classes of Transformers cannot share experts between engines; start without "
            "--enable-expert-parallel, or without --data-parallel-size."
        )
    try:
        return build_transformers_model(spec, context)
    except UnknownModelError:
        raise ModelLoadError(explain_unknown(spec, ARCHITECTURES)) from None


def _registered_class(spec: ModelSpec) -> Callable[[ModelSpec, ModelContext], Model]:
    assert spec.model_class is not None
    module_name, _, class_name = spec.model_class.partition(":")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ModelLoadError(
            f"{spec.model_class!r}, registered for {spec.architecture}, cannot be imported by a worker: {error}. "
            "Install its package, or set PYTHONPATH to its folder."
        ) from error
