"""The recipe: the parts put together. `pairing` says which of them do not fit, `loading` reads it from YAML."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from cct import pairing
from cct.critic import Critic, critics
from cct.environment import Environment, environments
from cct.evidence import Evidence, evidences
from cct.geometry import Geometry, geometries
from cct.policy import Generation, Policy, engines, policies
from cct.registry import Component, Knobs, descendants
from cct.rollout import Prompt
from cct.statistic import Statistic, statistics
from cct.system.plain_yaml import index_or_name
from cct.system.terminal import shortened
from cct.task import Task, tasks
from cct.transport import Transport, transports

MOST_PROBLEMS, MOST_CHARACTERS = 20, 2000  # of a recipe, and of one of them

AnyStatistic = Annotated[Statistic, statistics]  # under a knob called `statistics`

CRITIC_WARMUP_SEED = 2_000_003  # added to the recipe's for the prompts on which only the critic learns


class RecipeError(ValueError):
    """One or several problems of a recipe, each with what was found, where, and what to do; of very many the first ones."""

    def __init__(self, *problems: str):
        first = [shortened(problem, MOST_CHARACTERS) for problem in problems[:MOST_PROBLEMS]]
        if len(problems) > MOST_PROBLEMS:
            first.append(f"and {len(problems) - MOST_PROBLEMS:,} more problems")
        super().__init__("\n".join(first))
        self.problems = tuple(first)


class Plugin(Knobs):
    """A file or module whose import registers components."""

    path: str
    """`./file.py`, relative to the recipe that names it, or an installed `package.module`."""
    sha256: str | None = None
    """Hash of the source; where it is given and differs, the recipe is refused. Written into every run."""


class Training(Knobs):
    """How much is sampled, and how actor and critic are updated from it."""

    iterations: int = Field(60, ge=1, le=10**12)
    """Rounds of sampling and updating the policy."""
    prompts_per_iteration: int = Field(16, ge=1, le=10**6)
    """Prompts in a round."""
    responses_per_prompt: int = Field(16, ge=1, le=10**6)
    """Responses sampled for each prompt."""
    epochs: int = Field(1, ge=1, le=100)
    """Passes of the policy update over a round's responses."""
    minibatch_size: int = Field(128, ge=1, le=10**9)
    """Responses per optimizer step; divides the responses of a round."""
    micro_batch_size: int | None = Field(None, ge=1)
    """Responses per forward of one process; null takes its whole part of a minibatch. Never changes the gradient."""
    micro_batch_tokens: int | None = Field(None, ge=16)
    """Tokens per forward of one process, padding included, in place of micro_batch_size: as many responses of like length go
    together as fit, and one that is longer goes alone."""
    learning_rate: float = Field(2e-4, gt=0, le=1)
    """AdamW, actor, at the first iteration."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the actor's learning rate goes from iteration to iteration: linear and cosine fall to a tenth at the last one."""
    critic_learning_rate: float = Field(1e-3, gt=0, le=1)
    """AdamW, critic; constant."""
    critic_epochs: int = Field(1, ge=1, le=100)
    """Passes of the critic update over a round's responses, on what the actor's behaviour forward left behind."""
    critic_window: int = Field(1, ge=1, le=64)
    """Iterations whose responses those passes go over, this one included. The policy reads older ones again at each, with a
    forward; their value targets stay. A critic remembers more of what it has seen, and each pass takes as many times longer."""
    critic_warmup: int = Field(0, ge=0, le=10**12)
    """Rounds before the first policy update in which only the critic learns, from responses of the starting policy."""
    bootstrap_truncated: bool = True
    """What follows a response that the length limit cut is worth the critic's V there. Off, it ended with the score it got:
    for a tight limit that is part of the task, where a critic that hopes too much pays for rambling."""
    share_prefix: Literal["auto"] | bool = "auto"
    """Whether a forward computes a prompt once for all of its responses, in policy and critic. auto does on the CPU, where that
    leaves at most half of the tokens and the policy's attention allows it; true wherever it can, and refuses a policy that
    cannot. It changes which rows go together and the rounding of sums, nothing else."""
    logits_at_once: int | None = Field(None, ge=1)
    """Tokens of a forward whose logits over the vocabulary stand in memory together; where there are more, the backward
    computes them again. null: as many as make 2^26 numbers. Changes no number."""
    weight_decay: float = Field(0.0, ge=0, le=1)
    """AdamW, both."""
    gradient_clip: float = Field(1.0, gt=0)
    """Greatest gradient norm, of the actor and of the critic each by itself."""
    checkpoint_every: int = Field(10, ge=1)
    """Iterations between checkpoints; the last iteration is always kept."""
    keep_checkpoints: int = Field(2, ge=1)
    """How many of the newest are kept: two, should the last be cut short; more to look back with `cct fidelity --iteration`."""
    strategy: Literal["auto", "ddp", "fsdp", "deepspeed_1", "deepspeed_2", "deepspeed_3"] = "auto"
    """How processes share the work, through Lightning: auto is one process, or ddp where there are more; fsdp and
    deepspeed_3 split the weights too; deepspeed needs the extra `.[deepspeed]`. All run on CPUs as well."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """What DeepSpeed keeps in the CPU's memory: the optimizer's state, or with ZeRO-3 the weights as well."""
    precision: Literal["float32", "bf16"] = "float32"
    """bf16: forwards and backwards in bfloat16, weights and optimizer in float32."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward instead of keeping its activations; changes no number."""
    devices: int = Field(1, ge=1, le=1024)
    """Processes on each node, one per device; they divide every minibatch between them."""
    nodes: int = Field(1, ge=1, le=4096)
    """Machines, started by torchrun or SLURM."""
    threads: int | None = Field(None, ge=1, le=4096)
    """CPU threads of torch; null leaves torch's default."""

    @model_validator(mode="after")
    def _divides(self) -> Training:
        responses = self.prompts_per_iteration * self.responses_per_prompt
        if responses % self.minibatch_size:
            raise ValueError(
                f"minibatch_size ({self.minibatch_size}) must divide the {responses} responses of an iteration "
                f"({self.prompts_per_iteration} prompts x {self.responses_per_prompt} responses)"
            )
        if self.offload != "none" and not self.strategy.startswith("deepspeed"):
            raise ValueError(f"offload is DeepSpeed's; strategy is {self.strategy}")
        if self.offload == "parameters" and self.strategy != "deepspeed_3":
            raise ValueError(f"offload: parameters needs strategy: deepspeed_3, which splits them; found {self.strategy}")
        if self.minibatch_size % self.processes:
            raise ValueError(f"{self.processes} processes must divide minibatch_size ({self.minibatch_size})")
        if self.micro_batch_size and self.micro_batch_tokens:
            raise ValueError(
                f"micro_batch_size ({self.micro_batch_size}) and micro_batch_tokens ({self.micro_batch_tokens}) both say how "
                "much goes into a forward; set one of them to null"
            )
        if (self.minibatch_size // self.processes) % (self.micro_batch_size or 1):
            raise ValueError(
                f"micro_batch_size ({self.micro_batch_size}) must divide the {self.minibatch_size // self.processes} responses "
                "of a minibatch that each process has"
            )
        return self

    @property
    def processes(self) -> int:
        return self.devices * self.nodes

    def rows_per_forward(self, length: int) -> int:
        """Responses in one forward of one process where all are `length` tokens long, their prompts included."""
        fit = max(1, self.micro_batch_tokens // length) if self.micro_batch_tokens else None
        rows = self.minibatch_size // self.processes
        return min(rows, self.micro_batch_size or fit or rows)


class Evaluation(Knobs):
    """Greedy decoding of the task's held-out prompts."""

    every: int = Field(10, ge=1)
    """Iterations between evaluations; before the first and after the last one there always is one."""
    frozen: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")], Annotated[Task, tasks]] = Field({}, max_length=64)
    """Further evaluation sets by name, each the held-out problems of a task. `cct eval` alone reads them, a run never does."""


class Logging(Knobs):
    """What a run writes besides metrics.jsonl."""

    logger: Literal["csv", "tensorboard"] = "csv"
    """Lightning logger; tensorboard needs the extra `.[tensorboard]`."""
    samples: int = Field(8, ge=0, le=1000)
    """Responses per iteration in samples.jsonl."""
    statistics: list[AnyStatistic] = Field([], max_length=64)
    """Statistics of the behaviour forward to measure in each iteration, whatever the transport reads: their mean and standard
    deviation over trainable tokens are the metrics `statistic/NAME/mean` and `/std`, and stored rollouts hold them."""
    rollouts: Literal["auto", "always", "never"] = "auto"
    """Keep what transports read of each iteration in rollouts/, for `cct replay`: auto leaves off for the rest of a run
    whose rollouts would take more than rollouts_mb, always has no limit."""
    rollouts_mb: float = Field(64.0, gt=0, le=1e6)
    """Megabytes that auto gives the rollouts of one run."""

    @property
    def unread(self) -> dict[str, str]:
        return {} if self.rollouts == "auto" else {"rollouts_mb": f"rollouts: {self.rollouts} has no limit"}


class LightningCallback(Knobs):
    """A Lightning callback, of your own or of Lightning's. What it monitors is any metric of metrics.jsonl."""

    use: str = Field(pattern=r"^(.+\.py:[A-Za-z_]\w*|[A-Za-z_]\w*(\.[A-Za-z_]\w*)+)$", max_length=1000)
    """Its class: `lightning.pytorch.callbacks.EarlyStopping`, or `./mine.py:Mine` in a file, relative to the recipe that
    names it."""
    arguments: dict[str, Any] = {}
    """What the class is called with, by keyword."""


class Recipe(Knobs):
    """A whole training run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=200)
    """Names the run's folder."""
    seed: int = Field(0, ge=0, lt=2**31)
    """The one seed: weights, problems, sampling and shuffling derive from it."""
    plugins: list[Plugin] = []
    """Files or modules that register components of your own."""
    task: Annotated[Task, tasks]
    """Prompts and gold answers."""
    environment: Annotated[Environment, environments] | None = None
    """Turns the task's prompts into episodes of several turns; null for single responses."""
    policy: Annotated[Policy, policies]
    """The language model."""
    generation: Annotated[Generation, engines]
    """The engine that samples."""
    evidence: list[Annotated[Evidence, evidences]] = Field(min_length=1)
    """What tells success; rewards are the weighted sum, accuracy is the first one's mean."""
    critic: Annotated[Critic, critics] | None = None
    """Predicts returns; null for critic-free transports."""
    transport: Annotated[Transport, transports]
    """Carries rewards back along the tokens."""
    geometry: Annotated[Geometry, geometries]
    """Turns advantages into a policy change."""
    training: Training = Training()
    evaluation: Evaluation = Evaluation()
    logging: Logging = Logging()
    callbacks: list[LightningCallback] = []
    """Lightning callbacks, called in this order: early stopping, keeping the best checkpoint, your own."""

    @property
    def parts(self) -> dict[str, Component]:
        """Every component by its place, gates inside transports and frozen evaluation sets included."""
        return dict(descendants(self))

    @property
    def statistics(self) -> dict[str, Statistic]:
        """What the behaviour forward measures, by its name in `Rollout.stats`: for the metrics and for the transport."""
        return {what.name: what for what in self.logging.statistics} | self.transport.statistics

    @property
    def reward_bounds(self) -> tuple[float, float]:
        """Least and greatest reward of a response."""
        ends = [sorted(bound * part.weight for bound in part.bounds) for part in self.evidence]
        return sum(low for low, _ in ends), sum(high for _, high in ends)

    @property
    def alphabet(self) -> str:
        """Characters of the task and of the environment, for policies that make their own tokenizer of them."""
        return self.task.alphabet + (self.environment.alphabet if self.environment is not None else "")

    def prompts(self, first: int, last: int) -> list[Prompt]:
        """Training prompts of iterations `first` to `last`.

        The critic's warm-up, 0 and below, has a stream of its own, so that recipes with and without one see the same prompts
        in iteration 1, 2, ...
        """
        each, before = self.training.prompts_per_iteration, self.training.critic_warmup
        drawn: list[Prompt] = []
        if first < 1:
            count = min(last, 0) - first + 1
            drawn += self.task.prompts(self.seed + CRITIC_WARMUP_SEED, (first - 1 + before) * each, count * each)
        if last > 0:
            start = max(first, 1)
            drawn += self.task.prompts(self.seed, (start - 1) * each, (last - start + 1) * each)
        return drawn

    @property
    def warnings(self) -> list[str]:
        """What can be run and cannot be meant, each with its place. The task's data are read for it."""
        written = getattr(self.policy, "alphabet", None)  # of a policy that makes its own tokenizer
        if written is None or "#" in (written or self.alphabet):
            return []
        return [
            f"evidence.{index}: 'exact_match' looks for the answer behind a '#' unless its pattern says otherwise, and policy "
            f"'{self.policy.use}' has no such character, so that no response can be right; set evidence.{index}.pattern"
            for index, part in enumerate(self.evidence)
            if part.use == "exact_match" and part.model_dump()["pattern"] == part.default_of("pattern")
        ]

    def needs(self, what: str) -> bool:
        """Whether any part does."""
        return any(what in part.needs for part in self.parts.values())

    def providers(self, need: str) -> list[str]:
        """Places of this recipe that provide `need`."""
        training = {place: part for place, part in self.parts.items() if not place.startswith("evaluation.")}
        found = [place for place, part in training.items() if need in part.provides]
        if need == "groups" and self.training.responses_per_prompt >= 2:
            found.append("training.responses_per_prompt")
        return found

    @model_validator(mode="after")
    def _parts_fit(self) -> Recipe:
        found = [
            {
                "type": PydanticCustomError("pairing", "{message}", {"message": message}),
                "loc": tuple(index_or_name(key) for key in place.split(".")),
                "input": place,
            }
            for place, message in pairing.problems(self)
        ]
        if found:
            raise ValidationError.from_exception_data("Recipe", found)  # type: ignore[arg-type]
        return self
