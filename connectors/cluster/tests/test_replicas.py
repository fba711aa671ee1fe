"""Replicas: the proxy before them, the command, and two of them on a Ray cluster, of which one is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
import weakref
from collections import Counter
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from answering import Alone
from conftest import saved
from families import tiny
from kvkeep_cluster import replicas as replicas_module
from kvkeep_cluster.proxy import HEADER, ProxyMiddleware
from kvkeep_cluster.ray_cluster import ClusterEnded, connected
from kvkeep_cluster.replicas import Scale, app, labelled
from kvkeep_cluster.serve import serve_replicas
from living import descendants
from running import KEYS, figures, post, program

import kvkeep
from kvkeep.blocks.store import QUOTA, Store
from kvkeep.cli.serve.address import Address
from kvkeep.errors import KvkeepError, UsageError
from kvkeep.models import loading
from kvkeep.models.loading import Loaded
from kvkeep.serve.http.body import MAX_BODY_BYTES

# -- the proxy --------------------------------------------------------------------------------------------


class Behind:
    """What Serve's proxy does with a request: these messages, and the error after them."""

    def __init__(self, *messages: dict[str, Any], error: Exception | None = None) -> None:
        self.messages, self.error = messages, error
        self.header: str | None = None
        self.body = b""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        given = [value.decode() for name, value in scope["headers"] if name.replace(b"_", b"-") == HEADER.encode()]
        assert len(given) <= 1
        self.header = given[0] if given else None
        self.body = (await receive()).get("body", b"")
        for one in self.messages:
            await send(one)
        if self.error is not None:
            raise self.error


def started(status: int = 200, kind: str = "application/json") -> dict[str, Any]:
    names = [(b"x-request-id", b"of-the-door"), (b"x-request-id", b"of-serve")]
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind.encode()), *names]}


