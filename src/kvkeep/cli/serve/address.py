"""Where a server listens: an address, a port, and files for HTTPS."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvkeep.errors import UsageError


@dataclass(frozen=True)
class Address:
    """host: an address or a name. port: 0 for one that is free. tls: what uvicorn is told for HTTPS; nothing for
    HTTP."""

    host: str
    port: int
    tls: Mapping[str, str] = field(default_factory=dict)

    @property
    def own(self) -> bool:
        """Whether only this machine reaches it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def near(self) -> str:
        """How a browser of this machine names the host, also where that is every address of it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)
        return f"[{host}]" if ":" in host else host

    @property
    def everywhere(self) -> bool:
        """Whether other machines have to name another host than this one does."""
        return self.near.strip("[]") != self.host

    def url(self, port: int) -> str:
        """Return the server's address for a browser of this machine, at the port that it got."""
        return f"http{'s' if self.tls else ''}://{self.near}:{port}"

    def socket(self) -> socket.socket:
        """Return a socket that is bound to it. Raises UsageError where nothing can listen."""
        made = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((self.host, self.port))
        except OSError as error:
            made.close()
            reason = (error.strerror or str(error)).lower()
            raise UsageError(
                f"Nothing can listen at {self.host}:{self.port}: {reason}; take another --port or --host."
            ) from None
        return made


def https(certificate: str | None, private_key: str | None) -> dict[str, str]:
    """Return what uvicorn is told for HTTPS, and nothing for HTTP. Raises UsageError for files that do not do."""
    if certificate is None and private_key is None:
        return {}
    if certificate is None or private_key is None:
        raise UsageError("HTTPS takes both --certificate and --private-key.")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, private_key, password="")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        raise UsageError(f"'{certificate}' with '{private_key}' cannot be used for HTTPS: {reason}.") from error
    return {"ssl_certfile": certificate, "ssl_keyfile": private_key}
