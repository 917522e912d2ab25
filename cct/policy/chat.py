"""Conversations in tokens: what the policy sampled is never rendered again, and what a chat template makes of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from cct.rollout import as_messages

from .base import Policy, Tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

    from cct.rollout import Message


@dataclass(frozen=True)
class Added:
    """What the policy reads after an observation."""

    ids: list[int]
    """Tokens that follow what stands there; where the template rewrites that, the whole prompt of a new row."""
    anew: bool
    """They are a new row."""
    observed: int
    """Tokens that stand for the observation, in either case."""
    refused: str = ""
    """Why the template cannot write the conversation so far; the tokens then stay as they were sampled."""


@dataclass
class Conversation:
    """Turns of the policy and observations, one after the other. Raises ValueError where the template refuses the opening."""

    policy: Policy
    tokenizer: Tokenizer
    opening: str | Sequence[Message]
    tools: Tools = ()
    rewrites: bool = True
    """The template's rendering of earlier turns counts where it differs by more than white space, as a new row."""
    ids: tuple[int, ...] = field(init=False)
    """Tokens of the opening."""
    messages: list[Message] = field(init=False)
    text: str = field(init=False)
    """All that the policy read and wrote, end tokens of its turns included where the template writes them."""
    _end: int | None = field(init=False, default=None)  # the token by which the policy ended the last turn

    def __post_init__(self) -> None:
        self.ids = tuple(self.policy.encode(self.tokenizer, self.opening, self.tools))
        self.messages = as_messages(self.opening)
        self.text = self.policy.written(self.tokenizer, self.messages, self.tools) or ""

    def say(self, tokens: Sequence[int], ended: bool) -> tuple[str, str]:
        """A turn as it was sampled; ended: its last token is an end token. Returns its text without and with special tokens.

        The end token is in neither; what the prompt opened of the turn is in both.
        """
        self._end = tokens[-1] if ended else None
        said, before = list(tokens[:-1] if ended else tokens), self.policy.opened
        raw = str(self.tokenizer.decode(said, skip_special_tokens=False))
        self.text += raw
        self.messages.append({"role": "assistant", "content": before + raw})
        return before + str(self.tokenizer.decode(said, skip_special_tokens=True)), before + raw

    def observe(self, observation: str | Sequence[Message]) -> Added:
        """What the policy reads next. Raises ValueError where the template cannot write the observation."""
        between = self.policy.between(self.tokenizer, self.opening, observation, self.tools)
        self.messages += as_messages(observation)
        self.text += between
        ids = self._tokens(between)
        if ids and ids[0] == self._end:
            ids = ids[1:]  # the end of the turn, which the policy emitted itself
        refused = ""
        if self.rewrites:
            try:
                whole = self.policy.written(self.tokenizer, self.messages, self.tools)
            except ValueError as error:
                whole, refused = None, str(error)
            if whole is not None and not same_but_for_space(whole, self.text):
                self.text = whole
                return Added(self._tokens(whole), True, len(ids))
        return Added(ids, False, len(ids), refused)

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def same_but_for_space(one: str, other: str) -> bool:
    return "".join(one.split()) == "".join(other.split())


# --- what a template makes of earlier turns -------------------------------------------------------
THOUGHT = "<think>\nIs it so?\n</think>\n\nyes"
# What the policy may say in a turn, and how a finding names it.
TURNS = {
    "a plain turn": "yes",
    "white space around a turn": " \n yes\n\n",
    "newlines within a turn": "yes\n\n no\n",
    "characters beyond ASCII": "naïve 数 🙂",
    "the thinking of a turn": THOUGHT,
    "an empty turn": "",
}
CUT = "a turn cut by the length limit"
CALLED = "a result of a tool"
SPACED = "white space around an observation"
LENGTH = 3  # turns of each conversation
EXCERPT = 60  # characters
OTHERWISE = "earlier turns are written otherwise than they were read"


@dataclass(frozen=True)
class Finding:
    """What a chat template does with a conversation of several turns."""

    fails: bool
    """No episode of several turns can be played."""
    text: str


