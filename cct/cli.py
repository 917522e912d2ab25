"""The command line. Each verb imports what it needs when it is called, so that help and checks stay instant."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from cct import __version__
from cct.system.files import NO_ROOM, WriteError
from cct.system.signals import Interrupted, answered
from cct.system.terminal import encode_anything, printable, say, say_traceback

AXES = ("task", "policy", "generation", "environment", "evidence", "critic", "transport", "gate", "geometry")


def main(argv: list[str] | None = None) -> int:
    """Entry point. Returns 0, 1 (a run stopped, or does not fit), or 2 (bad input, one readable message)."""
    encode_anything()
    arguments = _parser().parse_args(argv)
    from cct.recipe import RecipeError
    from cct.registry import PluginError, error_text, raised_at

    try:
        os.getcwd()
    except OSError:
        say("error: the current folder no longer exists; go to another one", file=sys.stderr)
        return 2
    try:
        with answered():
            code = arguments.verb(arguments)
            if sys.stdout is not None:
                sys.stdout.flush()
            return code
    except RecipeError as error:
        for problem in error.problems:
            say(f"error: {problem}", file=sys.stderr)
        return 2
    except PluginError as error:
        say(f"error: {error}", file=sys.stderr)
        return 2
    except (ImportError, RuntimeError) as error:
        broken = _broken_media(error)
        if broken is None:
            raise
        say(f"error: {broken}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `cct schema | head`
        _leave_stdout()
        return 0
    except WriteError as error:
        say(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        _leave_stdout()  # it may be where nothing can be written
        say(f"error: {error}", file=sys.stderr)
        return 1
    except (SystemExit, GeneratorExit) as error:
        if not raised_at(error):  # cct's own, in a process for which another one speaks
            raise
        say(f"error: code of a part tried to end the process with {error_text(error)}", file=sys.stderr)
        return 2
    except Interrupted as error:
        print("interrupted" if error.number == signal.SIGINT else f"interrupted by {error.name}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _leave_stdout() -> None:
    """What is still to be written there goes nowhere, or Python complains when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _stopped(error: Exception) -> int:
    """Say in a line why a run stopped; the traceback of what a part raised is printed where CCT_TRACEBACK is set."""
    say(f"stopped: {error}", file=sys.stderr)
    if error.__cause__ is not None and os.environ.get("CCT_TRACEBACK"):
        say_traceback(error.__cause__)
    elif error.__cause__ is not None:
        print("(CCT_TRACEBACK=1 in the environment prints the traceback)", file=sys.stderr)
    return 1


