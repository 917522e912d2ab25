"""Evidence from a learnt reward model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from cct.rollout import Prompt, Response

from .base import Evidence, Failure, Verdict, evidences


@evidences.register("reward_model")
class RewardModel(Evidence):
    """The score of a sequence classifier of transformers, from a local folder or the hub, in batches."""

    path: str = Field(min_length=1)
    """Folder, or name on the hub."""
    revision: str | None = None
    """Commit, tag or branch on the hub."""
    label: int = Field(0, ge=0)
    """Which of the classifier's outputs is the score."""
    squash: Literal["none", "sigmoid"] = "none"
    """Whether the output goes through a sigmoid first."""
    low: float = Field(0.0, ge=-1e6, le=1e6)
    """Lowest score; lower ones are raised to it, because bounded critics rely on it."""
    high: float = Field(1.0, ge=-1e6, le=1e6)
    """Highest score; higher ones are lowered to it."""
    batch_size: int = Field(16, ge=1)
    """Responses in one forward."""
    max_length: int = Field(2048, ge=2)
    """Maximum number of tokens of prompt plus response; a longer text loses its beginning."""
    join: Literal["plain", "chat"] = "plain"
    """How prompt and response become one text: one after the other, or as two turns in the model's chat template."""
    workers: int = Field(0, ge=0, le=0)
    """None: the model is in the trainer's process, which judges in batches."""
    time_limit: None = None
    """None: it has no workers."""

    @model_validator(mode="after")
    def _bounded(self) -> RewardModel:
        if self.low >= self.high:
            raise ValueError(f"low ({self.low:g}) must be below high ({self.high:g})")
        return self

    def ready(self) -> None:
        folder = Path(self.path)
        if self.path.startswith((".", "/")) and not (folder / "config.json").is_file():
            raise ValueError(f"{folder} holds no model (no config.json)")

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        """(tokenizer, model), on a GPU where there is one."""
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self.path, revision=self.revision, truncation_side="left")
            model = AutoModelForSequenceClassification.from_pretrained(self.path, revision=self.revision, dtype="auto")
        except OSError as error:
            raise ValueError(f"cannot load '{self.path}': {str(error).splitlines()[0]}") from error
        if self.label >= model.config.num_labels:
            raise ValueError(f"'{self.path}' has {model.config.num_labels} outputs; there is no label {self.label}")
        if self.join == "chat" and not tokenizer.chat_template:
            raise ValueError(f"the tokenizer of '{self.path}' has no chat template; set join: plain")
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        if model.config.pad_token_id is None:  # or it takes the score at the padding
            model.config.pad_token_id = tokenizer.pad_token_id
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return tokenizer, model.to(device).eval().requires_grad_(False)

    def _scores(self, prompts: Sequence[Prompt], responses: Sequence[Response]) -> list[float]:
        import torch

        tokenizer, model = self._loaded
        pairs = list(zip(prompts, responses, strict=True))
        if self.join == "chat":
            asked = [prompt.messages or ({"role": "user", "content": prompt.text},) for prompt in prompts]
            turns = [[*p, {"role": "assistant", "content": r.text}] for p, (_, r) in zip(asked, pairs, strict=True)]
            texts = [tokenizer.apply_chat_template(turn, tokenize=False) for turn in turns]
        else:
            texts = [prompt.text + response.text for prompt, response in pairs]
        inputs = tokenizer(
            texts,
            padding=True,
            truncation=True,
            max_length=self.max_length,
            return_tensors="pt",
            add_special_tokens=self.join == "plain",  # the template writes its own
        )
        with torch.no_grad():
            scores = model(**inputs.to(model.device)).logits[:, self.label].float()
        if self.squash == "sigmoid":
            scores = scores.sigmoid()
        return [score if score != score else min(self.high, max(self.low, score)) for score in scores.tolist()]

    def __call__(self, prompt: Prompt, response: Response) -> float:
        return self._scores([prompt], [response])[0]

    def judge_batch(self, prompts: Sequence[Prompt], responses: Sequence[Response]) -> list[Verdict | Failure]:
        _ = self._loaded  # a model that is not there is an error of all
        verdicts: list[Verdict | Failure] = []
        for start in range(0, len(prompts), self.batch_size):
            part = slice(start, start + self.batch_size)
            try:
                verdicts += self._scores(prompts[part], responses[part])
            except Exception:  # whose fault it is shows one by one
                verdicts += super().judge_batch(prompts[part], responses[part])
        return verdicts

    @property
    def bounds(self) -> tuple[float, float]:
        return self.low, self.high
