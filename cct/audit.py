"""Checks of a recipe's data, without weights: prompts that are too long, gold answers that cannot be read, duplicates."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cct.evidence import Evidence, Failure
from cct.policy.chat import examine
from cct.prompts import EXAMPLES, begun, drawn, measured, named
from cct.recipe import Recipe
from cct.rollout import Prompt
from cct.task import same

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

OPENED = re.compile(r"<(?:think|thinking|thought|reasoning)>\s*$")


# --- gold answers and duplicates --------------------------------------------------------------
def unreadable(part: Evidence, prompts: Sequence[Prompt]) -> list[tuple[Prompt, str]]:
    """The prompts whose gold answer the evidence cannot read, and why."""
    found = ((prompt, part.unreadable(prompt)) for prompt in prompts)
    return [(prompt, reason) for prompt, reason in found if reason]


def golds(evidence: Sequence[Evidence], prompts: Sequence[Prompt], place: str = "evidence") -> Iterator[tuple[bool, str]]:
    """Findings about the gold answers: whether it would stop a run, and its text. place: of the evidence in the recipe."""
    for index, part in enumerate(evidence):
        if bad := unreadable(part, prompts):
            shown = "; ".join(f"{prompt.place}: {reason}".removeprefix(": ") for prompt, reason in bad[:EXAMPLES])
            becomes = {
                "fail": "the run would stop there",
                "zero": "their responses get reward 0",
                "drop": "their responses are left out of the update",
            }
            yield (
                part.on_error == "fail",
                f"{place}.{index}: '{part.use}' cannot read the gold answers of {len(bad)} of {len(prompts)} prompts "
                f"({becomes[part.on_error]}), e.g. {shown}",
            )
    raw = [prompt for prompt in prompts if "####" in prompt.answer]
    if raw:
        yield (
            False,
            f"task: {len(raw)} of {len(prompts)} gold answers contain '####', e.g. {named(raw[0])}; "
            r"set task.answer_pattern to '####\s*(\S+)' to use only what follows it",
        )
    odd = [prompt for prompt in prompts if prompt.answer.strip().lower() in ("nan", "none", "null", "<na>")]
    if odd:
        shown = ", ".join(f"{named(prompt)}: {prompt.answer!r}" for prompt in odd[:EXAMPLES])
        yield False, f"task: {len(odd)} of {len(prompts)} gold answers look like missing values, e.g. {shown}"


def duplicates(prompts: Sequence[Prompt]) -> Iterator[str]:
    """Findings about prompts that occur more than once, ignoring white space."""
    first: dict[str, Prompt] = {}
    texts = [prompt for prompt in prompts if prompt.text]  # where there is none, an environment makes it
    again = [(first[key], prompt) for prompt in texts if first.setdefault(key := same(prompt.text), prompt) is not prompt]
    if again:
        yield f"{len(again)} of {len(prompts)} prompts are duplicates of earlier ones, e.g. {named(again[0][1])}"
    differ = [(one, other) for one, other in again if one.answer != other.answer]
    if differ:
        one, other = differ[0]
        yield f"{len(differ)} duplicates have a different gold answer, e.g. {named(other)}: {one.answer!r} and {other.answer!r}"


# --- episodes ---------------------------------------------------------------------------------
def _openings(recipe: Recipe, tokenizer: Tokenizer, prompts: Sequence[Prompt], name: str, result: Audit) -> list[Prompt]:
    """Prompts with what the environment opens the first episodes with; those that cannot begin are reported."""
    assert recipe.environment is not None
    found = begun(recipe, prompts, tokenizer.chat_template)
    failed = [(prompt, start) for prompt, start in zip(prompts, found, strict=False) if isinstance(start, Failure)]
    if failed:
        prompt, first = failed[0]
        result.found(
            recipe.environment.on_error == "fail" and name in ("training", "held out"),
            f"{name}: environment '{recipe.environment.use}' cannot begin {len(failed)} of {len(found)} episodes, e.g. of "
            f"{named(prompt)} {prompt.meta or ''}: {first.reason}",
        )
    return [start for start in found if isinstance(start, Prompt)]


# --- the deep check ---------------------------------------------------------------------------
@dataclass
class Audit:
    """What was found."""

    problems: list[str] = field(default_factory=list)
    """Findings that would stop a run."""
    warnings: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    """What was checked, one line per set."""

    def found(self, fails: bool, text: str) -> None:
        (self.problems if fails else self.warnings).append(text)


def audit(recipe: Recipe) -> Audit:
    """Tokenise the prompts of a run and read their gold answers. Raises ValueError or OSError if there is no tokenizer.

    Covers the training prompts that `drawn` returns, the held-out ones, and those of the other sets. A problem in a frozen
    set would stop `cct eval` but not a run, so it is a warning.
    """
    result, alphabet = audit_turns(recipe), recipe.alphabet if recipe.policy.reads_alphabet else ""
    tokenizer = recipe.policy.tokenizer(alphabet=alphabet)
    config = recipe.policy.config(alphabet=alphabet)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if refused := _unshared(recipe, config):
        text = f"training.share_prefix: the policy cannot share prompts: {refused}"
        (result.problems if recipe.training.share_prefix is True else result.lines).append(text)
    sets = {"training": drawn(recipe), "held out": list(recipe.task.held_out())}
    sets |= {place: list(task.held_out()) for place, task in recipe.evaluation.other_tasks.items()}
    own = {f"evaluation.sets.{name}": one for name, one in recipe.evaluation.sets.items()}
    endless = recipe.task.training() is None
    for name, prompts in sets.items():
        runs, episodes = not name.startswith("evaluation.frozen."), recipe.environment is not None
        try:
            starts = _openings(recipe, tokenizer, prompts, name, result) if episodes else prompts
            lengths = measured(recipe, tokenizer, positions, starts)
        except ValueError as error:
            result.found(runs, f"{name}: {error}")
            continue
        if not starts:
            continue
        sizes = [len(ids) for ids in lengths.tokens]
        what = "the first of an endless stream, " if endless and name == "training" else ""
        what += f"{len(starts):,} episodes begun, " if episodes else ""
        spread = f"{min(sizes):,} to {max(sizes):,} tokens, mean {sum(sizes) / len(sizes):,.0f}"
        result.lines.append(f"{name}: {len(prompts):,} prompts, {what}{spread}; {len(lengths.too_long)} too long")
        if lengths.too_long:
            dropped = recipe.generation.overlong == "drop" and len(lengths.too_long) < len(prompts)
            if dropped:
                result.warnings.append(f"{name}: {lengths.which}; they are left out (overlong: drop)")
            else:
                result.found(runs, f"{name}: {lengths.problem}")
        for fails, text in golds(own[name].evidence or recipe.evidence if name in own else recipe.evidence, prompts):
            result.found(fails and runs, f"{name}: {text}")
        if name != "training" or not endless:
            result.warnings += [f"{name}: {text}" for text in duplicates(prompts)]
        end = str(tokenizer.decode(list(lengths.tokens[0][-16:])))
        if (opened := OPENED.search(end)) and not recipe.policy.opened and name == "training":
            result.warnings.append(
                f"policy: prompts end in {opened[0]!r}, which evidence does not see as part of the response; "
                f"if it should, set policy.response_prefix to {opened[0]!r}"
            )
    return result


def _unshared(recipe: Recipe, config: Any) -> str:
    """Why the policy cannot share prompts, as far as its configuration tells; empty where it can or need not."""
    from cct.policy.sharing import sharing_of_config

    return sharing_of_config(config).refused if recipe.training.share_prefix else ""


def audit_turns(recipe: Recipe) -> Audit:
    """What the chat template makes of conversations of several turns that begin as the recipe's do.

    Raises ValueError or OSError where there is no tokenizer.
    """
    tokenizer, result = recipe.policy.tokenizer(alphabet=recipe.alphabet if recipe.policy.reads_alphabet else ""), Audit()
    if recipe.environment is None:
        return result
    environment = recipe.environment.fitted(tokenizer.chat_template)
    for opening in begun(recipe, drawn(recipe, 1)[:1], tokenizer.chat_template):
        if isinstance(opening, Failure) or not opening.written:
            continue
        rewrites = environment.history == "template"
        for finding in examine(recipe.policy, tokenizer, opening.written, environment.tool_schemas, rewrites=rewrites):
            (result.problems if finding.fails else result.lines).append(f"conversation: {finding.text}")
    return result
