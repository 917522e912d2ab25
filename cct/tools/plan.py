"""`cct plan`: what a recipe needs of memory, process by process, without loading weights.

Weights, gradients and optimizer states follow from the number of parameters, the strategy and the precision.
What the passes hold is counted by `tools.memory`. Not counted: what kernels take inside, and the time of it all.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cct.prompts import LOOK_AHEAD, begun
from cct.recipe import Recipe, RecipeError
from cct.rollout import Prompt

if TYPE_CHECKING:
    from cct.tools.memory import Footprint, Peak

MB, GB = 10**6, 10**9

# Memory of one device in GB, as the maker's data sheets say (NVIDIA; product pages of each). The devices have a little more.
GPUS = {
    "A100-40GB": 40,
    "A100-80GB": 80,
    "H100-80GB": 80,
    "H200-141GB": 141,
    "B200-180GB": 180,
    "L4-24GB": 24,
    "L40S-48GB": 48,
    "A10-24GB": 24,
    "RTX-3090-24GB": 24,
    "RTX-4090-24GB": 24,
}

# On a GPU, taken beside PyTorch's tensors: CUDA context, kernels' workspaces, NCCL's buffers. A guess, not measured here.
GPU_FIXED = 2 * GB

# On a GPU, what PyTorch's allocator loses between blocks of changing sizes, as a share of what passes hold. A guess as well.
GPU_FRAGMENTATION = 0.1

# On a CPU, what a run takes beside imports and tensors (Lightning's loop, threads' arenas, kernels made at first use):
# measured on the shipped recipes.
CPU_FIXED = int(0.06 * GB)

# On a CPU, what glibc's allocator loses between blocks that come and go, as a share of what passes hold: measured on runs of
# 0.7 to 4.7 GB. It gives little back to the system, so what is written after a pass comes on top of it. (Blocks of up to 32 MB
# come from its heap; with MALLOC_MMAP_THRESHOLD_=65536 in the environment the share was near 0.)
CPU_FRAGMENTATION = 0.45

# Elements in DeepSpeed's two communication buckets (Lightning's default), and the most that ZeRO-3 gathers (DeepSpeed's).
DEEPSPEED_BUCKETS = 2 * 200_000_000
DEEPSPEED_GATHERED = 1_000_000_000

# KV cache of vLLM on a CPU where the recipe does not say.
CPU_CACHE = 2**30

# Copies of the logits of one position per sequence while transformers' generate samples: logits, scaled, noise, its logarithm.
SAMPLING_COPIES = 4

CHARACTERS_PER_TOKEN = 3  # where no tokenizer is at hand: fewer than tokenizers reach, so that prompts are not made too short
UNKNOWN_PROMPT = 512  # tokens, where the task's data cannot be read either


@dataclass
class Plan:
    """Bytes in one process, by phase and part, and what was assumed."""

    actor: int
    trained: int
    critic: int
    critics: dict[str, int]
    """Parameters of the recipe's critic, and of those to compare it with."""
    processes: int
    prompt: int
    """Tokens of the longest prompt."""
    width: int
    """Tokens of the longest response, or of an episode without its prompt."""
    responses: int
    """In one iteration, over all processes."""
    phases: dict[str, dict[str, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Why it cannot work, whatever the sums say."""

    @property
    def peak(self) -> int:
        return max(sum(parts.values()) for parts in self.phases.values())


def plan(recipe: Recipe, gpu: int | None = None) -> Plan:
    """What one process needs. gpu: bytes of its device; None plans for a process on the CPU.

    Raises RecipeError where the model's configuration cannot be had.
    """
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it warns at each of its attempts
    base = _resident() if gpu is None else 0
    from cct.tools.memory import footprint, sizes

    problems = Problems(recipe)
    try:
        config = recipe.policy.config(alphabet=problems.alphabet)
    except (OSError, ValueError) as error:
        raise RecipeError(f"policy '{recipe.policy.use}': {str(error).splitlines()[0]}") from None
    training = recipe.training
    notes: list[str] = []
    prompt = _prompt_tokens(recipe, problems, notes)
    width = _response_tokens(recipe, config, prompt, notes)
    rows, prompts = _forward(recipe, config, prompt, width, notes)
    micro_batches = training.minibatch_size // training.processes // rows  # of the longest responses
    accumulates = micro_batches > 1 or _sharded(recipe)
    try:
        foot = footprint(recipe, config, prompt, width, rows=rows, prompts=prompts, accumulates=accumulates)
    except ValueError as error:
        raise RecipeError(f"policy '{recipe.policy.use}': {error}") from None
    result = Plan(
        foot.actor,
        foot.trained,
        foot.critic,
        sizes(recipe, config),
        training.processes,
        prompt,
        width,
        training.prompts_per_iteration * training.responses_per_prompt,
        notes=notes,
    )
    for phase, parts in _phases(recipe, foot, result, gpu, rows=rows, accumulates=accumulates, problems=problems):
        passing = parts.get("activations", 0) + parts.get("logits", 0)
        parts["allocator"] = int(passing * (CPU_FRAGMENTATION if gpu is None else GPU_FRAGMENTATION))
        parts["fixed"] = base + CPU_FIXED if gpu is None else GPU_FIXED
        result.phases[phase] = {name: size for name, size in parts.items() if size}
    return result


# --- the parts --------------------------------------------------------------------------------
def _sharded(recipe: Recipe) -> bool:
    """Gradients leave as they come, and each process keeps its part."""
    return recipe.training.strategy in ("fsdp", "deepspeed_2", "deepspeed_3")


def _states_over(recipe: Recipe) -> int:
    """Processes that the optimizer's states are divided among."""
    strategy = recipe.training.strategy
    return recipe.training.processes if strategy == "fsdp" or strategy.startswith("deepspeed") else 1


def _standing(recipe: Recipe, foot: Footprint) -> dict[str, int]:
    """What is held in every phase."""
    training, strategy, processes = recipe.training, recipe.training.strategy, recipe.training.processes
    deepspeed = strategy.startswith("deepspeed")
    of_weights = processes if strategy in ("fsdp", "deepspeed_3") else 1
    learning = foot.trained + foot.critic
    weights = (foot.actor + foot.critic) * foot.weight_bytes
    # AdamW's two moments in float32; DeepSpeed keeps a copy of the weights that it updates beside them.
    states = learning * (12 if deepspeed else 8)
    standing = {
        "weights": weights // of_weights if training.offload != "parameters" else 0,
        "optimizer states": states // _states_over(recipe) if training.offload == "none" else 0,
    }
    if recipe.needs("reference"):
        standing["reference model"] = foot.actor * foot.weight_bytes
    if foot.teacher:
        standing["teacher"] = foot.teacher
    if strategy in ("auto", "ddp") and processes > 1:
        standing["communication"] = learning * foot.weight_bytes
    elif deepspeed:
        standing["communication"] = min(DEEPSPEED_BUCKETS, 2 * learning) * foot.weight_bytes
    return standing


def _phases(
    recipe: Recipe, foot: Footprint, plan: Plan, gpu: int | None, *, rows: int, accumulates: bool, problems: Problems
) -> Iterator[tuple[str, dict[str, int]]]:
    """Each phase of an iteration with its parts, in bytes; rows: in a forward."""
    training, strategy, processes = recipe.training, recipe.training.strategy, recipe.training.processes
    deepspeed = strategy.startswith("deepspeed")
    of_gradients = processes if _sharded(recipe) else 1
    learning = foot.trained + foot.critic
    standing = _standing(recipe, foot)
    gathered = {
        "deepspeed_3": min(DEEPSPEED_GATHERED, foot.actor + foot.critic) * foot.weight_bytes,
        "fsdp": 2 * foot.largest * foot.weight_bytes,
    }.get(strategy, 0)

    rollout = plan.responses * (12 * (plan.prompt + plan.width) + 40 * plan.width)
    traces = recipe.training.critic_window * plan.responses // processes // rows * foot.read.left
    engine = _engine(recipe, foot, plan, gpu, problems)
    sleeps = gpu is not None and getattr(recipe.generation, "sleep", False)
    asleep = {} if sleeps else {name: size for name, size in engine.items() if name.startswith("engine")}
    if recipe.generation.lag:  # it samples beside the update
        asleep = {"engine beside the update": sum(engine.values())}

    def gradients(parameters: int) -> int:
        both = learning if deepspeed else parameters  # DeepSpeed has zeros for the part that does not learn
        return both * foot.weight_bytes // of_gradients

    def passing(peak: Peak, made_gradients: int = 0) -> dict[str, int]:
        return {"activations": max(0, peak.total - peak.logits - made_gradients), "logits": peak.logits}

    left = {} if deepspeed else {"gradients": gradients(foot.trained)}
    yield "generate", standing | left | engine
    read = passing(foot.read)
    read["activations"] = max(0, read["activations"] - foot.read.left)
    within = {"gathered weights": gathered}
    yield "read", standing | left | asleep | within | {"rollout": rollout + traces} | read
    if foot.critic:
        parts = passing(foot.critic_pass, foot.critic * 4 if not deepspeed else 0)
        yield (
            "critic pass",
            standing | asleep | within | {"rollout": rollout + traces, "gradients": gradients(foot.critic)} | parts,
        )
    made = 0 if accumulates else foot.trained * foot.weight_bytes
    full = {"rollout": rollout + traces, "gradients": gradients(foot.trained)}
    yield "policy pass", standing | asleep | within | full | passing(foot.policy_pass, made)
    if gpu is not None and training.offload == "none":
        # The step's own temporaries: PyTorch's grouped AdamW one of the size of the weights, DeepSpeed float32 gradients.
        step = {"activations": learning * 4 // _states_over(recipe)}
        yield "step", standing | asleep | full | step


def _engine(recipe: Recipe, foot: Footprint, plan: Plan, gpu: int | None, problems: Problems) -> dict[str, int]:
    """What the generation engine holds while it samples; parts named after it stay unless it sleeps."""
    generation, length = recipe.generation, plan.prompt + plan.width
    if generation.elsewhere:
        plan.notes.append("vLLM's servers are not in this plan: they have memory of their own")
        return {}
    shares = getattr(generation, "memory_fraction", None)
    if shares is None or (generation.use == "auto" and gpu is None):  # transformers, on the weights being trained
        sequences = min(generation.batch_size, max(plan.responses, len(problems.held_out)) // plan.processes or 1)
        copied = generation.lag or recipe.training.strategy in ("fsdp", "deepspeed_3")  # whole, of split ones
        copy = foot.actor * foot.weight_bytes if copied else 0
        cache = sequences * length * foot.cache_per_token * foot.weight_bytes
        return {"engine weights": copy, "KV cache": cache, "logits": SAMPLING_COPIES * sequences * foot.vocabulary * 4}
    knobs: Any = generation
    each = 4 if knobs.dtype == "float32" or (knobs.dtype == "auto" and gpu is None) else 2
    weights, sequence = (
        foot.actor * each // knobs.tensor_parallel,
        length * foot.cache_per_token * each // knobs.tensor_parallel,
    )
    asked = int(knobs.kv_cache_gb * 2**30) if knobs.kv_cache_gb else None
    room = asked or (CPU_CACHE if gpu is None else int(shares * gpu) - weights)
    if room < sequence:
        plan.problems.append(
            f"generation: vLLM's weights ({weights / GB:.2f} GB) leave {room / GB:.2f} GB for its KV cache, but one "
            f"sequence of {length} tokens takes {sequence / GB:.2f} GB; raise memory_fraction ({shares}), kv_cache_gb or "
            "tensor_parallel"
        )
        return {"engine weights": weights, "engine KV cache": max(0, room)}
    wanted = min(knobs.batch_size, plan.responses * knobs.tensor_parallel // plan.processes)
    plan.notes.append(
        f"vLLM has room for {room // sequence} sequences of {length} tokens at once; the recipe asks for {wanted}"
    )
    return {"engine weights": weights, "engine KV cache": room}


# --- the lengths ------------------------------------------------------------------------------
class Problems:
    """The task's data, read when it is first asked for, and once: a hub that cannot be reached is waited for each time."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe

    @cached_property
    def _read(self) -> tuple[Sequence[Prompt], Sequence[Prompt], str]:
        task = self.recipe.task
        try:
            count = min(self.recipe.training.prompts_per_iteration, LOOK_AHEAD)
            return task.prompts(self.recipe.seed, 0, count), task.held_out(), ""
        except (OSError, ValueError) as error:
            return [], [], str(error).splitlines()[0]

    @property
    def training(self) -> Sequence[Prompt]:
        """Of the first iteration."""
        return self._read[0]

    @property
    def held_out(self) -> Sequence[Prompt]:
        return self._read[1]

    @property
    def missing(self) -> str:
        """Why they cannot be read; empty where they can."""
        return self._read[2]

    @property
    def alphabet(self) -> str:
        """The task's characters, where the policy makes its tokenizer of them."""
        return self.recipe.alphabet if self.recipe.policy.reads_alphabet and not self.missing else ""


def _prompt_tokens(recipe: Recipe, problems: Problems, notes: list[str]) -> int:
    """Tokens of the longest prompt that the engine takes, or that the first iteration and the evaluation have."""
    limit, width = getattr(recipe.generation, "max_length", None), recipe.generation.max_new_tokens
    if limit is not None and recipe.environment is None:
        return max(1, limit - width)
    if problems.missing:
        notes.append(f"prompts of {UNKNOWN_PROMPT} tokens assumed, as the task's data cannot be read: {problems.missing}")
        return UNKNOWN_PROMPT
    prompts = [*problems.training, *problems.held_out]
    tools = recipe.environment.tool_schemas if recipe.environment else ()
    try:
        tokenizer = recipe.policy.tokenizer(alphabet=problems.alphabet)
        if recipe.environment is not None:
            starts = begun(recipe, prompts, tokenizer.chat_template)
            prompts = [start for start in starts if isinstance(start, Prompt)]
            if not prompts:
                notes.append(f"prompts of {UNKNOWN_PROMPT} tokens assumed, as the environment begins no episode")
                return UNKNOWN_PROMPT
        return max(len(recipe.policy.encode(tokenizer, prompt.written, tools)) for prompt in prompts)
    except (OSError, ValueError):
        notes.append(f"no tokenizer is at hand: {CHARACTERS_PER_TOKEN} characters a token assumed, and no chat template")
        return max(len(prompt.text) for prompt in prompts) // CHARACTERS_PER_TOKEN + 1


def _response_tokens(recipe: Recipe, config: Any, prompt: int, notes: list[str]) -> int:
    """Tokens of the longest response, or of an episode: its budget, or what its turns may have."""
    environment, each = recipe.environment, recipe.generation.max_new_tokens
    if environment is None:
        return each
    said = f"{environment.max_turns} turns of {each} tokens"
    width = environment.max_tokens or environment.max_turns * each
    if environment.max_tokens is None:
        notes.append(
            f"an episode of {said} assumed; what the environment says comes on top, unless environment.max_tokens is set"
        )
    limit = recipe.generation.limit(getattr(config.get_text_config(), "max_position_embeddings", None))
    if limit is not None and width > limit[0] - prompt:
        width = max(1, limit[0] - prompt)
        notes.append(f"an episode ends at {limit[1]}")
    if environment.history == "template" and recipe.policy.takes_messages:
        notes.append(
            "one row per episode assumed; a chat template that rewrites earlier turns makes more (`cct check` says whether)"
        )
    return width


def _resident() -> int:
    """Bytes that this process holds once it has imported what a run imports."""
    import resource

    import cct.training.run  # noqa: F401

    statistics = Path("/proc/self/statm")
    if statistics.is_file():
        return int(statistics.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, and the most so far


# --- the command ------------------------------------------------------------------------------
def gpu_memory(name: str) -> int:
    """Bytes of a GPU by name, or of `24` or `24GB`. Raises RecipeError where neither is meant."""
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GB)?", name, re.IGNORECASE)
    if size:
        return int(float(size[1]) * GB)
    plain = lambda text: re.sub(r"[^a-z0-9]", "", text.lower())  # noqa: E731
    found = [known for known in GPUS if plain(known).startswith(plain(name))] if plain(name) else []
    if len(found) != 1:
        what = f"may be {' or '.join(found)}" if found else "is not known"
        raise RecipeError(f"--gpu {name} {what}; there are: {', '.join(GPUS)}, or a size in GB such as 24")
    return GPUS[found[0]] * GB


def print_plan(recipe: Recipe, gpu: str | None) -> int:
    """Print the plan. Returns 0 if it fits the GPU or none is named, otherwise 1."""
    from rich.table import Table

    from cct.system.terminal import make_console, say

    memory = gpu_memory(gpu) if gpu is not None else None
    found, training = plan(recipe, memory), recipe.training
    say(f"actor: {found.actor:,} parameters" + (f", {found.trained:,} trained" if found.trained != found.actor else ""))
    for name, count in found.critics.items():
        chosen = recipe.critic is not None and name == recipe.critic.use
        said = "critic" if chosen else "for comparison, critic"
        say(f"{said} ({name}): {count:,} parameters, {count / found.actor:.1%} of the actor")
    say(
        f"an iteration: {found.responses:,} responses of at most {found.prompt} + {found.width} tokens, "
        f"{found.responses * (found.prompt + found.width):,} in all"
    )
    say(f"processes: {training.processes}, {training.strategy}, {training.precision}")
    for note in found.notes:
        say(note)
    unit = "MB" if found.peak < 10 * GB else "GB"
    device = "CPU" if memory is None else f"a GPU of {memory / GB:g} GB"
    table = Table(title=f"{unit} in one process, {device}", title_justify="left")
    table.add_column("")
    for phase in found.phases:
        table.add_column(phase, justify="right")
    for part in dict.fromkeys(part for parts in found.phases.values() for part in parts):
        table.add_row(part, *(_shown(parts.get(part, 0), unit) for parts in found.phases.values()))
    table.add_row("sum", *(_shown(sum(parts.values()), unit) for parts in found.phases.values()), style="bold")
    make_console(width=128).print(table)
    if memory is None:
        say(f"peak: {found.peak / GB:.2f} GB of resident memory in each process, including torch and other imports")
        return 0
    for problem in found.problems:
        say(problem)
    fits = found.peak <= memory and not found.problems
    say(f"peak: {found.peak / GB:.1f} of {memory / GB:g} GB: {'fits' if fits else 'does not fit'}")
    if found.peak > memory:
        say(_advice(recipe, found))
    return 0 if fits else 1


def _forward(recipe: Recipe, config: Any, prompt: int, width: int, notes: list[str]) -> tuple[int, int | None]:
    """Rows of the longest responses in a forward, and how many prompts stand in it once; None where they are not shared."""
    from cct.packing import SHARED_AT_MOST
    from cct.policy.sharing import sharing_of_config

    training = recipe.training
    rows, wanted, most = training.rows_per_forward(prompt + width), training.share_prefix, training.minibatch_size
    part = most / (training.prompts_per_iteration * training.responses_per_prompt)
    # Of as many rows drawn at random.
    distinct = math.ceil(training.prompts_per_iteration * (1 - (1 - part) ** training.responses_per_prompt))
    left = (distinct * prompt + most * width) / (most * (prompt + width))
    if not wanted or (wanted == "auto" and left > SHARED_AT_MOST):
        return rows, None
    try:
        refused, window = sharing_of_config(config)
    except ValueError:  # said where its passes are run
        return rows, None
    if refused or (window is not None and prompt + width > window):
        return rows, None
    each = most / distinct  # responses of a minibatch to one prompt
    prompts_of = lambda count: min(count, math.ceil(count / each))  # noqa: E731
    if training.micro_batch_tokens and not training.micro_batch_size:
        most_rows = training.minibatch_size // training.processes
        while rows < most_rows and prompts_of(rows + 1) * prompt + (rows + 1) * width <= training.micro_batch_tokens:
            rows += 1
    notes.append(
        f"share_prefix: a forward of {rows} responses has {prompts_of(rows)} prompts, each computed once, which leaves "
        f"{(prompts_of(rows) * prompt + rows * width) / (rows * (prompt + width)):.0%} of its tokens"
    )
    return rows, prompts_of(rows)


def _shown(size: int, unit: str) -> str:
    if not size:
        return ""
    return f"{size / GB:.2f}" if unit == "GB" else f"{size / MB:,.1f}"


def _advice(recipe: Recipe, found: Plan) -> str:
    """What to reduce, by the largest part of the largest phase."""
    phase, parts = max(found.phases.items(), key=lambda item: sum(item[1].values()))
    part = max(parts, key=lambda name: parts[name])
    remedy = {
        "weights": "training.strategy: deepspeed_3, policy.lora, or more GPUs",
        "reference model": "geometry.kl_coef: 0, or another model",
        "teacher": "a smaller teacher, or its dtype: bfloat16",
        "gradients": "training.strategy: deepspeed_2 or policy.lora",
        "optimizer states": "training.strategy: deepspeed_1, training.offload: optimizer, policy.lora, or more GPUs",
        "activations": "training.micro_batch_size, training.gradient_checkpointing: true, or generation.max_new_tokens",
        "logits": "training.micro_batch_size, micro_batch_tokens or generation.max_new_tokens",
        "rollout": "critic.depth, training.responses_per_prompt or more GPUs",
        "engine weights": "generation.tensor_parallel, or generation.sleep: true",
        "engine beside the update": "generation.lag: 0, generation.batch_size, or generation.memory_fraction",
        "engine KV cache": "generation.memory_fraction",
        "KV cache": "generation.batch_size",
    }.get(part, "a smaller model")
    return f"the largest part is {part} ({parts[part] / GB:.1f} GB, {phase}); to reduce it: {remedy}"
