"""From judged responses to credit: the steps between the sampler and the update. No gradient here.

rollout = estimator.rollout(rows, ...)         tensors of what happened
rollout, cost = estimator.branch(...)          values by continuing responses, where the transport asks for them
rollout, traces = estimator.read(rollout)      the behaviour forward: log-probabilities, values, statistics
rollout, cost = estimator.charge_kl(rollout)   the KL to the reference, as a part of the rewards
credit, rollout = estimator.credit(rollout)    the transport, and what it read
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from cct.agent.agent import Agent
from cct.agent.oracle import with_exact_values
from cct.errors import TrainingStopped, attributed_to
from cct.geometry.functional import kl_estimate
from cct.handover import check, read_only
from cct.recipe import Recipe
from cct.registry import described
from cct.rollout import Credit, Rollout, Trace, derive_seed
from cct.tensors import as_mask
from cct.transport.functional import join, jointly, masked_mean_std

from .plans import Plan, forward_plans, or_any, trimmed
from .processes import Ranks
from .rows import OBSERVED, Row, scores_by_prompt, with_components
from .sampler import Sampler

# Share of the old running mean and deviation of a statistic kept at each iteration: follows the policy within ~10 iterations.
MOMENTS_DECAY = 0.9


class Estimator:
    """A recipe's steps from rows to credit. Its state is the running moments of the statistics that gates read, and what the
    transport remembers of each prompt."""

    def __init__(
        self,
        recipe: Recipe,
        agent: Agent,
        reference: PreTrainedModel | None = None,
        teacher: PreTrainedModel | None = None,
    ):
        self.recipe, self.agent = recipe, agent
        self.frozen = {"reference_logprobs": agent.like(reference)} if reference is not None else {}
        if teacher is not None:
            self.frozen["teacher_logprobs"] = agent.like(teacher, share=False)
        self.moments: dict[str, tuple[float, float]] = {}
        self.history: dict[str, tuple[float, float]] = {}

    @property
    def reads(self) -> bool:
        """Whether the behaviour forward gives something that neither the update's forward nor the engine does."""
        recipe, geometry, training = self.recipe, self.recipe.geometry, self.recipe.training
        if recipe.statistics or recipe.transport.reads_policy or recipe.critic is not None or self.frozen:
            return True
        responses = training.epochs * training.prompts_per_iteration * training.responses_per_prompt
        single_step = responses == training.minibatch_size and not geometry.marks
        return geometry.correction != "none" or not (geometry.ratio_to == "engine" or single_step)

    def rollout(self, rows: Sequence[Row], tokenizer: Tokenizer, iteration: int) -> Rollout:
        """The responses as tensors, prompts padded on the left; with exact values where the task has them."""
        left, right = max(len(row.prompt_tokens) for row in rows), max(1, max(len(row.tokens) for row in rows))
        input_ids = torch.full((len(rows), left + right), tokenizer.pad_token_id)
        attention_mask, rewards = torch.zeros_like(input_ids), torch.zeros(len(rows), right)
        rollout_logprobs, turns = torch.zeros_like(rewards), torch.full((len(rows), right), OBSERVED)
        for number, row in enumerate(rows):
            first, n = left - len(row.prompt_tokens), len(row.tokens)
            input_ids[number, first : left + n] = torch.tensor([*row.prompt_tokens, *row.tokens])
            attention_mask[number, first : left + n] = 1
            turns[number, :n] = torch.tensor(row.turns)
            rewards[number, row.emitted] = torch.tensor(row.own_rewards)
            rollout_logprobs[number, row.emitted] = torch.tensor(row.logprobs)
        mask = (turns != OBSERVED) & torch.tensor([row.keep for row in rows]).unsqueeze(1)
        device = self.agent.actor.device
        sampled = rollout_logprobs.to(device)
        rollout = Rollout(
            input_ids.to(device),
            attention_mask.to(device),
            mask.to(device),
            rewards.to(device),
            torch.tensor([row.group for row in rows], device=device),
            torch.tensor([not row.response.finished for row in rows], device=device),
            sampled,
            sampled.clone(),  # by the trainer, which may still say it itself
            moments=dict(self.moments),
            seed=derive_seed(self.recipe.seed, "transport", iteration),
            **(self._of_episodes(rows, turns) if self.recipe.environment is not None else {}),
        )
        if self.recipe.needs("components"):
            rollout = with_components(rollout, rows, self.recipe.evidence)
        if self.recipe.needs("history"):
            expected = [self.recipe.transport.expected(self.history.get(row.key)) for row in rows]
            rollout = rollout.replace(prompt_values=rewards.new_tensor(expected).to(device))
        if self.recipe.environment is not None or self.recipe.generation.lag:
            versions = torch.tensor([[row.version] for row in rows])
            rollout = rollout.replace(versions=torch.where(turns == OBSERVED, -1, versions).to(device))
        if "exact_values" not in self.recipe.task.provides:
            return rollout
        return with_exact_values(rollout, self.agent, tokenizer, [row.prompt for row in rows], [row.response for row in rows])

    def _of_episodes(self, rows: Sequence[Row], turns: Tensor) -> dict[str, Any]:
        """The fields of a rollout about episodes. turns: [B, T], `OBSERVED` where the policy emitted nothing."""
        device, episodes = self.agent.actor.device, torch.tensor([row.episode for row in rows])
        names = dict.fromkeys(name for row in rows for turn in row.response.turns for name in turn.rewards)
        every = [(row.group, turn.state) for row in rows for turn in row.response.turns if turn.state is not None]
        number_of: dict[tuple[int, str | None], int] = {state: number for number, state in enumerate(dict.fromkeys(every))}
        anchors = torch.full_like(turns, -1)
        components = {name: torch.zeros(turns.shape) for name in names}
        for number, row in enumerate(rows):
            for k, turn in enumerate(row.response.turns):
                places = (turns[number] == k).nonzero().flatten()
                anchors[number, places] = number_of.get((row.group, turn.state), -1)
                for name, reward in turn.rewards.items():
                    components[name][number, places[-1:]] = reward
        return {
            "episodes": episodes.to(device),
            "order": torch.tensor([row.order for row in rows], device=device),
            "turns": turns.to(device),
            "anchors": anchors.to(device),
            "components": {name: x.to(device) for name, x in components.items()},
        }

    def greedy(
        self, sampler: Sampler, rollout: Rollout, rows: Sequence[Row], iteration: int
    ) -> tuple[Rollout, dict[str, float]]:
        """The rollout with the score of a greedy response to each of its prompts."""
        prompts = {row.group: row.prompt for row in rows}
        scores = sampler.greedy_scores([prompts[group] for group in sorted(prompts)], iteration)
        judged = [score for score in scores if math.isfinite(score)]
        metrics = {"train/greedy_reward": sum(judged) / len(judged)} if judged else {}
        return rollout.replace(greedy_scores=rollout.rewards.new_tensor(scores)[rollout.groups]), metrics

    def branch(
        self, sampler: Sampler, rollout: Rollout, rows: Sequence[Row], iteration: int
    ) -> tuple[Rollout, dict[str, float]]:
        """The rollout with values of the states that its transport marks, by continuing responses from them, and the cost."""

        def text_of(token: int) -> str:
            return str(sampler.tokenizer.decode([token]))

        name = f"transport '{self.recipe.transport.use}' (starts)"
        with attributed_to(name, iteration):
            with read_only(name, vars(rollout)):
                starts = jointly(rollout, lambda joined: as_mask(self.recipe.transport.starts(joined, text_of), "starts"))
            if starts.shape != rollout.mask.shape:
                raise ValueError(f"starts must have shape {tuple(rollout.mask.shape)}; got {tuple(starts.shape)}")
            starts = starts & rollout.mask
        places = [row.nonzero().flatten().tolist() for row in starts]
        emitted = [{place: number for number, place in enumerate(row.emitted)} for row in rows]
        counted = [[numbers[place] for place in here] for here, numbers in zip(places, emitted, strict=True)]
        seed = derive_seed(self.recipe.seed, "branch", iteration)
        found, cost = sampler.branch_values(rows, counted, seed)
        values = torch.zeros_like(rollout.rewards)
        for number, (here, some) in enumerate(zip(places, found, strict=True)):
            values[number, here] = torch.tensor(some, dtype=values.dtype, device=values.device)
        return rollout.replace(starts=starts, branch_values=values), cost

    def read(self, rollout: Rollout, iteration: int, plan: Plan | None = None) -> tuple[Rollout, list[Trace]]:
        """The behaviour forward: log-probabilities, values, statistics, and the traces that the critic learns from.

        plan: for each process, the rows of each of its forwards. Where no part reads it, the rollout stays as it is.
        """
        traces: list[Trace] = []
        if self.reads:
            rollout, traces = self._forward(rollout, plan)
        self._check(rollout, iteration)
        return rollout, traces

    @torch.no_grad()
    def _forward(self, rollout: Rollout, plan: Plan | None) -> tuple[Rollout, list[Trace]]:
        ranks = Ranks.current()
        if plan is None:
            size = self.recipe.training.minibatch_size
            cuts = [len(part) for part in torch.arange(len(rollout.mask)).split(size)]
            plan = forward_plans([(rollout, cuts)], self.recipe.training, ranks.world, self.agent.share)[0]
        width, readings, frozen = rollout.mask.shape[1], [], {name: list[Tensor]() for name in self.frozen}
        for rows, _ in map(or_any, plan[ranks.rank]):
            columns, narrow = trimmed(rollout, rows)
            ids, attention_mask = rollout.input_ids[rows, columns], rollout.attention_mask[rows, columns]
            readings.append(self.agent(ids, attention_mask, narrow, statistics=self.recipe.statistics, with_critic=True))
            for name, model in self.frozen.items():
                frozen[name].append(model.to(ids.device)(ids, attention_mask, narrow, with_entropy=False).logprobs)
        shares = [torch.tensor([row for rows in of_rank for row in rows]) for of_rank in plan]

        def join(parts: Iterable[Tensor], width: int = width) -> Tensor:
            mine = zip(parts, plan[ranks.rank], strict=True)
            whole = [torch.nn.functional.pad(part[: len(rows)], (0, width - part.shape[1])) for part, rows in mine]
            return ranks.gather_rows(torch.cat(whole), shares)

        stats = {name: join(reading.stats[name] for reading in readings) for name in readings[0].stats}
        read = rollout.replace(
            logprobs=join(reading.logprobs for reading in readings),
            stats={**stats, "entropy": join(reading.entropy for reading in readings)},
            **{name: join(parts) for name, parts in frozen.items()},  # type: ignore[arg-type]
        )
        if self.agent.critic is not None:
            values = join((reading.values for reading in readings), width + 1)
            after = values.gather(1, rollout.attention_mask[:, -width:].sum(1, keepdim=True)).squeeze(1)
            cut = after * rollout.truncated if self.recipe.training.bootstrap_truncated else None
            read = read.replace(values=values[:, :-1], bootstrap=cut)
        return read, [reading.trace for reading in readings if reading.trace is not None]

    def _check(self, rollout: Rollout, iteration: int) -> None:
        """Raise with the name of the part that returned NaN or infinity, before the transport runs."""
        mask, recipe = rollout.mask, self.recipe
        policy = "policy" if self.reads else f"policy, by engine '{recipe.generation.use}'"
        given = {
            f"{policy} (log-probabilities)": rollout.logprobs,
            f"engine '{recipe.generation.use}' (log-probabilities)": rollout.rollout_logprobs,
            "policy (entropy)": rollout.stats.get("entropy"),
            "reference policy (log-probabilities)": rollout.reference_logprobs,
            "teacher (log-probabilities)": rollout.teacher_logprobs,
        }
        given |= {f"statistic '{name}' ({type(x).__name__})": rollout.stats[name] for name, x in recipe.statistics.items()}
        with attributed_to("policy", iteration):
            for part, numbers in given.items():
                if numbers is not None:
                    check(part, numbers, mask)
            if recipe.critic is not None and rollout.values is not None:
                check(recipe.critic, rollout.values, mask, output="values")
                if rollout.bootstrap is not None:
                    check(recipe.critic, rollout.bootstrap, rollout.valid, output="value after the last token")

    def charge_kl(self, rollout: Rollout) -> tuple[Rollout, dict[str, float]]:
        """Subtract each token's KL to the reference policy (`geometry.kl_in_reward`); also returns the mean estimate."""
        geometry, reference = self.recipe.geometry, rollout.reference_logprobs
        if not geometry.kl_in_reward or reference is None:
            return rollout, {}
        kl = kl_estimate(rollout.logprobs, reference, rollout.mask, geometry.kl_estimator or "k1")
        mean = float(masked_mean_std(kl, rollout.mask)[0])
        return rollout.replace(rewards=rollout.rewards - geometry.kl_in_reward * kl), {"train/reference_kl": mean}

    def credit(self, rollout: Rollout, iteration: int) -> tuple[Credit, Rollout]:
        """The transport's credit, and the rollout as the transport saw it: with the critic's baseline if it has one."""
        recipe, credit = self.recipe, self._transport(rollout, iteration)
        if recipe.critic is None or credit.value_targets is None:
            return credit, rollout
        name = f"critic '{recipe.critic.use}' (baseline)"
        joined, split = join(rollout)
        targets = credit.value_targets if split is None else split.join(credit.value_targets)
        with attributed_to(name, iteration):
            with read_only(name, vars(joined) | vars(credit), contents=iteration <= 1):
                other = recipe.critic.baseline(joined, targets, recipe.reward_bounds)
            if other is None:
                return credit, rollout
            _of_one_kind(other, joined, recipe.critic.use)
            assert other.values is not None
            check(name, other.values, joined.mask)
            if other.bootstrap is not None:
                check(name, other.bootstrap, joined.valid)
            values, after = other.values, other.bootstrap
            if split is not None:
                values, after = split(values), None if after is None else split.at_ends(after)
            rollout = rollout.replace(values=values, bootstrap=after)  # the rest is not the critic's
        return self._transport(rollout, iteration), rollout

    def _transport(self, rollout: Rollout, iteration: int) -> Credit:
        """The transport's credit. Raises TrainingStopped if it is not valid, with the name of the part that caused it."""
        transport = self.recipe.transport
        with (
            attributed_to(f"transport '{transport.use}'", iteration, self.recipe),
            read_only(transport, {f"rollout.{name}": x for name, x in vars(rollout).items()}, contents=iteration <= 1),
        ):
            credit = transport.checked(rollout)
        if self.agent.critic is not None and credit.value_targets is None:
            raise TrainingStopped(
                f"transport '{transport.use}' gives no value targets, so the critic cannot learn; set `critic: null`"
            )
        return credit

    def remember(self, rollout: Rollout, rows: Sequence[Row] = ()) -> None:
        """Add a finished iteration to the running moments of later ones, and to what is known of its prompts."""
        if self.recipe.needs("history"):
            for key, scores in scores_by_prompt(rows, rollout.scores.tolist(), rollout.valid.tolist()).items():
                self.history[key] = self.recipe.transport.remembered(self.history.get(key), scores)
        for name in self.recipe.statistics:
            new = tuple(float(x) for x in masked_mean_std(rollout.stats[name], rollout.mask))
            old = self.moments.get(name, new)
            self.moments[name] = tuple(MOMENTS_DECAY * o + (1 - MOMENTS_DECAY) * n for o, n in zip(old, new, strict=True))  # type: ignore[assignment]


def _of_one_kind(other: object, rollout: Rollout, name: str) -> None:
    """Raises TrainingStopped if a critic's `baseline` returned something other than a valid rollout."""
    values = other.values if isinstance(other, Rollout) else None
    if values is None or values.shape != rollout.mask.shape or not values.is_floating_point():
        found = f"a rollout with {described(values)} as values" if isinstance(other, Rollout) else described(other)
        raise TrainingStopped(
            f"critic '{name}' returned {found} as its baseline; expected a rollout with values of shape "
            f"{tuple(rollout.mask.shape)}, or None"
        )
