"""Checkpoints: forms in which entries are stored, and the computation of exact keys and values from them.

K and V of layer l are projections of the residual entering layer l. So "one vector per token" and "one matrix product
per token and layer" are two different checkpoints (KV-Direct's Eqs. 24 and 26 quote the memory of one with the latency
of the other). This package has both, and kinds in between:

* :class:`~kvkeep.stores.checkpoints.entries.EntryCheckpoint` (``kv``): the keys and values themselves, elsewhere.
  Recall is a copy.
* :class:`~kvkeep.stores.checkpoints.residuals.ResidualCheckpoint` (``residual:s``): the residual entering every s-th
  layer. Recall at such a layer is a projection; the layers between are run over all tokens, one layer at a time.
* ``tokens`` has the stride that spans all layers: the residual entering layer 0 follows from the token id.
"""
