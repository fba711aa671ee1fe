"""``kvkeep serve``: the server of one model."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvkeep.cli import options
from kvkeep.cli.options import ModelOptions
from kvkeep.cli.output import note
from kvkeep.cli.serve.address import Address, https
from kvkeep.cli.serve.server_options import (
    GRACE_S,
    LimitOptions,
    MemoryOptions,
    NetworkOptions,
    StoreOptions,
    process_options,
)
from kvkeep.cli.startup import startup
from kvkeep.plugins import optional

if TYPE_CHECKING:
    from kvkeep.cli.serve.server_options import ProcessOptions
else:
    ProcessOptions = process_options()


@options.command
def serve(
    *,
    memory: MemoryOptions,
    model: ModelOptions,
    drafts: options.Drafts = options.DraftsOption.copies,
    network: NetworkOptions,
    limits: LimitOptions,
    log_requests: Annotated[
        bool,
        typer.Option("--log-requests", help="Log each request in a line on standard error, without any of its text."),
    ] = False,
    store: StoreOptions,
    processes: ProcessOptions,
) -> None:
    """Serve conversations to clients of OpenAI and Anthropic over HTTP, all within one memory limit.

    API keys come from KVKEEP_API_KEYS (separated by commas) and from --keys. A server that other machines can reach
    needs a key: without one it makes a key, saves it in the user's data folder and uses it from then on.
    """
    memory.check()
    model.check()
    for package in ("uvicorn", "fastapi", "prometheus_client"):
        optional(package, "serve")
    processes.check(memory, network, limits, store)
    grace = GRACE_S if limits.grace is None else limits.grace
    address = Address(network.host, network.port, https(network.certificate, network.private_key))
    keys, access = _access(network.keys, address)

    with ExitStack() as stack:
        server = None
        if processes.replicas is None:
            from kvkeep.cli.serve.process import listening, serve_here

            # before the imports below, which take seconds
            server = stack.enter_context(listening(address, grace, limits.waiting))
            note(f"{server.url} listens; requests wait until the model is loaded")
        conversations = memory.conversations
        with startup():
            folder = store.folder()
            given: dict[str, Any] = {
                **vars(model), **vars(memory), **vars(network), **vars(limits), **vars(store),
                "sessions": folder and folder.absolute(),
                "drafts": drafts is options.DraftsOption.copies, "log_requests": log_requests,
            }  # fmt: skip
            service = processes.service(given, memory.cache(), keys)
        saved = store.describe(service)
        if server is None:
            processes.serve(service, conversations, address, grace, saved, access)
        else:
            service.store()
            serve_here(server, service, address, conversations, grace, saved, access)


def _access(file: str | None, address: Address) -> tuple[list[str], str]:
    """Return the keys, and a line that describes who can use the server."""
    from kvkeep.serve.http.keys import kept_key, keys_given

    if keys := keys_given(file):
        return keys, f"{len(keys)} API keys"
    if address.is_local:
        return [], "no API key: only this machine can reach the server"
    key, path, new = kept_key()
    return [key], f"API key: {key if new else 'as before'}  (saved in {path})"