def _broken_media(error: BaseException | None) -> str | None:
    """What to do where transformers cannot be imported beside builds of torch's media packages for another torch."""
    packages = ("torchvision", "torchaudio", "torchcodec")
    while error is not None:
        found = next((name for name in packages if name in str(error)), None)
        if found:
            remedy = f"text models need none: pip uninstall -y {' '.join(packages)}"
            return f"{found} does not fit the installed torch ({error}); {remedy}"
        error = error.__cause__ or error.__context__
    return None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="cct", allow_abbrev=False, description="Credit transport for language-model reinforcement learning.")
    parser.add_argument("--version", action="version", version=f"cct {__version__}")
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, verb, help: str) -> argparse.ArgumentParser:
        command = verbs.add_parser(name, help=help, description=help, allow_abbrev=False)
        command.set_defaults(verb=verb)
        return command

    def add_trust(command: argparse.ArgumentParser) -> None:
        command.add_argument(
            "--trust-plugins",
            action="store_true",
            help="run plug-ins of the run's recipe that have no recorded SHA-256, or another one: they may be anyone's code",
        )

    def add_set(command: argparse.ArgumentParser) -> None:
        command.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="a.b=c",
            help="change a key of the recipe, `a.b=` to null; may be repeated",
        )

    run = add("run", _run, "train a recipe, or go on with a run")
    run.add_argument("recipe", nargs="?", help="recipe file; with --resume the run's own unless given")
    add_set(run)
    run.add_argument("--resume", metavar="RUN", type=Path, help="go on from the newest checkpoint of this run folder")
    run.add_argument(
        "--runs", metavar="DIR", type=Path, default=Path("runs"), help="where run folders are made (default: runs)"
    )
    run.add_argument(
        "--profile", action="store_true", help="print where the time goes, and write a trace of one iteration for Perfetto"
    )
    run.add_argument("--into", metavar="FOLDER", type=Path, help="train into this folder, which must not hold anything yet")
    run.add_argument("--dry-run", action="store_true", help="validate and say what would run, without loading a model")

    check = add("check", _check, "validate recipes without loading a model")
    check.add_argument("recipe", nargs="+")
    check.add_argument(
        "--deep",
        action="store_true",
        help="also find prompts that are too long or twice, and unreadable gold answers",
    )
    add_set(check)

    explain = add("explain", _explain, "print a recipe resolved: each part's source, needs and providers, parameter counts")
    explain.add_argument("recipe")
    add_set(explain)

    plan = add("plan", _plan, "say what a recipe needs of memory, and whether it fits a GPU, without loading weights")
    plan.add_argument("recipe")
    plan.add_argument(
        "--gpu", metavar="NAME", help="a GPU by name, such as H100, or its memory in GB, such as 24; default: the CPU"
    )
    add_set(plan)

    listing = add("ls", _ls, "list the registered components")
    listing.add_argument("axis", nargs="?", metavar="AXIS", help=f"of {', '.join(AXES)}; with its knobs")
    listing.add_argument("--markdown", action="store_true", help="as the page docs/catalogue.md, of what comes with cct")

    operator = add("check-operator", _check_operator, "run the conformance suite on a part, one's own included")
    operator.add_argument("operator", metavar="NAME_OR_FILE:NAME", help="a registered name, or file.py:NAME")
    operator.add_argument(
        "--axis", choices=("transport", "gate", "geometry", "critic", "evidence", "environment"), help="where a name is several"
    )
    operator.add_argument("--examples", type=int, default=60, metavar="N", help="inputs tried on each property (default: 60)")
    operator.add_argument("--set", action="append", default=[], metavar="a=b", help="change a knob; may be repeated")

    schema = add("schema", _schema, "print the JSON Schema of recipes, for editors")
    schema.add_argument("recipe", nargs="?", help="include this recipe's plug-ins")

    new = add("new", _new, "write a component of your own with a recipe and a test")
    new.add_argument("axis", choices=("transport", "environment"))
    new.add_argument("name")

    evaluate = add("eval", _eval, "evaluation of a finished run, on the held-out problems and the frozen sets")
    evaluate.add_argument("run", type=Path)
    evaluate.add_argument("--samples", type=int, default=0, metavar="N", help="sample N responses to each problem as well")
    evaluate.add_argument("--ks", type=_numbers, default=[1], metavar="K,K", help="the k of pass@k, at most N (default: 1)")
    add_trust(evaluate)
    evaluate.add_argument("--json", type=Path, metavar="FILE", help="write the metrics there, too")

    replay = add("replay", _replay, "recompute the credit of a run's stored rollouts under other transports, and compare")
    replay.add_argument("run", type=Path)
    replay.add_argument(
        "--transport", action="append", default=[], metavar="YAML", help="a name or '{use: gae, lam: 0.95}'; may be repeated"
    )
    replay.add_argument("--plugin", action="append", default=[], metavar="FILE", help="file or module of a part of one's own")
    add_trust(replay)
    replay.add_argument("--save", action="store_true", help="write tokens.json: some responses token by token, for the report")

    study = add("study", _study, "run a study, recipes times seeds side by side, and its statistics; goes on where it was cut")
    study.add_argument(
        "action", nargs="?", default="run", choices=("run", "check", "status", "summary"), help="what to do (default: run)"
    )
    study.add_argument("study", metavar="STUDY", type=Path, help="study file, for example recipes/studies/compo.yaml")
    study.add_argument("--set", action="append", default=[], metavar="a.b=c", help="change a key of the study; may be repeated")
    study.add_argument("--retry", action="store_true", help="run failed cells again")
    study.add_argument(
        "--studies", metavar="DIR", type=Path, default=Path("studies"), help="where study folders are made (default: studies)"
    )

    report = add("report", _report, "write an HTML page about a study or a run, or about several runs side by side")
    report.add_argument("source", nargs="+", metavar="STUDY_OR_RUN", type=Path)
    report.add_argument("-o", "--output", metavar="FILE", type=Path, help="default: report.html in the first folder")
    report.add_argument(
        "--transport", action="append", default=[], metavar="YAML", help="to show beside a run's own; as for replay"
    )
    report.add_argument("--plugin", action="append", default=[], metavar="FILE", help="file or module of a part of one's own")

    add_trust(report)

    fidelity = add("fidelity", _fidelity, "score the credit of transports against the true advantage, found by branching")
    fidelity.add_argument(
        "source", nargs="+", metavar="RUN_OR_RECIPE", type=Path, help="runs, or recipes before their first update"
    )
    fidelity.add_argument(
        "--transport", action="append", default=[], metavar="YAML", help="beside the run's own; as for replay"
    )
    fidelity.add_argument(
        "--critic",
        action="append",
        default=[],
        metavar="YAML",
        help="beside the run's own, around what it learnt: group_level, '{use: group_mean, weight: 0}'",
    )
    fidelity.add_argument("--plugin", action="append", default=[], metavar="FILE", help="file or module of a part of one's own")
    fidelity.add_argument("--iteration", type=int, metavar="N", help="of which checkpoint (default: the newest)")
    fidelity.add_argument("--batches", type=int, default=4, metavar="N", help="iterations of responses sampled (default: 4)")
    fidelity.add_argument("--positions", type=int, default=512, metavar="N", help="tokens looked at (default: 512)")
    fidelity.add_argument(
        "--below", type=float, default=0.95, metavar="P", help="of those sampled with a probability below P (default: 0.95)"
    )
    fidelity.add_argument(
        "--continuations", type=int, default=32, metavar="M", help="sampled before and after each of them (default: 32)"
    )
    fidelity.add_argument("--seed", type=int, metavar="S", help="of prompts and sampling (default: the recipe's)")
    fidelity.add_argument("-o", "--output", type=Path, metavar="FILE", help="also write the results of all runs here, as JSON")

    add_trust(fidelity)

    export = add("export", _export, "write the policy of a run's checkpoint as a Hugging Face folder")
    export.add_argument("run", type=Path)
    export.add_argument("folder", type=Path, help="made; must not hold anything")
    export.add_argument("--iteration", type=int, metavar="N", help="of which checkpoint (default: the newest)")
    export.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the written weights (default: the one they were trained in, policy.dtype)",
    )
    add_trust(export)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    from cct.recipe import RecipeError

    if arguments.recipe is None and arguments.resume is None:
        raise RecipeError("cct run needs a recipe, for example: cct run recipes/compo.yaml")
    recipe = _checked(arguments.recipe, arguments.set, demonstrations=True) if arguments.recipe else None
    if arguments.resume is not None:
        from cct.training.folder import to_resume

        recipe = to_resume(arguments.resume, recipe, arguments.set)[0]
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
    if arguments.profile:  # read when torch is imported: its profiler says on stderr that it starts and stops
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from cct.api import resume, train
    from cct.training.stopped import TrainingStopped

    try:
        if arguments.resume:
            resume(arguments.resume, arguments.set, recipe=recipe, profile=arguments.profile)
        else:
            train(recipe, runs=arguments.runs, into=arguments.into, profile=arguments.profile, check=False)
    except TrainingStopped as error:
        return _stopped(error)
    except BrokenPipeError:  # `cct run RECIPE | head`: the run is not done
        _leave_stdout()
        raise Interrupted(signal.SIGPIPE) from None
    return 0


