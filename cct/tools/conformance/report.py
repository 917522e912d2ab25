"""`cct check-operator`: one line per property, and what breaks it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import cct.recipe  # noqa: F401  (registers every axis)
from cct.loading import read_part
from cct.recipe import RecipeError
from cct.registry import REGISTRIES, Component, PluginError, did_you_mean, load_entry_points, load_plugin
from cct.system.terminal import say

from .base import AXES, FAILED, hypothesis


def find(written: str, axis: str | None, overrides: Sequence[str]) -> tuple[str, Component]:
    """(axis, component) of a registered name, or of `file.py:NAME`, by its name or its class's. Raises RecipeError."""
    load_entry_points()
    file, colon, name = written.rpartition(":")
    if not colon and written.endswith(".py"):
        raise RecipeError(f"{written}: name a part of the file, {written}:NAME")
    if colon:
        file = file if file.endswith(".py") else f"{file}.py"
        try:
            load_plugin(file, Path.cwd())
        except PluginError as error:
            raise RecipeError(str(error)) from None
    axes = [axis] if axis else AXES
    known = [(each, REGISTRIES[each][use]) for each in axes for use in REGISTRIES[each].names()]
    if colon:
        known = [(each, cls) for each, cls in known if cls.where()[0] == (Path.cwd() / file).resolve()]
    found = [(each, cls.use) for each, cls in known if cls.use == name or (colon and cls.__name__ == name)]
    if not found:
        where = f" in {file}" if colon else ""
        raise RecipeError(did_you_mean(f"{axis or 'operator'}{where}", name, [cls.use for _, cls in known]))
    if len(found) > 1:
        raise RecipeError(f"'{name}' is a {' and a '.join(each for each, _ in found)}; choose one with --axis")
    each, use = found[0]
    return each, read_part(each, use if not overrides else f"{{use: {use}}}", overrides)


def print_verdicts(written: str, axis: str | None, overrides: Sequence[str], examples: int) -> int:
    """Print a verdict per property. Returns 1 where one failed. Raises RecipeError where nothing can be said."""
    if examples < 1:
        raise RecipeError(f"--examples {examples}: must be at least 1")
    axis, operator = find(written, axis, overrides)
    try:
        hypothesis()
        operator.ready()
    except (ValueError, OSError) as error:
        raise RecipeError(f"{axis} '{operator.use}': {error}") from None
    from .suite import check

    say(f"{axis} {operator.use}  ({type(operator).file()})")
    verdicts = check(operator, examples=examples)
    for verdict in verdicts:
        say(f"  {verdict.outcome:<14}  {verdict.property:<11}  {verdict.says}")
        if verdict.why:
            say(textwrap.indent(verdict.why, " " * 18))
        if verdict.example:
            say(" " * 18 + "smallest failing case:")
            say(textwrap.indent(verdict.example, " " * 22))
    failed = [verdict.property for verdict in verdicts if verdict.outcome == FAILED]
    say(f"{axis} {operator.use}: {'failed: ' + ', '.join(failed) if failed else 'ok'}")
    return 1 if failed else 0
