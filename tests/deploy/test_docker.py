"""The image's recipe, as far as it can be checked without a daemon: pins, user, health check, and what is copied."""

import re
import shlex
import tomllib
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = ("cpu", "cuda")


@dataclass
class Stage:
    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [words for name, words in self.steps if name == instruction]


def stages() -> dict[str, Stage]:
    text = re.sub(r"^#.*\n", "", (ROOT / "deploy/docker/Dockerfile").read_text(), flags=re.M)
    found: dict[str, Stage] = {}
    for line in text.replace("\\\n", " ").splitlines():
        instruction, _, words = line.strip().partition(" ")
        if instruction == "FROM":
            base, _, name = words.partition(" AS ")
            current = found[name] = Stage(name, base)
        elif instruction:
            current.steps.append((instruction, words.strip()))
    return found


def lineage(name: str) -> list[Stage]:
    """A stage and those it builds on."""
    known = stages()
    return [known[name], *(lineage(known[name].base) if known[name].base in known else [])]


def ignored(path: str) -> bool:
    """As .dockerignore says: the last pattern that matches decides."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    result = False
    for line in lines:
        pattern = line.removeprefix("!")
        if fnmatch(path, pattern.removeprefix("**/")) or fnmatch(path, pattern) or fnmatch(path, f"{pattern}/*"):
            result = not line.startswith("!")
    return result


def test_the_only_foreign_base_is_pinned_to_a_patch_version():
    known = stages()
    bases = {stage.base for stage in known.values()} - known.keys()
    assert len(bases) == 1
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", bases.pop())


def test_every_installation_is_held_to_the_constraints_and_torch_to_the_tested_version():
    torch = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)[1]
    installs = [run for stage in stages().values() for run in stage.all("RUN") if "pip install" in run]
    assert len(installs) == 4
    assert all("--constraint constraints.txt" in run for run in installs)
    assert [re.search(r"torch==([\d.]+)", run)[1] for run in installs[:2]] == [torch] * 2


@pytest.mark.parametrize("target", TARGETS)
def test_the_target_runs_as_a_user_of_its_own_and_answers_for_its_health(target: str):
    stage = stages()[target]
    assert stage.all("USER") == ["choral"]
    assert any("useradd --uid 1000 --create-home choral" in run for s in lineage(target) for run in s.all("RUN"))
    last_user = max(i for i, (name, _) in enumerate(stage.steps) if name == "USER")
    assert not any("pip" in words for _, words in stage.steps[last_user:])
    (check,), (expose,) = stage.all("HEALTHCHECK"), stage.all("EXPOSE")
    assert f"http://127.0.0.1:{expose}/health" in check
    assert "--retries=3" in check


@pytest.mark.parametrize("target", TARGETS)
def test_the_command_is_one_choral_understands(target: str):
    from deploy.cli import make_parser

    words = re.findall(r'"([^"]*)"', stages()[target].all("CMD")[0])
    args = make_parser().parse_args(words[1:])
    assert words[0] == "choral" and vars(args)["cluster.host"] == "0.0.0.0"


def test_what_is_copied_exists_reaches_the_build_and_is_every_package():
    copied = []
    for stage in stages().values():
        for copy in stage.all("COPY"):
            if not copy.startswith("--from="):
                copied += shlex.split(copy)[:-1]
    assert all((ROOT / path).exists() for path in copied)
    assert not any(ignored(path) for path in copied)
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert {name.partition(".")[0] for name in packages} <= set(copied)
    assert {"pyproject.toml", "README.md", "LICENSE", "constraints.txt"} <= set(copied)


@pytest.mark.parametrize(
    "path", [".git", ".env", ".venv", "tests", "deploy/kuberay", "docs", "kernels/__pycache__", "id_rsa"]
)
def test_what_an_image_does_not_need_stays_out(path: str):
    assert ignored(path)


def test_no_secret_is_passed_in():
    text = (ROOT / "deploy/docker/Dockerfile").read_text()
    assert not re.search(r"^ARG|--mount=type=secret|(?i:password|api_key|auth_token)", text, re.M)
