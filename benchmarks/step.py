"""A whole iteration, sampling to update: `cct` GRPO beside TRL's, CompPO beside GRPO, and what each critic costs."""

from __future__ import annotations

import io
import random
import statistics
import string
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import torch
from lightning import Callback
from pydantic import Field
from rich.console import Console

from cct.agent.building import build
from cct.evidence import Evidence, evidences
from cct.loading import load_recipe
from cct.policy import policies
from cct.policy.models import Scratch
from cct.recipe import Recipe
from cct.rollout import Prompt, Response
from cct.run_folder import RunFolder
from cct.task import Task, tasks
from cct.training.run import train

from .measure import Result, Table, Target, extra_memory, mib, number, ratios, spread

RECIPES = Path(__file__).parents[1] / "recipes"
TRL = "TRL GRPOTrainer"


@dataclass(frozen=True)
class Size:
    """Of one iteration."""

    prompts: int = 16
    responses: int = 16
    tokens: int = 48
    minibatch: int = 64
    width: int = 128
    layers: int = 4
    iterations: int = 4
    """Timed in a round, after one that is not."""
    prompt: int | None = None
    """Tokens of every prompt; None takes the problems of `chain_arithmetic` as they are."""

    @property
    def total(self) -> int:
        return self.prompts * self.responses


SIZE = Size()
QUICK = Size(prompts=4, responses=4, tokens=12, minibatch=8, width=64, layers=2, iterations=2)


@policies.register("endless")
class Endless(Scratch):
    """A fresh Qwen3 that never ends a response, so that everyone samples the same number of tokens."""

    def load(self, *, alphabet, seed):
        model, tokenizer = super().load(alphabet=alphabet, seed=seed)
        bias = torch.zeros(model.config.vocab_size)
        bias[[tokenizer.pad_token_id, tokenizer.eos_token_id]] = -1e9
        del model.lm_head.bias  # no weight of the policy's: it is not exported
        model.lm_head.register_buffer("bias", bias, persistent=False)
        return model, tokenizer


@tasks.register("long")
class Long(Task):
    """Random letters, as many as are asked for; nothing to learn."""

    length: int = Field(ge=1)
    """Characters of a prompt, a token each."""

    def prompts(self, seed, start, count):
        drawn = [random.Random(f"{seed} {number}") for number in range(start, start + count)]
        return [Prompt("".join(draw.choices(self.alphabet, k=self.length))) for draw in drawn]

    def held_out(self):
        return self.prompts(-1, 0, 1)

    @property
    def alphabet(self):
        return string.digits + string.ascii_lowercase


@evidences.register("digits")
class Digits(Evidence):
    """The share of digits in a response: differs from one random response to the next."""

    def __call__(self, prompt, response):
        return sum(map(str.isdigit, response.text)) / max(1, len(response.text))


CCT = {
    "cct grpo": ("grpo",),
    "cct grpo, ratio to the engine": ("grpo", "geometry.ratio_to=engine"),
    "cct compo (TAC), as shipped: 6 critic passes": ("compo", "training.critic_warmup=0"),
    "cct compo (TAC), 1 critic pass": ("compo", "training.critic_warmup=0", "training.critic_epochs=1"),
    "cct comp_gae_standard (second Transformer), 6 critic passes": ("comp_gae_standard", "training.critic_warmup=0"),
    "cct comp_gae_standard, 1 critic pass": ("comp_gae_standard", "training.critic_warmup=0", "training.critic_epochs=1"),
}


SHARING = {
    "cct grpo": ("grpo",),
    "cct grpo, share_prefix: false": ("grpo", "training.share_prefix=false"),
    "cct compo (TAC), 1 critic pass": ("compo", "training.critic_warmup=0", "training.critic_epochs=1"),
    "cct compo (TAC), 1 critic pass, share_prefix: false": (
        "compo",
        "training.critic_warmup=0",
        "training.critic_epochs=1",
        "training.share_prefix=false",
    ),
}


