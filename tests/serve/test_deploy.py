"""What stands in deploy/ and docs/serving.md works: options are the command's, health is checked, clients speak."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from running import KEYS, held, serving

from kvkeep.serve.http import app as apps

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def understood(arguments: list[str]) -> None:
    """Parse the arguments of kvkeep, and run nothing."""
    from click import Context

    from kvkeep.cli import COMMANDS
    from kvkeep.cli.lazy import application

    group: Any = application(COMMANDS)
    name, command, rest = group.resolve_command(Context(group), arguments)
    command.make_context(name, rest)


def test_the_unit_starts_what_there_is(tmp_path: Path) -> None:
    text = (DEPLOY / "kvkeep.service").read_text()
    (line,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    program, *arguments = shlex.split(line)
    assert program.endswith("/kvkeep")
    understood(arguments)
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here: the unit is not verified")
    unit = tmp_path / "kvkeep.service"
    unit.write_text(text.replace(program, "/bin/true"))  # which has to exist
    found = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert found.returncode == 0 and not found.stderr, found.stderr


def test_the_image_starts_what_there_is_and_knows_when_it_is_ill(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    entry = json.loads(re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)[0])
    given = re.findall(r"kvkeep (--model .*)$", text, re.MULTILINE)[0]
    understood([*entry[1:], *shlex.split(given)])
    check = json.loads(re.findall(r"^\s*CMD (\[.*\])$", text, re.MULTILINE)[0])
    port = entry[entry.index("--port") + 1]
    assert f"127.0.0.1:{port}/health" in check[2]
    assert "USER kvkeep" in text.partition("ENTRYPOINT")[0]

    def healthy(address: str) -> bool:
        code = check[2].replace(f"http://127.0.0.1:{port}", address)
        return subprocess.run([sys.executable, *check[1:-1], code], capture_output=True).returncode == 0

    with serving() as (address, engine):
        assert healthy(address)
        with held(engine):
            engine.running.append(None)  # type: ignore[arg-type]
            monkeypatch.setattr(apps, "STALLED_S", 0.0)
            time.sleep(0.01)
            assert not healthy(address)  # it has work, and takes no step
            engine.running.clear()
        engine.fault = RuntimeError("gone")
        assert not healthy(address)
    assert not healthy(address)  # there is none


def examples() -> list[str]:
    return re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "serving.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("package", ["openai", "langchain_openai"])
def test_clients_speak_as_the_docs_say(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(package)
    (code,) = [one for one in examples() if f"from {package} import" in one]
    with serving() as (address, engine):
        code = (
            code.replace("http://127.0.0.1:8000", address)
            .replace('"smollm2"', '"tiny"')
            .replace('"KEY"', repr(KEYS[0]))
        )
        exec(compile(code, package, "exec", dont_inherit=True), {})
        assert len(capsys.readouterr().out.split()) > 10
        assert [name for _, name in engine.sessions.memory] == ["talk"]
