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
    say(f"# training.share_prefix: {_sharing(recipe)}")
    return 0


def _sharing(recipe: Recipe) -> str:
    """Whether the policy can share prompts, as far as its configuration tells."""
    from cct.packing import SHARED_AT_MOST
    from cct.policy.sharing import sharing_of_config

    wanted = recipe.training.share_prefix
    if not wanted:
        return "off"
    try:
        refused, window = sharing_of_config(recipe.policy.config(alphabet=recipe.alphabet))
    except ValueError as error:
        raise RecipeError(f"policy '{recipe.policy.use}': {error}") from None
    if refused:
        return f"{'off' if wanted == 'auto' else 'refused'}, as the policy cannot share prompts: {refused}"
    longest = f", in sequences of at most {window} tokens (sliding window)" if window is not None else ""
    where = f"on where it leaves at most {SHARED_AT_MOST:.0%} of a forward's tokens" if wanted == "auto" else "on"
    return f"{where}{longest}"


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
