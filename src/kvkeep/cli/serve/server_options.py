"""The options of ``kvkeep serve``, grouped by subject."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from kvkeep.budget import bytes_of, size
from kvkeep.cli import options
from kvkeep.cli.cache_options import AUTO, CacheOptions
from kvkeep.errors import UsageError
from kvkeep.plugins import each_plugin
from kvkeep.policies.names import checked_pin

if TYPE_CHECKING:
    from kvkeep.cli.serve.address import Address
    from kvkeep.serve.service import Service

GRACE_S = 10.0
"""Default seconds for running answers to finish."""


Quota = Annotated[
    str | None,
    Option(
        help="Maximum size of the stored blocks (10GB); the blocks that are worth the least are removed.",
        show_default="2GB",
    ),
]
Keys = Annotated[str | None, Option(metavar="FILE", help="File of API keys, one per line; '#' starts a comment.")]


class Beyond(StrEnum):
    """What a session does beyond the model's positions."""

    endless = "endless"


@dataclass(frozen=True)
class ConversationOptions:
    """Memory of all conversations, and their default cache."""

    memory: Annotated[
        str | None,
        Option(
            help="Memory for all conversations together (512MB).",
            show_default="enough for --conversations, at most a quarter of the free memory",
        ),
    ] = None
    method: Annotated[
        str | None,
        Option(
            "--method",
            "-x",
            help="Default cache method of a session ('kvkeep methods' lists them).",
            show_default="kv-direct with a budget; without, full if it fits, else kv-direct",
        ),
    ] = None
    budget: Annotated[
        str | None,
        Option(
            "--budget",
            "-b",
            help="Default cache budget of a session: entries per layer (512), bytes (64MB), a share (25%), or auto.",
        ),
    ] = None
    conversations: Annotated[
        int,
        Option(
            min=1, help="Number of conversations to plan for, if --memory, or both --method and --budget, are left out."
        ),
    ] = 8
    as_sent: Annotated[
        bool,
        Option(
            "--as-sent",
            help="Leave lines of a system prompt that change with each session (a date, a header) where they are.",
        ),
    ] = False

    def check(self) -> None:
        """Check the options as far as possible without torch. Raises UsageError or BudgetError."""
        CacheOptions(self.method, self.budget).check()
        if self.memory is not None:
            bytes_of(self.memory)

    def cache(self) -> dict[str, str]:
        """Return the given method and budget; a budget of ``auto`` is that of a server without either."""
        given = {"method": self.method, "budget": None if self.budget == AUTO else self.budget}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class MemoryOptions(ConversationOptions):
    """Also what conversations do beyond the model's positions."""

    at_end: Annotated[
        Beyond | None,
        Option(
            "--at-end",
            help="When a session fills the model's context: continue with the method endless.",
            show_default="longer prompts are refused",
        ),
    ] = None
    capacity: Annotated[
        int | None,
        Option(
            min=1,
            help="Maximum number of older tokens that a session of endless stores; its oldest ones are dropped.",
            show_default="unlimited",
        ),
    ] = None
    pin: options.PinOption = None

    def check(self) -> None:
        """Check the options as far as possible without torch. Raises UsageError or BudgetError."""
        super().check()
        if self.pin is not None:
            checked_pin(self.pin)


@dataclass(frozen=True)
class NetworkOptions:
    """The address of the server, and access to it."""

    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8000
    certificate: Annotated[str | None, Option(metavar="FILE", help="For HTTPS: the certificate (PEM).")] = None
    private_key: Annotated[str | None, Option(metavar="FILE", help="For HTTPS: its private key (PEM).")] = None
    keys: Keys = None
    cors: Annotated[
        list[str] | None,
        Option(metavar="ORIGIN", help="Allow web pages of this origin (https://chat.example) to use it; repeatable."),
    ] = None


@dataclass(frozen=True)
class LimitOptions:
    """Limits of requests and answers."""

    waiting: Annotated[int, Option(min=1, help="Maximum number of requests in the queue.")] = 64
    answers: Annotated[
        int, Option(min=1, help="Maximum number of concurrent answers per key, including those in the queue.")
    ] = 64
    time: Annotated[
        float | None, Option(min=0.1, help="Seconds after which an answer is cut off.", show_default="no limit")
    ] = None
    grace: Annotated[
        float | None,
        Option(
            min=0, help="Seconds that running answers get to finish after SIGTERM.", show_default=f"{GRACE_S:g} seconds"
        ),
    ] = None


@dataclass(frozen=True)
class StoreOptions:
    """The store of conversations: its folder, size and lifetime."""

    sessions: options.Sessions = None
    quota: Quota = None
    age: Annotated[
        float | None,
        Option(min=0, help="Days after which unused blocks and sessions are removed.", show_default="no limit"),
    ] = None
    private: Annotated[bool, Option("--private", help="Keep conversations in memory only.")] = False

    def folder(self) -> Path | None:
        """Return the folder of the store; None with --private. Raises UsageError for --private with another option of
        the store."""
        from kvkeep.blocks.store import store_folder

        if not self.private:
            return store_folder(self.sessions)
        for name in ("sessions", "quota", "age"):
            if getattr(self, name) is not None:
                raise UsageError(f"--private keeps conversations in memory only; leave it or --{name} out.")
        return None

    def describe(self, service: Service) -> str:
        """Return a line on what is stored where."""
        if service.sessions is None:
            return "conversations are kept in memory only"
        age = "" if self.age is None else f", for {self.age:g} days without use"
        where = f"conversations are stored in {service.place}, at most {size(service.quota)}{age}"
        return f"{where} (--private keeps them in memory)"


CLUSTER = "kvkeep.cluster"
"""The group of the entry point that names the :class:`ProcessOptions` of the connector ``kvkeep-cluster``."""


@dataclass(frozen=True)
class ProcessOptions:
    """More processes than one, or a store that is no folder: what the connector ``kvkeep-cluster`` does. Its subclass
    has further options."""

    replicas: Annotated[
        str | None,
        Option(metavar="N", help="Number of server processes (with kvkeep-cluster).", show_default="this process only"),
    ] = None
    bucket: Annotated[
        str | None, Option(metavar="URL", help="Bucket that several servers share (with kvkeep-cluster).")
    ] = None

    def check(self, memory: MemoryOptions, network: NetworkOptions, limits: LimitOptions, store: StoreOptions) -> None:
        """Raise UsageError for incompatible options."""
        for name in ("replicas", "bucket"):
            if getattr(self, name) is not None:
                raise UsageError(
                    f"--{name} needs the connector kvkeep-cluster, which is not installed: pip install "
                    "./connectors/cluster (in a clone of the repository)."
                )

    def service(self, given: Mapping[str, Any], cache: Mapping[str, Any], keys: Sequence[str]) -> Service:
        """Return the options of a process (:meth:`kvkeep.serve.service.Service.parse`)."""
        from kvkeep.serve.service import Service

        return Service.parse(given, cache, keys)

    def serve(
        self, service: Service, conversations: int, address: Address, grace: float, saved: str, access: str
    ) -> None:
        """Run the processes of :attr:`replicas`. saved, access: lines to print about the store and keys."""
        raise NotImplementedError


def process_options() -> type[ProcessOptions]:
    """Return the options of the connector if it is installed, else those that say how to install it."""
    found = [ProcessOptions]
    each_plugin(CLUSTER, lambda _, options: found.append(options))
    return found[-1]
