"""The recipe: all parts of a run. `pairing` has the rules for combining them, `loading` reads a recipe from YAML."""

from __future__ import annotations

from typing import Annotated, Literal

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
from cct.statistic import Statistic
from cct.system.plain_yaml import index_or_name
from cct.system.terminal import shortened
from cct.task import Task, tasks
from cct.transport import Transport, transports
from cct.watching import Evaluation, LightningCallback, Logging

MOST_PROBLEMS, MOST_CHARACTERS = 20, 2000  # of a recipe, and of one of them

CRITIC_WARMUP_SEED = 2_000_003  # added to the recipe's for the prompts on which only the critic learns


class RecipeError(ValueError):
    """One or several problems of a recipe, each with what was found, where, and what to do; only the first ones if there are
    many."""

    def __init__(self, *problems: str):
        first = [shortened(problem, MOST_CHARACTERS) for problem in problems[:MOST_PROBLEMS]]
        if len(problems) > MOST_PROBLEMS:
            first.append(f"and {len(problems) - MOST_PROBLEMS:,} more problems")
        super().__init__("\n".join(first))
        self.problems = tuple(first)


class Plugin(Knobs):
    """A file or module whose import registers components."""

    path: str
    """`./file.py`, relative to the recipe, or an installed `package.module`."""
    sha256: str | None = None
    """Hash of the source; if it is set and differs, the recipe is refused. Every run records it."""


