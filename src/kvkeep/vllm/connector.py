"""The connector that vLLM makes: one in its scheduler's process, one in its worker's."""

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

from kvkeep.errors import UsageError
from kvkeep.vllm import pinned
from kvkeep.vllm.behind import Counts, WriteBehind
from kvkeep.vllm.codec import Codec, Coded, Exact, bits_of
from kvkeep.vllm.folder import HEADER, BlockFolder
from kvkeep.vllm.identity import namespace, settings_of, weights_of
from kvkeep.vllm.loading import Loader
from kvkeep.vllm.options import Options
from kvkeep.vllm.pages import Pages
from kvkeep.vllm.plan import Plan, Planner, Save

log = logging.getLogger(__name__)

IDLE_S = 0.005
"""Seconds that a step without tokens waits for blocks: the engine would only ask again."""
HASHES = ("sha256", "sha256_cbor")
"""Of blocks: others are another number in each process, or can be forged."""


@dataclass
class Metadata(KVConnectorMetadata):
    """What the scheduler's side asks of the worker's for a step."""

    plan: Plan


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """What the worker's side tells the scheduler's: the namespace."""

    space: str


@dataclass
class Stats(KVConnectorStats):
    """Blocks since the last interval, by the names of :class:`~kvkeep.vllm.behind.Counts`."""

    data: dict[str, Any] = field(default_factory=lambda: asdict(Counts()))

    def reset(self) -> None:
        """Begin with nothing."""
        self.data = asdict(Counts())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Return the sum of both."""
        return Stats({name: number + other.data[name] for name, number in self.data.items()})

    def reduce(self) -> dict[str, int | float]:
        """Return what is logged."""
        return {f"blocks {name}": number for name, number in self.data.items()}

    def is_empty(self) -> bool:
        """Return whether nothing happened."""
        return not any(self.data.values())


class KeepConnector(KVConnectorBase_V1):
    """Keeps blocks of prompts and answers in a folder, and restores them by prefix: after preemption, for another
    request, and after a restart. Settings: :class:`~kvkeep.vllm.options.Options`.

    Raises UsageError for an engine that it does not understand.
    """

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        if reason := next(_refusals(vllm_config, kv_cache_config), None):
            raise UsageError(f"KeepConnector cannot keep this engine's blocks: {reason}.")
        transfer = vllm_config.kv_transfer_config
        self.options = Options.parse(transfer.kv_connector_extra_config)
        self.folder = BlockFolder(self.options.folder, self.options.quota)
        self.planner: Planner | None = None  # of the scheduler's side
        self.work: _Work | None = None  # of the worker's
        self._space: str | None = None
        self._bad: set[int] = set()
        self._idle = False  # this step computes nothing

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: a block that is not kept costs a hit."""
        return False

    # -- the worker's side ----------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Take the tensors of vLLM's cache. Raises UsageError where their blocks are not those of the scheduler."""
        if any(len(tensor) != self._kv_cache_config.num_blocks for tensor in kv_caches.values()):
            raise UsageError("KeepConnector cannot keep this engine's blocks: its kernels divide them.")
        self.work = _Work(self._vllm_config, self.options, self.folder, kv_caches)
        self._space = namespace(_facts(self._vllm_config, self.options, self.work.pages))
        log.info(
            "KeepConnector keeps blocks of %d bytes as %s in '%s/%s', %d bytes at most.",
            self.work.pages.nbytes, self.options.codec, self.folder.folder, self._space, self.folder.quota,
        )  # fmt: skip

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return the namespace, for the scheduler's side."""
        return None if self._space is None else Handshake(self._space)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin to load blocks; the step does not wait for them."""
        assert self.work is not None
        self._idle = forward_context.attn_metadata is None
        for load in self._asked().loads:
            self.work.loader.start(load)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is not in a step while its blocks are loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: blocks are copied when the step is over."""

    def wait_for_save(self) -> None:
        """Copy the blocks that this step filled, and queue them."""
        assert self.work is not None
        asked = self._asked()
        for save in asked.saves:
            self.work.save(save)
        for use in asked.uses:
            self.work.behind.use(use)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose blocks were loaded; with them belongs what is asked for next."""
        assert self.work is not None
        done, self._bad = self.work.loader.take(IDLE_S if self._idle else 0.0)
        return None, done or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the cache's blocks that are not what they should be."""
        bad, self._bad = self._bad, set()
        return bad

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what happened since it was last asked."""
        return None if self.work is None else self.work.news()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Return the statistics of :meth:`get_kv_connector_stats`, which came from another process."""
        return Stats() if data is None else Stats(data)

    def shutdown(self) -> None:
        """Write what is queued."""
        if self.work is not None:
            self.work.close()

    def _asked(self) -> Plan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Metadata)
        return metadata.plan

    # -- the scheduler's side -------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Take the namespace from the worker's side."""
        (told,) = metadata.values()
        assert isinstance(told, Handshake)
        transfer, size = self._vllm_config.kv_transfer_config, self._vllm_config.cache_config.block_size
        self.planner = Planner(
            told.space, size, self.folder.has, loads=transfer.is_kv_consumer, saves=transfer.is_kv_producer
        )

    def on_new_request(self, request: Any) -> None:
        """Take note of a request."""
        if self.planner is not None:
            self.planner.begin(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded, which is done between steps."""
        found = 0 if self.planner is None else self.planner.found(request, num_computed_tokens)
        return found, found > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Take note of the blocks of a request that is let in."""
        if self.planner is not None:
            self.planner.admit(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return what this step loads and saves."""
        if self.planner is None:
            return Metadata(Plan())
        state = scheduler_output.kv_connector_block_state

        def blocks_of(request_id: str) -> list[int] | None:
            found = None if state is None else state.get_block_ids(request_id)
            return None if found is None else found[0]

        return Metadata(self.planner.step(scheduler_output.num_scheduled_tokens.items(), blocks_of))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks were copied when they were full."""
        if self.planner is not None:
            self.planner.end(request.request_id)
        return False, None

    def reset_cache(self) -> bool | None:
        """Remove all blocks of this namespace, and go on in one of this process: the weights may be others now."""
        if self.planner is not None:
            self.folder.clear(self.planner.space)
            self.planner.renew(f"{self.planner.space.partition('/')[0]}/since-{os.urandom(8).hex()}")
        return True


class _Work:
    """What the worker's side has."""

    def __init__(self, config: Any, options: Options, folder: BlockFolder, caches: dict[str, Tensor]) -> None:
        self.folder, self.pages, self.counts, self._told = folder, Pages(caches), Counts(), Counts()
        codec = _codec(config, options, self.pages)
        options.check(self.pages.nbytes, HEADER.size + codec.nbytes)
        self.behind = WriteBehind(folder, codec.encode, options.queue, self.counts)
        self.loader = Loader(folder, codec, self.pages, self.counts)

    def save(self, save: Save) -> None:
        """Queue the blocks of a request that are not there."""
        for name, block in zip(save.names, save.blocks, strict=True):
            if not self.folder.has(name):
                self.behind.offer(name, self.pages.nbytes, partial(self.pages.read, block))
        self.behind.use(save)

    def news(self) -> Stats | None:
        """Return what happened since it was last asked."""
        counts, told = asdict(self.counts), asdict(self._told)
        self._told = Counts(**counts)
        new = Stats({name: number - told[name] for name, number in counts.items()})
        return None if new.is_empty() else new

    def close(self) -> None:
        """End both threads; what is queued is written."""
        self.loader.close()
        self.behind.close()


def _refusals(config: Any, cache: Any) -> Iterator[str]:
    """Yield reasons why an engine's blocks cannot be kept."""
    transfer, parallel = config.kv_transfer_config, config.parallel_config
    if moved := pinned.moved():
        yield f"it is written for vLLM {pinned.PIN}, and in {vllm.__version__} {moved[0]}"
    if not current_platform.is_cpu():
        yield "it was run on the CPU alone, and this is another device"
    if parallel.world_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield "a model that is split over processes (tensor, pipeline or context parallel) is not supported"
    if parallel.decode_context_parallel_size > 1:
        yield "a context that is split over processes is not supported"
    if config.speculative_config is not None:
        yield "speculative decoding is not supported, as drafts have entries of their own"
    if transfer.kv_load_failure_policy != "recompute":
        yield (
            "a damaged block has to be computed again, and not to fail its request; add "
            '"kv_load_failure_policy": "recompute" to the configuration of the transfer'
        )
    if config.cache_config.prefix_caching_hash_algo not in HASHES:
        yield f"blocks have to be called by {' or '.join(HASHES)} (--prefix-caching-hash-algo)"
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    layers = [
        layer
        for spec in specs
        for layer in (spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec])
    ]
    if len(specs) != 1 or not all(isinstance(layer, FullAttentionSpec) and not layer.non_causal for layer in layers):
        yield "it needs layers that all keep all entries"


def _codec(config: Any, options: Options, pages: Pages) -> Codec:
    bits = bits_of(options.codec)
    if not bits:
        return Exact(pages.nbytes)
    isa = _isa(config, pages)
    if isa is None:
        raise UsageError("This attention's keys and values are not understood; use codec 'exact'.")

    def store(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
        slots = torch.arange(len(keys))
        cpu_attn_reshape_and_cache(keys, values, key_cache[None], value_cache[None], slots, isa)

    return Coded(bits, pages, store)


def _isa(config: Any, pages: Pages) -> str | None:
    """Return what vLLM calls the order of entries in a block on this processor, None where it does not say."""
    layers = config.compilation_config.static_forward_context
    found = {getattr(layers.get(name), "isa", None) for name in pages.names}
    return found.pop() if len(found) == 1 else None


def _facts(config: Any, options: Options, pages: Pages) -> dict[str, Any]:
    """Return all that blocks depend on besides their tokens and salts."""
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
            for name, tensor in zip(pages.names, pages.tensors, strict=True)
        ],
        "order": _isa(config, pages),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "compiled": str(config.compilation_config.mode),
        "codec": options.codec,
    }
