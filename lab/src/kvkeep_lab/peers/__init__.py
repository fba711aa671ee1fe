"""Implementations by others, measured like kvkeep's own methods: one file for each.

Tasks, experiments and stores do not distinguish them: a peer is named where a method is, and measured by the same
:class:`~kvkeep_lab.subject.Subject`. Names begin with ``stock-`` for the caches that come with transformers beside its
default (``stock``), with ``peer-`` for what does the reading itself.
"""

from __future__ import annotations

from kvkeep.policies.specs import build
from kvkeep_lab.peers.base import Peer, PeerReader
from kvkeep_lab.peers.kvpress import Kvpress
from kvkeep_lab.peers.llmlingua import LLMLingua
from kvkeep_lab.peers.stock import Offloaded, Static, StockQuantised

PEERS: dict[str, type[Peer]] = {
    "stock-static": Static,
    "stock-offloaded": Offloaded,
    "stock-quantized": StockQuantised,
    "peer-kvpress": Kvpress,
    "peer-llmlingua": LLMLingua,
}
"""The peers by name."""

__all__ = ["PEERS", "Peer", "PeerReader", "peer_of"]


def peer_of(method: str) -> Peer | None:
    """Return the peer that ``method`` names, with parameters after a colon (``stock-quantized:2``), or None where it is
    a method of kvkeep's. Raises UsageError for an unknown peer or parameter."""
    return build("peer", method, PEERS) if method.startswith(("stock-", "peer-")) else None
