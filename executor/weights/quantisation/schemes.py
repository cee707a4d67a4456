"""Which scheme a model's linear layers have."""

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.weights.quantisation.scheme import LinearScheme
from quire.executor.weights.quantisation.unquantised import Unquantised


def choose_scheme(spec: ModelSpec) -> LinearScheme:
    """The scheme of the checkpoint.

    Raises:
        ModelLoadError: the checkpoint has a quantisation of its own.
    """
    own = spec.hf_config.get("quantization_config")
    if own:
        method = own.get("quant_method", "unknown")
        raise ModelLoadError(
            f"{spec.name} is quantised ({method}), which is not supported; use the unquantised checkpoint."
        )
    return Unquantised()
