"""The geometry of a model's key/value cache: layers, heads, widths, and bytes per token.

The sizes of the KV-Direct paper (arXiv:2603.19664): Eq. 23 (bytes of keys and values per token), Eq. 24 (bytes of one
residual vector) and Table 1. They are read from a transformers config, so a model can be
sized before any weight is loaded, and equal the bytes of a ``DynamicCache`` of that model.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import get_layer_types_and_kwargs

from kvkeep.errors import UnsupportedModelError, UsageError

TOKEN_ID_BYTES = 4
"""An int32 token id; its position is bookkeeping, counted elsewhere."""

STATE_BYTES = 4
"""Bytes of an element of a recurrence, which transformers computes in float32."""

_KIND_OF_TYPE = {"full_attention": "full", "sliding_attention": "sliding", "hybrid": "full"}
_RECURRENT = ("linear_attention", "conv", "hybrid")
# Families with a misleading config, found by comparing about 120 tiny models with their caches.
_UNTRUE_CONFIGS = {
    "cpmant": "its heads are wider than hidden_size / heads",
    "mimo_v2_flash": "its sliding layers have twice the key/value heads that its config names",
    "openai-gpt": "it has no cache",
    "recurrent_gemma": "its modules hold its recurrent states, and no cache does",
    "xlm": "it has no cache",
}
_SCALES_POSITIONS = ("yarn", "dynamic")
"""Kinds of rotary frequencies whose factor multiplies the positions of a config that may state those before scaling."""
WITHOUT_CACHE = ("moe", "mlp")
"""Kinds of layers that hold nothing of the text."""
_WITHOUT_KEYS = {"shared", "linear_attention", "conv", "mamba", *WITHOUT_CACHE}


@dataclass(frozen=True)
class LayerGeometry:
    """The cached entries of one layer."""

    index: int
    """The layer's number in the decoder."""
    kind: str
    """"full" (every token), "sliding" (the last ``window - 1``), "shared" (another layer's keys and values), or
    transformers' name of any other type: "linear_attention" and "conv" have a recurrent state instead of keys and
    values; bounded methods refuse all others ("chunked_attention", ...)."""
    kv_heads: int
    """Heads that the cache holds; 1 for latent attention."""
    key_dim: int
    """Elements of one key of one head, as cached."""
    value_dim: int
    """Elements of one value of one head, as cached."""
    window: int | None
    """How far back the layer attends, the token itself included; None: it attends to everything."""
    source: int
    """The layer whose keys and values this one reads; the layer itself unless shared."""
    recurrent: bool = field(default=False, repr=False)
    """Whether it has a recurrent state: a short convolution, linear attention, or Mamba; a hybrid layer has one beside
    its keys and values."""
    state_elements: tuple[int, int] | None = field(default=None, repr=False)
    """Elements of the recurrent state of one sequence: the convolution's, in the model's dtype, and the recurrence's,
    in float32. None: it has no state, or the config does not tell."""

    @property
    def owns_entries(self) -> bool:
        """Whether this layer writes keys and values into the cache."""
        return self.source == self.index and self.kind not in _WITHOUT_KEYS

    @property
    def entry_elements(self) -> int:
        """Elements that one token adds to this layer's cache: kv_heads * (key_dim + value_dim), or 0."""
        return self.kv_heads * (self.key_dim + self.value_dim) if self.owns_entries else 0


