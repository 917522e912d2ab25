"""Where metrics go besides the terminal: metrics.jsonl, and the loggers that the recipe names."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import Logger

from cct.recipe import Recipe, RecipeError
from cct.registry import RAISED, error_text
from cct.run_folder import RunFolder
from cct.system.files import append
from cct.watching import LOGGERS

SAMPLE = ("iteration", "prompt", "response", "reward", "advantage", "finished")  # columns of a table of samples


class JsonLinesLogger(Logger):
    """metrics.jsonl: one JSON object per event, with its iteration."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path

    @property
    def name(self) -> str:
        return "jsonl"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: recipe.yaml holds them."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        append(self.path, json.dumps({"iteration": step, **metrics}) + "\n")


class TrackioLogger(Logger):
    """Trackio, which has no logger in Lightning: metrics, system metrics and tables of samples in a local database."""

    def __init__(self, project: str, name: str, **arguments: Any):
        super().__init__()
        import trackio

        self.trackio, self._name, self._version = trackio, project, name
        self.arguments = {"resume": "allow", "embed": False, "auto_log_cpu": True, **arguments}
        self.config: dict[str, Any] = {}
        self.run: Any = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def version(self) -> str:
        return self._version

    @property
    def experiment(self) -> Any:
        """The run, begun when it is first asked for."""
        if self.run is None:
            self.run = self.trackio.init(project=self._name, name=self._version, config=self.config, **self.arguments)
        return self.run

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.config = dict(params)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.experiment.log(metrics, step=step)

    def log_table(self, key: str, columns: list[str], data: list[list[Any]], step: int | None = None) -> None:
        self.experiment.log({key: self.trackio.Table(columns=columns, data=data)}, step=step)

    def log_file(self, path: Path) -> None:
        self.experiment.log_artifact(str(path), name=f"{self._version}-{path.name}", type="run")

    def finalize(self, status: str) -> None:
        if self.run is not None:
            self.run.finish()
            self.run = None


def _wandb(run: RunFolder, recipe: Recipe, arguments: dict[str, Any]) -> Logger:
    """Under an id that a resumed run has again, so that it goes on in the same place."""
    told = {"project": recipe.name, "name": run.path.name, "save_dir": run.path / "logs", "id": _identity(run)}
    return WandbLogger(**{**told, "resume": "allow", **arguments})


def _mlflow(run: RunFolder, recipe: Recipe, arguments: dict[str, Any]) -> Logger:
    """On the server that MLFLOW_TRACKING_URI names, or else in a database in the run's folder."""
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    folder = run.path.resolve() / "logs"
    folder.mkdir(exist_ok=True)
    begun = folder / "mlflow_run"  # the id of the run there, for a resumed one to go on with
    told: dict[str, Any] = {"experiment_name": recipe.name, "run_name": run.path.name}
    if begun.exists():
        told["run_id"] = begun.read_text(encoding="utf-8")
    if not (server := os.environ.get("MLFLOW_TRACKING_URI")):
        told["artifact_location"] = f"file:{folder / 'mlflow'}"
    logger = MLFlowLogger(**{**told, "tracking_uri": server or f"sqlite:///{folder}/mlflow.db", **arguments})
    begun.write_text(str(logger.run_id), encoding="utf-8")
    return logger


def _trackio(run: RunFolder, recipe: Recipe, arguments: dict[str, Any]) -> Logger:
    return TrackioLogger(**{"project": recipe.name, "name": f"{run.path.name}-{_identity(run)[:8]}", **arguments})


def _identity(run: RunFolder) -> str:
    """A random one, kept in the run's folder."""
    file = run.path / "logs" / "id"
    file.parent.mkdir(exist_ok=True)
    if not file.exists():
        file.write_text(uuid.uuid4().hex, encoding="utf-8")
    return file.read_text(encoding="utf-8")


KEEP_FILES = (WandbLogger, MLFlowLogger, TrackioLogger)
WITH_NAMES: dict[str, Callable[[RunFolder, Recipe, dict[str, Any]], Logger]] = {
    "wandb": _wandb,
    "mlflow": _mlflow,
    "trackio": _trackio,
}


def loggers_of(recipe: Recipe, run: RunFolder, first: int) -> list[Logger]:
    """metrics.jsonl, then the recipe's loggers with the resolved recipe as hyperparameters; `first`: the iteration before.

    Raises RecipeError where one cannot be created.
    """
    made: list[Logger] = [JsonLinesLogger(run.metrics_file)]
    knobs = recipe.model_dump(mode="json")
    for asked in recipe.logging.logger:
        with_version = {"save_dir": run.path, "name": "logs", "version": f"from_{first:06d}"}
        try:
            if asked.use in WITH_NAMES:
                made.append(WITH_NAMES[asked.use](run, recipe, asked.arguments))
            elif asked.use in LOGGERS:
                kind = {"csv": CSVLogger, "tensorboard": TensorBoardLogger}[asked.use]
                made.append(kind(**{**with_version, **asked.arguments}))
                continue  # csv writes hyperparameters to a file of its own, and recipe.yaml is that file
            else:
                made.append(asked.made(Logger, "lightning.pytorch.loggers.Logger"))  # type: ignore[type-abstract]
            if not (first and isinstance(made[-1], MLFlowLogger)):  # which takes no changed ones
                made[-1].log_hyperparams(knobs)
        except RAISED as error:
            raise RecipeError(f"logging.logger: {asked.use}: {error_text(error)}") from error
    return made


def log_samples(loggers: Sequence[Logger], samples: Sequence[dict[str, Any]], iteration: int) -> None:
    """An iteration's samples as a table, to each logger that has tables."""
    rows = [[sample[column] for column in SAMPLE] for sample in samples]
    for logger in loggers:
        if rows and isinstance(logger, WandbLogger | TrackioLogger):
            logger.log_table("samples", columns=list(SAMPLE), data=rows, step=iteration)


class Artifacts(Callback):
    """At the end of a run, its recipe, samples and report to each logger that keeps files.

    report: writes the report of a run's folder, and returns its files.
    """

    def __init__(self, report: Callable[[Sequence[Path]], Sequence[Path]]):
        self.report = report

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        keep = [logger for logger in trainer.loggers if isinstance(logger, KEEP_FILES)]
        if not keep or not trainer.is_global_zero or not cast(Any, module).recipe.logging.artifacts:
            return
        run = RunFolder(Path(trainer.default_root_dir))
        log_files(keep, [run.recipe_file, run.samples_file, *self.report([run.path])])


def log_files(loggers: Sequence[Logger], files: Sequence[Path]) -> None:
    """Files of a run, to each logger that keeps files."""
    for logger in loggers:
        for file in files:
            if isinstance(logger, TrackioLogger):
                logger.log_file(file)
            elif isinstance(logger, MLFlowLogger):
                logger.experiment.log_artifact(logger.run_id, str(file))
        if isinstance(logger, WandbLogger):
            import wandb

            artifact = wandb.Artifact(f"run-{logger.experiment.id}", type="run")
            for file in files:
                artifact.add_file(str(file))
            logger.experiment.log_artifact(artifact)
