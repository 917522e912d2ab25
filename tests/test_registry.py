"""Components and registries: what a name may be, what a component must have, and how knobs become operators."""

import math
import re
import tomllib
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import BaseModel, ValidationError

import cct.recipe
from cct.recipe import Recipe
from cct.registry import REGISTRIES, Component, Registry, install, load_plugin, optional
from cct.transport import Gate, Transport, gates, transports
from cct.transport.gae import GAE, CompGAE
from cct.transport.gate import AttentionGate, ConstantGate, ShuffleGate

EVERY_COMPONENT = [
    (axis, name)
    for axis, registry in REGISTRIES.items()
    for name in registry.names()
    if registry[name].__module__.startswith("cct.")
]


class Flavour(Component):
    """What something tastes of."""


@pytest.fixture
def flavours():
    """An axis of its own, so that what a test registers stays in the test."""
    yield Registry("flavour", Flavour)
    del REGISTRIES["flavour"]


def register_sour(flavours):
    @flavours.register("sour")
    class Sour(Flavour):
        """Of lemons."""

        strength: float = 1.0
        """How much of it."""

    return Sour


# --- registering ------------------------------------------------------------------------------
def test_a_taken_name_is_refused_and_the_first_place_named(flavours):
    sour = register_sour(flavours)
    with pytest.raises(ValueError, match="flavour 'sour' is already registered at") as caught:

        @flavours.register("sour")
        class Vinegar(Flavour):
            """Of vinegar."""

    path, line = sour.where()
    assert f"{path}:{line}" in str(caught.value) and str(path) == __file__
    assert flavours["sour"] is sour


def test_a_taken_name_is_refused_where_the_first_class_has_no_source(flavours):
    typed = '@flavours.register("typed")\nclass Typed(Flavour):\n    """Typed into a console."""'
    exec(typed, {"flavours": flavours, "Flavour": Flavour})
    with pytest.raises(ValueError, match="'typed' is already registered"):

        @flavours.register("typed")
        class Again(Flavour):
            """Of the same."""


def test_one_class_has_one_name(flavours):
    sour = register_sour(flavours)
    with pytest.raises(ValueError, match="Sour is already registered as 'sour'"):
        flavours.register("acid")(sour)


def test_a_class_without_docstring_is_refused(flavours):
    with pytest.raises(ValueError, match="'mute' has no docstring"):

        @flavours.register("mute")
        class Mute(Flavour):
            pass

    assert flavours.names() == []


def test_a_parents_docstring_is_not_its_own(flavours):
    sour = register_sour(flavours)
    with pytest.raises(ValueError, match="'sourer' has no docstring"):

        @flavours.register("sourer")
        class Sourer(sour):
            pass


def test_a_class_of_another_axis_is_refused(flavours):
    with pytest.raises(ValueError, match="Loud is not a Flavour, as the flavour registry requires"):

        @flavours.register("loud")
        class Loud(Gate):
            """Not a flavour."""


def test_a_function_is_refused(flavours):
    with pytest.raises(ValueError, match="flavour"):

        @flavours.register("function")
        def bitter(rollout):
            """Of almonds."""


@pytest.mark.parametrize("name", [3, None, ""])
def test_a_name_is_a_text(flavours, name):
    with pytest.raises(ValueError, match="name"):

        @flavours.register(name)
        class Nameless(Flavour):
            """Of nothing."""


def test_register_without_a_name_is_refused(flavours):
    with pytest.raises(ValueError, match="name"):

        @flavours.register
        class Forgotten(Flavour):
            """Of nothing."""


# --- looking up -------------------------------------------------------------------------------
def test_an_unknown_name_lists_what_there_is_and_guesses():
    with pytest.raises(
        KeyError,
        match=r"no transport is called 'comp_gea' \(did you mean 'comp_gae'\?\); there are: abc, ",
    ):
        transports["comp_gea"]
    with pytest.raises(KeyError) as caught:
        transports["zzz"]
    assert "did you mean" not in str(caught.value) and "there are: abc" in str(caught.value)


