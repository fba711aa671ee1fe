"""A step of a layer: what happens to its entries, as plain data (:mod:`.plan`), and three executors of it.

:mod:`.torch` executes it by plain tensor operations, on any device: the reference and the fallback. :mod:`.native`
hands the same data to the library for CPUs (:mod:`kvkeep.native`), one layer or all layers at a time, for one session
or many; no other module calls the library's attention. :mod:`.triton` runs it by kernels for GPUs. :mod:`.choice` says
which of the two a device has.
"""
