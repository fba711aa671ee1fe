"""The connector. vLLM makes one in its scheduler and one in its worker."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import vllm
from torch import Tensor
from vllm._custom_ops import cpu_attn_reshape_and_cache
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvkeep.blocks.folder import BlockFolder, encode
from kvkeep.errors import UsageError
from kvkeep_vllm import pinned
from kvkeep_vllm.codec import BlockCodec, ExactCodec, QuantizedCodec, bits_of
from kvkeep_vllm.identity import namespace, settings_of, weights_of
from kvkeep_vllm.loader import BlockLoader
from kvkeep_vllm.options import ConnectorOptions
from kvkeep_vllm.tensors import BlockTensors
from kvkeep_vllm.transfers import Save, TransferPlanner, Transfers
from kvkeep_vllm.writer import BlockWriter, Counts

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.005
"""Seconds that a step without tokens waits for loads, instead of polling."""
HASHES = ("sha256", "sha256_cbor")
"""Accepted block hashes. Others differ by process or can be forged."""


@dataclass
class Metadata(KVConnectorMetadata):
    """Work of the worker's side in one step, planned by the scheduler's side."""

    transfers: Transfers


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """The namespace, from the worker's side to the scheduler's."""

    space: str


@dataclass
class Stats(KVConnectorStats):
    """Counts of blocks in one interval of the log; the fields are those of :class:`~kvkeep_vllm.writer.Counts`."""

    data: dict[str, Any] = field(default_factory=lambda: asdict(Counts()))

    def reset(self) -> None:
        """Set all numbers to 0."""
        self.data = asdict(Counts())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Return the sum of both."""
        return Stats({name: number + other.data[name] for name, number in self.data.items()})

    def reduce(self) -> dict[str, int | float]:
        """Return the numbers to log."""
        return {f"blocks {name}": number for name, number in self.data.items()}

    def is_empty(self) -> bool:
        """Return whether all numbers are 0."""
        return not any(self.data.values())


