"""What an installation brings: recipes by name, `cct doctor`, and a wheel that trains from an empty folder."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from cct.cli import main
from cct.loading import load_recipe, recipe_file
from cct.recipe import RecipeError

ROOT = Path(__file__).parents[1]


def test_a_recipe_that_comes_with_cct_is_known_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_recipe("compo") == load_recipe(ROOT / "recipes/compo.yaml")
    Path("compo").write_text("a file of one's own comes first")
    assert recipe_file("compo") == Path("compo")
    assert recipe_file("compo.yaml") == Path("compo.yaml")
    Path("gae").mkdir()
    assert recipe_file("gae").name == "gae.yaml"  # a folder is no recipe


def test_an_unknown_name_is_met_with_those_that_there_are(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=r"'compoo' \(did you mean 'compo'\?\).*gae_tac.*ends in \.yaml"):
        load_recipe("compoo")
    assert main(["check", "compoo"]) == 2 and "did you mean 'compo'" in capsys.readouterr().err


def test_the_doctor_names_versions_extras_and_the_machine(capsys):
    assert main(["doctor", "--no-test"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in ("Python", "torch", "transformers", "extra deepspeed", "CUDA", "all is well"))


@pytest.mark.slow
def test_the_doctor_trains(capsys):
    assert main(["doctor"]) == 0
    assert "transformers: resume works" in capsys.readouterr().out


@pytest.mark.slow
def test_a_wheel_holds_the_recipes_and_trains_from_an_empty_folder(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {"cct/recipes/compo.yaml", "cct/recipes/base/chain_arithmetic.yaml"} <= set(archive.namelist())
        archive.extractall(tmp_path / "site")
    (tmp_path / "empty").mkdir()
    small = ["policy.warm_start=", "training.iterations=1", "task.held_out_size=8", "training.critic_warmup=0"]
    command = [sys.executable, "-m", "cct.cli", "run", "compo", *(word for one in small for word in ("--set", one))]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    subprocess.run(command, check=True, cwd=tmp_path / "empty", env=environment, capture_output=True)
    assert (tmp_path / "empty/runs/compo/001/policy/model.safetensors").is_file()
