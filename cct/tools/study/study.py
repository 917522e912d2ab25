"""The study file: which recipes and seeds make its cells, what is compared, and what counts as stable.

    name: compo
    base: ../compo.yaml                       # the recipe that arms are laid over, relative to this file
    arms:
      compo: {}
      grpo: {base: ../grpo.yaml}              # or a recipe of its own
    common: {evaluation: {every: 3}}          # laid over every arm
    seeds: [0, 1, 2]
    compare: [[compo, grpo]]

An arm is what would stand in a recipe file. `factors` multiply: their product makes the arms, or, where there are arms, the
settings of a grid under which each arm is run.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from cct.loading import Source, override, read_yaml, recipe_of, validated, with_bases
from cct.preflight import preflight
from cct.recipe import Recipe, RecipeError
from cct.registry import Knobs, did_you_mean
from cct.system.plain_yaml import dump
from cct.system.terminal import shortened

MOST_CELLS = 10_000

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
Layer = dict[str, Any] | None


class Stable(Knobs):
    """When a run counts as stable. It is part of the study because it must be fixed before the runs."""

    max_drop: float = Field(0.1, ge=0, le=1)
    """Largest allowed fall of the held-out accuracy below the best evaluation before it."""
    max_kl: float = Field(0.1, gt=0, le=1e6)
    """Largest allowed `policy/approx_kl` of an iteration, in nats."""


class Evaluate(Knobs):
    """`cct eval` of each trained policy, on the held-out problems and on the frozen sets of its recipe."""

    samples: int = Field(0, ge=0, le=10_000)
    """Responses sampled to each problem, in addition to the greedy one, at the temperature of training."""
    ks: list[Annotated[int, Field(ge=1)]] = [1]
    """Values of k for pass@k, each at most `samples`."""

    @model_validator(mode="after")
    def _enough(self) -> Evaluate:
        if self.samples and max(self.ks) > self.samples:
            raise ValueError(f"pass@{max(self.ks)} needs at least {max(self.ks)} samples; there are {self.samples}")
        return self


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    arm: str
    setting: str
    """The levels of the grid's factors, joined by hyphens; empty without a grid."""
    seed: int

    @property
    def name(self) -> str:
        """Arm and setting, the name of its recipe."""
        return f"{self.arm}-{self.setting}" if self.setting else self.arm

    @property
    def place(self) -> Path:
        """Its run folder, relative to the study's."""
        return Path("cells") / self.name / str(self.seed)


class Study(Knobs):
    """A whole experiment."""

    name: Name
    """Names the study's folder."""
    base: str | None = None
    """Recipe file that the arms override, relative to this file; not needed if each arm names one."""
    arms: dict[Name, Layer] = {}
    """What is compared, by name: keys of a recipe that override `base`, or the arm's own `base`."""
    factors: dict[Name, dict[Name, Layer]] = {}
    """By factor, then by level, keys of a recipe. Their product makes the arms, or a grid of settings if there are arms."""
    common: dict[str, Any] = {}
    """Keys of a recipe that override every arm."""
    seeds: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(min_length=1)
    """Seeds; every arm is run with each. Arms with one seed share warm start, prompts and sampling streams."""
    compare: list[tuple[str, str]] = []
    """Pairs of arms; the difference of the first minus the second is taken within seeds."""
    interactions: dict[str, tuple[tuple[str, str], tuple[str, str]]] = {}
    """By name, [[a, b], [c, d]]: (d - c) - (b - a), the effect of one factor on the effect of the other, within seeds."""
    jobs: int = Field(1, ge=1, le=1024)
    """Number of cells that run at a time."""
    threads: int = Field(1, ge=1, le=1024)
    """CPU threads of each cell; this sets `training.threads`, on which the last bits of a run depend."""
    executor: Literal["local", "slurm"] = "local"
    """Processes on this machine, or one SLURM job per cell (extra `.[submitit]`; all nodes must share the study's folder)."""
    slurm: dict[str, Any] = {}
    """Resources of a job of `executor: slurm`, by submitit's names: `{slurm_partition: gpu, gpus_per_node: 1}`."""
    hours: float | None = Field(None, gt=0)
    """After this many hours no further cell is started; running cells finish. Null: no limit."""
    final_evaluations: int = Field(1, ge=1)
    """Number of last evaluations over which the final accuracy is averaged."""
    stable: Stable = Stable()
    evaluate: Evaluate | None = None
    """How each trained policy is evaluated; null: not at all."""

    @model_validator(mode="after")
    def _names_fit(self) -> Study:
        if not self.arms and not self.factors:
            raise ValueError("give arms or factors; without them there is nothing to compare")
        if empty := [name for name, levels in self.factors.items() if not levels]:
            raise ValueError(f"factor '{empty[0]}' has no level")
        cells = max(1, len(self.arms)) * math.prod(map(len, self.factors.values())) * len(self.seeds)
        if cells > MOST_CELLS:
            raise ValueError(f"{cells:,} cells; a study has at most {MOST_CELLS:,}")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"a seed occurs twice: {shortened(str(self.seeds), 200)}")
        names = [cell.name for cell in self.cells if cell.seed == self.seeds[0]]
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"two cells would have the name '{twice[0]}'; rename an arm or a level")
        for name in [n for pair in self.compare for n in pair] + [
            n for square in self.interactions.values() for pair in square for n in pair
        ]:
            if name not in self.arm_names:
                raise ValueError(did_you_mean("arm", name, self.arm_names))
        return self

    @property
    def _products(self) -> dict[str, list[Layer]]:
        products = itertools.product(*(levels.items() for levels in self.factors.values()))
        return {"-".join(name for name, _ in product): [layer for _, layer in product] for product in products}

    @property
    def arm_names(self) -> list[str]:
        return list(self.arms or self._products)

    @property
    def settings(self) -> list[str]:
        """Of the grid, in the order of the file; one that is empty where there is none."""
        return list(self._products) if self.arms and self.factors else [""]

    @property
    def cells(self) -> list[Cell]:
        """Seed by seed, so that an interrupted study has whole pairs."""
        return [Cell(arm, setting, seed) for seed in self.seeds for setting in self.settings for arm in self.arm_names]