class Training(Knobs):
    """How much is sampled, and how actor and critic are updated from it."""

    iterations: int = Field(60, ge=1, le=10**12)
    """Iterations of sampling and updating the policy."""
    prompts_per_iteration: int = Field(16, ge=1, le=10**6)
    """Prompts in an iteration."""
    responses_per_prompt: int = Field(16, ge=1, le=10**6)
    """Responses sampled for each prompt."""
    refill: int = Field(0, ge=0, le=100)
    """Maximum number of rounds in an iteration that replace prompts without contrast, those whose responses all have the same
    score by the first evidence, by the task's next prompts (dynamic sampling of DAPO, Yu et al. 2025). What has no contrast
    after the last round stays, so the number of responses is always the same. 0: none. No effect in the critic's warm-up."""
    epochs: int = Field(1, ge=1, le=100)
    """Passes of the policy update over an iteration's responses."""
    minibatch_size: int = Field(128, ge=1, le=10**9)
    """Responses per optimizer step; must divide the responses of an iteration."""
    micro_batch_size: int | None = Field(None, ge=1)
    """Responses per forward of one process; null is its whole share of a minibatch. Does not change the gradient."""
    micro_batch_tokens: int | None = Field(None, ge=16)
    """Tokens per forward of one process, padding included, instead of micro_batch_size. A forward takes as many responses of
    similar length as fit; a longer response goes alone."""
    learning_rate: float = Field(2e-4, gt=0, le=1)
    """AdamW, actor, in the first iteration."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the actor's learning rate over iterations; linear and cosine fall to a tenth in the last one."""
    critic_learning_rate: float = Field(1e-3, gt=0, le=1)
    """AdamW, critic; constant."""
    critic_epochs: int = Field(1, ge=1, le=100)
    """Passes of the critic update over an iteration's responses, on the traces of the actor's behaviour forward."""
    critic_window: int = Field(1, ge=1, le=64)
    """Number of latest iterations, this one included, whose responses the critic learns from. The policy runs a forward
    over older ones in each iteration; their value targets stay. The critic forgets less, and each pass takes as many times
    longer."""
    critic_warmup: int = Field(0, ge=0, le=10**12)
    """Iterations before the first policy update in which only the critic learns, from responses of the starting policy."""
    bootstrap_truncated: bool = True
    """Value the rest of a truncated response at the critic's V after its last token. If off, a truncated response ends with its
    score: use this for a tight limit that is part of the task, where an optimistic critic would reward long responses."""
    share_prefix: Literal["auto", True, False] = "auto"
    """Compute a prompt once for all of its responses in a forward, in policy and critic. auto: where that leaves at most three
    quarters of the tokens and the policy's attention allows it; a run says where it does not. true: wherever possible; a policy
    that cannot share is refused. false: never. It changes which rows go together and the rounding of sums, and nothing else."""
    logits_at_once: int | None = Field(None, ge=1)
    """Maximum number of tokens whose logits over the vocabulary are in memory together; beyond it, the backward recomputes
    them. Null: as many as make 2^26 numbers. Changes no number."""
    weight_decay: float = Field(0.0, ge=0, le=1)
    """AdamW, both."""
    gradient_clip: float = Field(1.0, gt=0)
    """Maximum gradient norm, for actor and critic separately."""
    checkpoint_every: int = Field(10, ge=1)
    """Iterations between checkpoints; the last iteration always has one."""
    keep_checkpoints: int = Field(2, ge=1)
    """Number of newest checkpoints to keep: two, in case the last one is incomplete; more for `cct fidelity --iteration`."""
    strategy: Literal["auto", "ddp", "fsdp", "deepspeed_1", "deepspeed_2", "deepspeed_3"] = "auto"
    """How processes share the work, through Lightning. auto: one process, or ddp with several. fsdp and deepspeed_3 also split
    the weights. DeepSpeed needs the extra `.[deepspeed]`. All run on CPUs too."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """What DeepSpeed keeps in CPU memory: the optimizer's state, or with ZeRO-3 also the weights."""
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
            raise ValueError(f"offload works only with DeepSpeed; strategy is {self.strategy}")
        if self.offload == "parameters" and self.strategy != "deepspeed_3":
            raise ValueError(f"offload: parameters needs strategy: deepspeed_3, which splits them; found {self.strategy}")
        if self.minibatch_size % self.processes:
            raise ValueError(f"{self.processes} processes must divide minibatch_size ({self.minibatch_size})")
        if self.micro_batch_size and self.micro_batch_tokens:
            raise ValueError(
                f"micro_batch_size ({self.micro_batch_size}) and micro_batch_tokens ({self.micro_batch_tokens}) both set the "
                "size of a forward; set one of them to null"
            )
        if (self.minibatch_size // self.processes) % (self.micro_batch_size or 1):
            raise ValueError(
                f"micro_batch_size ({self.micro_batch_size}) must divide the {self.minibatch_size // self.processes} responses "
                "of a minibatch on each process"
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


class Recipe(Knobs):
    """A whole training run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=200)
    """Names the run's folder."""
    seed: int = Field(0, ge=0, lt=2**31)
    """The one seed: weights, problems, sampling and shuffling derive from it."""
    plugins: list[Plugin] = []
    """Files or modules that register your components."""
    task: Annotated[Task, tasks]
    """Prompts and gold answers."""
    environment: Annotated[Environment, environments] | None = None
    """Turns the task's prompts into episodes of several turns; null for single responses."""
    policy: Annotated[Policy, policies]
    """The language model."""
    generation: Annotated[Generation, engines]
    """The engine that samples."""
    evidence: list[Annotated[Evidence, evidences]] = Field(min_length=1)
    """What judges responses; the reward is the weighted sum, accuracy is the mean of the first one."""
    teacher: Annotated[Policy, policies] | None = None
    """Frozen policy with the same vocabulary, from which the transport `distill` learns; null for none."""
    critic: Annotated[Critic, critics] | None = None
    """Predicts returns; null for critic-free transports."""
    transport: Annotated[Transport, transports]
    """The advantage estimator: carries rewards back along the tokens."""
    geometry: Annotated[Geometry, geometries]
    """The policy loss: turns advantages into an update."""
    training: Training = Training()
    evaluation: Evaluation = Evaluation()
    logging: Logging = Logging()
    callbacks: list[LightningCallback] = []
    """Lightning callbacks, called in this order: early stopping, keeping the best checkpoint, your own."""

    @property
    def parts(self) -> dict[str, Component]:
        """Every component by its place, including gates inside transports and frozen evaluation sets."""
        return dict(descendants(self))

    @property
    def statistics(self) -> dict[str, Statistic]:
        """What the behaviour forward measures, by its name in `Rollout.stats`: for the metrics and for the transport."""
        return {what.name: what for what in self.logging.statistics} | self.transport.statistics

    @property
    def reward_bounds(self) -> tuple[float, float]:
        """Lowest and highest reward of a response."""
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
        """Recipes that run but cannot be intended, each with its place. This reads the task's data."""
        written = getattr(self.policy, "alphabet", None)  # of a policy that makes its own tokenizer
        if written is None or "#" in (written or self.alphabet):
            return []
        return [
            f"evidence.{index}: by default 'exact_match' looks for the answer after a '#', but the alphabet of policy "
            f"'{self.policy.use}' has no '#', so no response can be right; set evidence.{index}.pattern"
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
        if need == "teacher" and self.teacher is not None:
            found.append("teacher")
        if need in ("components", "history"):  # the loop's own
            found.append("training")
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