class KeepConnector(KVConnectorBase_V1):
    """Saves blocks of prompts and answers in a folder, and restores them by prefix: after a preemption, for another
    request, and after a restart. Settings: :class:`~kvkeep_vllm.options.ConnectorOptions`.

    Raises UsageError for an engine that is not supported.
    """

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        if reason := next(_refusals(vllm_config, kv_cache_config), None):
            raise UsageError(f"KeepConnector does not support this engine: {reason}.")
        transfer = vllm_config.kv_transfer_config
        self.options = ConnectorOptions.parse(transfer.kv_connector_extra_config)
        self.folder = BlockFolder(self.options.folder, self.options.quota)
        self.planner: TransferPlanner | None = None  # on the scheduler's side
        self.work: _Work | None = None  # on the worker's side
        self._space: str | None = None
        self._bad: set[int] = set()
        self._idle = False  # the current step computes nothing

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: vLLM need not wait for saves."""
        return False

    # -- the worker's side ----------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Receive the tensors of vLLM's cache. Raises UsageError if their blocks are not the scheduler's."""
        if any(len(tensor) != self._kv_cache_config.num_blocks for tensor in kv_caches.values()):
            raise UsageError("KeepConnector does not support this engine: its kernels divide blocks.")
        self.work = _Work(self._vllm_config, self.options, self.folder, kv_caches)
        self._space = namespace(_facts(self._vllm_config, self.options, self.work.tensors))
        log.info(
            "KeepConnector: blocks of %d bytes, codec %s, folder '%s/%s', quota %d bytes.",
            self.work.tensors.nbytes, self.options.codec, self.folder.folder, self._space, self.folder.quota,
        )  # fmt: skip

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return the namespace, for the scheduler's side."""
        return None if self._space is None else Handshake(self._space)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the loads; the step does not wait for them."""
        assert self.work is not None
        self._idle = forward_context.attn_metadata is None
        for load in self._transfers().loads:
            self.work.loader.start(load)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: no step includes a request whose blocks are being loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: blocks are copied after the step."""

    def wait_for_save(self) -> None:
        """Copy the blocks that the step filled, and queue them."""
        assert self.work is not None
        transfers = self._transfers()
        for save in transfers.saves:
            self.work.save(save)
        for use in transfers.uses:
            self.work.writer.use(use)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose loads ended. vLLM then asks for :meth:`get_block_ids_with_load_errors`."""
        assert self.work is not None
        done, self._bad = self.work.loader.finished(IDLE_WAIT_S if self._idle else 0.0)
        return None, done or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the cache's blocks that could not be restored."""
        bad, self._bad = self._bad, set()
        return bad

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the counts since the last call."""
        return None if self.work is None else self.work.new_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Return statistics from the numbers of :meth:`get_kv_connector_stats` in another process."""
        return Stats() if data is None else Stats(data)

    def shutdown(self) -> None:
        """Write queued blocks and end the threads."""
        if self.work is not None:
            self.work.close()

    def _transfers(self) -> Transfers:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Metadata)
        return metadata.transfers

    # -- the scheduler's side -------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Receive the namespace from the worker's side."""
        (handshake,) = metadata.values()
        assert isinstance(handshake, Handshake)
        transfer, size = self._vllm_config.kv_transfer_config, self._vllm_config.cache_config.block_size
        self.planner = TransferPlanner(
            handshake.space, size, self.folder.has, loads=transfer.is_kv_consumer, saves=transfer.is_kv_producer
        )

    def on_new_request(self, request: Any) -> None:
        """Track a new request."""
        if self.planner is not None:
            self.planner.begin(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the number of tokens that can be loaded, and whether vLLM waits for them between steps."""
        found = 0 if self.planner is None else self.planner.found(request, num_computed_tokens)
        return found, found > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the load of an admitted request."""
        if self.planner is not None:
            self.planner.admit(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the loads and saves of the step."""
        if self.planner is None:
            return Metadata(Transfers())
        state = scheduler_output.kv_connector_block_state

        def blocks_of(request_id: str) -> list[int] | None:
            found = None if state is None else state.get_block_ids(request_id)
            return None if found is None else found[0]

        return Metadata(self.planner.step(scheduler_output.num_scheduled_tokens.items(), blocks_of))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Stop tracking a request; each full block was copied already."""
        if self.planner is not None:
            self.planner.end(request.request_id)
        return False, None

    def reset_cache(self) -> bool | None:
        """Remove all blocks of the namespace, and continue in a new namespace of this process: the weights may have
        changed."""
        if self.planner is not None:
            for name in self.folder.names():
                if f"{name.space}/".startswith(f"{self.planner.space}/"):
                    self.folder.remove(name)
            self.planner.renew(f"{self.planner.space.partition('/')[0]}/since-{os.urandom(8).hex()}")
        return True


class _Work:
    """The worker's side: tensors, and the threads that load and write."""

    def __init__(self, config: Any, options: ConnectorOptions, folder: BlockFolder, caches: dict[str, Tensor]) -> None:
        self.folder, self.tensors, self.counts, self._reported = folder, BlockTensors(caches), Counts(), Counts()
        codec = _codec(config, options, self.tensors)
        empty = torch.zeros(self.tensors.nbytes, dtype=torch.uint8)
        options.check(len(empty), sum(map(len, encode(64 * "0", codec.encode(empty)))))
        self.writer = BlockWriter(folder, codec.encode, options.queue, self.counts)
        self.loader = BlockLoader(folder, codec, self.tensors, self.counts)

    def save(self, save: Save) -> None:
        """Queue the blocks of a request that the folder lacks."""
        for name, block in zip(save.names, save.blocks, strict=True):
            if not self.folder.has(name):
                self.writer.offer(name, self.tensors.nbytes, partial(self.tensors.read, block), save.names)
        self.writer.use(save)

    def new_stats(self) -> Stats | None:
        """Return the counts since the last call, None if nothing happened."""
        counts, reported = asdict(self.counts), asdict(self._reported)
        self._reported = Counts(**counts)
        new = Stats({name: number - reported[name] for name, number in counts.items()})
        return None if new.is_empty() else new

    def close(self) -> None:
        """Write queued blocks and end both threads."""
        self.loader.close()
        self.writer.close()


def _refusals(config: Any, cache: Any) -> Iterator[str]:
    """Yield the reasons why an engine is not supported."""
    transfer, parallel = config.kv_transfer_config, config.parallel_config
    if moved := pinned.moved():
        yield f"the connector is written for vLLM {pinned.PIN}; in {vllm.__version__}, {moved[0]}"
    if not current_platform.is_cpu():
        yield "only the CPU is supported"
    if parallel.world_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield "the model is split over processes (tensor, pipeline or context parallel)"
    if parallel.decode_context_parallel_size > 1:
        yield "the context is split over processes"
    if config.speculative_config is not None:
        yield "speculative decoding keeps entries of drafts"
    if transfer.kv_load_failure_policy != "recompute":
        yield (
            'a damaged block would fail its request; add "kv_load_failure_policy": "recompute" to kv_transfer_config'
        )
    if config.cache_config.prefix_caching_hash_algo not in HASHES:
        yield f"block hashes must be {' or '.join(HASHES)} (--prefix-caching-hash-algo)"
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    layers = [
        layer
        for spec in specs
        for layer in (spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec])
    ]
    if len(specs) != 1 or not all(isinstance(layer, FullAttentionSpec) and not layer.non_causal for layer in layers):
        yield "all layers must keep all entries"


def _codec(config: Any, options: ConnectorOptions, tensors: BlockTensors) -> BlockCodec:
    bits = bits_of(options.codec)
    if not bits:
        return ExactCodec(tensors.nbytes)
    isa = _isa(config, tensors)
    if isa is None:
        raise UsageError("The layout of this attention's keys and values is unknown; use codec 'exact'.")

    def store(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
        slots = torch.arange(len(keys))
        cpu_attn_reshape_and_cache(keys, values, key_cache[None], value_cache[None], slots, isa)

    return QuantizedCodec(bits, tensors, store)


def _isa(config: Any, tensors: BlockTensors) -> str | None:
    """Return vLLM's name for the order of entries in a block on this processor, None if there is none."""
    layers = config.compilation_config.static_forward_context
    found = {getattr(layers.get(name), "isa", None) for name in tensors.names}
    return found.pop() if len(found) == 1 else None


def _facts(config: Any, options: ConnectorOptions, tensors: BlockTensors) -> dict[str, Any]:
    """Return everything that blocks depend on besides tokens and salt."""
    model, cache = config.model_config, config.cache_config
    return {
        "vllm": vllm.__version__,
        "weights": weights_of(model.model, model.revision, config.load_config.download_dir),
        "loaded": [str(config.load_config.load_format), model.quantization],
        "settings": settings_of(model.hf_config.to_dict(), model.max_model_len),
        "types": [str(model.dtype), cache.cache_dtype],
        "tokens": cache.block_size,
        "hash": cache.prefix_caching_hash_algo,
        "layers": [
            [name, list(tensor.shape[1:]), str(tensor.dtype)]
            for name, tensor in zip(tensors.names, tensors.layers, strict=True)
        ],
        "order": _isa(config, tensors),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "compiled": str(config.compilation_config.mode),
        "codec": options.codec,
    }
