"""`cct check-operator`: one line per property, and what breaks it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import cct.recipe  # noqa: F401  (registers every axis)
from cct.loading import read_part
from cct.recipe import RecipeError
from cct.registry import REGISTRIES, Component, PluginError, did_you_mean, load_entry_points, load_plugin

from .base import AXES, FAILED, hypothesis


def find(written: str, axis: str | None, overrides: Sequence[str]) -> tuple[str, Component]:
    """(axis, component) of a registered name, or of `file.py:NAME`, by its name or its class's. Raises RecipeError."""
    load_entry_points()
    file, _, name = written.rpartition(":")
    if file:
        try:
            load_plugin(file if file.endswith(".py") else f"{file}.py", Path.cwd())
        except PluginError as error:
            raise RecipeError(str(error)) from None
    found = [
        (each, use)
        for each in ([axis] if axis else AXES)
        for use in REGISTRIES[each].names()
        if use == name or (file and REGISTRIES[each][use].__name__ == name)
    ]
    if not found:
        known = [use for each in ([axis] if axis else AXES) for use in REGISTRIES[each].names()]
        raise RecipeError(did_you_mean(axis or "operator", name, known))
    if len(found) > 1:
        raise RecipeError(f"'{name}' is a {' and a '.join(each for each, _ in found)}; say which with --axis")
    each, use = found[0]
    return each, read_part(each, use if not overrides else f"{{use: {use}}}", overrides)


def print_verdicts(written: str, axis: str | None, overrides: Sequence[str], examples: int) -> int:
    """Print a verdict per property. Returns 1 where one failed. Raises RecipeError where nothing can be said."""
    if examples < 1:
        raise RecipeError(f"--examples {examples}: at least 1")
    axis, operator = find(written, axis, overrides)
    try:
        hypothesis()
        operator.ready()
    except (ValueError, OSError) as error:
        raise RecipeError(f"{axis} '{operator.use}': {error}") from None
    from .suite import check

    path, line = type(operator).where()
    print(f"{axis} {operator.use}  ({path}:{line})")
    verdicts = check(operator, examples=examples)
    for verdict in verdicts:
        print(f"  {verdict.outcome:<14}  {verdict.property:<11}  {verdict.says}")
        if verdict.why:
            print(textwrap.indent(verdict.why, " " * 18))
        if verdict.example:
            print(" " * 18 + "smallest failing case:")
            print(textwrap.indent(verdict.example, " " * 22))
    failed = [verdict.property for verdict in verdicts if verdict.outcome == FAILED]
    print(f"{axis} {operator.use}: {'failed: ' + ', '.join(failed) if failed else 'ok'}")
    return 1 if failed else 0