@dataclass(frozen=True)
class ModelGeometry:
    """The layers of one decoder, in order, and their bytes. Fingerprints are made of its ``repr``."""

    model_type: str
    """transformers' name of the decoder ("llama", "gemma3_text")."""
    hidden_size: int
    """d, the width of the residual stream."""
    layers: tuple[LayerGeometry, ...]
    attention_heads: int
    """Query heads (of the first layer, should they differ)."""
    vocab_size: int
    """Token ids known to the model."""
    max_positions: int | None
    """The context that the model was trained for; None where the config names none."""
    dtype_bytes: int
    """b, bytes per cached element."""
    steady_positions: int | None = field(default=None, repr=False)
    """The number of tokens up to which the rotary frequencies of a text never change; None: they never do. For longer
    texts transformers chooses the frequencies of all tokens of a call by its last one. It is not in ``repr``:
    fingerprints have the settings that it follows from."""

    streams: int = field(default=1, repr=False)
    """The number of residual streams (Gemma 3n has several)."""

    @classmethod
    def of(cls, model: Any) -> ModelGeometry:
        """Read the geometry of a loaded ``model``, whose cached elements have the type of its parameters. Raises as
        :meth:`from_config`."""
        return cls.from_config(model.config, next(model.parameters()).dtype.itemsize)

    @classmethod
    def from_config(cls, config: Any, dtype_bytes: int | None = None) -> ModelGeometry:
        """Read the geometry from a transformers ``config`` of a decoder, or of a wrapper around a text decoder.

        dtype_bytes: bytes per cached element; by default those of ``config.dtype``, or of ``torch.get_default_dtype()``
        where the config names no dtype. Raises UnsupportedModelError for an encoder-decoder, or a config without a
        required field.
        """
        if getattr(config, "is_encoder_decoder", False):
            raise UnsupportedModelError(
                f"'{config.model_type}' is an encoder-decoder; kvkeep bounds the cache of decoder-only models."
            )
        text = config.get_text_config(decoder=True)
        if text.model_type in _UNTRUE_CONFIGS:
            raise UnsupportedModelError(
                f"'{text.model_type}' cannot be sized from its config: {_UNTRUE_CONFIGS[text.model_type]}."
            )
        hidden_size = _need(text, text, "hidden_size")
        _need(text, text, "num_hidden_layers")
        layer_configs, modes = list(text.per_layer_config), getattr(text, "kv_sharing_modes", None) or ()
        shared = {index for index, mode in enumerate(modes) if mode == "reuse"}
        inferred, given = get_layer_types_and_kwargs(text)
        types = list(getattr(text, "layer_types", None) or inferred)
        if "hybrid_sliding" in types or any(one.get("number_of_states", 1) > 1 for one in given):
            raise UnsupportedModelError(
                f"'{text.model_type}' has layers with several convolutions, or with one beside a window, whose states "
                "kvkeep's caches do not hold; use transformers' own cache."
            )
        windows = [one.get("sliding_window") for one in given]
        return cls(
            model_type=text.model_type,
            hidden_size=hidden_size,
            layers=tuple(_layer(text, index, types, shared, windows) for index in range(len(types))),
            attention_heads=_need(text, layer_configs[0], "num_attention_heads"),
            vocab_size=_need(text, text, "vocab_size"),
            max_positions=_max_positions(text),
            dtype_bytes=dtype_bytes or _dtype_bytes(text, config),
            steady_positions=_steady_positions(text),
            streams=getattr(text, "altup_num_inputs", None) or 1,
        )

    def steady(self, tokens: int | None) -> bool:
        """Return whether the rotary frequencies of a text of ``tokens`` tokens are the same however it is cut into
        calls; None: for any text."""
        return self.steady_positions is None or (tokens is not None and tokens <= self.steady_positions)

    @property
    def full_layers(self) -> tuple[LayerGeometry, ...]:
        """Layers that cache every token: those a budget governs."""
        return tuple(layer for layer in self.layers if layer.kind == "full")

    @property
    def sliding_layers(self) -> tuple[LayerGeometry, ...]:
        """Layers that bound themselves to a window."""
        return tuple(layer for layer in self.layers if layer.kind == "sliding")

    @property
    def recurrent_layers(self) -> tuple[LayerGeometry, ...]:
        """Layers with a recurrent state, whose size does not depend on the number of tokens."""
        return tuple(layer for layer in self.layers if layer.recurrent)

    @property
    def unbounded_layers(self) -> tuple[LayerGeometry, ...]:
        """Layers whose state kvkeep neither bounds nor knows to be bounded; methods with a budget refuse the model."""
        known = ("full", "sliding", "shared", *WITHOUT_CACHE)
        return tuple(layer for layer in self.layers if layer.kind not in known and not layer.recurrent)

    @property
    def other_layers(self) -> tuple[LayerGeometry, ...]:
        """Layers whose state is not keys and values alone."""
        return tuple(layer for layer in self.layers if layer in self.unbounded_layers or layer.recurrent)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values per token over all layers, no window reached yet (Eq. 23)."""
        return self.dtype_bytes * sum(layer.entry_elements for layer in self.layers)

    @property
    def full_bytes_per_token(self) -> int:
        """Bytes of keys and values per token over the full layers only."""
        return self.dtype_bytes * sum(layer.entry_elements for layer in self.full_layers)

    def sliding_bytes(self, context: int | None = None) -> int:
        """Bytes the sliding layers hold for one sequence of ``context`` tokens (None: windows filled)."""
        return self.dtype_bytes * sum(
            layer.entry_elements * window_rows(layer.window, context)
            for layer in self.sliding_layers
            if layer.window is not None
        )

    def fixed_bytes(self, context: int | None = None) -> int:
        """Bytes of one sequence that no budget changes: :meth:`sliding_bytes` and :meth:`recurrent_bytes`."""
        return self.sliding_bytes(context) + self.recurrent_bytes()

    def recurrent_bytes(self) -> int:
        """Bytes of the recurrent states of one sequence. Raises UnsupportedModelError where the config does not tell
        them."""
        sizes = [layer.state_elements for layer in self.recurrent_layers]
        if None in sizes:
            raise UnsupportedModelError(
                f"'{self.model_type}' has recurrent layers, and kvkeep does not know the bytes of their states; give "
                "a budget in entries."
            )
        return sum(size[0] * self.dtype_bytes + size[1] * STATE_BYTES for size in sizes if size is not None)

    @property
    def residual_bytes_per_token(self) -> int:
        """Bytes of one residual vector, d * b (Eq. 24), or of one in each stream."""
        return self.streams * self.hidden_size * self.dtype_bytes

    def residual_anchors(self, stride: int) -> tuple[int, ...]:
        """Layers whose incoming residual a ``residual`` checkpoint of this ``stride`` keeps.

        They are the multiples of the stride from which some full layer is rebuilt: full layer l starts
        from the anchor stride * floor(l / stride) and runs the layers in between. Stride 1 therefore
        keeps one residual per full layer; sliding layers keep their window.
        """
        if stride < 1:
            raise UsageError(f"A residual stride must be 1 or more layers, not {stride}.")
        return tuple(sorted({layer.index // stride * stride for layer in self.full_layers}))

    def residual_checkpoint_bytes_per_token(self, stride: int = 1) -> int:
        """Bytes of one evicted token in a ``residual`` checkpoint: d * b for each of :meth:`residual_anchors`. The
        residual entering layer 0 is a function of the token, so its id is kept instead."""
        anchors = self.residual_anchors(stride)
        return sum(self.residual_bytes_per_token if anchor else TOKEN_ID_BYTES for anchor in anchors)


def _need(text: Any, holder: Any, name: str) -> int:
    """Return the integer ``holder.name``; raises UnsupportedModelError if there is none."""
    value = getattr(holder, name, None)
    if not isinstance(value, int):
        raise UnsupportedModelError(
            f"'{text.model_type}' cannot be sized: its config has no '{name}', so the width of its cache is unknown."
        )
    return value


def _max_positions(text: Any) -> int | None:
    """Return the number of positions that a config allows. Some state the number before scaling, others after."""
    stated = getattr(text, "max_position_embeddings", None)
    if stated is None:
        return None
    scaled = [
        int((one.get("original_max_position_embeddings") or stated) * (one.get("factor") or 1))
        for one in _rotary(text)
        if one.get("rope_type") in _SCALES_POSITIONS
    ]
    return max(stated, *scaled) if scaled else stated


def _rotary(text: Any) -> list[dict[str, Any]]:
    """Return a config's rotary parameters, also those by the type of a layer."""
    stated = getattr(text, "rope_parameters", None) or {}
    return [stated, *(value for value in stated.values() if isinstance(value, dict))]