def _checked(path: str, overrides: list[str], *, demonstrations: bool = False):
    """The recipe, its data looked at as well; the demonstrations of a warm start before a run only: that takes a second."""
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


def _check(arguments: argparse.Namespace) -> int:
    from cct.recipe import RecipeError

    problems: list[str] = []
    for path in arguments.recipe:
        try:
            recipe = _checked(path, arguments.set)
            if arguments.deep:
                _look_deep(path, recipe)
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
    for line in found.lines:
        say(f"{path}: {line}")
    for warning in found.warnings:
        say(f"warning: {path}: {warning}", file=sys.stderr)
    if found.problems:
        raise RecipeError(*(f"{path}: {problem}" for problem in found.problems))


def _explain(arguments: argparse.Namespace) -> int:
    from cct.tools.explain import explain

    return explain(_checked(arguments.recipe, arguments.set))


def _plan(arguments: argparse.Namespace) -> int:
    from cct.loading import load_recipe
    from cct.tools.plan import print_plan

    return print_plan(load_recipe(arguments.recipe, arguments.set), arguments.gpu)


def _ls(arguments: argparse.Namespace) -> int:
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


def _check_operator(arguments: argparse.Namespace) -> int:
    from cct.tools.conformance.report import print_verdicts

    return print_verdicts(arguments.operator, arguments.axis, arguments.set, arguments.examples)


