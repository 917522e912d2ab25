"""The reward of the laboratory's tasks."""

from __future__ import annotations

from cct.laboratory import Layout, Step, layout_of
from cct.rollout import Prompt, Response

from .base import Evidence, Verdict, evidences


@evidences.register("lab")
class Lab(Evidence):
    """What a task of the laboratory (parts, filler, chain, recall) rewards a response for."""

    def __call__(self, prompt: Prompt, response: Response) -> Verdict:
        layout = layout_of(prompt)
        earned = layout.rewards(response.text)
        if not layout.dense:
            return sum(earned)
        others = len(response.tokens) - len(earned)
        if not 0 <= others <= 1:
            raise ValueError(
                f"{len(response.tokens)} tokens for {len(earned)} characters; dense rewards need a policy whose tokens are "
                "characters, as those of policy `scratch` are"
            )
        return earned + [0.0] * others

    def unreadable(self, prompt: Prompt) -> str | None:
        try:
            layout_of(prompt)
        except ValueError as error:
            return str(error)
        return None

    @property
    def example(self) -> Prompt:
        return Prompt("3+4=", "3+4=7", {"layout": Layout((Step("3+4=", 4, 3),))})
