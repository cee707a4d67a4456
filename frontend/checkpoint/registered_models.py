"""Models from other packages: architectures of config.json, and the classes that implement them."""

from importlib.metadata import entry_points

from quire.core.errors import ConfigError

ENTRY_POINTS = "quire.models"
"""The group of entry points in which an installed package names its classes by architecture."""

_registered: dict[str, str] = {}


def register_model(architecture: str, model_class: str) -> None:
    """Registers a class of yours for `architecture`, for engines that start later, even if Quire has the architecture.

    Args:
        architecture: as in `architectures` of config.json.
        model_class: `module:Class`, which workers import. It is called with a `ModelSpec` and a `ModelContext`, and
            makes a `quire.executor.models.base.Model`.

    Raises:
        ConfigError: a `model_class` of another form.
    """
    module, _, name = model_class.partition(":")
    if not module or not name.isidentifier():
        raise ConfigError(f"register_model: the class of {architecture} must be 'module:Class', got {model_class!r}.")
    _registered[architecture] = model_class


def find_model(architecture: str) -> str | None:
    """The class that a program registered, or else an installed package names, as `module:Class`."""
    if architecture in _registered:
        return _registered[architecture]
    return next((point.value for point in entry_points(group=ENTRY_POINTS, name=architecture)), None)
