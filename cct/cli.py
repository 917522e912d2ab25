"""The command line: its arguments, and what becomes of errors. `commands` holds what the verbs do."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from cct import __version__, commands
from cct.commands import AXES
from cct.system.files import NO_ROOM, WriteError
from cct.system.signals import Interrupted, answered
from cct.system.terminal import encode_anything, leave_stdout, printable, say, say_traceback

Add = Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]  # name, what it calls, help


def main(argv: list[str] | None = None) -> int:
    """Entry point. Returns 0, 1 (a run stopped, or does not fit), or 2 (bad input, one readable message)."""
    encode_anything()
    arguments = _parser().parse_args(argv)
    from cct.errors import TrainingStopped
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
    except TrainingStopped as error:
        return _stopped(error)
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
        leave_stdout()
        return 0
    except WriteError as error:
        say(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        leave_stdout()  # it may be where nothing can be written
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

    def add(name: str, verb: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        command = verbs.add_parser(name, help=help, description=help, allow_abbrev=False)
        command.set_defaults(verb=verb)
        return command

    for group in (_of_recipes, _of_parts, _of_runs, _of_studies, _fidelity, _export):
        group(add)
    return parser


def _add_trust(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--trust-plugins",
        action="store_true",
        help="run plug-ins of the run's recipe that have no recorded SHA-256, or another one: they may be anyone's code",
    )


def _add_set(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="a.b=c",
        help="change a key of the recipe, `a.b=` to null; may be repeated",
    )


def _add_plugin(command: argparse.ArgumentParser) -> None:
    command.add_argument("--plugin", action="append", default=[], metavar="FILE", help="file or module of a part of one's own")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _of_recipes(add: Add) -> None:
    run = add("run", commands.run, "train a recipe, or go on with a run")
    run.add_argument("recipe", nargs="?", help="recipe file; with --resume the run's own unless given")
    _add_set(run)
    run.add_argument("--resume", metavar="RUN", type=Path, help="go on from the newest checkpoint of this run folder")
    run.add_argument(
        "--runs", metavar="DIR", type=Path, default=Path("runs"), help="where run folders are made (default: runs)"
    )
    run.add_argument(
        "--profile", action="store_true", help="print where the time goes, and write a trace of one iteration for Perfetto"
    )
    run.add_argument("--into", metavar="FOLDER", type=Path, help="train into this folder, which must not hold anything yet")
    run.add_argument("--dry-run", action="store_true", help="validate and say what would run, without loading a model")

    check = add("check", commands.check, "validate recipes without loading a model")
    check.add_argument("recipe", nargs="+")
    check.add_argument(
        "--deep",
        action="store_true",
        help="also find prompts that are too long or twice, and unreadable gold answers",
    )
    _add_set(check)

    explain = add(
        "explain", commands.explain, "print a recipe resolved: each part's source, needs and providers, parameter counts"
    )
    explain.add_argument("recipe")
    _add_set(explain)

    plan = add("plan", commands.plan, "say what a recipe needs of memory, and whether it fits a GPU, without loading weights")
    plan.add_argument("recipe")
    plan.add_argument(
        "--gpu", metavar="NAME", help="a GPU by name, such as H100, or its memory in GB, such as 24; default: the CPU"
    )
    _add_set(plan)


def _of_parts(add: Add) -> None:
    listing = add("ls", commands.ls, "list the registered components")
    listing.add_argument("axis", nargs="?", metavar="AXIS", help=f"of {', '.join(AXES)}; with its knobs")
    listing.add_argument("--markdown", action="store_true", help="as the page docs/catalogue.md, of what comes with cct")

    operator = add("check-operator", commands.check_operator, "run the conformance suite on a part, your own included")
    operator.add_argument("operator", metavar="NAME_OR_FILE:NAME", help="a registered name, or file.py:NAME")
    operator.add_argument(
        "--axis",
        choices=("transport", "gate", "statistic", "geometry", "critic", "evidence", "environment"),
        help="if several axes have the name",
    )
    operator.add_argument("--examples", type=int, default=60, metavar="N", help="inputs tried on each property (default: 60)")
    operator.add_argument("--set", action="append", default=[], metavar="a=b", help="change a knob; may be repeated")

    schema = add("schema", commands.schema, "print the JSON Schema of recipes, for editors")
    schema.add_argument("recipe", nargs="?", help="include this recipe's plug-ins")

    new = add("new", commands.new, "write a component of your own with a recipe and a test")
    new.add_argument("axis", choices=("transport", "statistic", "environment"))
    new.add_argument("name")


def _of_runs(add: Add) -> None:
    evaluate = add("eval", commands.evaluate, "evaluation of a finished run, on the held-out problems and the frozen sets")
    evaluate.add_argument("run", type=Path)
    evaluate.add_argument("--samples", type=int, default=0, metavar="N", help="sample N responses to each problem as well")
    evaluate.add_argument("--ks", type=_numbers, default=[1], metavar="K,K", help="the k of pass@k, at most N (default: 1)")
    _add_trust(evaluate)
    evaluate.add_argument("--json", type=Path, metavar="FILE", help="write the metrics there, too")

    replay = add(
        "replay", commands.replay, "recompute the credit of a run's stored rollouts under other transports, and compare"
    )
    replay.add_argument("run", type=Path)
    replay.add_argument(
        "--transport", action="append", default=[], metavar="YAML", help="a name or '{use: gae, lam: 0.95}'; may be repeated"
    )
    _add_plugin(replay)
    _add_trust(replay)
    replay.add_argument("--save", action="store_true", help="write tokens.json: some responses token by token, for the report")


def _of_studies(add: Add) -> None:
    study = add(
        "study", commands.study, "run a study, recipes times seeds side by side, and its statistics; goes on where it was cut"
    )
    study.add_argument(
        "action", nargs="?", default="run", choices=("run", "check", "status", "summary"), help="what to do (default: run)"
    )
    study.add_argument("study", metavar="STUDY", type=Path, help="study file, for example recipes/studies/compo.yaml")
    study.add_argument("--set", action="append", default=[], metavar="a.b=c", help="change a key of the study; may be repeated")
    study.add_argument("--retry", action="store_true", help="run failed cells again")
    study.add_argument(
        "--studies", metavar="DIR", type=Path, default=Path("studies"), help="where study folders are made (default: studies)"
    )

    lab = add(
        "lab", commands.lab, "score advantage estimators where the truth is known: share of what exact credit gains over GRPO"
    )
    lab.add_argument(
        "operator",
        nargs="*",
        metavar="OPERATOR",
        help="beside grpo and exact: a transport, gate or critic by name, as '{use: gae, lam: 0.9}', as file.py:NAME; `all`",
    )
    lab.add_argument("--tasks", default="parts", metavar="A,B", help="parts, filler, chain, recall (default: parts)")
    lab.add_argument(
        "--critic",
        action="append",
        default=[],
        metavar="YAML",
        help="of transports that read values, `exact` for an oracle's; may be repeated (default: tac)",
    )
    lab.add_argument("--seeds", type=int, default=10, metavar="N", help="seeds 0 to N - 1 (default: 10)")
    lab.add_argument("--jobs", type=int, default=2, metavar="N", help="runs side by side (default: 2)")
    lab.add_argument("--into", type=Path, default=Path("lab"), metavar="FOLDER", help="holds runs and results (default: lab)")
    lab.add_argument("--retry", action="store_true", help="run failed cells again")
    _add_set(lab)

    report = add("report", commands.report, "write an HTML page about a study or a run, or about several runs side by side")
    report.add_argument("source", nargs="+", metavar="STUDY_OR_RUN", type=Path)
    report.add_argument("-o", "--output", metavar="FILE", type=Path, help="default: report.html in the first folder")
    report.add_argument(
        "--transport", action="append", default=[], metavar="YAML", help="to show beside a run's own; as for replay"
    )
    _add_plugin(report)
    _add_trust(report)


def _fidelity(add: Add) -> None:
    fidelity = add(
        "fidelity", commands.fidelity, "score the credit of transports against the true advantage, found by branching"
    )
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
    _add_plugin(fidelity)
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
    _add_trust(fidelity)


def _export(add: Add) -> None:
    export = add("export", commands.export, "write the policy of a run's checkpoint as a Hugging Face folder")
    export.add_argument("run", type=Path)
    export.add_argument("folder", type=Path, help="made; must not hold anything")
    export.add_argument("--iteration", type=int, metavar="N", help="of which checkpoint (default: the newest)")
    export.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the written weights (default: the one they were trained in, policy.dtype)",
    )
    _add_trust(export)


if __name__ == "__main__":
    sys.exit(main())