def _steady_positions(text: Any) -> int | None:
    """Return the number of tokens up to which a config's rotary frequencies stay the same; None where all lengths have
    the same."""
    found = []
    for one in _rotary(text):
        if one.get("rope_type") == "longrope" and one.get("long_factor") != one.get("short_factor"):
            found.append(one.get("original_max_position_embeddings") or text.max_position_embeddings)
        elif "dynamic" in (one.get("rope_type") or ""):
            found.append(text.max_position_embeddings - 1)  # at this length, the angles are those of the previous call
    return min(found, default=None)


def _source(text: Any, index: int, types: list[str], shared: set[int]) -> int:
    """Return the layer whose keys and values layer ``index`` reads.

    Gemma 3n and Gemma 4 read the last layer of the same attention type that is not itself shared;
    other configs list the sources.
    """
    listed = getattr(text, "kv_source_layers", None)
    if listed is not None:
        return int(listed[index])
    if index not in shared:
        return index
    for candidate in range(index - 1, -1, -1):
        if candidate not in shared and types[candidate] == types[index]:
            return candidate
    raise UnsupportedModelError(
        f"'{text.model_type}' layer {index} shares the keys of an earlier '{types[index]}' layer, but there is none."
    )


def spare_rows(window: int) -> int:
    """Return the rows that a sliding layer has beside those of the entries that its next token sees. It moves these
    entries once in so many steps, and a step of several tokens (at most 16) needs as many rows."""
    return max(16, min(64, window // 4))


def window_rows(window: int, length: int | None = None) -> int:
    """Return the rows of memory of a sliding layer after ``length`` tokens; None: the most."""
    spare = spare_rows(window)
    return window - 1 + spare if length is None else min(window - 1 + spare, -(-length // spare) * spare)


def _layer(text: Any, index: int, types: list[str], shared: set[int], windows: list[int | None]) -> LayerGeometry:
    """Return the geometry of layer ``index``; a shared layer has the widths and the window of its source."""
    source, recurrent = _source(text, index, types, shared), types[index] in _RECURRENT
    kv_heads, key_dim, value_dim = _widths(text, text.per_layer_config[source])
    return LayerGeometry(
        index=index,
        kind="shared" if index in shared else _KIND_OF_TYPE.get(types[index], types[index]),
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        window=windows[source],
        source=source,
        recurrent=recurrent,
        state_elements=_state_elements(text, text.per_layer_config[index]) if recurrent else None,
    )


def _state_elements(text: Any, layer_config: Any) -> tuple[int, int] | None:
    """Return the elements of a layer's recurrent state: of the convolution, and of the recurrence."""

    def of(*names: str) -> Any:
        return next((value for name in names if (value := getattr(layer_config, name, None)) is not None), None)

    if (heads := of("linear_num_value_heads")) is not None:  # gated delta net
        key_dim, value_dim = of("linear_key_head_dim"), of("linear_value_head_dim")
        channels = 2 * of("linear_num_key_heads") * key_dim + heads * value_dim
        return channels * of("linear_conv_kernel_dim"), heads * key_dim * value_dim
    if (kernel := of("conv_L_cache")) is not None:  # short convolution
        return text.hidden_size * kernel, 0
    if (state := of("mamba_d_state", "ssm_state_size")) is not None:  # Mamba 2; Mamba convolves no groups
        groups = of("mamba_n_groups", "mamba_ngroups", "n_groups") or 0
        heads = of("mamba_num_heads")
        inner = heads * of("mamba_head_dim") if heads else of("mamba_d_ssm") or of("mamba_expand") * text.hidden_size
        return (inner + 2 * groups * state) * of("mamba_d_conv", "conv_kernel"), inner * state
    return None


def _widths(text: Any, layer_config: Any) -> tuple[int, int, int]:
    """Return (kv_heads, key_dim, value_dim) as the cache of one layer holds them."""
    heads = _need(text, layer_config, "num_attention_heads")
    if getattr(layer_config, "kv_lora_rank", None):
        return _latent_widths(text, layer_config, heads)
    head_dim = getattr(layer_config, "head_dim", None) or text.hidden_size // heads
    value_dim = getattr(layer_config, "v_head_dim", None) or head_dim
    # Falcon's new architecture caches the KV heads repeated for every query head.
    if getattr(layer_config, "multi_query", False) and not getattr(layer_config, "new_decoder_architecture", False):
        return 1, head_dim, value_dim
    return getattr(layer_config, "num_key_value_heads", None) or heads, head_dim, value_dim


def _latent_widths(text: Any, layer_config: Any, heads: int) -> tuple[int, int, int]:
    """Multi-head latent attention: the compressed latents where the model caches those, else full heads.

    Models that cache latents widen them after the cache with ``expand_kv``; asking for that method is
    safer than a version number, since model code on the hub follows no version.
    """
    rotary = _need(text, layer_config, "qk_rope_head_dim")
    if _expands_after_cache(text):
        return 1, layer_config.kv_lora_rank, rotary
    key_dim = _need(text, layer_config, "qk_nope_head_dim") + rotary
    return heads, key_dim, _need(text, layer_config, "v_head_dim")


def _expands_after_cache(text: Any) -> bool:
    package, _, module = type(text).__module__.rpartition(".")
    try:
        modeling = importlib.import_module(f"{package}.{module.replace('configuration_', 'modeling_', 1)}")
    except ImportError as error:
        raise UnsupportedModelError(
            f"'{text.model_type}' uses latent attention, but its modeling code could not be read ({error})."
        ) from error
    return any(hasattr(value, "expand_kv") for value in vars(modeling).values() if isinstance(value, type))


def _dtype_bytes(*configs: Any) -> int:
    """Return bytes per element of the first config that names a dtype, else of torch's default."""
    named = (getattr(config, "dtype", None) for config in configs)
    return next((dtype for dtype in named if isinstance(dtype, torch.dtype)), torch.get_default_dtype()).itemsize