def long_prompts(prompt: int, responses: str, rounds: int = 3, iterations: int = 3, prompts: int = 8) -> Result:
    """Prompts of so many tokens, `16x32` responses to each of them: with their prompts shared, without, and TRL.

    iterations: at least 2, as the last one, after which a run evaluates, is not timed.

    By the CPU's time, all threads together, which what else a machine does disturbs less than the clock.
    """
    count, tokens = map(int, responses.split("x"))
    minibatch = min(SIZE.minibatch, prompts * count)
    size = Size(prompts, count, tokens, minibatch, iterations=iterations, prompt=prompt)
    recipes = {name: recipe(size, *knobs) for name, knobs in SHARING.items()}
    each: dict[str, Callable[[], Iterations]] = {name: lambda one=one: of_cct(one) for name, one in recipes.items()}  # type: ignore[misc]
    if find_spec("trl") is not None:
        each[TRL] = lambda: of_trl(recipes["cct grpo"])
    found, memory = in_rounds(each, rounds)
    seconds = {name: [statistics.median(one.cpu) for one in them] for name, them in found.items()}
    tokens_of = {name: statistics.mean(one.tokens for one in them) for name, them in found.items()}
    assert len(set(tokens_of.values())) == 1, f"not the same work: {tokens_of} tokens an iteration"
    work = tokens_of["cct grpo"]
    grpo, apart, compo, compo_apart = (seconds[name] for name in SHARING)
    rows = [
        (name, spread(taken), number(work / statistics.median(taken)), spread(ratios(taken, grpo)), mib(memory[name]))
        for name, taken in seconds.items()
    ]
    targets = [
        Target("CPU time: grpo without sharing / grpo", ratios(apart, grpo), least=1.0),
        Target("CPU time: compo without sharing / compo", ratios(compo_apart, compo), least=1.0),
    ]
    if TRL in seconds:
        targets += [
            Target(f"tokens per second of CPU: cct grpo / {TRL}", ratios(seconds[TRL], grpo), least=2.0),
            Target(f"tokens per second of CPU: cct compo / {TRL}", ratios(seconds[TRL], compo), least=1.7),
        ]
    peak, peak_apart = (memory[name] for name in list(SHARING)[:2])
    if peak and peak_apart:
        targets.append(Target("peak memory: grpo / without sharing", (peak / peak_apart,), most=0.6))
    title = f"An iteration: {prompts} prompts of {prompt} tokens, {count} x {tokens} to each, minibatches of {minibatch}"
    columns = ("", "CPU s", "tokens per CPU second", "times cct grpo", "peak memory of a run")
    return Result((Table(title, columns, tuple(rows)), stages(found, list(recipes))), tuple(targets))


def in_rounds(
    each: dict[str, Callable[[], Iterations]], rounds: int
) -> tuple[dict[str, list[Iterations]], dict[str, int | None]]:
    """What every run gave in each round, and the memory of its last one; rounds go forwards and backwards."""
    found: dict[str, list[Iterations]] = {name: [] for name in each}
    memory: dict[str, int | None] = {}
    for number_of_round in range(rounds):
        for name in list(each) if number_of_round % 2 == 0 else list(each)[::-1]:
            memory[name] = extra_memory(lambda name=name: found[name].append(each[name]()))  # type: ignore[misc]
    return found, memory


def run(size: Size = SIZE, rounds: int = 3) -> Result:
    recipes = {name: recipe(size, *knobs) for name, knobs in CCT.items()}
    each: dict[str, Callable[[], Iterations]] = {name: lambda one=one: of_cct(one) for name, one in recipes.items()}  # type: ignore[misc]
    notes = []
    if find_spec("trl") is None:
        notes.append("TRL is not installed (`pip install '.[bench]'`), so nothing is compared with it.")
    else:
        each[TRL] = lambda: of_trl(recipes["cct grpo"])
    found, memory = in_rounds(each, rounds)
    seconds = {name: [statistics.median(one.seconds) for one in them] for name, them in found.items()}
    tokens = {name: statistics.mean(one.tokens for one in them) for name, them in found.items()}
    assert len(set(tokens.values())) == 1, f"not the same work: {tokens} tokens an iteration"
    grpo = seconds["cct grpo"]
    rows = [
        (
            name,
            spread(taken),
            number(tokens[name] / statistics.median(taken)),
            spread(ratios(taken, grpo)),
            number(critic_parameters(recipes[name]) / 1e6) if name in recipes else "0",
            mib(memory[name]),
        )
        for name, taken in seconds.items()
    ]
    straight, compo, lean, *_ = (seconds[name] for name in list(CCT)[1:])
    targets = [
        Target("iteration: compo as shipped / grpo", ratios(compo, grpo), most=1.2),
        Target("iteration: compo with one critic pass / grpo", ratios(lean, grpo), most=1.2),
    ]
    if TRL in seconds:
        targets[:0] = [
            Target(f"tokens/s: cct grpo / {TRL}", ratios(seconds[TRL], grpo), least=1.5),
            Target(f"tokens/s: cct grpo, ratio to the engine / {TRL}", ratios(seconds[TRL], straight), least=1.5),
        ]
    agent = build(recipes["cct grpo"])[0]
    actor = sum(p.numel() for p in agent.actor.parameters())
    title = (
        f"An iteration: {size.total} responses x {size.tokens} tokens, minibatches of {size.minibatch}, Qwen3 of "
        f"{number(actor / 1e6)}M parameters"
    )
    columns = ("", "s", "tokens/s", "times cct grpo", "critic, M parameters", "peak memory of a run")
    return Result((Table(title, columns, tuple(rows)), stages(found, list(recipes))), tuple(targets), tuple(notes))


