"""The contracts: the parts of a cache layer, and their promises to each other.

A full layer within a budget needs three answers. Each comes from one part:

* Which entries are evicted? A :class:`Selector` ranks the resident entries.
* How are they stored? A :class:`Fate` makes the layer's :class:`EvictedStore`.
* How are they attended? A :class:`Recall` makes the layer's :class:`Reader`, which computes its attention.

Selectors, fates and recalls are frozen dataclasses of parameters, registered by name (:func:`kvkeep.register`). The
objects that they make hold the state of one layer of one cache. Each contract is a file, together with its inputs;
:mod:`.entries` defines the types that all parts exchange. Parts ask each other for capabilities (flags), never for a
class.

Tensors are by *lane*: one KV head of one row of the batch, lane = row * kv_heads + head. A *slot* is a place in the
sequence, padding included, from 0.
"""
