"""The command line: arguments and the handling of errors. `commands` implements the verbs."""

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
    """Entry point. Returns 0, 1 (a run stopped, or a plan does not fit), or 2 (bad input, with one readable message)."""
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
        leave_stdout()  # stdout may be the file that cannot be written
        say(f"error: {error}", file=sys.stderr)
        return 1
    except (SystemExit, GeneratorExit) as error:
        if not raised_at(error):  # raised by cct, in a process whose error another process prints
            raise
        say(f"error: a part's code tried to end the process with {error_text(error)}", file=sys.stderr)
        return 2
    except Interrupted as error:
        print("interrupted" if error.number == signal.SIGINT else f"interrupted by {error.name}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _stopped(error: Exception) -> int:
    """Print in one line why a run stopped. If CCT_TRACEBACK is set, also print the traceback of what a part raised."""
    say(f"stopped: {error}", file=sys.stderr)
    if error.__cause__ is not None and os.environ.get("CCT_TRACEBACK"):
        say_traceback(error.__cause__)
    elif error.__cause__ is not None:
        print("(CCT_TRACEBACK=1 in the environment prints the traceback)", file=sys.stderr)
    return 1


def _broken_media(error: BaseException | None) -> str | None:
    """What to do if transformers cannot be imported because torch's media packages were built for another torch."""
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

    for group in (_of_recipes, _of_parts, _of_runs, _of_studies, _fidelity, _export, _doctor):
        group(add)
    return parser


def _add_trust(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--trust-plugins",
        action="store_true",
        help="import the recipe's plug-ins even if their SHA-256 was not recorded or differs; they may be anyone's code",
    )


def _add_set(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="a.b=c",
        help="change a key of the recipe; `a.b=` sets it to null; may be repeated",
    )


def _add_plugin(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--plugin", action="append", default=[], metavar="FILE", help="file or module that defines parts of yours"
    )


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _of_recipes(add: Add) -> None:
    run = add("run", commands.run, "train a recipe, or resume a run")
    run.add_argument(
        "recipe", nargs="?", help="recipe file, or the name of one of cct's, `compo`; with --resume, default: the run's"
    )
    _add_set(run)
    run.add_argument("--resume", metavar="RUN", type=Path, help="resume from the newest checkpoint of this run folder")
    run.add_argument(
        "--runs", metavar="DIR", type=Path, default=Path("runs"), help="where run folders are created (default: runs)"
    )
    run.add_argument(
        "--profile", action="store_true", help="print where the time goes, and write a trace of one iteration for Perfetto"
    )
    run.add_argument("--into", metavar="FOLDER", type=Path, help="train into this folder, which must be empty or new")
    run.add_argument("--dry-run", action="store_true", help="validate and print what would run, without loading a model")

    check = add("check", commands.check, "validate recipes without loading a model")
    check.add_argument("recipe", nargs="+")
    check.add_argument(
        "--deep",
        action="store_true",
        help="also find prompts that are too long or duplicated, and gold answers that cannot be read",
    )
    _add_set(check)

    explain = add(
        "explain", commands.explain, "print the resolved recipe: each part's source, needs and providers, parameter counts"
    )
    explain.add_argument("recipe")
    _add_set(explain)

    plan = add("plan", commands.plan, "plan a recipe's memory without loading weights, and report whether it fits a GPU")
    plan.add_argument("recipe")
    plan.add_argument(
        "--gpu", metavar="NAME", help="a GPU by name, such as H100, or its memory in GB, such as 24; default: the CPU"
    )
    _add_set(plan)


def _of_parts(add: Add) -> None:
    listing = add("ls", commands.ls, "list the registered components")
    listing.add_argument("axis", nargs="?", metavar="AXIS", help=f"one of {', '.join(AXES)}: also list the knobs")
    listing.add_argument("--markdown", action="store_true", help="print the page docs/catalogue.md, with built-in parts only")

    operator = add("check-operator", commands.check_operator, "run the conformance suite on a part, built-in or yours")
    operator.add_argument("operator", metavar="NAME_OR_FILE:NAME", help="a registered name, or file.py:NAME")
    operator.add_argument(
        "--axis",
        choices=("transport", "gate", "statistic", "geometry", "critic", "evidence", "environment"),
        help="needed if the name is registered on several axes",
    )
    operator.add_argument("--examples", type=int, default=60, metavar="N", help="inputs tried per property (default: 60)")
    operator.add_argument("--set", action="append", default=[], metavar="a=b", help="change a knob; may be repeated")

    schema = add("schema", commands.schema, "print the JSON Schema of recipes, for editors")
    schema.add_argument("recipe", nargs="?", help="include this recipe's plug-ins")

    new = add("new", commands.new, "write a new component, with a recipe and a test")
    new.add_argument("axis", choices=("transport", "statistic", "environment"))
    new.add_argument("name")


def _of_runs(add: Add) -> None:
    evaluate = add("eval", commands.evaluate, "evaluate a finished run on the held-out problems and the frozen sets")
    evaluate.add_argument("run", type=Path)
    evaluate.add_argument("--samples", type=int, default=0, metavar="N", help="also sample N responses to each problem")
    evaluate.add_argument(
        "--ks", type=_numbers, default=[1], metavar="K,K", help="values of k for pass@k, at most N (default: 1)"
    )
    _add_trust(evaluate)
    evaluate.add_argument("--json", type=Path, metavar="FILE", help="also write the metrics to this file")

    replay = add("replay", commands.replay, "recompute credit for a run's stored rollouts under other transports, and compare")
    replay.add_argument("run", type=Path)
    replay.add_argument(
        "--transport", action="append", default=[], metavar="YAML", help="a name or '{use: gae, lam: 0.95}'; may be repeated"
    )
    _add_plugin(replay)
    _add_trust(replay)
    replay.add_argument("--save", action="store_true", help="write tokens.json: some responses token by token, for the report")


def _of_studies(add: Add) -> None:
    study = add(
        "study", commands.study, "run recipes over seeds in parallel and compute statistics; resumes an interrupted study"
    )
    study.add_argument(
        "action", nargs="?", default="run", choices=("run", "check", "status", "summary"), help="what to do (default: run)"
    )
    study.add_argument("study", metavar="STUDY", type=Path, help="study file, for example recipes/studies/compo.yaml")
    study.add_argument("--set", action="append", default=[], metavar="a.b=c", help="change a key of the study; may be repeated")
    study.add_argument("--retry", action="store_true", help="run failed cells again")
    study.add_argument(
        "--studies",
        metavar="DIR",
        type=Path,
        default=Path("studies"),
        help="where study folders are created (default: studies)",
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

    report = add("report", commands.report, "write an HTML page about a study, a run, or several runs side by side")
    report.add_argument("source", nargs="+", metavar="STUDY_OR_RUN", type=Path)
    report.add_argument("-o", "--output", metavar="FILE", type=Path, help="default: report.html in the first folder")
    report.add_argument(
        "--transport", action="append", default=[], metavar="YAML", help="also show this transport's credit; as for replay"
    )
    _add_plugin(report)
    _add_trust(report)


def _fidelity(add: Add) -> None:
    fidelity = add(
        "fidelity", commands.fidelity, "score the credit of transports against the true advantage, measured by branching"
    )
    fidelity.add_argument(
        "source",
        nargs="+",
        metavar="RUN_OR_RECIPE",
        type=Path,
        help="run folders, or recipes, which are scored before their first update",
    )
    fidelity.add_argument(
        "--transport", action="append", default=[], metavar="YAML", help="also score this transport; as for replay"
    )
    fidelity.add_argument(
        "--critic",
        action="append",
        default=[],
        metavar="YAML",
        help="also score with this critic, built on the run's trained one: group_level, '{use: group_mean, weight: 0}'",
    )
    _add_plugin(fidelity)
    fidelity.add_argument("--at", choices=("tokens", "turns"), default="tokens", help="what to score (default: tokens)")
    fidelity.add_argument(
        "--iteration", type=int, metavar="N", help="score the checkpoint of iteration N (default: the newest)"
    )
    fidelity.add_argument("--batches", type=int, default=4, metavar="N", help="iterations of responses to sample (default: 4)")
    fidelity.add_argument("--positions", type=int, default=512, metavar="N", help="how many to score (default: 512)")
    fidelity.add_argument(
        "--below",
        type=float,
        default=0.95,
        metavar="P",
        help="score only tokens sampled with probability below P (default: 0.95)",
    )
    fidelity.add_argument(
        "--continuations",
        type=int,
        default=32,
        metavar="M",
        help="continuations from before and from after each token (default: 32)",
    )
    fidelity.add_argument("--seed", type=int, metavar="S", help="seed of prompts and sampling (default: the recipe's)")
    fidelity.add_argument("-o", "--output", type=Path, metavar="FILE", help="also write the results of all runs here, as JSON")
    _add_trust(fidelity)


def _doctor(add: Add) -> None:
    doctor = add(
        "doctor", commands.doctor, "print versions, devices and extras for a bug report, and train for a minute as a test"
    )
    doctor.add_argument("--no-test", action="store_true", help="print only; train nothing")


def _export(add: Add) -> None:
    export = add("export", commands.export, "write the policy of a run's checkpoint as a Hugging Face folder")
    export.add_argument("run", type=Path)
    export.add_argument("folder", type=Path, help="folder to create; must be empty or new")
    export.add_argument("--iteration", type=int, metavar="N", help="export the checkpoint of iteration N (default: the newest)")
    export.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="type of the written weights (default: the type they were trained in, policy.dtype)",
    )
    _add_trust(export)


if __name__ == "__main__":
    sys.exit(main())