def _schema(arguments: argparse.Namespace) -> int:
    import json

    from cct.loading import json_schema, load_recipe
    from cct.registry import load_entry_points

    load_entry_points()
    if arguments.recipe:
        load_recipe(arguments.recipe)
    say(json.dumps(json_schema(), indent=2))
    return 0


def _new(arguments: argparse.Namespace) -> int:
    from cct.tools.scaffold import new_part

    for path in new_part(arguments.axis, arguments.name, Path.cwd()):
        say(f"wrote {path}")
    name = arguments.name
    say(f"try: cct run {name}.yaml, pytest test_{name}.py, and cct check-operator {name}.py:{name}")
    return 0


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _eval(arguments: argparse.Namespace) -> int:
    import json

    from cct.system.files import write_text
    from cct.training.folder import must_be_trained

    must_be_trained(arguments.run)  # before torch is imported
    from cct.api import evaluate
    from cct.training.stopped import TrainingStopped

    try:
        metrics = evaluate(arguments.run, samples=arguments.samples, ks=arguments.ks, trust_plugins=arguments.trust_plugins)
    except TrainingStopped as error:
        return _stopped(error)
    if arguments.json:
        write_text(arguments.json, json.dumps(metrics, indent=1) + "\n")
    width = max(18, *map(len, metrics))
    for name, value in metrics.items():
        say(f"{name:<{width}} {value:.4f}")
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    from cct.training.folder import must_be_run

    must_be_run(arguments.run)
    from cct.tools.replay import print_replay

    return print_replay(
        arguments.run, arguments.transport, arguments.plugin, save=arguments.save, trust=arguments.trust_plugins
    )


def _report(arguments: argparse.Namespace) -> int:
    from cct.recipe import RecipeError
    from cct.tools.report.read import ReportError
    from cct.tools.report.write import write_report

    for source in arguments.source:  # the page reads files only, so what it shows of tokens is written first
        stored, tokens = [*(source / "rollouts").glob("*.safetensors")], source / "tokens.json"
        if arguments.transport and not stored:
            raise RecipeError(f"{source}: --transport needs a run's stored rollouts, and there are none")
        written = tokens.stat().st_mtime if tokens.is_file() else 0.0
        if stored and (arguments.transport or written < max(path.stat().st_mtime for path in stored)):
            from cct.tools.replay import save_tokens

            save_tokens(source, arguments.transport, arguments.plugin, trust=arguments.trust_plugins)
    try:
        for path in write_report(arguments.source, arguments.output):
            say(f"wrote {path}")
    except ReportError as error:
        raise RecipeError(str(error)) from None
    return 0


def _fidelity(arguments: argparse.Namespace) -> int:
    from cct.recipe import RecipeError

    for name, least in (("batches", 1), ("positions", 2), ("continuations", 4)):
        if getattr(arguments, name) < least:
            raise RecipeError(f"--{name} {getattr(arguments, name)}: at least {least} are needed")
    if not 0 < arguments.below <= 1:
        raise RecipeError(f"--below {arguments.below:g}: a probability above 0, and at most 1, for all tokens")
    from cct.registry import install

    try:
        from cct.tools.fidelity.table import print_fidelity
        from cct.training.stopped import TrainingStopped
    except ModuleNotFoundError as error:
        if error.name != "scipy":
            raise
        raise RecipeError(f"cct fidelity needs SciPy, which is not installed: {install('study')}") from None
    try:
        return print_fidelity(
            arguments.source,
            arguments.transport,
            arguments.output,
            critics=arguments.critic,
            plugins=arguments.plugin,
            at=arguments.iteration,
            batches=arguments.batches,
            positions=arguments.positions,
            below=arguments.below,
            continuations=arguments.continuations,
            seed=arguments.seed,
            trust=arguments.trust_plugins,
        )
    except TrainingStopped as error:
        return _stopped(error)


def _study(arguments: argparse.Namespace) -> int:
    from cct.tools.study.command import command

    return command(arguments.action, arguments.study, arguments.set, arguments.studies, retry=arguments.retry)


def _export(arguments: argparse.Namespace) -> int:
    from cct.training.folder import must_be_run

    must_be_run(arguments.run)
    from cct.training.export import export

    checkpoint = export(
        arguments.run, arguments.folder, arguments.iteration, dtype=arguments.dtype, trust=arguments.trust_plugins
    )
    say(f"wrote {arguments.folder} from {checkpoint}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
