"""A run's recipe under other transports and critics, to compare their credit with its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cct.critic import Critic
from cct.critic.combined import GroupCritic
from cct.loading import OWN, read_part, read_transports
from cct.recipe import Recipe, RecipeError
from cct.run_folder import RunFolder
from cct.transport import Transport


def variants_of(
    source: Path, recipe: Recipe, written: Sequence[str], critics: Sequence[str], plugins: Sequence[str], seed: int | None
) -> dict[str, Recipe]:
    """The recipe under its own transport and each of the others, and where they read values under each critic, by name.

    seed: instead of the recipe's.
    """
    transports = read_transports(recipe, written, plugins)
    found = {name: _with(recipe, transport) for name, transport in transports.items()}
    reading = [name for name, variant in found.items() if variant.critic is not None]
    if reading and not RunFolder(source).recipe_file.is_file():
        raise RecipeError(
            f"{source}: transport {reading[0]} reads a critic, which has not learnt anything before a run; name a run folder"
        )
    for text in critics if reading else ():
        critic = _around(recipe, text)
        for name in reading:
            transport = found[name].transport
            found[f"{transport.use if name.endswith(OWN) else name}, {text.strip()}"] = _with(recipe, transport, critic)
    return found if seed is None else {name: variant.model_copy(update={"seed": seed}) for name, variant in found.items()}


def _around(recipe: Recipe, written: str) -> Critic:
    """A critic that the run's weights can be read through, from YAML: the one that it taught, by its name, or one around that.

    Raises RecipeError for any other.
    """
    assert recipe.critic is not None
    taught = recipe.critic.of if isinstance(recipe.critic, GroupCritic) else recipe.critic
    if written.strip() == taught.use:
        return taught
    critic = read_part("critic", written)
    if isinstance(critic, GroupCritic) and "of" not in critic.model_fields_set:
        try:
            return type(critic).model_validate(dict(critic) | {"of": taught})
        except ValidationError as error:
            raise RecipeError(*(f"--critic {written}: {_said(problem)}" for problem in error.errors())) from None
    if critic != taught and not (isinstance(critic, GroupCritic) and critic.of == taught):
        raise RecipeError(
            f"--critic {written}: the run trained only '{taught.use}', with the recipe's knobs. These critics can be used: "
            f"{taught.use}, group_mean and group_level, without `of`"
        )
    assert isinstance(critic, Critic)
    return critic


def _said(problem: Any) -> str:
    return str(problem["msg"]).removeprefix("Value error, ")


def _with(recipe: Recipe, transport: Transport, critic: Critic | None = None) -> Recipe:
    """The recipe under another transport, with the critic (its own) where it reads one; rewards are the evidence's alone.

    Raises RecipeError where nothing provides what the transport needs.
    """
    if unknown := transport.needs & {"teacher", "history"}:
        raise RecipeError(f"transport {transport.use}: it needs {min(unknown)}, which is not there outside a run")
    critic = (critic or recipe.critic) if "values" in transport.needs else None
    generation = recipe.generation.model_copy(update={"lag": 0})
    plain: dict[str, object] = {"transport": transport.model_dump(), "geometry": "ppo_clip"}
    plain["generation"] = generation.model_dump()
    if critic is None:
        plain |= {"critic": None, "training": recipe.training.model_dump() | {"critic_warmup": 0, "critic_window": 1}}
    else:
        plain["critic"] = critic.model_dump()
    try:
        geometry = Recipe.model_validate(recipe.model_dump() | plain).geometry
    except ValidationError as error:
        raise RecipeError(*(f"transport {transport.use}: {_said(problem)}" for problem in error.errors())) from None
    return recipe.model_copy(update={"transport": transport, "critic": critic, "geometry": geometry, "generation": generation})


def sampled_under(variants: Mapping[str, Recipe]) -> Recipe:
    """The variant whose rows have what all of them read: rewards by each piece of evidence, where one does."""
    first, *_ = variants.values()
    return next((one for one in variants.values() if one.needs("components")), first)
