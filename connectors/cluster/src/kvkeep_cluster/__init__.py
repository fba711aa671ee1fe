"""A connector of kvkeep for several processes and machines: replicas of the server, and a store in a bucket.

kvkeep finds it by the entry point ``kvkeep.cluster``, which names :class:`~kvkeep_cluster.options.ClusterOptions`
(docs/replicas.md).
"""
