"""Loading plug-ins: files, installed modules, and the entry points of installed packages."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from contextlib import chdir
from hashlib import sha256
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from cct.system.plain_yaml import Unreadable, read_file

from .components import REGISTRIES, Component
from .knobs import did_you_mean
from .user_code import Exited, no_exit

_PLUGIN = "cct_plugin_"  # begins the names of modules made from files


MOST_CODE = 2**22  # bytes of one file


class PluginError(ValueError):
    """A plug-in is missing or is not the expected one; errors inside a plug-in pass unchanged."""


def load_plugin(name: str, folder: Path, expected: str | None = None) -> str | None:
    """Import `./file.py` (relative to `folder`) or an installed `package.module`; returns the file's SHA-256.

    expected: the SHA-256 it must have, or it is not run. Raises PluginError where it is missing or
    another. An error of the plug-in itself passes through with its own traceback.
    """
    is_file = name.endswith(".py")
    path = Path(os.path.realpath(folder / name)) if is_file else _module_file(name)
    try:
        digest = sha256(read_file(path, MOST_CODE)).hexdigest() if path else None
    except Unreadable as error:
        missing = f"not found at {path}" if path and not os.path.lexists(path) else f"{path}: {error}"
        raise PluginError(f"plug-in {name} {missing}") from None
    if expected and (digest or "").lower() != expected.lower():
        raise PluginError(
            f"plug-in {name} has changed (SHA-256 {str(digest)[:12]}..., but {expected[:12]}... in the recipe); "
            "restore it, or remove `sha256` to accept it as it is"
        )
    try:
        if is_file:
            assert path
            run_file(path)
        else:
            with no_exit():
                importlib.import_module(name)
    except Exited as error:
        raise PluginError(f"plug-in {name} failed to import: {error}") from error
    return digest


def run_file(path: Path) -> ModuleType:
    """The module that a Python file makes, run once: one that a plug-in or an import by hand has made is taken as it is."""
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path):
            return module
    module_name = f"{_PLUGIN}{path.stem}_{sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        with no_exit(), chdir(Path.cwd()):  # the folder is as it was afterwards
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(module_name, None)
        raise
    return module


def named_in_code(name: str) -> Any:
    """What `./file.py:name` or `package.module:name` names. Raises ValueError where there is no such module or name."""
    where, _, attribute = name.rpartition(":")
    if not where.endswith(".py"):
        _module_file(where)  # says so where it is not installed
        with no_exit():
            module = importlib.import_module(where)
    elif not os.path.isfile(where):
        raise ValueError(f"{where} {'is not a file' if os.path.lexists(where) else 'does not exist'}")
    else:
        module = run_file(Path(os.path.realpath(where)))
    if not hasattr(module, attribute):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise ValueError(f"{where}: {did_you_mean('function or class', attribute, own)}")
    return getattr(module, attribute)


def origin(cls: type[Component]) -> str:
    """What `load_plugin` takes to define a component's class again in another process: its file, or its module."""
    module = sys.modules[cls.__module__]
    from_file = module.__name__ == "__main__" or module.__name__.startswith(_PLUGIN)
    return str(module.__file__) if from_file else module.__name__


def _module_file(name: str) -> Path | None:
    """Where an installed module would be imported from; None where it has no file."""
    words = name.split(".")
    try:  # no parent is imported that is not there
        named = all(word.isidentifier() for word in words) and importlib.util.find_spec(words[0]) is not None
        with no_exit():
            spec = importlib.util.find_spec(name) if named else None
    except (ModuleNotFoundError, ValueError):  # below a module that is no package; one without a spec, such as __main__
        spec = None
    if spec is None:
        raise PluginError(f"plug-in '{name}': no such module is installed; name a file with its extension, ./my_plugin.py")
    return Path(spec.origin) if spec.origin and Path(spec.origin).is_file() else None


def load_entry_points() -> None:
    """Import the components that installed packages announce under `cct.<axis>`."""
    announced = entry_points()  # one look at every installed package
    for axis in REGISTRIES:
        for entry in announced.select(group=f"cct.{axis}"):
            package = entry.dist.name if entry.dist else "?"
            where = f"entry point {entry.name} = {entry.value} (cct.{axis}) of the installed package {package} failed to import"
            try:
                with no_exit():
                    entry.load()
            except Exited as error:
                raise PluginError(f"{where}: {error}") from error
            except Exception as error:
                error.add_note(where)
                raise
