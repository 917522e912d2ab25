"""`cct explain`: a recipe resolved, part by part, and what its actor and critic weigh."""

from __future__ import annotations

from cct.loading import dump_recipe
from cct.recipe import Recipe, RecipeError
from cct.system.terminal import say


def explain(recipe: Recipe) -> int:
    """Print the resolved recipe; for each part its source, needs and providers; parameter counts. Returns 0."""
    say(dump_recipe(recipe))
    for place, part in recipe.parts.items():
        say(f"# {place}: {part.use}  ({type(part).file()}:{type(part).where()[1]})")
        for need in sorted(part.needs):
            say(f"#     needs {need}, provided by {', '.join(recipe.providers(need))}")
    for name, count in parameter_counts(recipe).items():
        say(f"# {name}: {count:,} parameters")
    return 0


def parameter_counts(recipe: Recipe) -> dict[str, int]:
    """Parameters of actor and critic, built without memory for weights."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        config = recipe.policy.config(alphabet=recipe.alphabet)
    except (OSError, ValueError) as error:
        raise RecipeError(f"policy '{recipe.policy.use}': {str(error).splitlines()[0]}") from None
    with torch.device("meta"):
        actor = AutoModelForCausalLM.from_config(config)
        counts = {"actor": sum(p.numel() for p in actor.parameters())}
        if recipe.critic is not None:
            critic = recipe.critic.build(actor, recipe.reward_bounds)
            counts[f"critic ({recipe.critic.use})"] = sum(p.numel() for p in critic.parameters())
    return counts
