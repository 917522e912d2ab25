"""Whatever stands in a recipe, `cct check` ends with 0, or with 2 and a short message; never with a traceback."""

import os
import random
import re
import resource
import time
from pathlib import Path

import pytest
import yaml

from cct.cli import main

BASE = """
name: fuzzed
task: {use: chain_arithmetic, steps: 4, held_out_size: 8, noisy_operands: [3, 7]}
policy: {use: scratch, alphabet: "", warm_start: {steps: 2, batch_size: 2}}
generation: {use: transformers, max_new_tokens: 32, stop: ["#"]}
evidence: [{use: exact_match, weight: 1.0}, {use: format, pattern: "a*b", weight: 0.5}]
critic: {use: tac, width: 16, depth: 2, ladder: [1, 4]}
transport: {use: comp_gae, lam: 0.95, gate: {use: product, parts: [entropy, {use: shuffle, of: attention}]}}
geometry: {use: ppo_clip, clip_low: 0.2}
training: {iterations: 2, prompts_per_iteration: 2, responses_per_prompt: 4, minibatch_size: 8, learning_rate: 1e-4}
evaluation: {every: 1, frozen: {other: {use: chain_arithmetic, steps: 3, held_out_size: 4}}}
logging: {samples: 1}
"""

# YAML that goes where a value was.
ODD = [
    *(
        "!!bool foo",
        "!!bool ''",
        "!!int ''",
        "!!int x",
        "!!float x",
        "!!float ''",
        "!!null x",
        "!!str",
        "!!timestamp x",
        "2024-13-45",
    ),
    *(
        "2024-01-01",
        "1:30",
        "1:2.5",
        "0x_",
        "0b_",
        "010",
        "1_0",
        "0x" + "f" * 10_000,
        "9" * 5000,
        "1e999",
        "-1e999",
        ".nan",
        ".inf",
    ),
    *(
        "-.inf",
        "-0.0",
        "0",
        "-1",
        "1",
        "2",
        "3.0",
        "1e3",
        "1e-400",
        "99999999999999999999",
        "1e30",
        "true",
        "yes",
        "'yes'",
        "'3'",
    ),
    *(
        "null",
        "''",
        "' '",
        "~",
        "=",
        "<<",
        "!!binary aGk=",
        "!!set {a, b}",
        "!!omap [a: 1]",
        "!!pairs [a: 1]",
        "!!python/name:os.system",
    ),
    *(
        "!!python/object/apply:os.abort []",
        "!local x",
        "!<x> y",
        "*nowhere",
        "&a [*a]",
        "&b {x: *b}",
        "{<<: 3}",
        "{<<: {use: gae}}",
    ),
    *(
        "[true, yes]",
        "[[[]]]",
        "[null]",
        "[1, [2, {a: b}]]",
        "{}",
        "[]",
        "{1: 2}",
        "{null: x}",
        "{[a]: b}",
        "{{a: b}: c}",
        "{? a}",
    ),
    *(
        "[" * 700 + "]" * 700,
        "{a: " * 700 + "}" * 700,
        "[" + "1," * 6000 + "]",
        "x" * 100_000,
        '"\\0"',
        '"\\ud800"',
        '"\\x1b[31m"',
    ),
    *(
        '"[/] [bold]"',
        '"\\u202e"',
        "'{'",
        "'('",
        "'(a+)+$'",
        "'" + "(" * 1000 + ")" * 1000 + "'",
        "'{a!r:>99999999}'",
        "%TAG",
        "@x",
        "`x`",
    ),
    *(
        "/dev/zero",
        "/dev/stdin",
        "..",
        "x/" * 200,
        "a" * 300,
        "{use: gae}",
        "{use: 3}",
        "{use: [a]}",
        "{use: }",
        "gae",
        "tac",
        "standard",
    ),
    *(
        "{use: python, path: /dev/zero}",
        "[{use: python, path: /dev/null}]",
        "{use: jsonl, path: /dev/zero, held_out_path: /dev/zero}",
    ),
    *(
        "{use: shuffle, of: {use: shuffle, of: {use: shuffle, of: entropy}}}",
        "{use: pretrained, path: /dev/zero}",
        "[exact_match, length]",
    ),
    *(
        "{use: pretrained, path: " + "a" * 300 + "}",
        "{use: math_verify}",
        "{use: jsonl, path: a, held_out_path: .}",
        "{use: vllm}",
        "auto",
    ),
]
# Documents, whole.
WHOLE = [
    *(
        "",
        "\t",
        "---",
        "a",
        "- a",
        "3",
        "%TAG ! x\n",
        "%YAML 9.9\n--- a",
        "a: 1\n---\nb: 2\n",
        "\ufeffname: a\n",
        "name: a\r\n\tb: c\r\n",
    ),
    *(
        "base: " + value
        for value in ("3", "[a]", "''", ".", "..", "/", "/dev/zero", "/dev/stdin", "a" * 300, "r.yaml", "./r.yaml", '"\\0"')
    ),
    *(
        "base: " + value
        for value in ("a/b/c.yaml", "~", "pipe.yaml", "loop.yaml", "/proc/self/mem", '"\\ud800"', "é.yaml", "[/]")
    ),
    *(
        "plugins: " + value
        for value in ("3", "[3]", "[[]]", "['']", "['.']", "['a..b']", "[os.path.x]", "[sys.x]", "[__main__]", "['/']")
    ),
    *(
        "plugins: " + value
        for value in ("[/dev/zero]", "[pipe.py]", "[loop.py]", "[{path: a, sha256: 3}]", "['\\0.py']", "[{}]", "[null]")
    ),
    *(
        "plugins: " + value
        for value in ("['" + "a" * 300 + ".py']", "['" + "a" * 300 + "']", "['[/].py']", "{a: b}", "[" + "a," * 4000 + "]")
    ),
    "\n".join(f"k{number}: {number}" for number in range(60_000)),
    "\n".join(f"k{number}: {number}" for number in range(2000)),
    "training:\n" + "\n".join(f"  k{number}: {number}" for number in range(2000)),
    "a: &a [x, x, x, x, x, x, x, x, x]\n"
    + "\n".join(f"{b}: &{b} [{', '.join(['*' + a] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
    "a: &a {x: 1}\n"
    + "\n".join(f"{b}: &{b} {{<<: [{', '.join(['*' + a] * 9)}]}}" for a, b in zip("abcdef", "bcdefg", strict=True)),
    "name: " + "x" * 10**6,
    "#" * 10**6,
    "? " * 5000,
    "- " * 5000,
    "evidence: [" + "{use: nope}," * 900 + "]",
    "evaluation: {frozen: {" + ", ".join(f"s{number}: nope" for number in range(900)) + "}}",
    "evaluation: {frozen: {'" + "9" * 5000 + "': {use: chain_arithmetic}}}",
]


def places(data, path=()):
    """Every key path."""
    yield path
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield from places(value, (*path, key))


def changed(seed: int) -> str:
    """BASE with one to three changes: values, keys, lines, characters."""
    rng, data = random.Random(seed), yaml.safe_load(BASE)
    odd: list[str] = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        *above, key = rng.choice([path for path in places(data) if path])
        node = data
        for step in above:
            node = node[step]
        odd.append(rng.choice(ODD))
        kind = rng.random()
        if kind < 0.75:
            node[key] = f"ODD{len(odd) - 1}"
        elif kind < 0.85:
            del node[key]
        elif isinstance(node, dict):
            node[f"ODD{len(odd) - 1}"] = node.pop(key)
    text = yaml.safe_dump(data, sort_keys=False)
    text = re.sub(r"ODD(\d+)", lambda found: odd[int(found[1])], text)
    if rng.random() < 0.15:
        at = rng.randrange(len(text))
        text = (
            text[:at]
            + rng.choice(["\0", "\t", "\x07", "\x85", "\u2028", ":", "- ", "&a ", "*a", "\n", "{", "'", "é", "%", "!"])
            + text[at:]
        )
    return text


@pytest.fixture
def checked(tmp_path, monkeypatch, capsys):
    """Runs a verb on a text, and returns the exit code and what went to stderr, with the promises of this file kept."""
    monkeypatch.chdir(tmp_path)

    def run(text: str, *argv: str) -> tuple[int, str]:
        Path("r.yaml").write_text(text, encoding="utf-8")
        begun, held = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        code = main([*(argv or ("check",)), "r.yaml"])
        errors = capsys.readouterr().err
        assert code in (0, 2) and (code == 0 or errors.startswith("error: ")), errors
        assert len(errors) < 20_000 and not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", errors)
        assert time.process_time() - begun < 2
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held < 300 * 2**10  # KB
        return code, errors

    return run


def test_what_is_changed_here_is_right(checked):
    assert checked(BASE) == (0, "")


@pytest.mark.parametrize("seed", range(120))
def test_a_changed_recipe_is_right_or_refused_in_short(seed, checked):
    checked(changed(seed))


@pytest.mark.parametrize("text", WHOLE, ids=lambda text: repr(text[:30]))
def test_odd_documents_are_refused_in_short(text, checked):
    os.mkfifo("pipe.yaml")
    os.mkfifo("pipe.py")
    os.symlink("loop.yaml", "loop.yaml")
    os.symlink("loop.py", "loop.py")
    checked(BASE + text if text.startswith(("base", "plugins", "k", "a: &a")) else text)


@pytest.mark.parametrize("value", ODD, ids=lambda value: repr(value[:30]))
def test_odd_values_of_set_are_refused_in_short(value, checked):
    checked(BASE, "check", "--set", f"transport.gate={value}")


@pytest.mark.parametrize(
    "key", [".", "a..b", "", ".".join("a" * 1000), "evidence." + "9" * 5000, "x" * 10_000, "\udcff", "é", "\x1b[1m"]
)
def test_odd_keys_of_set_are_refused_in_short(key, checked):
    assert checked(BASE, "check", "--set", f"{key}=1")[0] == 2


STUDY = """
name: fuzzed
arms: {one: {base: base.yaml}, two: {base: base.yaml, transport: {lam: 0.5}}}
factors: {size: {small: {training: {prompts_per_iteration: 2}}, large: {training: {prompts_per_iteration: 4}}}}
seeds: [0, 1]
compare: [[one, two]]
"""


@pytest.mark.parametrize(
    "change",
    [
        *(
            "seeds: [true]",
            "seeds: ['1']",
            "seeds: 3",
            "seeds: [" + "1," * 2000 + "]",
            "seeds: [" + ",".join(map(str, range(4000))) + "]",
        ),
        *(
            "arms: {one: {training: 3}}",
            "arms: {one: 3}",
            "arms: {one: {base: 3}}",
            "arms: {one: {base: pipe.yaml}}",
            "arms: {1: 2}",
        ),
        "factors: {" + ", ".join(f"f{i}: {{" + ", ".join(f"l{j}: {{}}" for j in range(10)) + "}" for i in range(12)) + "}",
        *(
            "common: {training: [1]}",
            "common: {transport: !!set {a}}",
            "compare: [[one]]",
            "compare: [[one, three]]",
        ),
        *(
            "name: !!binary aGk=",
            "stable: {max_drop: true}",
            "evaluate: {ks: [1.0]}",
            "interactions: {x: [[one, two], [one]]}",
            "jobs: 1e9",
        ),
        *(
            "arms: &a {one: *a}",
            "arms: {'../x': {}}",
            "threads: yes",
        ),
    ],
    ids=lambda change: change[:30],
)
def test_a_broken_study_is_refused_in_short(change, checked):
    os.mkfifo("pipe.yaml")
    Path("base.yaml").write_text(BASE)
    kept = [line for line in STUDY.strip().split("\n") if line.split(":")[0] != change.split(":")[0]]
    assert checked("\n".join([*kept, change]), "study", "check")[0] == 2