def examine(
    policy: Policy, tokenizer: Tokenizer, opening: str | Sequence[Message], tools: Tools = (), *, rewrites: bool = True
) -> list[Finding]:
    """Whether prompt, sampled turns and what stands between them are the tokens of the whole conversation rendered at once.

    Over conversations of a few turns, each of one kind of turn or observation; says where it is not so, and what follows.
    """
    if policy.written(tokenizer, as_messages(opening), tools) is None:
        return [Finding(False, "no chat template: an observation enters as its own tokens, and nothing is rewritten")]
    kinds: list[tuple[str, str, bool, str | Sequence[Message]]] = [(kind, text, True, "go on") for kind, text in TURNS.items()]
    kinds += [(CUT, "yes and", False, "go on"), (SPACED, "yes", True, " \n7\n")]
    if tools:
        name = str(tools[0].get("function", tools[0]).get("name", "tool"))
        kinds.append((CALLED, "yes", True, [{"role": "tool", "name": name, "content": "7", "tool_call_id": "000000001"}]))
    same: list[str] = []
    found: dict[str, tuple[str, list[str]]] = {}
    findings: list[Finding] = []
    for kind, text, ended, observation in kinds:
        try:
            said, example = _difference(
                Conversation(policy, tokenizer, opening, tools, rewrites), kind, text, ended, observation
            )
        except ValueError as error:
            what = "role tool" if kind == CALLED else kind
            findings.append(Finding(True, f"the template refuses {what}: {error}"))
            continue
        (found.setdefault(said, (example, []))[1] if said else same).append(kind)
    if same:
        exact = f"the same tokens as the whole conversation rendered at once, over {LENGTH} turns: {', '.join(same)}"
        findings.append(Finding(False, exact))
    for said, (example, their) in found.items():
        findings.append(Finding(False, f"{', '.join(their)}: {said}{f' ({example})' if example else ''}"))
    if "strftime_now" in str(tokenizer.chat_template or ""):
        findings.append(
            Finding(
                False,
                "the template writes today's date: a run resumed on another day reads other prompts, unless a date "
                "stands in policy.chat_options",
            )
        )
    return findings


def _difference(talk: Conversation, kind: str, text: str, ended: bool, observation: str | Sequence[Message]) -> tuple[str, str]:
    """What the template does otherwise with turns of this kind, and an example; empty where the tokens are the same."""
    policy, tokenizer, row = talk.policy, talk.tokenizer, list(talk.ids)
    between = policy.between(tokenizer, talk.opening, observation, talk.tools)
    said = list(tokenizer(text.removeprefix(policy.opened), add_special_tokens=False)["input_ids"]) if text else []
    turn = [*said, _end_of(tokenizer, between)] if ended else said
    for number in range(1, LENGTH + 1):
        talk.say(turn, ended)
        row += turn
        read, added = talk.text + between, talk.observe(observation)
        if added.refused:
            return "refused in earlier turns, and the episode goes on with the tokens as they were sampled", added.refused
        if added.anew and "Is it so?" in read and "Is it so?" not in talk.text:
            return "thinking of earlier turns is left out: each turn starts a new row", ""
        if added.anew:
            return "earlier turns are written otherwise than they were read: each turn starts a new row", _apart(
                read, talk.text
            )
        row += added.ids if number < LENGTH else []
    whole = policy.written(tokenizer, talk.messages, talk.tools) or ""
    if not same_but_for_space(whole, talk.text):
        return f"{OTHERWISE}, and stay as they were sampled (history: sampled)", _apart(talk.text, whole)
    if whole != talk.text:
        what = "the text is trimmed" if kind.startswith("white space") else "white space is not what it was"
        return f"{what}, of which the policy reads what was sampled", _apart(talk.text, whole)
    written = list(tokenizer(whole, add_special_tokens=False)["input_ids"])
    place = next((k for k, (a, b) in enumerate(zip(row, written, strict=False)) if a != b), None)
    if place is None:
        return "", ""
    ours, theirs = (tokenizer.convert_ids_to_tokens(ids[place : place + 2]) for ids in (row, written))
    return "the text is the same, its tokens are not, of which the policy reads those sampled", f"{ours} for {theirs}"


def _end_of(tokenizer: Tokenizer, between: str) -> int:
    """The token by which the policy ends a turn: the special one that the template writes there, else the tokenizer's."""
    first, known = tokenizer(between, add_special_tokens=False)["input_ids"][0], tokenizer.added_tokens_decoder
    return first if first in known and known[first].special else tokenizer.eos_token_id


def _apart(read: str, written: str) -> str:
    """The first difference of what the template writes from what the policy read, in words; of white space only if no other."""
    if not same_but_for_space(read, written):
        read, written = " ".join(read.split()), " ".join(written.split())
    start = next((k for k, (a, b) in enumerate(zip(read, written, strict=False)) if a != b), min(len(read), len(written)))
    ours, theirs = read[start : start + 400], written[start : start + 400]
    steps = SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes()
    gone, new = next((ours[a:b], theirs[c:d]) for step, a, b, c, d in steps if step != "equal")
    if gone and new:
        return f"the template writes {new[:EXCERPT]!r} in place of {gone[:EXCERPT]!r}"
    changed = gone or new
    while start and read[start - 1] == changed[-1] and steps[0][0] != "equal":  # `<a><` behind a `<` is `<a>`
        changed, start = changed[-1] + changed[:-1], start - 1
    return f"the template {'leaves out' if gone else 'adds'} {changed[:EXCERPT]!r}"
