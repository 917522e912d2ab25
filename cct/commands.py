"""What the verbs of `cct` do. Each imports what it needs when it is called, so that help and checks stay instant."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from cct.system.signals import Interrupted
from cct.system.terminal import leave_stdout, say

AXES = ("task", "environment", "policy", "generation", "evidence", "critic", "transport", "gate", "statistic", "geometry")


def run(arguments: argparse.Namespace) -> int:
    from cct.recipe import RecipeError

    if arguments.recipe is None and arguments.resume is None:
        raise RecipeError("cct run needs a recipe, for example: cct run recipes/compo.yaml")
    recipe = _checked(arguments.recipe, arguments.set, demonstrations=True) if arguments.recipe else None
    if arguments.resume is not None:
        from cct.run_folder import RunFolder

        recipe = RunFolder(arguments.resume).to_resume(recipe, arguments.set)[0]
    assert recipe is not None
    if arguments.dry_run:
        training = recipe.training
        size = f"{training.prompts_per_iteration} x {training.responses_per_prompt} responses"
        critic = recipe.critic.use if recipe.critic else "none"
        say(
            f"{recipe.name}: {training.iterations} iterations of {size}, after {training.critic_warmup} of critic warm-up; "
            f"critic {critic}, transport {recipe.transport.use}, geometry {recipe.geometry.use}; "
            f"into {arguments.resume or arguments.into or arguments.runs / recipe.name}"
        )
        return 0
    if arguments.profile:  # silences torch's profiler on stderr; must be set before torch is imported
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from cct.api import resume, train

    try:
        if arguments.resume:
            resume(arguments.resume, arguments.set, recipe=recipe, profile=arguments.profile)
        else:
            train(recipe, runs=arguments.runs, into=arguments.into, profile=arguments.profile, check=False)
    except BrokenPipeError:  # `cct run RECIPE | head`: the run is not done
        leave_stdout()
        raise Interrupted(signal.SIGPIPE) from None
    return 0


def _checked(path: str, overrides: list[str], *, demonstrations: bool = False):
    """Load a recipe and check its data. `demonstrations`: also those of a warm start, which takes a second."""
    from cct.loading import load_recipe
    from cct.preflight import preflight
    from cct.recipe import RecipeError

    recipe = load_recipe(path, overrides)
    try:
        warnings = preflight(recipe, demonstrations=demonstrations)
    except RecipeError as error:
        raise RecipeError(*(f"{path}: {problem}" for problem in error.problems)) from None
    for warning in [*recipe.warnings, *warnings]:
        say(f"warning: {path}: {warning}", file=sys.stderr)
    return recipe


def check(arguments: argparse.Namespace) -> int:
    from cct.recipe import RecipeError

    problems: list[str] = []
    for path in arguments.recipe:
        try:
            recipe = _checked(path, arguments.set)
            if arguments.deep:
                _look_deep(path, recipe)
            elif recipe.environment is not None and recipe.policy.takes_messages:
                _look_at_turns(path, recipe)
            say(f"{path}: ok ({recipe.name}: {recipe.transport.use}, critic {recipe.critic.use if recipe.critic else 'none'})")
        except RecipeError as error:
            problems += error.problems
    if problems:
        raise RecipeError(*problems)
    return 0


def _look_deep(path: str, recipe) -> None:
    from cct.audit import audit
    from cct.recipe import RecipeError

    try:
        found = audit(recipe)
    except (ValueError, OSError) as error:
        raise RecipeError(f"{path}: {error}") from None
    _shown(path, found)


def _look_at_turns(path: str, recipe) -> None:
    """What the chat template makes of several turns; a tokenizer that cannot be had is a warning."""
    from cct.audit import audit_turns

    try:
        found = audit_turns(recipe)
    except (ValueError, OSError) as error:
        say(f"warning: {path}: what the chat template makes of several turns was not looked at: {error}", file=sys.stderr)
        return
    _shown(path, found)


def _shown(path: str, found) -> None:
    """Print what was found. Raises RecipeError where a run would fail by it."""
    from cct.recipe import RecipeError

    for line in found.lines:
        say(f"{path}: {line}")
    for warning in found.warnings:
        say(f"warning: {path}: {warning}", file=sys.stderr)
    if found.problems:
        raise RecipeError(*(f"{path}: {problem}" for problem in found.problems))


def explain(arguments: argparse.Namespace) -> int:
    from cct.tools.explain import explain

    return explain(_checked(arguments.recipe, arguments.set))


def plan(arguments: argparse.Namespace) -> int:
    from cct.loading import load_recipe
    from cct.tools.plan import print_plan

    return print_plan(load_recipe(arguments.recipe, arguments.set), arguments.gpu)


def ls(arguments: argparse.Namespace) -> int:
    from cct.recipe import RecipeError
    from cct.registry import REGISTRIES, did_you_mean, load_entry_points
    from cct.tools.catalogue import catalogue, default_of

    if arguments.markdown:
        say(catalogue(AXES), end="")
        return 0
    load_entry_points()
    if arguments.axis not in (None, *AXES):
        its = [f"cct ls {axis}" for axis in AXES if arguments.axis in REGISTRIES[axis].names()]
        hint = f"; '{arguments.axis}' is listed by {' and '.join(its)}" if its else ""
        raise RecipeError(did_you_mean("axis", arguments.axis, AXES) + hint)
    axes = [arguments.axis] if arguments.axis else AXES
    width = max(len(name) for axis in axes for name in REGISTRIES[axis].names())
    for axis in axes:
        registry = REGISTRIES[axis]
        if not arguments.axis:
            say(axis)
        for name in registry.names():
            cls = registry[name]
            say(f"  {name:<{width}} {cls.summary()}")
            if arguments.axis:
                helps = {f"{knob} = {default_of(field)}": field.description or "" for knob, field in cls.model_fields.items()}
                for knob, help in helps.items():
                    say(f"      {knob:<{max(map(len, helps))}}  {' '.join(help.split())}")
    return 0


def check_operator(arguments: argparse.Namespace) -> int:
    from cct.tools.conformance.report import print_verdicts

    return print_verdicts(arguments.operator, arguments.axis, arguments.set, arguments.examples)


def schema(arguments: argparse.Namespace) -> int:
    import json

    from cct.loading import json_schema, load_recipe
    from cct.registry import load_entry_points

    load_entry_points()
    if arguments.recipe:
        load_recipe(arguments.recipe)
    say(json.dumps(json_schema(), indent=2))
    return 0


def new(arguments: argparse.Namespace) -> int:
    from cct.tools.scaffold import new_part

    for path in new_part(arguments.axis, arguments.name, Path.cwd()):
        say(f"wrote {path}")
    name = arguments.name
    say(f"try: cct run {name}.yaml, pytest test_{name}.py, and cct check-operator {name}.py:{name}")
    return 0


def evaluate(arguments: argparse.Namespace) -> int:
    import json

    from cct.run_folder import RunFolder
    from cct.system.files import write_text

    RunFolder(arguments.run).must_be_trained()  # before torch is imported
    from cct.api import evaluate

    metrics = evaluate(arguments.run, samples=arguments.samples, ks=arguments.ks, trust_plugins=arguments.trust_plugins)
    if arguments.json:
        write_text(arguments.json, json.dumps(metrics, indent=1) + "\n")
    width = max(18, *map(len, metrics))
    for name, value in metrics.items():
        say(f"{name:<{width}} {value:.4f}")
    return 0


def replay(arguments: argparse.Namespace) -> int:
    from cct.run_folder import RunFolder

    RunFolder(arguments.run).must_be_run()
    from cct.tools.replay import print_replay

    print_replay(arguments.run, arguments.transport, arguments.plugin, trust=arguments.trust_plugins)
    if arguments.save:
        from cct.tools.tokens import save_tokens

        say(f"wrote {save_tokens(arguments.run, arguments.transport, arguments.plugin, trust=arguments.trust_plugins)}")
    return 0


def report(arguments: argparse.Namespace) -> int:
    from cct.recipe import RecipeError
    from cct.run_folder import RunFolder
    from cct.tools.report.read import ReportError
    from cct.tools.report.write import write_report

    for source in arguments.source:  # the page reads only files, so the token view is written first
        folder = RunFolder(source)
        stored, tokens = folder.rollouts.values(), folder.tokens_file
        if arguments.transport and not stored:
            raise RecipeError(f"{source}: --transport needs a run's stored rollouts, and this folder has none")
        written = tokens.stat().st_mtime if tokens.is_file() else 0.0
        if stored and (arguments.transport or written < max(path.stat().st_mtime for path in stored)):
            from cct.tools.tokens import save_tokens

            save_tokens(source, arguments.transport, arguments.plugin, trust=arguments.trust_plugins)
    try:
        for path in write_report(arguments.source, arguments.output):
            say(f"wrote {path}")
    except ReportError as error:
        raise RecipeError(str(error)) from None
    return 0


def fidelity(arguments: argparse.Namespace) -> int:
    from cct.recipe import RecipeError

    for name, least in (("batches", 1), ("positions", 2), ("continuations", 4)):
        if getattr(arguments, name) < least:
            raise RecipeError(f"--{name} {getattr(arguments, name)}: must be at least {least}")
    if not 0 < arguments.below <= 1:
        raise RecipeError(f"--below {arguments.below:g}: must be above 0 and at most 1, which takes all tokens")
    from cct.registry import install

    try:
        from cct.tools.fidelity.table import print_fidelity
    except ModuleNotFoundError as error:
        if error.name != "scipy":
            raise
        raise RecipeError(f"cct fidelity needs SciPy, which is not installed: {install('study')}") from None
    return print_fidelity(
        arguments.source,
        arguments.transport,
        arguments.output,
        critics=arguments.critic,
        plugins=arguments.plugin,
        iteration=arguments.iteration,
        at=arguments.at,
        batches=arguments.batches,
        positions=arguments.positions,
        below=arguments.below,
        continuations=arguments.continuations,
        seed=arguments.seed,
        trust=arguments.trust_plugins,
    )


def study(arguments: argparse.Namespace) -> int:
    from cct.tools.study.command import command

    return command(arguments.action, arguments.study, arguments.set, arguments.studies, retry=arguments.retry)


def lab(arguments: argparse.Namespace) -> int:
    from cct.tools.lab.board import names
    from cct.tools.lab.command import command

    return command(
        arguments.operator,
        tasks=names(arguments.tasks),
        critics=arguments.critic or ["tac"],
        seeds=arguments.seeds,
        jobs=arguments.jobs,
        into=arguments.into,
        changes=arguments.set,
        retry=arguments.retry,
    )


def export(arguments: argparse.Namespace) -> int:
    from cct.run_folder import RunFolder

    RunFolder(arguments.run).must_be_run()
    from cct.agent.export import export

    checkpoint = export(
        arguments.run, arguments.folder, arguments.iteration, dtype=arguments.dtype, trust=arguments.trust_plugins
    )
    say(f"wrote {arguments.folder} from {checkpoint}")
    return 0


def doctor(arguments: argparse.Namespace) -> int:
    from cct.system.terminal import make_console
    from cct.tools.doctor import doctor

    return 0 if doctor(make_console(), test=not arguments.no_test) else 1
