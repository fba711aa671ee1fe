"""The parts of vLLM that the connector uses: the supported version, and every name, public or private.

vLLM calls its interface of connectors experimental. The connector refuses to start if :func:`moved` finds a difference.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import reduce
from importlib import import_module
from typing import Any

PIN = "0.32.0"
"""Version of vLLM with which the connector is tested."""

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"

CALLS: dict[str, str] = {
    # called by vLLM, on the scheduler's side and on the worker's
    f"{_V1}.base:KVConnectorBase_V1.__init__": "self vllm_config role kv_cache_config",
    f"{_V1}.base:KVConnectorBase_V1.on_new_request": "self request",
    f"{_V1}.base:KVConnectorBase_V1.get_num_new_matched_tokens": "self request num_computed_tokens",
    f"{_V1}.base:KVConnectorBase_V1.update_state_after_alloc": "self request blocks num_external_tokens",
    f"{_V1}.base:KVConnectorBase_V1.build_connector_meta": "self scheduler_output",
    f"{_V1}.base:KVConnectorBase_V1.request_finished": "self request block_ids",
    f"{_V1}.base:KVConnectorBase_V1.reset_cache": "self",
    f"{_V1}.base:KVConnectorBase_V1.get_handshake_metadata": "self",
    f"{_V1}.base:KVConnectorBase_V1.set_xfer_handshake_metadata": "self metadata",
    f"{_V1}.base:KVConnectorBase_V1.register_kv_caches": "self kv_caches",
    f"{_V1}.base:KVConnectorBase_V1.start_load_kv": "self forward_context kwargs",
    f"{_V1}.base:KVConnectorBase_V1.wait_for_layer_load": "self layer_name",
    f"{_V1}.base:KVConnectorBase_V1.save_kv_layer": "self layer_name kv_layer attn_metadata kwargs",
    f"{_V1}.base:KVConnectorBase_V1.wait_for_save": "self",
    f"{_V1}.base:KVConnectorBase_V1.get_finished": "self finished_req_ids",
    f"{_V1}.base:KVConnectorBase_V1.get_block_ids_with_load_errors": "self",
    f"{_V1}.base:KVConnectorBase_V1.get_kv_connector_stats": "self",
    f"{_V1}.base:KVConnectorBase_V1.build_kv_connector_stats": "data",
    f"{_V1}.base:KVConnectorBase_V1.shutdown": "self",
    # called by the connector
    f"{_V1}.base:KVConnectorBase_V1._get_connector_metadata": "self",
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks.get_block_ids": "self allow_none group_ids",
    "vllm.v1.core.sched.output:KVConnectorBlockState.get_block_ids": "self req_id",
    "vllm._custom_ops:cpu_attn_reshape_and_cache": (
        "key value key_cache value_cache slot_mapping isa k_scale v_scale kv_cache_dtype"
    ),
}
"""Functions by module and name, with their parameters."""

FIELDS: dict[str, str] = {
    f"{_V1}.base:KVConnectorBase_V1": "_cache_hit_source requires_kv_delivery _vllm_config _kv_cache_config",
    f"{_V1}.base:KVConnectorRole": "",
    f"{_V1}.base:KVConnectorMetadata": "",
    f"{_V1}.base:KVConnectorHandshakeMetadata": "",
    f"{_V1}.metrics:KVConnectorStats": "data reset aggregate reduce is_empty to_dict",
    "vllm.v1.metrics.cache_hit_source:CacheHitSource": "DISK",
    "vllm.v1.core.sched.output:SchedulerOutput": "num_scheduled_tokens kv_connector_block_state",
    "vllm.forward_context:ForwardContext": "attn_metadata",
    "vllm.v1.request:Request": (
        "request_id block_hashes num_tokens num_computed_tokens num_preemptions cache_salt lora_request mm_features "
        "prompt_embeds resumable"
    ),
    "vllm.v1.kv_cache_interface:KVCacheConfig": "kv_cache_groups num_blocks",
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": "kv_cache_spec",
    "vllm.v1.kv_cache_interface:FullAttentionSpec": "block_size non_causal",
    "vllm.v1.kv_cache_interface:UniformTypeKVCacheSpecs": "kv_cache_specs",
    "vllm.config:VllmConfig": (
        "cache_config compilation_config kv_transfer_config load_config model_config parallel_config speculative_config"
    ),
    "vllm.config:CacheConfig": "block_size cache_dtype prefix_caching_hash_algo",
    "vllm.config:CompilationConfig": "mode static_forward_context",
    "vllm.config:KVTransferConfig": ("kv_connector_extra_config kv_load_failure_policy is_kv_producer is_kv_consumer"),
    "vllm.config:LoadConfig": "download_dir load_format",
    "vllm.config:ModelConfig": "model revision dtype quantization hf_config max_model_len",
    "vllm.config:ParallelConfig": "world_size prefill_context_parallel_size decode_context_parallel_size",
    "vllm.platforms.interface:Platform": "is_cpu",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder": "_set_isa_to_layers",  # layer.isa
}
"""Attributes of classes: fields, methods, or set by ``__init__``."""


def moved() -> list[str]:
    """Return the differences from the installed vLLM, one line each."""
    return [*_moved_calls(), *_moved_fields()]


def _moved_calls() -> Iterator[str]:
    for name, listed in CALLS.items():
        try:
            found = " ".join(one for one in inspect.signature(_named(name)).parameters)
        except (ImportError, AttributeError) as error:
            yield f"{name}: {error}"
            continue
        if found != listed:
            yield f"{name} takes ({found}), not ({listed})"


def _moved_fields() -> Iterator[str]:
    for name, listed in FIELDS.items():
        try:
            owner = _named(name)
        except (ImportError, AttributeError) as error:
            yield f"{name}: {error}"
            continue
        made = owner.__init__.__code__.co_names if inspect.isfunction(owner.__init__) else ()
        there = {*dir(owner), *getattr(owner, "__dataclass_fields__", ()), *made}
        there |= {one for base in owner.__mro__ for one in getattr(base, "__annotations__", ())}
        yield from (f"{name} has no {field}" for field in listed.split() if field not in there)


def _named(name: str) -> Any:
    module, _, within = name.partition(":")
    return reduce(getattr, within.split("."), import_module(module))