def stages(found: dict[str, list[Iterations]], names: list[str]) -> Table:
    """Where `cct` spends an iteration."""
    every = [name for name in ("generate", "behaviour", "transport", "update") if name in found[names[0]][0].stages]
    rows = [
        (name, *(number(1e3 * statistics.median(one.stages.get(stage, 0.0) for one in found[name])) for stage in every))
        for name in names
    ]
    return Table("Its stages, ms", ("", *every), tuple(rows))


@dataclass(frozen=True)
class Iterations:
    """Those of one run that were timed."""

    seconds: list[float]
    tokens: float
    """In one iteration."""
    stages: dict[str, float]
    """Median seconds of each."""
    cpu: list[float]
    """Seconds of all threads, evaluation and what is written left out."""


def recipe(size: Size, name: str, *knobs: str) -> Recipe:
    heads = size.width // 32
    policy = (
        f"{{use: endless, hidden_size: {size.width}, intermediate_size: {3 * size.width}, layers: {size.layers}, "
        f"heads: {heads}, kv_heads: {heads}, max_length: {max(512, (size.prompt or 0) + size.tokens)}}}"
    )
    return load_recipe(
        RECIPES / f"{name}.yaml",
        [
            f"policy={policy}",
            "evidence=[digits]",
            f"generation.max_new_tokens={size.tokens}",
            f"generation.batch_size={size.total}",
            f"training.prompts_per_iteration={size.prompts}",
            f"training.responses_per_prompt={size.responses}",
            f"training.minibatch_size={size.minibatch}",
            f"training.iterations={size.iterations + 1}",
            "training.checkpoint_every=1000",
            "evaluation.every=1000",
            "logging.rollouts=never",
            *([f"task={{use: long, length: {size.prompt}}}"] if size.prompt else ["task.held_out_size=1"]),
            *knobs,
        ],
    )


def critic_parameters(one: Recipe) -> int:
    critic = build(one)[0].critic
    return sum(p.numel() for p in critic.parameters()) if critic is not None else 0


def of_cct(one: Recipe) -> Iterations:
    """By the run's own clock: sampling, judging, behaviour pass, transport, update."""
    ends = list[float]()

    class Clock(Callback):
        def on_train_epoch_end(self, trainer, module):
            ends.append(time.process_time())

    with tempfile.TemporaryDirectory() as root:
        folder = RunFolder.new(Path(root), one.name).path
        train(one, folder, console=Console(file=io.StringIO()), callbacks=[Clock()])
        events = [event for event in RunFolder(folder).metrics if event["iteration"] > 1]
    names = {name for event in events for name in event if name.startswith("time/")} - {"time/iteration"}
    medians = {name.removeprefix("time/"): statistics.median(event.get(name, 0.0) for event in events) for name in names}
    cpu = [after - before for before, after in pairwise(ends)][:-1]  # the last one evaluates
    return Iterations([event["time/iteration"] for event in events], events[0]["train/tokens"], medians, cpu)


def of_trl(one: Recipe) -> Iterations:
    """The same prompts, model, lengths, minibatches and reward; by the wall clock from the end of one iteration to the next."""
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    training, lengths, ends, cpu = one.training, list[int](), list[float](), list[float]()
    steps = training.prompts_per_iteration * training.responses_per_prompt // training.minibatch_size
    actor, tokenizer = one.policy.load(alphabet=one.task.alphabet, seed=one.seed)
    prompts = one.task.prompts(one.seed, 0, training.iterations * training.prompts_per_iteration)

    def reward(prompts, completions, completion_ids, **others):
        lengths.extend(map(len, completion_ids))
        return [one.evidence[0](Prompt(p), Response(c, (), True)) for p, c in zip(prompts, completions, strict=True)]

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            if state.global_step % steps == 0:
                ends.append(time.perf_counter())
                cpu.append(time.process_time())

    with tempfile.TemporaryDirectory() as root:
        config = GRPOConfig(
            output_dir=root,
            per_device_train_batch_size=training.minibatch_size,
            steps_per_generation=steps,
            gradient_accumulation_steps=1,
            num_generations=training.responses_per_prompt,
            max_completion_length=one.generation.max_new_tokens,
            max_steps=steps * training.iterations,
            learning_rate=training.learning_rate,
            beta=0.0,
            temperature=1.0,
            shuffle_dataset=False,
            gradient_checkpointing=False,
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            actor,
            reward,
            config,
            train_dataset=Dataset.from_list([{"prompt": prompt.text} for prompt in prompts]),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    timed, of_cpu = ([after - before for before, after in pairwise(each)] for each in (ends, cpu))
    return Iterations(timed, sum(lengths) / training.iterations, {}, of_cpu)
