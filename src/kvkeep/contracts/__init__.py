"""The contracts: what a cache layer is made of, and what its parts promise each other.

A layer of a full budget needs three answers, and each is a part:

* Which entries are evicted? A :class:`Selector` ranks the resident entries.
* What is stored of them? A :class:`Fate` makes the layer's :class:`EvictedStore`.
* How are they attended? A :class:`Recall` makes the layer's :class:`Reader`, which computes its attention.

Selectors, fates and recalls are frozen dataclasses of parameters, registered by name (:func:`kvkeep.register`). What
they make holds the state of one layer of one cache. A file has one of them, with what it is handed; :mod:`.entries` has
what all hand each other. Parts ask each other for capabilities (flags), never for a class.

Tensors are by *lane*: one KV head of one row of the batch, lane = row * kv_heads + head. A *slot* is a place in the
sequence, padding included, from 0.
"""