def test_an_empty_registry_says_so(flavours):
    with pytest.raises(KeyError, match="there are: none"):
        flavours["sweet"]


# --- reading ----------------------------------------------------------------------------------
class Holder(BaseModel):
    transport: Annotated[Transport, transports]


def test_a_bare_name_is_the_mapping_with_use_alone():
    assert Holder(transport="gae").transport == Holder(transport={"use": "gae"}).transport == GAE()


def test_knobs_reach_the_component():
    assert Holder(transport={"use": "gae", "lam": 0.5, "gap": "cut"}).transport == GAE(lam=0.5, gap="cut")


def test_a_component_is_taken_as_it_is():
    part = GAE(lam=0.5)
    assert Holder(transport=part).transport is part


def test_components_nest():
    written = {"use": "comp_gae", "gate": {"use": "shuffle", "of": {"use": "constant", "of": {"use": "attention", "low": 0.5}}}}
    assert Holder(transport=written).transport == CompGAE(gate=ShuffleGate(of=ConstantGate(of=AttentionGate(low=0.5))))
    assert Holder(transport={"use": "comp_gae", "gate": "shuffle"}).transport.gate.of == AttentionGate()


def test_an_error_in_a_nested_component_has_the_whole_path():
    with pytest.raises(ValidationError) as caught:
        Holder(transport={"use": "comp_gae", "gate": {"use": "shuffle", "of": {"use": "attention", "lo": 0.5}}})
    (problem,) = caught.value.errors()
    assert problem["loc"] == ("transport", "gate", "of", "lo")
    assert "no key is called 'lo' (did you mean 'low'?)" in problem["msg"]


@pytest.mark.parametrize(
    "written", [None, 3, [], ["gae"], {}, {"lam": 1.0}, {"use": None}, {"use": ["gae"]}, {"use": {"use": "gae"}}, b"gae"]
)
def test_what_is_no_component_is_refused_with_the_names(written):
    with pytest.raises(ValidationError) as caught:
        Holder(transport=written)
    names = ", ".join(transports.names())
    assert f"a name or a mapping with the key 'use'; there are: {names}" in caught.value.errors()[0]["msg"]


def test_a_component_of_another_axis_is_refused():
    with pytest.raises(ValidationError, match="no transport is called 'attention'"):
        Holder(transport="attention")
    with pytest.raises(ValidationError):
        Holder(transport=AttentionGate())


def test_components_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        GAE().lam = 0.5


# --- every registered component ---------------------------------------------------------------
@pytest.mark.parametrize(("axis", "name"), EVERY_COMPONENT)
def test_every_component_says_what_it_is(axis, name):
    cls = REGISTRIES[axis][name]
    path, line = cls.where()
    assert cls.use == name and cls.summary().endswith(".")
    assert f"class {cls.__name__}" in "".join(path.read_text(encoding="utf-8").splitlines(keepends=True)[line - 1 : line + 2])
    undocumented = [knob for knob, field in cls.model_fields.items() if not field.description]
    assert not undocumented


@pytest.mark.parametrize(("axis", "name"), EVERY_COMPONENT)
def test_every_component_is_written_and_read_back(axis, name):
    registry = REGISTRIES[axis]
    required = {knob: f"some/{knob}" for knob, field in registry[name].model_fields.items() if field.is_required()}
    required = {
        ("gate", "constant"): {"gamma": 0.9},  # either of two
        ("environment", "tools"): {"tools": ["json:dumps"]},
        ("environment", "gym_text"): {"env": "json:JSONDecoder"},
        ("task", "reasoning_gym"): {"name": "chain_sum"},  # likewise
        ("evidence", "length"): {"max_tokens": 8, "buffer": 4},
        ("generation", "vllm_server"): {"servers": 1},  # either of two
    }.get((axis, name), required)
    part = registry._read({"use": name, **required})
    assert part.model_dump(mode="json")["use"] == name
    assert registry._read(part.model_dump(mode="json")) == part


