"""One version in all places, lowest versions that are known, and one set of commands for make, hooks and workflows."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import yaml

import kvkeep

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from versions import lowest  # noqa: E402


def test_all_distributions_and_the_citation_have_one_version() -> None:
    own, lab, cluster, connector = (
        tomllib.loads((ROOT / name / "pyproject.toml").read_text())["project"]
        for name in ("", "lab", "connectors/cluster", "connectors/vllm")
    )
    assert own["version"] == lab["version"] == cluster["version"] == connector["version"] == kvkeep.__version__
    assert f"kvkeep[serve]=={kvkeep.__version__}" in cluster["dependencies"]
    assert lab["optional-dependencies"]["ray"] == [f"kvkeep-cluster=={kvkeep.__version__}"]
    assert f"kvkeep-lab=={kvkeep.__version__}" in own["optional-dependencies"]["lab"]
    assert f"kvkeep[cli,gguf]=={kvkeep.__version__}" in lab["dependencies"]
    assert connector["dependencies"] == [f"kvkeep=={kvkeep.__version__}"]
    assert re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1] == kvkeep.__version__


def test_every_need_has_a_lowest_version_and_the_page_names_them() -> None:
    wanted = dict(one.split("==") for one in lowest())
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \|", (ROOT / "docs" / "install.md").read_text(), re.MULTILINE)
    assert {name: wanted.get(name, "3.11") for name, _ in rows} == dict(rows) and len(rows) == 3


def test_hooks_and_workflow_run_what_make_and_ci_run() -> None:
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    commands = [line.strip().replace("$(BIN)", ".venv/bin").removesuffix(" .") for line in recipe.splitlines()]
    (own,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [hook["entry"] for hook in own["hooks"]] == commands and len(commands) == 3
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["ci"]
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=" + job["strategy"]["matrix"]["python"][0]
