"""Supervised warm start on the task's demonstrations, cached by the content of everything it depends on."""

from __future__ import annotations

import inspect
import json
import math
import os
from collections.abc import Callable
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path

import torch
import transformers
from filelock import FileLock
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from cct.environment import Environment, opened
from cct.policy import WARM_START_SEED, Policy, WarmStart
from cct.policy.attention import tappable
from cct.policy.chat import Conversation
from cct.policy.weights import save
from cct.rollout import Prompt, derive_seed
from cct.system.files import WriteError, damage, kept, remove, sweep, whole, writing
from cct.task import Task


def cache_folder() -> Path:
    """`$CCT_CACHE`, or `~/.cache/cct`."""
    return Path(os.environ.get("CCT_CACHE") or Path.home() / ".cache" / "cct")


def warm_start_key(policy: Policy, task: Task, seed: int, environment: Environment | None = None) -> str:
    """Hash of the knobs, the seed, and the code that demonstrates and trains."""
    others = [] if environment is None else [type(environment)]
    content = {
        "policy": policy.model_dump(mode="json"),
        "task": task.model_dump(mode="json"),
        "seed": seed,
        "code": [inspect.getsource(inspect.getmodule(part)) for part in (type(task), type(policy), warm_start, *others)],  # type: ignore[arg-type]
        "versions": [torch.__version__, transformers.__version__],
        **({} if environment is None else {"environment": environment.model_dump(mode="json")}),
    }
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def warm_start(
    policy: Policy,
    task: Task,
    seed: int,
    report: Callable[[int, int, float], None] = lambda step, steps, loss: None,
    say: Callable[[str], None] = print,
    environment: Environment | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the policy and, where it says so, its warm start, from the cache if it is there.

    Demonstrations are the environment's, where it has an expert, else the task's.

    report: called with (step, steps, loss) after every step. say: called with a line where it cannot be kept. The cache entry
    appears whole or not at all; of processes that want the same one, the first computes it and the others wait.
    """
    alphabet = task.alphabet + (environment.alphabet if environment is not None else "")
    model, tokenizer = policy.load(alphabet=alphabet, seed=seed)
    if policy.warm_start is None:
        return model, tokenizer
    entry = cache_folder() / "warm_start" / warm_start_key(policy, task, seed, environment)
    expert = environment if environment is not None and "demonstrations" in environment.provides else None
    held = ExitStack()
    try:
        with writing(entry):
            entry.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(FileLock(f"{entry}.lock"))  # let go by the system where its holder is killed
    except WriteError as error:
        if not entry.is_dir():  # or it is a cache of others, and holds what is wanted
            say(f"warm start: not kept, as nothing can be written into {entry.parent} ({error}); set CCT_CACHE to a folder")
            _supervise(model, tokenizer, policy, task, expert, policy.warm_start, seed, report)
            return model.eval(), tokenizer
    with held:
        if entry.is_dir() and (why := damage(entry, entry / "policy")) is not None:
            say(f"warm start: computed again, as the one in {entry} is damaged ({why})")
            with writing(entry):
                remove(entry)
        if not entry.is_dir():
            _supervise(model, tokenizer, policy, task, expert, policy.warm_start, seed, report)
            sweep(entry.parent, entry.name)
            try:
                with whole(entry) as unfinished, kept(unfinished, unfinished / "policy") as place:
                    save(model, tokenizer, place)
            except Exception as error:  # a full disk, or a model that cannot be saved, which the run says before it begins
                say(f"warm start: not kept in {entry.parent} ({error})")
                return model.eval(), tokenizer
    return tappable(AutoModelForCausalLM.from_pretrained(entry / "policy", dtype=model.dtype)), tokenizer


def _supervise(
    model, tokenizer, policy: Policy, task: Task, expert: Environment | None, knobs: WarmStart, seed, report
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "warm start"))  # of a model's dropout
        _steps(model, tokenizer, policy, task, expert, knobs, seed, report)


def _steps(model, tokenizer, policy: Policy, task: Task, expert: Environment | None, knobs: WarmStart, seed, report) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=knobs.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)

    def pace(step: int) -> float:
        return min(1.0, (step + 1) / max(1, knobs.warmup)) * 0.5 * (1 + math.cos(math.pi * step / knobs.steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, pace)
    model.train()
    for step in range(knobs.steps):
        wanted = seed + WARM_START_SEED, step * knobs.batch_size, knobs.batch_size
        if expert is None:
            rows = [_answered(policy, tokenizer, *pair) for pair in task.demonstrations(*wanted)]
        else:
            rows = [
                _played(policy, tokenizer, expert, prompt, derive_seed(wanted[0], "expert", wanted[1] + number))
                for number, prompt in enumerate(task.prompts(*wanted))
            ]
        width = max(len(ids) for ids, _ in rows)
        batch = {
            "input_ids": torch.tensor(
                [ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in rows], device=model.device
            ),
            "attention_mask": torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows], device=model.device),
            "labels": torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows], device=model.device),
        }
        loss = model(**batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        report(step + 1, knobs.steps, loss.item())


def _answered(policy: Policy, tokenizer, prompt: str, response: str) -> tuple[list[int], list[int]]:
    """Token ids of a demonstration, and its labels: those of the response."""
    asked = policy.encode(tokenizer, prompt)
    answer = tokenizer(response, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    return asked + answer, [-100] * len(asked) + answer


def _played(policy: Policy, tokenizer, expert: Environment, prompt: Prompt, seed: int) -> tuple[list[int], list[int]]:
    """The same of an episode that an environment's expert plays: the labels are those of its turns."""
    shown = expert.demonstration(prompt, seed)
    talk = Conversation(policy, tokenizer, opened(prompt, shown.start).written, expert.tool_schemas, rewrites=False)
    ids, labels = list(talk.ids), [-100] * len(talk.ids)
    for action, observation in shown.turns:
        said = tokenizer(action, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        talk.say(said, ended=True)
        ids, labels = ids + said, labels + said
        if observation is not None:
            added = talk.observe(observation).ids
            ids, labels = ids + added, labels + [-100] * len(added)
    return ids, labels