def sent(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


def asked(behind: Behind, body: Any = None, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
    async def ask() -> httpx.Response:
        way = httpx.ASGITransport(ProxyMiddleware(behind), raise_app_exceptions=False)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        async with httpx.AsyncClient(transport=way, base_url="http://localhost") as client:
            if body is None:
                return await client.get(path, headers=given)
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await client.post(path, content=content, headers=given)

    return asyncio.run(ask())


def key(body: Any = None, path: str = "/v1/chat/completions", **headers: str) -> str | None:
    """The routing key of a request."""
    behind = Behind(started(), sent(b"{}"))
    assert asked(behind, body, path, **headers).status_code == 200
    assert behind.body == (b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode())
    return behind.header


def test_requests_of_a_conversation_have_one_routing_key_and_others_another() -> None:
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One?"}]
    later = [*first, {"role": "assistant", "content": "Two."}, {"role": "user", "content": "Three?"}]
    talk = {"kvkeep": {"session": "talk"}}
    named = key({"messages": first, **talk})
    assert named == key({"messages": later[3:], **talk}) == key(path="/v1/sessions/talk/cache")
    assert named == key({"prompt": "x", **talk}, "/v1/completions", x_session_id="other")
    assert named == key({"messages": first}, x_session_id="talk")
    begun = key({"messages": first})
    assert begun == key({"messages": later}) != key({"messages": [first[0], later[3]]})
    others = [
        key({"messages": first, **talk}, authorization="Bearer k"),
        key({"messages": first, "kvkeep": {"session": "walk"}}),
        begun,
        key(path="/v1/sessions/walk"),
    ]
    assert len({named, *others[:3], None}) == 5 and others[1] == others[3]
    assert others[0] == key(path="/v1/sessions/talk", authorization="bearer  k")  # as the replica reads the key


def test_without_a_session_only_a_conversation_has_a_routing_key() -> None:
    """Prompts that begin alike, as examples of an evaluation do, go to all replicas."""
    assert key({"prompt": "a" * 600}, "/v1/completions") is key({"prompt": [1] * 600}, "/v1/completions") is None
    assert key(path="/v1/models") is key(path="/v1/sessions") is key(path="/metrics") is None
    assert (
        key({"prompt": "a", "kvkeep": {"session": "talk"}}, "/v1/completions") == key(x_session_id="talk") is not None
    )
    for odd in (
        b"",
        b"[" * 10**5,
        b"\xff",
        [],
        {"kvkeep": 1},
        {"messages": [1]},
        {"messages": "\ud800"},
        {"messages": [{"role": "assistant", "content": "Yes."}]},
    ):
        assert key(odd) is None
    assert key({"messages": [{"role": "user", "content": "\ud800"}]}) is not None


def test_what_a_replica_did_not_say_the_proxy_does() -> None:
    lost = {
        "message": "The replica that handled the request has ended; retry, and another replica continues.",
        "code": "replica_lost",
    }
    whole = asked(Behind(started(), sent(b'{"a": ', True), sent(b"1}")), {})
    assert whole.json() == {"a": 1} and whole.headers["x-request-id"] == "of-the-door"
    for behind in (
        Behind(),
        Behind(started(500, "text/plain"), sent(b"Internal")),
        Behind(started(503, ""), sent(b"")),
    ):
        found = asked(behind, {})
        assert found.status_code == 503 and found.headers["retry-after"] == "1"
        assert lost.items() <= found.json()["error"].items()
    refused = asked(Behind(started(503), sent(b'{"error": {}}')), {})  # by the replica itself
    assert refused.json() == {"error": {}}
    events = started(kind="text/event-stream; charset=utf-8")
    stream = asked(Behind(events, sent(b"data: {}\n\n", True)), {}).text.split("\n\n")
    assert lost.items() <= json.loads(stream[1].removeprefix("data: "))["error"].items()
    assert [stream[0], *stream[2:]] == ["data: {}", "data: [DONE]", ""]
    assert asked(Behind(events, sent(b"data: [DONE]\n\n")), {}).text == "data: [DONE]\n\n"
    broken = RuntimeError("of the proxy itself")
    assert lost.items() <= asked(Behind(error=broken), {}).json()["error"].items()
    assert asked(Behind(events, sent(b"data: {}\n\n", True), error=broken), {}).text.split("\n\n") == stream
    large = asked(Behind(), b"x" * (MAX_BODY_BYTES + 1))
    assert large.status_code == 413 and large.headers["x-request-id"].startswith("req-")


def test_figures_of_several_replicas_have_their_names() -> None:
    text = b"# HELP kvkeep_a_total A.\n# TYPE kvkeep_a_total counter\nkvkeep_a_total%s 2.0\n"
    found = labelled([("x", text % b""), ("y", text % b'{reason="b"}')]).decode()
    assert 'kvkeep_a_total{replica="x"} 2.0' in found and 'kvkeep_a_total{reason="b",replica="y"} 2.0' in found
    assert found.count("# TYPE kvkeep_a_total counter") == 1


# -- the command ------------------------------------------------------------------------------------------


def test_numbers_of_replicas() -> None:
    assert Scale.parse("3", 1, 8).options() == {"num_replicas": 3}
    scale = Scale.parse("1:4", 1, 8).options()["autoscaling_config"]
    assert scale == {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 8}
    for wrong in ("", "0", "-1", "x", "2:1", "1:", ":2", "1:2:3", "9" * 5000):
        with pytest.raises(UsageError, match="is not a number of replicas"):
            Scale.parse(wrong, 1, 8)
    for many, cores in (("2", 1e308), ("999999999", 1), ("1:10000001", 0.1)):
        with pytest.raises(UsageError, match="are more than any cluster has"):
            Scale.parse(many, cores, 8)


def test_a_file_has_the_options_of_the_command_and_their_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVKEEP_API_KEYS", raising=False)
    monkeypatch.setattr(replicas_module, "bound", lambda *given: given)
    (tmp_path / "keys").write_text("some-key\n")
    given = {"memory": "8MB", "budget": "25%", "sessions": "/chats", "keys": str(tmp_path / "keys"), "quota": None}
    service, scale = app(given)
    assert (service.memory, service.cache, service.sessions) == (8 * 10**6, {"budget": "25%"}, "/chats")
    assert (service.quota, service.age, service.limits.answers, service.log_requests) == (QUOTA, None, 64, False)
    assert (scale.minimum, scale.maximum, scale.cores, scale.ongoing) == (2, 2, 1, 8)
    given |= {"cors": ["https://chat.example"], "log_requests": "true", "age": "0.5", "time": 2, "waiting": "7"}
    service, scale = app(given | {"cores": "0.5", "conversations": "3", "replicas": 4, "quota": "1GB"})
    assert (service.cors, service.log_requests, service.age) == (("https://chat.example",), True, 43200)
    assert (service.limits.seconds, service.waiting, service.quota) == (2, 7, 10**9)
    assert (scale.maximum, scale.cores, scale.ongoing) == (4, 0.5, 3)
    wrong: dict[str, tuple[Any, ...]] = {
        "waiting": ("many", -1, 1.5, True), "answers": (0, "x"), "conversations": (0,), "cores": (0, "nan", "inf"),
        "age": ("x", -1), "time": (0,), "memory": (-5, "25%"), "quota": ("0B",), "weights": ("int5",),
        "cors": ("chat.example", ["*", "x"]), "log_requests": ("maybe",), "replicas": ("0",), "method": ("h2p",),
    }  # fmt: skip
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(UsageError) as error:
                app(given | {name: value})
            assert str(error.value).endswith(".") and "'" in str(error.value), (name, value)
    with pytest.raises(UsageError, match="Without a key"):
        app(given | {"keys": None, "cors": "*"})


def test_what_serve_knows_of_replicas_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, scale = pytest.importorskip("ray"), Scale.parse("2", 1, 8)
    found = SimpleNamespace(message="Failed to update the deployments ['kvkeep'].", deployments={})
    grants = list[float]()

    def fail(*given: Any, **options: Any) -> None:
        raise RuntimeError("Failed to update the deployments ['kvkeep'].")

    def told(**states: int) -> None:
        trace = "Traceback:\n  in load\nkvkeep.errors.ModelError: There is no model at '/none'.\n"
        found.deployments = {"kvkeep": SimpleNamespace(message=trace, replica_states=states)}

    def answered(*ends: Any) -> int:
        def results(timeout_s: float, return_exceptions: bool) -> list[Any]:
            grants.append(timeout_s)
            if ends == ("none",):
                raise TimeoutError
            return [*ends]

        serve.get_app_handle = lambda name: SimpleNamespace(broadcast=lambda *what: SimpleNamespace(results=results))
        return replicas_module.drain(2)

    serve: Any = SimpleNamespace(start=fail, status=lambda: SimpleNamespace(applications={"kvkeep": found}))
    monkeypatch.setattr(replicas_module, "ray_serve", lambda: serve)
    told(RUNNING=1, STARTING=1)
    with pytest.raises(KvkeepError) as error:
        replicas_module.deploy(None, scale, "", 0, {})  # type: ignore[arg-type]
    assert str(error.value) == "The replicas did not start: There is no model at '/none'. Replicas that run: 1."
    found.deployments = {}
    for known, sentence in (("Its arguments are wrong.", "start: Its arg.* wrong.$"), ("", "RuntimeError: Failed to")):
        found.message = known
        with pytest.raises(KvkeepError, match=sentence):
            replicas_module.deploy(None, scale, "", 0, {})  # type: ignore[arg-type]

    told(RUNNING=2, STARTING=1)
    silent, dead = TimeoutError(), ray.exceptions.ActorDiedError()
    assert (answered(None, None), answered(None, dead), answered(None, silent), answered("none")) == (0, 0, 1, 2)
    told(RUNNING=1, STOPPING=1)
    assert answered(None) == 1 and min(grants) > 2


def test_a_signal_that_ends_the_cluster_too_ends_the_command_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would wait a minute for its processes, and then complain and end this one."""
    pytest.importorskip("ray")
    gone = threading.Event()
    replicas = {"kvkeep": SimpleNamespace(replica_states={})}
    broadcast = SimpleNamespace(results=lambda **given: gone.wait())
    serve: Any = SimpleNamespace(
        status=lambda: SimpleNamespace(applications={"kvkeep": SimpleNamespace(deployments=replicas)}),
        get_app_handle=lambda name: SimpleNamespace(broadcast=lambda *given: broadcast),
    )
    monkeypatch.setattr(replicas_module, "ray_serve", lambda: serve)
    monkeypatch.setattr(replicas_module, "CHECK_S", 0.01)
    monkeypatch.setattr("kvkeep_cluster.ray_cluster.alive", lambda: False)
    with pytest.raises(ClusterEnded, match="Running answers were cut off"):
        replicas_module.drain(2)
    gone.set()
    ended: list[str] = []
    monkeypatch.setattr("ray.shutdown", lambda: ended.append("shutdown"))
    monkeypatch.setattr("ray.init", lambda *given, **named: None)
    with pytest.raises(ClusterEnded), connected(None, 1):
        raise ClusterEnded
    assert not ended
    with connected(None, 1):
        pass
    assert ended == ["shutdown"]


def test_proxies_that_a_cluster_has_are_told_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray")
    own = SimpleNamespace(host="0.0.0.0", port=8123, ssl_certfile=None, ssl_keyfile=None)
    context = SimpleNamespace(_get_global_client=lambda: SimpleNamespace(http_config=own))
    ran = list[Any]()
    serve: Any = SimpleNamespace(start=lambda **given: None, run=lambda *given, **named: ran.append(1), context=context)
    monkeypatch.setattr(replicas_module, "ray_serve", lambda: serve)
    monkeypatch.setattr(replicas_module, "bound", lambda *given: None)
    monkeypatch.setattr(replicas_module, "cluster", lambda *given: nullcontext())
    monkeypatch.setattr(replicas_module, "lacking", dict)
    service: Any = SimpleNamespace(memory=10**6, model="tiny", cache={"method": "full"})

    def said(**given: Any) -> str:
        asked = Address(**{"host": "127.0.0.1", "port": 8000, **given})
        serve_replicas(service, Scale.parse("2", 1, 8), "auto", asked, 0.0, "", "")
        return capsys.readouterr().err

    tls = {"ssl_certfile": "a.pem", "ssl_keyfile": "a.key"}
    told = said()
    assert "http://127.0.0.1:8123/v1" in told and "--host and --port do not change that" in told
    assert "do not change" not in said(host="0.0.0.0", port=8123)
    with pytest.raises(UsageError, match="proxies that speak HTTP, and --certificate"):
        said(tls=tls)
    own.ssl_certfile, own.ssl_keyfile = "b.pem", "b.key"
    with pytest.raises(UsageError, match="HTTPS by other files"):
        said(tls=tls)
    assert len(ran) == 2  # and nothing was replaced
    own.ssl_certfile, own.ssl_keyfile = tls.values()
    assert "https://127.0.0.1:8123/v1" in said(tls=tls) and "https://" in said()


def test_what_cannot_be_replicated_is_one_sentence(
    run: Any, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("serve", "--model", str(model_folder), "--memory", "50MB", "-x", "full")
    for wrong, sentence in (
        (("--ray", "auto"), "is used with --replicas only"),
        (("--replicas", "none"), "is not a number of replicas"),
        (("--replicas", "2", "--ray", "auto"), "give --sessions"),
        (("--replicas", "2", "--ray", "auto", "--sessions", str(tmp_path), "--port", "0"), "give one with --port"),
        (("--replicas", "2", "--ray", "auto", "--sessions", str(tmp_path), "--grace", "10"), "leave --grace out"),
    ):
        code, _, err = run(*common, *wrong)
        assert code == 2 and sentence in err and "Traceback" not in err
    pytest.importorskip("ray.serve")
    there = ("--replicas", "2", "--sessions", str(tmp_path), "--ray")
    for address, status, sentence in (
        ("", 2, "'' is not an address of a Ray cluster"),
        ("local", 2, "'local' is not an address"),
        ("127.0.0.1:1", 1, "There is no Ray cluster at '127.0.0.1:1': connection refused."),
        ("ray://localhost:1", 1, "There is no Ray cluster at 'ray://localhost:1': connection refused."),
    ):
        code, _, err = run(*common, *there, address)
        assert code == status and sentence in err and "Traceback" not in err
    code, _, err = run(*common, "--replicas", "2", "--cores", "inf")
    assert code == 2 and "'cores' has to be a number" in err and "Traceback" not in err
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    code, _, err = run(*common, "--replicas", "2")
    assert code == 2 and "pip install ./connectors/cluster" in err and "Traceback" not in err


def test_a_command_with_replicas_has_no_model_of_its_own(
    run: Any, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a default needs one, it is gone before replicas start."""
    pytest.importorskip("ray.serve")
    loaded, load = list[Any](), loading.load

    def noted(*given: Any, **options: Any) -> Loaded:
        found = load(*given, **options)
        loaded.append(weakref.ref(found.model))
        return found

    def started(*given: Any) -> None:
        assert not [one for one in loaded if one() is not None]
        raise KvkeepError("It ends here.")

    monkeypatch.setattr(loading, "load", noted)
    monkeypatch.setattr(replicas_module, "cluster", started)
    common = ("serve", "--replicas", "2", "--port", "0", "--sessions", str(tmp_path), "--model")
    for options, count in ((("--memory", "50MB", "-x", "full"), 0), (("--memory", "50MB"), 1), (("-x", "full"), 2)):
        code, _, err = run(*common, str(model_folder), *options)
        assert (code, len(loaded)) == (1, count) and "It ends here." in err, err
    code, _, err = run(*common, str(tmp_path), "--memory", "50MB", "-x", "full")
    assert code == 1 and "is not a model" in err


# -- two of them ------------------------------------------------------------------------------------------


def replicas() -> set[int]:
    """The processes of replicas that descend from this one."""
    found = set[int]()
    for number in descendants(os.getpid()):
        with suppress(OSError):  # it has just ended
            if Path(f"/proc/{number}/cmdline").read_bytes().startswith(b"ray::ServeReplica"):
                found.add(number)
    return found


def names(found: dict[str, float]) -> set[str]:
    """The labels of replicas in what /metrics says."""
    return {name.removeprefix("kvkeep_sessions") for name in found if name.startswith("kvkeep_sessions{")}


class Talk:
    """A session of two replicas, its client, and what it should hear."""

    def __init__(self, address: str, name: str, alone: Alone) -> None:
        from openai import OpenAI

        self.client = OpenAI(base_url=f"{address}/v1", api_key=KEYS[0], max_retries=0)
        self.name, self.alone, self.ids, self.cached = name, alone, list[int](), 0
        self.heard, self.error, self.begun = "", None, threading.Event()

    def ask(self, ids: list[int], new: int) -> None:
        """Ask for a turn, and keep what is heard."""
        self.heard, self.error, own = "", None, {"kvkeep": {"session": self.name}}
        given: Any = {"model": self.model, "prompt": [*self.ids, *ids], "max_tokens": new, "temperature": 0}
        options: Any = {"stream": True, "stream_options": {"include_usage": True}, "extra_body": own}
        try:
            for event in self.client.completions.create(**given, **options):
                self.heard += event.choices[0].text if event.choices else ""
                self.begun.set()
                self.cached = event.usage.prompt_tokens_details.cached_tokens if event.usage else self.cached
        except Exception as error:
            self.error = error
            self.begun.set()

    def settled(self, ids: list[int], new: int) -> None:
        """The turn was heard as it is alone."""
        assert self.error is None, self.error
        prompt = [*self.ids, *ids]
        before, self.ids = len(self.ids), [*prompt, *self.alone.answer(prompt, new)]
        assert self.heard == self.alone.text and self.cached == max(0, before - 1)

    model = ""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_of_two_replicas_one_is_killed_in_the_middle_of_answers(tmp_path: Path) -> None:
    pytest.importorskip("ray.serve")
    model, folder = saved(tiny("llama", positions=32768), tmp_path / "tiny"), tmp_path / "sessions"
    loaded = kvkeep.load(str(model))
    options = ("--model", str(model), "--memory", "64MB", "-x", "full", "--replicas", "2", "--cores", "1")
    with program(*options, "--sessions", str(folder), fork=True) as running:
        Talk.model, second, new = running.model, [*range(40, 60)], 2000  # longer than until the last begins
        talks, held = list[Talk](), Counter[str]()
        for number in range(30):  # until each of the replicas has two sessions
            talk = Talk(running.address, f"talk-{number}", Alone(loaded, method="full"))
            talk.ask(first := [5 + number, *range(20, 50)], 4)
            talk.settled(first, 4)
            found = figures(running.address)
            (name,) = {name for name in names(found) if found[f"kvkeep_sessions{name}"] > held[name]}
            held[name] += 1
            talks += [talk] if held[name] <= 2 else []
            if len(talks) == 4:
                break
        assert len(talks) == 4 and len(replicas()) == len(held) == 2

        # Another server takes a session of the folder, and goes on with it: the replica has to follow.
        store, (owner,) = Store(folder), {path.parent.name for path in folder.rglob("*.session")}
        body = {"model": running.model, "prompt": [*talks[0].ids, 7], "max_tokens": 1, "temperature": 0}
        body |= {"kvkeep": {"session": talks[0].name}}
        other = post(running.address, body, KEYS[1], "/v1/completions").json()
        assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # another key's session of this name
        assert post(running.address, body, "wrong-key", "/v1/completions").status_code == 401

        for _ in range(12):  # on a busy machine, Serve's router may take a replica for one that is gone
            killed, *_ = sorted(replicas())
            threads = [threading.Thread(target=talk.ask, args=(second, new)) for talk in talks]
            for talk, thread in zip(talks, threads, strict=True):
                talk.begun.clear()
                thread.start()
            assert all(talk.begun.wait(60) for talk in talks)
            os.kill(killed, signal.SIGSTOP)
            time.sleep(1)  # until clients have heard what it sent before
            heard = [talk.heard for talk in talks]
            time.sleep(1)
            going = zip(talks, threads, heard, strict=True)
            lost = [talk for talk, thread, said in going if thread.is_alive() and talk.heard == said]
            if 0 < len(lost) < len(talks) and not [talk for talk in talks if talk.error is not None]:
                break
            os.kill(killed, signal.SIGCONT)
            for talk, thread in zip(talks, threads, strict=True):
                thread.join(60)
                if talk.error is not None:  # its replica was taken for one that is gone
                    talk.ask(second, new)
                talk.settled(second, new)
        os.kill(killed, signal.SIGKILL)
        for thread in threads:
            thread.join(60)
        failed = [talk.name for talk in talks if talk.error is not None]  # names: a talk is long when it is printed
        assert 0 < len(lost) < len(talks) and [talk.name for talk in lost] == failed
        for talk in talks:
            if talk in lost:
                assert type(talk.error).__name__ == "APIError" and "retry" in str(talk.error)
                talk.ask(second, new)  # the other replica restores it, and reads what is new
            talk.settled(second, new)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(30) == 0 and "all turns are saved" in running.said()
    kept = {info.name: info for info in store.sessions()}
    assert len(kept) == sum(held.values()) + 1 and not [info for info in kept.values() if info.problem or info.in_use]
    assert all(kept[f"{owner}/{talk.name}"].tokens == len(talk.ids) - 1 for talk in talks)
    assert not replicas() and not [path for path in folder.rglob("*") if path.is_file() and ".saving-" in path.name]
