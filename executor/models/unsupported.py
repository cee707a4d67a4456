"""Error texts for architectures that have no file here: likely alternatives, and programs that support them."""

import difflib
from collections.abc import Iterable

from quire.core.config.resolved import ModelSpec


def explain_unsupported(spec: ModelSpec, known: Iterable[str]) -> str:
    """Explains what to do about a checkpoint whose architecture is not in `known`."""
    # Imported here: the tables are a large import, and only this error needs them.
    import transformers
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    native = sorted(known)
    decoders = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    model_type = str(spec.hf_config.get("model_type"))
    library = f"Transformers {transformers.__version__}"
    parts = [f"Architecture {spec.architecture!r} of {spec.name} is not supported."]
    if "auto_map" in spec.hf_config:
        files = sorted({f"{name.split('--')[-1].rpartition('.')[0]}.py" for name in _code_names(spec)})
        parts.append(
            "The checkpoint brings code for it, which is not run without --trust-remote-code: "
            f"{', '.join(files)}. Read it first."
        )
    if spec.architecture in decoders.values():
        parts.append(f"{library} has it, but no file of Quire does: drop --model-impl quire.")
    elif hasattr(transformers, spec.architecture):
        parts.append(f"{library} has it, but not as a decoder that generates text.")
    elif model_type in decoders:
        parts.append(
            f"{library} generates text of model_type {model_type!r} with {decoders[model_type]}; if these weights are "
            f'its own, name it: --hf-overrides \'{{"architectures": ["{decoders[model_type]}"]}}\'.'
        )
    elif model_type in CONFIG_MAPPING_NAMES:
        parts.append(f"{library} knows model_type {model_type!r}, but no decoder of it that generates text.")
    else:
        parts.append(f"{library} knows neither it nor model_type {model_type!r}; a newer release may.")
    near = difflib.get_close_matches(spec.architecture, {*native, *decoders.values()}, n=3, cutoff=0.7)
    near = [name for name in near if name != spec.architecture]
    if near:
        parts.append(f"Nearest names: {', '.join(near)}.")
    parts.append(f"Supported: {', '.join(native)}.")
    return " ".join(parts)


def _code_names(spec: ModelSpec) -> list[str]:
    """Lists the classes of the checkpoint's own code, as `file.Class` or `repository--file.Class`."""
    return [name for name in spec.hf_config["auto_map"].values() if isinstance(name, str)]