def read_study(path: Path, overrides: Sequence[str] = ()) -> tuple[Study, Source]:
    """A study, validated and as written. Raises RecipeError with every problem of its keys."""
    source = read_yaml(path)
    for text in overrides:
        source = override(text).lay_over(source)
    return validated(Study, source, path), source


def load_study(path: Path, overrides: Sequence[str] = ()) -> tuple[Study, dict[Cell, Recipe]]:
    """A study and the resolved recipe of each of its cells. Raises RecipeError with every problem of every cell."""
    study, source = read_study(path, overrides)
    recipes: dict[Cell, Recipe] = {}
    problems: dict[str, None] = {}
    for cell in study.cells:
        try:
            recipes[cell] = _recipe(study, source, path, cell)
        except RecipeError as error:
            problems |= dict.fromkeys(f"cell {cell.name}: {problem}" for problem in error.problems)
    if problems:
        raise RecipeError(*problems)
    if unpaired := list(dict.fromkeys(_unpaired(study, recipes))):
        raise RecipeError(*(f"{path}: {problem}" for problem in unpaired))
    return study, recipes


def look_at_data(recipes: Mapping[Cell, Recipe]) -> None:
    """The checks of `cct run` before it loads a model. Raises RecipeError with every problem of every cell."""
    problems: dict[str, None] = {}
    seen: list[Any] = []  # demonstrations are many, and arms with one seed have the same
    for cell, recipe in recipes.items():
        demonstrated = (recipe.seed, recipe.task, recipe.policy.warm_start, recipe.evaluation.frozen)
        try:
            preflight(recipe, demonstrations=demonstrated not in seen)
        except RecipeError as error:
            problems |= dict.fromkeys(f"cell {cell.name} seed {cell.seed}: {problem}" for problem in error.problems)
        seen.append(demonstrated)
    if problems:
        raise RecipeError(*problems)


def _recipe(study: Study, source: Source, path: Path, cell: Cell) -> Recipe:
    layers: list[tuple[str, ...]] = [("arms", cell.arm)] if study.arms else []
    levels = next(
        product
        for product in itertools.product(*study.factors.values())
        if "-".join(product) == (cell.setting if study.arms else cell.arm)
    )
    layers += [("factors", factor, level) for factor, level in zip(study.factors, levels, strict=True)]
    layers += [("common",)] if study.common else []
    written = [source.section(*keys) for keys in layers]
    own_base = next((layer.data["base"] for layer in written if "base" in layer.data), study.base)
    if own_base is None:
        raise RecipeError("no recipe to start from; set `base` of the study or of the arm")
    recipe = with_bases(Source({"base": own_base}, source.marks), path)
    for layer in written:
        layer.data = {key: value for key, value in layer.data.items() if key != "base"}
        recipe = with_bases(layer, path).lay_over(recipe)
    training = recipe.data.get("training") or {}
    if not isinstance(training, Mapping):
        raise RecipeError(f"training must be a mapping; found {shortened(repr(training), 80)}")
    threads = training.get("threads")
    if threads not in (None, study.threads):
        raise RecipeError(f"training.threads is {threads}, but threads of the study is {study.threads}; set only the study's")
    own = {"name": cell.name, "seed": cell.seed, "training": {"threads": study.threads}}
    return recipe_of(Source(own).lay_over(recipe), path)


PAIRED = ("task", "policy", "training.prompts_per_iteration", "training.responses_per_prompt")


def _unpaired(study: Study, recipes: Mapping[Cell, Recipe]) -> list[str]:
    """Pairs that are compared within seeds although they do not share warm start, prompts and sampling streams."""
    pairs = [*study.compare]
    for (a, b), (c, d) in study.interactions.values():
        pairs += [(b, a), (c, a), (d, a)]

    def shared(cell: Cell, key: str) -> Any:
        value: Any = recipes[cell]
        for name in key.split("."):
            value = getattr(value, name)
        return value

    problems = []
    for one, other in pairs:
        for setting in study.settings:
            cells = [Cell(arm, setting, study.seeds[0]) for arm in (one, other)]
            for key in PAIRED:
                if shared(cells[0], key) != shared(cells[1], key):
                    problems.append(
                        f"{one} and {other} are compared within seeds but differ in {key}: runs with one seed would not share "
                        "warm start, prompts and sampling streams. Make it equal, or remove the pair from `compare`"
                    )
    return problems


def dump_study(study: Study) -> str:
    """The study's own keys as YAML, every knob with its value."""
    return dump(study.model_dump(mode="json"))
