"""Checkpoints: what entries are kept as, and how exact keys and values come back from it.

K and V of layer l are projections of the residual entering layer l, so "one vector per token" and "one
matrix product per token and layer" are two different checkpoints (KV-Direct's Eqs. 24 and 26 quote one's
memory with the other's latency). Both are here, and what lies between:

* :class:`~kvkeep.stores.checkpoints.entries.EntryCheckpoint` (``kv``): the keys and values themselves, elsewhere.
  Recall is a copy.
* :class:`~kvkeep.stores.checkpoints.residuals.ResidualCheckpoint` (``residual:s``): the residual entering every s-th
  layer. Recall at such a layer is a projection; the layers between are run over all tokens, one layer at a time.
* ``tokens`` is the stride that spans all layers: the residual entering layer 0 is its token id.
"""
