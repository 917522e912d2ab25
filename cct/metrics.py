"""What a run measures: the meaning and unit of each metric of metrics.jsonl, and where it is shown."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Metric:
    """One or several metrics that are explained together."""

    names: str
    """Separated by commas; NAME stands for that of a component."""
    meaning: str
    unit: str = "\N{EN DASH}"

    def covers(self, name: str) -> bool:
        """Whether a metric of this name is one of these."""
        return any(re.fullmatch(re.escape(each).replace("NAME", r"\S+"), name) for each in _names(self.names))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(", "))


METRICS = (  # docs/runs.md holds this table, as `markdown` writes it
    Metric("eval/accuracy", "mean score of the first evidence over the held-out prompts, decoded greedily", "its score"),
    Metric("eval/reward", "mean weighted sum of all evidence over the same responses", "reward"),
    Metric("eval/length", "mean length of those responses", "tokens"),
    Metric("eval/truncated", "share of those responses cut by the length limit", "0 to 1"),
    Metric(
        "eval/overlong",
        "held-out prompts left out because they are too long, under `generation.overlong: drop`",
        "prompts",
    ),
    Metric(
        "sets/NAME/accuracy, sets/NAME",
        "the same of each of `evaluation.sets`, `sets/NAME/accuracy` and so on; with `samples` also `avg@n`, `pass@n`",
    ),
    Metric("train/reward", "mean reward of the sampled responses, without dropped ones", "reward"),
    Metric(
        "train/greedy_reward",
        "mean reward of the greedy responses to the same prompts, where a part needs them (`remax`)",
        "reward",
    ),
    Metric("train/length", "mean length of the sampled responses", "tokens"),
    Metric("train/tokens", "all tokens sampled", "tokens"),
    Metric("train/truncated", "share of responses cut by the length limit", "0 to 1"),
    Metric("train/dropped", "share of responses left out of the update", "0 to 1"),
    Metric("train/overlong", "prompts replaced because they are too long, under `generation.overlong: drop`", "prompts"),
    Metric(
        "refill/rounds, refill/prompts, refill/tokens",
        "with `training.refill`: rounds that replaced prompts without contrast, prompts replaced, and tokens sampled for "
        "these, which `train/tokens` does not include",
        "number",
    ),
    Metric(
        "refill/without_contrast", "share of the iteration's prompts that are without contrast after the last round", "0 to 1"
    ),
    Metric("episode/turns", "mean number of turns of an episode, where the recipe has an environment", "turns"),
    Metric("episode/observed", "mean number of tokens of an episode that its environment put in", "tokens"),
    Metric(
        "episode/rows",
        "mean number of rows of an episode: more than 1 where the chat template rewrites earlier turns",
    ),
    Metric("episode/read_again", "mean number of tokens of an episode that are read once more because of that", "tokens"),
    Metric("episode/reward/NAME", "mean total of a named reward of the environment", "reward"),
    Metric(
        "environment/NAME, eval/environment/NAME",
        "how often the environment failed: `errors`, `timeouts`; episodes that ended as there was no room for another turn,"
        " `out_of_room`, or that could not begin, `overlong`; observations without text, `empty`;"
        " turns after which the chat template could not write the conversation, which went on as sampled, `unwritten`",
        "episodes",
    ),
    Metric(
        "train/entropy, policy/entropy",
        "mean entropy of the policy at each token; `policy/entropy` replaces `train/entropy` where the behaviour forward "
        "is skipped (one on-policy step, and nothing reads that forward)",
        "nats",
    ),
    Metric(
        "train/reference_kl",
        "mean estimated KL to the starting policy that is charged to tokens under `geometry.kl_in_reward`; `train/reward`"
        " does not include it",
        "nats",
    ),
    Metric("train/tokens_per_second", "`train/tokens` / `time/iteration`", "tokens/s"),
    Metric("advantage/mean, advantage/std", "mean and standard deviation over tokens of the advantages used for training"),
    Metric(
        "gate/mean, gate/std",
        "mean and standard deviation over tokens of the discounts, for transports with a gate",
        "0 to 1",
    ),
    Metric(
        "statistic/NAME/mean, statistic/NAME/std",
        "mean and standard deviation over tokens of each statistic in `logging.statistics`; NAME as in the stored rollouts, "
        "`concentration/shannon/all/0` or `token_entropy`",
        "that of the statistic",
    ),
    Metric(
        "critic/explained_variance",
        "explained variance of the undiscounted Monte-Carlo return by the critic's values, before the critic learns from it",
        "at most 1",
    ),
    Metric(
        "critic/explained_variance_within",
        "the same with the group's mean subtracted from returns and values: what the critic knows about the response "
        "beyond the prompt; groups of one response are left out",
        "at most 1",
    ),
    Metric("critic/explained_variance_of_target", "the same for the critic's own target", "at most 1"),
    Metric(
        "baseline/explained_variance",
        "the same for the undiscounted Monte-Carlo return, by the values that the transport read instead of the critic's"
        " under `group_mean` or `group_level`",
        "at most 1",
    ),
    Metric("critic/value", "mean value over tokens", "reward"),
    Metric(
        "exact/rank_correlation, exact/right_signs, exact/scale",
        "on tasks of the laboratory, credit against the exact advantage A at the tokens that decide: Spearman's rank "
        "correlation, share of equal signs, and cov(credit, A) / var(A)",
    ),
    Metric("exact/bias", "mean of credit / scale - A at these", "reward"),
    Metric("exact/variance", "variance of credit / scale - A at these", "reward²"),
    Metric(
        "exact/explained_variance_within",
        "explained variance of the exact values at these by those that the transport read, with the group's mean subtracted "
        "from both",
        "at most 1",
    ),
    Metric("critic/disagreement", "mean standard deviation across the values of `mini_critics`", "reward"),
    Metric("critic/loss", "mean over the iteration's critic steps", "nats, or reward² / 2 for `output: scalar`"),
    Metric("critic/gradient_norm", "mean norm before clipping, over the critic's steps"),
    Metric("policy/loss", "mean over the iteration's policy steps"),
    Metric("policy/ratio", "mean ratio of new to sampling probability"),
    Metric("policy/clip_fraction", "share of tokens where the clip took effect", "0 to 1"),
    Metric("policy/marked", "share of tokens held back by `clip_cov` or `kl_cov`", "0 to 1"),
    Metric("policy/approx_kl", "mean estimate (k3) of the KL from the sampling to the new policy", "nats"),
    Metric("policy/reference_kl", "mean estimate of the KL to the starting policy, where `geometry.kl_coef` is not 0", "nats"),
    Metric(
        "engine/logprob_gap, engine/logprob_gap_max",
        "mean and largest difference between the engine's and the trainer's log-probabilities of the sampled tokens, "
        "where the behaviour forward ran; with `generation.lag` the last update's change of the policy is in it",
        "nats",
    ),
    Metric(
        "engine/probe_gap",
        "mean difference on fixed sequences after the engine's weights were updated (`vllm`; of `vllm_server` the largest)",
        "nats",
    ),
    Metric("engine/servers", "servers in use after their weights were updated (`vllm_server`)"),
    Metric("engine/asked_again", "responses asked for again after a fault of a server, since the last update (`vllm_server`)"),
    Metric(
        "correction/raw, correction/raw_max, correction/used, correction/changed",
        "mean and largest importance ratio of the sampled tokens, mean weight in the loss, share of tokens where ratio "
        "and weight differ; with `geometry.correction`",
        "ratio, 0 to 1",
    ),
    Metric(
        "lag/age",
        "with `generation.lag`: mean number of updates between the weights that sampled a token and those that the "
        "iteration's update starts from",
        "updates",
    ),
    Metric(
        "lag/ratio, lag/ratio_max",
        "mean and largest importance ratio of the sampled tokens, the policy before the update to the one that sampled, where "
        "the behaviour forward ran",
        "ratio",
    ),
    Metric("lag/effective_sample_size", "mean ratio² / mean of ratio²: 1 where these two policies agree", "0 to 1"),
    Metric("actor/gradient_norm", "mean norm before clipping, over the policy's steps"),
    Metric(
        "evidence/errors/NAME",
        "how often this evidence raised or lost its worker process, under `on_error: zero` or `drop`; absent if never",
        "responses",
    ),
    Metric(
        "evidence/timeouts/NAME",
        "how often it exceeded its `time_limit`, under the same settings; absent if never",
        "responses",
    ),
    Metric("evidence/abstained/NAME", "how often it abstained; absent if never", "responses"),
    Metric("eval/errors/NAME, eval/timeouts/NAME, eval/abstained/NAME", "the same in the evaluation", "responses"),
    Metric("time/generate", "sampling", "s"),
    Metric("time/evidence", "judging", "s"),
    Metric("time/greedy", "sampling and judging one greedy response per prompt, where a part needs it", "s"),
    Metric("time/branch", "sampling continuations from within responses and judging them; with `vineppo` and `spo` only", "s"),
    Metric(
        "branch/prefixes, branch/responses, branch/tokens",
        "states continued, continuations, and tokens sampled for them",
        "number",
    ),
    Metric("time/behaviour", "the forward that gives log-probabilities, statistics and values", "s"),
    Metric("time/transport", "the transport, and building minibatches", "s"),
    Metric("time/update", "optimizer steps of critic and policy", "s"),
    Metric("time/wait", "with `generation.lag`: after the update, until the next iteration's responses are there", "s"),
    Metric("time/ahead", "sampling and judging the next iteration, beside the stages above and not part of them", "s"),
    Metric("time/iteration", "from the first prompt to the end of the update, including everything between these stages", "s"),
    Metric("time/sync", "updating the engine's weights; not part of `time/iteration`", "s"),
    Metric("time/evaluate", "the evaluation; not part of `time/iteration`", "s"),
)


def among(names: Iterable[str], written: Iterable[str]) -> list[str]:
    """The metrics of these names; one with NAME stands for those that it covers among the written ones, in their order."""
    there = list(dict.fromkeys(written))
    return [one for name in names for one in (filter(Metric(name, "").covers, there) if "NAME" in name else (name,))]


def is_count(name: str) -> bool:
    """Whether it counts failures: an iteration without the metric had none."""
    return name.startswith(("environment/", "evidence/"))


def markdown() -> str:
    """The table of docs/runs.md."""
    rows = [(", ".join(f"`{name}`" for name in _names(each.names)), each.meaning, each.unit, _shown(each)) for each in METRICS]
    return "".join(f"| {' | '.join(row)} |\n" for row in [("name", "meaning", "unit", "shown in"), ("---",) * 4, *rows])


def _shown(metric: Metric) -> str:
    """Besides the files, where one of its names is shown: while a run trains and when it ends, in the report, in studies."""
    stages = tuple(f"time/{stage}" for stage in STAGES)
    places = {"terminal": (*TERMINAL, *CLOSING), "report": (*CURVES, *SUMMARY, *stages), "studies": CELLS}
    return ", ".join(place for place, names in places.items() if set(names) & set(_names(metric.names))) or "\N{EN DASH}"


TERMINAL = {  # label and format, while a run trains
    "train/tokens_per_second": ("tokens/s", ",.0f"),
    "train/reward": ("reward", ".3f"),
    "episode/turns": ("turns", ".1f"),
    "left": ("time left", ""),  # known to the display alone
    "critic/explained_variance": ("explained variance", ".3f"),
    "eval/accuracy": ("held-out accuracy", ".3f"),
}
CLOSING = _names(  # the table at a run's end
    "eval/accuracy, sets/NAME/accuracy, train/reward, train/length, critic/explained_variance, gate/mean, "
    "policy/clip_fraction, policy/approx_kl, train/tokens_per_second, episode/turns, episode/reward/NAME, environment/NAME"
)
SUMMARY = _names(  # the table of a report
    "eval/accuracy, train/reward, critic/explained_variance, policy/approx_kl, policy/clip_fraction, gate/mean, "
    "train/entropy, train/length, train/tokens_per_second, time/iteration, episode/turns, episode/rows, episode/observed, "
    "episode/reward/NAME, environment/NAME"
)
CELLS = _names(  # columns of a study's cells.csv: small enough to commit, enough for every number of results.json
    "eval/accuracy, eval/reward, eval/length, train/reward, train/length, train/truncated, train/entropy, "
    "critic/explained_variance, baseline/explained_variance, gate/mean, policy/approx_kl, policy/clip_fraction, "
    "actor/gradient_norm, time/iteration"
)
EXPLAINED = ("baseline/explained_variance", "critic/explained_variance")  # the first that there is, as the transport read it
STAGES = (
    "generate",
    "evidence",
    "greedy",
    "branch",
    "behaviour",
    "transport",
    "update",
    "wait",
)  # of an iteration: `time/STAGE`


@dataclass(frozen=True)
class Curve:
    """A chart of a report."""

    caption: str
    unit: str
    range: tuple[float, float] | None = None
    """Of the axis; None follows the values."""
    zero: bool = False
    """A line at zero."""
    least_span: float = 0.0
    """Of the axis, so that noise is not shown large."""


CURVES = {
    "eval/accuracy": Curve("Held-out accuracy, greedy", "share correct", range=(0.0, 1.0)),
    "sets/NAME/accuracy": Curve("Evaluation set: NAME", "share correct", range=(0.0, 1.0)),
    "train/reward": Curve("Reward of sampled responses", "reward"),
    "critic/explained_variance": Curve("Explained variance of the Monte-Carlo return", "at most 1", zero=True),
    "baseline/explained_variance": Curve("Explained variance, by the critic combined with the group", "at most 1", zero=True),
    "policy/approx_kl": Curve("KL from sampling to new policy", "nats", least_span=1e-4),
    "policy/clip_fraction": Curve("Tokens where the clip took effect", "share", least_span=0.01),
    "gate/mean": Curve("Gate: mean discount per token", "discount"),
    "train/entropy": Curve("Entropy of the policy", "nats per token"),
    "train/length": Curve("Length of responses", "tokens", least_span=2.0),
    "train/truncated": Curve("Responses cut by the length limit", "share", least_span=0.01),
    "actor/gradient_norm": Curve("Gradient norm of the policy, before clipping", "norm"),
    "episode/turns": Curve("Turns of an episode", "turns", least_span=1.0),
    "episode/reward/NAME": Curve("Reward of an episode: NAME", "reward"),
    "environment/NAME": Curve("Failures of the environment: NAME", "episodes", least_span=1.0),
}


def curves(written: Iterable[str]) -> dict[str, Curve]:
    """The charts of a report, one for each written metric that NAME stands for."""
    there, found = list(written), {}
    for pattern, curve in CURVES.items():
        for name in among([pattern], there):
            part = name.removeprefix(pattern.partition("NAME")[0])
            found[name] = replace(curve, caption=curve.caption.replace("NAME", part)) if "NAME" in pattern else curve
    return found


# What the cells of a study are compared by: its name in the terminal's tables, and in the report.
OUTCOMES = {
    "final_accuracy": ("final accuracy", "final held-out accuracy"),
    "area": ("area under curve", "mean of the learning curve"),
    "frozen/accuracy": ("frozen accuracy", "frozen accuracy"),
}
