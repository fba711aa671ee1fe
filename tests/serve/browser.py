"""A real browser without a window, driven by its own protocol through a pipe; no other package is needed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def found() -> str | None:
    """The path of a browser, None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab of a browser, its profile in ``folder``. Messages are JSON, ended by a zero byte, on two pipes."""

    def __init__(self, folder: Path, width: int = 1280, height: int = 860) -> None:
        path = found()
        assert path is not None
        given, self._out = os.pipe()
        self._in, told = os.pipe()
        high = [fcntl.fcntl(one, fcntl.F_DUPFD, 10) for one in (given, told)]

        def pipes() -> None:  # it reads from 3 and writes to 4
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        command = [path, "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        command += ["--disable-dev-shm-usage", "--hide-scrollbars", f"--user-data-dir={folder}", "about:blank"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, preexec_fn=pipes, close_fds=False, **quiet)  # type: ignore[call-overload]
        for one in (given, told, *high):
            os.close(one)
        self._count, self._rest = 0, b""
        self.errors: list[str] = []
        self.session: str | None = None
        """The tab that the calls are for."""
        self.session = self._tab()
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.size(width, height)

    def _tab(self) -> str:
        self.session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        made: str = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return made

    def another(self, address: str) -> str:
        """Open a page in another tab, and return its session. The tab before stays in sight."""
        before, self.session = self.session, self._tab()
        assert before is not None
        made = self.session
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.open(address)
        self.switch(before)
        return made

    def switch(self, session: str) -> None:
        """Bring another tab in sight, which calls are for from now on."""
        self.session = session
        self.call("Page.bringToFront")

    def call(self, method: str, **given: Any) -> Any:
        """Call a method of the protocol and return its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": given}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._in, 1 << 16)
            assert part, "the browser has gone"
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        event: dict[str, Any] = json.loads(text)
        self._note(event)
        return event

    def _note(self, event: dict[str, Any]) -> None:
        """Keep what the page complains of, and where it goes."""
        given = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            details = given["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif event.get("method") == "Log.entryAdded" and given["entry"]["source"] in ("security", "javascript"):
            self.errors.append(given["entry"]["text"])
        elif event.get("method") == "Page.javascriptDialogOpening":
            self._count += 1
            answer = {"id": self._count, "method": "Page.handleJavaScriptDialog", "params": {"accept": True}}
            os.write(self._out, json.dumps(answer | {"sessionId": self.session}).encode() + b"\0")
            self._count -= 1  # nobody waits for its answer

    def open(self, address: str) -> None:
        """Open a page."""
        self.call("Page.navigate", url=address)
        self.until(f"location.href.startsWith({json.dumps(address)}) && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        given = {"expression": script, "returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", **given)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description"))
        return answer["result"].get("value")

    def until(self, script: str, seconds: float = 15) -> Any:
        """Wait until an expression is true, and return it."""
        deadline = time.monotonic() + seconds
        script = f"(() => {{ const found = ({script}); return found instanceof Node ? true : found }})()"
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, f"never: {script}; {self.errors}; {self.run('document.body.innerText')}"
            time.sleep(0.03)
        return value

    def click(self, selector: str) -> None:
        """Click at the middle of an element, as a person does, once nothing covers it. If the page moves it meanwhile,
        click again."""
        name = json.dumps(selector)
        find = f"const e = document.querySelector({name}); if (!e) return; const b = e.getBoundingClientRect()"
        middle = "const at = [b.x + b.width / 2, b.y + b.height / 2]"
        shown = "if (e.contains(document.elementFromPoint(...at))) return at"
        hit = f"(event) => {{ window.clicked ||= event.target.closest({name}) !== null }}"
        self.run(f"(() => {{ window.clicked = false; addEventListener('click', {hit}, {{ capture: true }}) }})()")
        clicked = False
        while not clicked:
            x, y = self.until(f"(() => {{ {find}; {middle}; {shown} }})()")
            for kind in ("mousePressed", "mouseReleased"):
                self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
            clicked = self.run("window.clicked !== false")  # undefined: the click has opened another page

    def type(self, text: str) -> None:
        """Write text where the focus is."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int, **given: Any) -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            own = {"key": key, "code": key, "windowsVirtualKeyCode": code, **given}
            self.call("Input.dispatchKeyEvent", type=kind, **own)

    def size(self, width: int, height: int, dark: bool = False, mobile: bool = False) -> None:
        """Set the size and the colours that the page is shown in."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)

    def picture(self, path: Path) -> None:
        """Write what the page looks like."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        """End the browser."""
        self.session = None
        with suppress(AssertionError, OSError):
            self.call("Browser.close")
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
        os.close(self._out)
        os.close(self._in)