@pytest.mark.parametrize(("axis", "name"), EVERY_COMPONENT)
def test_no_number_of_a_component_may_be_nan(axis, name):
    registry = REGISTRIES[axis]
    for knob, field in registry[name].model_fields.items():
        if "float" in str(field.annotation):
            value = [math.nan, math.nan] if "tuple" in str(field.annotation) else math.nan
            with pytest.raises(ValidationError):
                registry._read({"use": name, knob: value})


def test_every_number_of_the_sections_is_bounded_too():
    for section in ("training", "evaluation", "logging"):
        cls = Recipe.model_fields[section].annotation
        for knob, field in cls.model_fields.items():
            assert field.description, f"{section}.{knob}"
            if "float" in str(field.annotation):
                with pytest.raises(ValidationError):
                    cls.model_validate({knob: math.nan})


def test_needs_and_provides_are_sets_of_words():
    for axis, name in EVERY_COMPONENT:
        part = REGISTRIES[axis][name].model_construct()
        for words in (part.needs, part.provides):
            assert isinstance(words, frozenset) and all(isinstance(word, str) for word in words)


# --- plug-ins (with recipes: see test_recipe.py) ----------------------------------------------
def test_a_missing_plugin_file_is_not_found_where_it_was_looked_for(tmp_path):
    with pytest.raises((FileNotFoundError, ValueError), match=r"plug-in \./mine\.py not found at") as caught:
        load_plugin("./mine.py", tmp_path)
    assert str(tmp_path / "mine.py") in str(caught.value)


def test_a_plugin_file_is_run_once(tmp_path):
    (tmp_path / "counts.py").write_text(
        "from pathlib import Path\nwith (Path(__file__).parent / 'log').open('a') as f:\n    f.write('x')\n"
    )
    assert load_plugin("./counts.py", tmp_path) == load_plugin("counts.py", tmp_path)
    assert (tmp_path / "log").read_text() == "x"


def test_a_plugin_that_failed_is_tried_again(tmp_path):
    (tmp_path / "late.py").write_text("raise RuntimeError('not yet')\n")
    with pytest.raises(RuntimeError, match="not yet"):
        load_plugin("./late.py", tmp_path)
    (tmp_path / "late.py").write_text("ready = True\n")
    assert load_plugin("./late.py", tmp_path)


def test_gates_and_transports_are_axes_of_their_own():
    assert {"task", "policy", "generation", "evidence", "critic", "transport", "gate", "geometry"} <= set(REGISTRIES)
    assert REGISTRIES["gate"] is gates and REGISTRIES["transport"] is transports


def test_a_library_that_is_not_there_is_named_by_its_top_package():
    with pytest.raises(ValueError, match=r"nowhere_to_be_found is not installed; install it with pip install -e '\.\[data\]'"):
        optional("nowhere_to_be_found.inside", "data")


def test_the_advice_is_an_install_of_the_checkout(tmp_path, monkeypatch):
    root = Path(cct.__file__).parents[1]
    monkeypatch.chdir(root)
    assert install("math") == "pip install -e '.[math]'"
    monkeypatch.chdir(tmp_path)
    assert install("math", "data") == f"pip install -e '.[math,data]' (in {root})"


def test_nothing_names_the_project_that_is_called_cct_on_pypi():
    root = Path(cct.__file__).parents[1]
    files = [root / "README.md", root / "pyproject.toml", *(root / "docs").glob("*.md"), *(root / "cct").rglob("*.py")]
    assert [path for path in files if re.search(r"\bcct\[", path.read_text(encoding="utf-8"))] == []
    assert tomllib.loads((root / "pyproject.toml").read_text())["project"]["name"] == "credit-transport"
