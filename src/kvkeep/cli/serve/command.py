"""``kvkeep serve``: the server of one model."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from kvkeep.budget import bytes_of
from kvkeep.cli import completion
from kvkeep.cli import options as o
from kvkeep.cli.serve.address import Address, https
from kvkeep.cli.startup import startup
from kvkeep.cli.validation import check_cache, check_model
from kvkeep.errors import UsageError
from kvkeep.extras import optional

GRACE_S = 10.0
"""Seconds that answers have to end in, where nothing is said."""


def serve(
    memory: Annotated[
        str | None,
        typer.Option(
            help="Bytes that all conversations together may hold (512MB).",
            show_default="for --conversations, at most a quarter of what is free",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes one that is free.")] = 8000,
    model: o.Model = "smollm2",
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            "-x",
            help="Of sessions that name none; see 'kvkeep methods'.",
            autocompletion=completion.methods,
            show_default="kv-direct with a budget, the planner's choice without",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget", "-b", help="Of sessions that name none: entries per layer (512), bytes (64MB), a share (25%)."
        ),
    ] = None,
    conversations: Annotated[
        int,
        typer.Option(min=1, help="Conversations to plan for, without --memory, or without --method and --budget."),
    ] = 8,
    weights: o.Weights = "auto",
    device: o.Device = None,
    grace: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds that answers have to end in after SIGTERM.", show_default=f"{GRACE_S:g}"),
    ] = None,
    waiting: Annotated[int, typer.Option(min=0, help="Requests that may wait, for memory or for another answer.")] = 64,
    keys: Annotated[str | None, typer.Option(metavar="FILE", help="A file of keys, one a line; '#': comment.")] = None,
    answers: Annotated[int, typer.Option(min=1, help="Answers of one key at once, waiting ones included.")] = 64,
    time: Annotated[float | None, typer.Option(min=0.1, help="Seconds after which an answer is cut.")] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Pages of this origin may speak to it (https://chat.example); repeatable."),
    ] = None,
    certificate: Annotated[str | None, typer.Option(metavar="FILE", help="For HTTPS: the certificate (PEM).")] = None,
    private_key: Annotated[str | None, typer.Option(metavar="FILE", help="For HTTPS: its private key (PEM).")] = None,
    log_requests: Annotated[
        bool, typer.Option("--log-requests", help="A line on standard error for each request; nothing of its text.")
    ] = False,
    measure: Annotated[
        bool, typer.Option(help="Measure this machine once, when nothing is asked, for the times of plans.")
    ] = True,
    sessions: o.Sessions = None,
    quota: Annotated[
        str | None,
        typer.Option(help="Bytes of all sessions in the folder (10GB); the oldest go.", show_default="none"),
    ] = None,
    age: Annotated[
        float | None, typer.Option(min=0, help="Days after which a session is removed.", show_default="none")
    ] = None,
    replicas: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Processes that Ray Serve runs, each with --memory; MIN:MAX for as many as are needed.",
            show_default="this process alone",
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="The Ray cluster for --replicas, which it goes on running; auto: the one of this machine.",
            show_default="one that is started here, and ends",
        ),
    ] = None,
    cores: Annotated[
        float | None,
        typer.Option(min=0.1, help="Cores of each of --replicas.", show_default="an equal share, or 1 with --ray"),
    ] = None,
) -> None:
    """Serve many conversations over HTTP within one memory, as OpenAI's clients speak.

    Keys come from KVKEEP_API_KEYS, by commas, and from --keys; listening beyond this machine without any makes one,
    which is kept in the user's folder and used again.
    """
    check_cache(method, budget)
    check_model(model, weights, device)
    if memory is not None:
        bytes_of(memory)
    for package in ("uvicorn", "fastapi", "prometheus_client"):
        optional(package, "serve")
    _check_cluster(ray, port, grace)
    with startup():
        from kvkeep.cli.serve.ray_serve import serve_replicas
        from kvkeep.cli.serve.single_process import serve_here
        from kvkeep.decode.session_store import sessions_folder
        from kvkeep.serve.replicas import Scale
        from kvkeep.serve.service import Service

    _check_replicas(replicas, ray, cores, memory, method or budget, sessions)
    grace = GRACE_S if grace is None else grace
    listening = Address(host, port, https(certificate, private_key))
    given, access = _access(keys, listening.own, ray)
    folder = sessions_folder(sessions)
    options: dict[str, Any] = {
        "model": model, "weights": weights, "device": device, "memory": memory, "waiting": waiting, "quota": quota,
        "age": age, "sessions": folder.absolute(), "answers": answers, "time": time, "cors": cors or (),
        "log_requests": log_requests,
    }  # fmt: skip
    cache = {name: one for name, one in (("method", method), ("budget", budget)) if one is not None}
    service = Service.parse(options, cache, given)
    if ray is None:
        service.store(shared=replicas is not None).check_folder()
    kept = f"sessions: {folder}" + _limits(quota, age)
    if replicas is None:
        serve_here(service, listening, conversations, grace, [kept, access], measure=measure)
        return
    own = cores or (1 if ray is not None else max(1, (os.cpu_count() or 1) // Scale.parse(replicas, 1, 1).most))
    serve_replicas(service, Scale.parse(replicas, own, conversations), ray, listening, grace, [kept, access])


def _access(keys: str | None, own: bool, ray: str | None) -> tuple[list[str], str]:
    """Return the keys, and a line that says who may come in. own: only this machine reaches the server."""
    from kvkeep.serve.http.keys import kept_key, keys_given

    if given := keys_given(keys):
        return given, f"{len(given)} keys"
    if own:
        who = "only this machine can reach it" if ray is None else "whoever reaches a proxy may use it"
        return [], f"no key: {who}"
    key, path, new = kept_key()
    return [key], f"key: {key if new else 'as before'}  (kept in {path})"


def _limits(quota: str | None, age: float | None) -> str:
    """Return what is said of what sessions may take and how long they stay."""
    said = "" if quota is None else f", at most {quota} together: the least recently used are removed"
    return said + ("" if age is None else f", {age:g} days at most")


def _check_replicas(
    replicas: str | None, ray: str | None, cores: float | None, memory: object, method: object, sessions: object
) -> None:
    """Raise UsageError for options of replicas that go with none, and for what a cluster elsewhere has to be told."""
    if replicas is None and (ray is not None or cores is not None):
        raise UsageError("--ray and --cores are for --replicas; give their number.")
    if ray is not None:
        needed = {"--memory": memory, "--method or --budget": method, "--sessions": sessions}
        missing = [name for name, value in needed.items() if value is None]
        if missing:
            raise UsageError(
                f"With --ray give {' and '.join(missing)}: machines differ in memory, and sessions have to be in a "
                "folder that all of them share."
            )


def _check_cluster(ray: str | None, port: int, grace: float | None) -> None:
    """Raise UsageError for options that mean nothing to a cluster elsewhere."""
    if ray is not None and port == 0:
        raise UsageError("With --ray every machine of the cluster listens at the port: name one, and not 0.")
    if ray is not None and grace is not None:
        raise UsageError(
            "With --ray the command ends at once, and the cluster goes on: leave --grace out; --time limits an answer."
        )
