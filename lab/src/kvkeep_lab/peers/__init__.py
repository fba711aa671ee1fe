"""Implementations by others, measured like kvkeep's methods. Each is a module.

A task, an experiment or a store accepts the name of a peer in place of a method.
:class:`~kvkeep_lab.subject.Subject` measures both. Names of transformers' caches begin with ``stock-``; its default
cache is ``stock``. Names of implementations that read the text themselves begin with ``peer-``, and names of those that
shorten it for a full cache with ``prompt-``.
"""

from __future__ import annotations

from kvkeep.policies import registry
from kvkeep.policies.specs import build
from kvkeep_lab.peers.base import Peer, PeerReader
from kvkeep_lab.peers.kvpress import KvpressPeer
from kvkeep_lab.peers.llmlingua import LLMLingua
from kvkeep_lab.peers.shorteners import Retrieved, Shortener, Summarised, Truncated
from kvkeep_lab.peers.stock import Offloaded, Static, StockQuantised

PEERS: dict[str, type[Peer]] = {
    "stock-static": Static,
    "stock-offloaded": Offloaded,
    "stock-quantized": StockQuantised,
    "peer-kvpress": KvpressPeer,
    "peer-llmlingua": LLMLingua,
    "prompt-newest": Truncated,
    "prompt-bm25": Retrieved,
    "prompt-summary": Summarised,
}
"""The peers by name."""

__all__ = ["PEERS", "Peer", "PeerReader", "Shortener", "peer_of"]


def peer_of(method: str) -> Peer | None:
    """Return the peer that ``method`` names, with parameters after a colon (``stock-quantized:2``), or None for a
    method of kvkeep. Raises UsageError for an unknown peer or parameter."""
    return build("peer", method, PEERS) if method.startswith(registry.PEERS) else None
