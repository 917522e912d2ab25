"""Components, the registries that name them, plug-ins, and what to say of a user's code that fails."""

from .components import REGISTRIES, Component, Registry, children, descendants
from .extras import install, optional
from .knobs import Knobs, did_you_mean
from .plugins import MOST_CODE, PluginError, load_entry_points, load_plugin, named_in_code, origin, run_file
from .user_code import RAISED, Exited, described, error_text, no_exit, raised_at

__all__ = [
    "MOST_CODE",
    "RAISED",
    "REGISTRIES",
    "Component",
    "Exited",
    "Knobs",
    "PluginError",
    "Registry",
    "children",
    "described",
    "descendants",
    "did_you_mean",
    "error_text",
    "install",
    "load_entry_points",
    "load_plugin",
    "named_in_code",
    "no_exit",
    "optional",
    "origin",
    "raised_at",
    "run_file",
]
