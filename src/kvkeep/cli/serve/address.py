"""The address of a server: host, port, and files for HTTPS."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvkeep.errors import UsageError, reason_of


@dataclass(frozen=True)
class Address:
    """The address on which a server listens."""

    host: str
    """A network address or a host name."""
    port: int
    """Port; 0 for any free port."""
    tls: Mapping[str, str] = field(default_factory=dict)
    """uvicorn's options for HTTPS; empty for HTTP."""

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def local_host(self) -> str:
        """The host in URLs on this machine: a loopback address if the server listens on all addresses."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)
        return f"[{host}]" if ":" in host else host

    @property
    def is_any(self) -> bool:
        """Whether the server listens on all addresses of this machine."""
        return self.local_host.strip("[]") != self.host

    def url(self, port: int) -> str:
        """Return the server's URL on this machine. port: the port that it got."""
        return f"http{'s' if self.tls else ''}://{self.local_host}:{port}"

    def socket(self) -> socket.socket:
        """Return a socket bound to this address. Raises UsageError if that fails."""
        made = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((self.host, self.port))
        except OSError as error:
            made.close()
            raise UsageError(
                f"The server cannot listen on {self.host}:{self.port}: {reason_of(error)}; choose another --port or "
                "--host."
            ) from None
        return made


def https(certificate: str | None, private_key: str | None) -> dict[str, str]:
    """Return uvicorn's options for HTTPS; empty without files. Raises UsageError for unusable files."""
    if certificate is None and private_key is None:
        return {}
    if certificate is None or private_key is None:
        raise UsageError("HTTPS needs both --certificate and --private-key; give both.")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, private_key, password="")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        raise UsageError(f"'{certificate}' with '{private_key}' cannot be used for HTTPS: {reason}.") from error
    return {"ssl_certfile": certificate, "ssl_keyfile": private_key}
