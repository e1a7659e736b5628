# SPDX-License-Identifier: Apache-2.0
"""transformers over nybble: a quantized cache, and attention straight over it.

    import nybble.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="nybble")
    cache = nybble.transformers.NybbleCache(model.config, bits=4)
    model.generate(**inputs, cache=cache)

Importing this module registers the attention implementation "nybble" and its masks. It also serves
models that are called without a cache, or with transformers' own: it then reads their tensors. It
computes where the model is, on the CPU or a CUDA device, and for inference alone.

    nybble.transformers.patch_decode(model)

makes generate() replay its decode steps as a CUDA graph, and

    nybble.transformers.patch_mlp(model)

puts one call of `nybble.geglu` in place of a Gemma model's gelu_tanh(gate) * up.

With left padding each sequence keeps its own length in the cache: padding is not stored, and rows
have the bits that they would have alone. Causal masks are bottom-right: the last query row sees
every token.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.activations import GELUTanh
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin, DummyLayer, get_layer_types_and_kwargs
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ._arrays import device_of
from ._attention import attention
from ._cache import Cache
from ._context import Context, default_context
from ._decode_graph import (
    DecodeGraph,
    DecodeGraphs,
    left_padding,
    patch_decode,
    unpatch_decode,
)
from ._errors import NybbleError, check, refuse
from ._formats import Format, affine
from ._geglu import geglu, path_id
from ._nybble import ffi, lib

__all__ = [
    "DecodeGraph",
    "DecodeGraphs",
    "NybbleCache",
    "NybbleLayer",
    "attention_forward",
    "attention_mask",
    "patch_decode",
    "patch_mlp",
    "unpatch_decode",
    "unpatch_mlp",
]

# Layers of the last kind attend over the keys and values of another layer: they store nothing.
_FULL, _SLIDING, _SHARED = "full_attention", "sliding_attention", "dummy"


# ---- What stands for keys and values between the cache and the attention ------------------------


class _Packed(torch.Tensor):
    """Has the shape, dtype and device of keys or values, and no elements: they are in the cache."""

    layer: NybbleLayer

    @staticmethod
    def __new__(
        cls: type[_Packed], layer: NybbleLayer, shape: Sequence[int], like: torch.Tensor
    ) -> _Packed:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        made.layer = layer
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"nybble's packed rows, {tuple(self.shape)}"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        raise refuse(
            f"{function} is asked of keys or values in a NybbleCache; they go to the attention "
            'implementation "nybble" alone: load the model with attn_implementation="nybble"',
            lib.NYB_ERROR_UNSUPPORTED,
        )


# ---- The cache ------------------------------------------------------------------------------------


class NybbleLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a `NybbleCache`, made at its first update.

    Args:
        bits, value_bits, group_size: see `NybbleCache`.
        sliding_window: the layer keeps what rows of such a window see, and no more; None keeps all.
        context: where it computes; that of the device which has the first keys where None.
    """

    is_croppable = True
    supports_early_init = False
    path: str = "auto"  # of the attention over this layer; NybbleCache.path sets all of a cache

    def __init__(
        self,
        bits: int = 4,
        value_bits: int | None = None,
        group_size: int = 64,
        sliding_window: int | None = None,
        context: Context | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bits, self.group_size = bits, group_size
        self.value_bits = bits if value_bits is None else value_bits
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.context = context
        self._room = 0
        self._stored: Cache | None = None
        # Tokens that replayed graphs have appended, and that the stored cache has not counted yet.
        self._replayed = 0
        # Tokens of a sequence as transformers counts them, padding included.
        self.cumulative_length = 0
        self.has_padding = False
        self._starts: list[int] | None = None  # of the sequences, once they were read
        self._waiting: tuple[torch.Tensor, torch.Tensor] | None = None
        self._module: weakref.ref[torch.nn.Module] | None = None  # whose tokens it holds

    @property
    def stored(self) -> Cache | None:
        """What holds the tokens; None before the first update. It has counted all of them: on CUDA
        this waits where graphs were replayed since."""
        if self._replayed:
            self.refresh()
        return self._stored

    def _format(self, bits: int, dtype: torch.dtype) -> Format:
        return affine(bits, self.group_size, str(dtype).rpartition(".")[2])

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.batch_size, heads, _, key_dim = key_states.shape
        context = self.context or default_context(device_of(key_states))
        self._stored = Cache(
            self.batch_size,
            heads,
            key_dim,
            value_states.shape[-1],
            key=self._format(self.bits, key_states.dtype),
            value=self._format(self.value_bits, key_states.dtype),
            initial_capacity_tokens=self._room,
            window_tokens=self.sliding_window or 0,
            context=context,
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take tokens; the attention, which knows of padding, stores them.

        Args:
            key_states: f32, f16 or bf16 [batch, kv_heads, tokens, head_dim].
            value_states: likewise.

        Raises:
            NybbleError: SHAPE for tokens of another batch or model; POINTER for those on another
                device; GROUP_SIZE; UNSUPPORTED where the tokens before were not attended by
                "nybble".
        """
        if self._waiting is not None:
            raise refuse(
                "the tokens of the update before were not attended by nybble; load the model with "
                'attn_implementation="nybble"',
                lib.NYB_ERROR_UNSUPPORTED,
            )
        if self.stored is None:
            self.lazy_initialization(key_states, value_states)
        stored = self.stored
        assert stored is not None
        have = (*key_states.shape[:2], key_states.shape[3], value_states.shape[3])
        wanted = (stored.batch, stored.kv_heads, stored.key_dim, stored.value_dim)
        if have != wanted:
            raise refuse(
                f"batch, heads, key and value head_dim are {have}; this cache holds {wanted}: it "
                "is of another model or batch",
                lib.NYB_ERROR_SHAPE,
            )
        stored._check_device(("keys", key_states), ("values", value_states))
        self._waiting = (key_states.detach(), value_states.detach())
        tokens, _ = self.get_mask_sizes(key_states.shape[2])
        self.cumulative_length += key_states.shape[2]
        shape = (stored.batch, stored.kv_heads, tokens)
        return (
            _Packed(self, (*shape, stored.key_dim), key_states),
            _Packed(self, (*shape, stored.value_dim), value_states),
        )

    def store(self, starts: torch.Tensor | None, module: torch.nn.Module) -> Cache:
        """Append the tokens of a model's attention that wait, without the padding before `starts`;
        returns the cache."""
        stored = self.stored
        assert stored is not None
        if self._waiting is not None:
            keys, values = self._waiting
            self._waiting = None
            tokens, before = keys.shape[2], self.cumulative_length - keys.shape[2]
            try:
                self._check_module(module, before)
                padding = None if starts is None else self._padding(starts, tokens, before)
                self.has_padding |= padding is not None
                stored.append(keys, values, padding=padding)
            except Exception:
                self.cumulative_length = before
                raise
        return stored

    def _check_module(self, module: torch.nn.Module, tokens: int) -> None:
        """Of the same sizes, another model's tokens would be as good as random ones."""
        if tokens == 0 or self._module is None:
            self._module = weakref.ref(module)
        elif self._module() is not module:
            raise refuse(
                f"the cache holds {tokens} tokens of another model, or of another layer; reset() it",
                lib.NYB_ERROR_UNSUPPORTED,
            )

    def _padding(self, starts: torch.Tensor, tokens: int, before: int) -> list[int] | None:
        """How many of the tokens to come are padding, by sequence; None where none is.

        A token behind every sequence's start is none: then a GPU is not waited for.
        """
        if tokens > 1 or self._starts is None or before < max(self._starts):
            self._starts = [int(start) for start in starts.tolist()]
        padding = [min(max(start - before, 0), tokens) for start in self._starts]
        return padding if any(padding) else None

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.sliding_window is None:
            return self.cumulative_length + query_length, 0
        offset = max(self.cumulative_length - self.sliding_window + 1, 0)
        return self.cumulative_length + query_length - offset, offset

    def get_seq_length(self) -> int:
        """Tokens seen, padding included."""
        return self.cumulative_length

    def get_max_length(self) -> int:
        return -1 if self.sliding_window is None else self.sliding_window

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last -tokens_to_remove tokens.

        Raises:
            NybbleError: VALUE for a positive number; LENGTH where a window has dropped what would
                be needed. Nothing is dropped then.
        """
        if tokens_to_remove > 0:
            raise refuse(f"crop({tokens_to_remove}): it must be 0 or negative: tokens to remove")
        if self.stored is not None and tokens_to_remove:
            self.stored.trim(-tokens_to_remove)
            self.cumulative_length = max(self.cumulative_length + tokens_to_remove, 0)

    def reset(self) -> None:
        """Empty; the next update may be of another batch."""
        self._stored, self._waiting, self.is_initialized = None, None, False
        self.cumulative_length, self._replayed = 0, 0
        self.has_padding, self._starts = False, None
        if hasattr(self, "batch_size"):
            del self.batch_size

    def reserve(self, tokens: int) -> None:
        """Make room for so many tokens of each sequence, now or once the layer is made."""
        self._room = tokens
        if self.stored is not None:
            self.stored.reserve(tokens)

    def refresh(self) -> None:
        """On CUDA: wait, and count what replayed graphs have appended since."""
        if self._stored is not None:
            before = len(self._stored)
            self._stored.refresh()
            self.cumulative_length += len(self._stored) - before - self._replayed
            self._replayed = 0

    def count_replay(self) -> None:
        """A replayed graph has appended a token."""
        self.cumulative_length += 1
        self._replayed += 1

    def take_back(self, tokens: int) -> None:
        """A step failed in this layer, or before or behind it: it holds so many tokens again."""
        if self._waiting is not None:
            self._waiting, self.cumulative_length = None, tokens
        self.crop(tokens - self.cumulative_length)

    def forget_capture(self, tokens: int) -> None:
        """A step was captured, or partly, and has not run: the layer holds so many tokens still."""
        self._waiting = None
        if self._stored is not None:
            self._stored.refresh()
        self.cumulative_length = tokens

    def _reorder(self, sources: Sequence[int]) -> None:
        if self.stored is not None:
            self.stored.reorder(sources)
            if self._starts is not None:
                self._starts = [self._starts[source] for source in sources]
            self.batch_size = self.stored.batch

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence i becomes what sequence beam_idx[i] was."""
        self._reorder(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence becomes `repeats` ones."""
        if self.stored is not None:
            self._reorder([b for b in range(self.stored.batch) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences of these numbers, or where a bool tensor is True."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        self._reorder(indices.tolist())

    def offload(self) -> None:
        raise refuse(
            "a NybbleCache is not offloaded: it stays where it is", lib.NYB_ERROR_UNSUPPORTED
        )

    def prefetch(self) -> None:
        self.offload()


class NybbleCache(TransformersCache):
    """A quantized cache for `generate(cache=...)` and `forward(cache=...)`.

    Args:
        config: of the model, which was loaded with attn_implementation="nybble".
        bits: 2, 3, 4, 5, 6 or 8 bits for keys; or one number for each layer.
        value_bits: for values; `bits` where None.
        group_size: 32, 64 or 128 elements share a scale and a bias; it must divide the head
            dimension.
        context: where it computes; that of the device which has the first keys where None.

    Layers that share another layer's keys and values (Gemma 4) store nothing.

    Raises:
        NybbleError: at construction, for what the model needs and nybble lacks: UNSUPPORTED for
            another attention implementation, a kind of layer (linear, chunked, ...), a window,
            softcap or sinks without a kernel; GROUP_SIZE; BITS; SHAPE for bits of another number
            of layers.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        bits: int | Sequence[int] = 4,
        value_bits: int | Sequence[int] | None = None,
        group_size: int = 64,
        context: Context | None = None,
    ) -> None:
        decoder = config.get_text_config(decoder=True)
        implementation = decoder._attn_implementation
        if implementation != "nybble":
            raise refuse(
                f"the model's attn_implementation is {implementation!r}; it must be 'nybble'",
                lib.NYB_ERROR_UNSUPPORTED,
            )
        types, options = get_layer_types_and_kwargs(decoder)
        key_bits = _for_layers("bits", bits, len(types))
        other_bits = _for_layers(
            "value_bits", bits if value_bits is None else value_bits, len(types)
        )
        layers: list[Any] = []
        for i, (kind, option) in enumerate(zip(types, options)):
            layer_config = decoder.per_layer_config[i]
            if kind == _SHARED:
                layers.append(DummyLayer())  # type: ignore[no-untyped-call]
                continue
            if kind not in (_FULL, _SLIDING):
                raise refuse(
                    f"layer {i} is {kind!r}; a NybbleCache has layers of {_FULL!r} and "
                    f"{_SLIDING!r} alone",
                    lib.NYB_ERROR_UNSUPPORTED,
                )
            dim = getattr(layer_config, "head_dim", None) or (
                layer_config.hidden_size // layer_config.num_attention_heads
            )
            for width in (key_bits[i], other_bits[i]):
                affine(width, group_size).row_bytes(dim)  # refuses what does not fit
            window = option.get("sliding_window")
            _check_supported(context or default_context(), i, layer_config, dim, window)
            layers.append(NybbleLayer(key_bits[i], other_bits[i], group_size, window, context))
        super().__init__(layers=layers)
        # Of `patch_decode` and its model: the captured step; where weights and tokens were at the
        # last eager one, and whether it was compiled; whether one is being captured.
        self.graph: DecodeGraph | None = None
        self.warm: Any = None
        self.capturing = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(self, *arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """See `NybbleLayer.update`; compiled models call it as it is."""
        made: tuple[torch.Tensor, torch.Tensor] = super().update(*arguments, **options)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> NybbleCache:
        """Of its own, without captured steps; windows refuse, once they hold tokens."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        for layer in self._layers():
            layer.stored  # noqa: B018 (it counts what replayed graphs have appended)
        own = {"graph": None, "warm": None, "capturing": False}
        for name, value in vars(self).items():
            vars(made)[name] = own[name] if name in own else copy.deepcopy(value, memo)
        return made

    def reset(self) -> None:
        """Empty, also of captured steps; the next tokens may be of another batch or model."""
        super().reset()
        self.graph = self.warm = None

    def _layers(self) -> Iterator[NybbleLayer]:
        return (layer for layer in self.layers if isinstance(layer, NybbleLayer))

    @property
    def path(self) -> str:
        """How the attention over this cache is computed: "auto", "fused" or "compat"."""
        return next(self._layers()).path

    @path.setter
    def path(self, path: str) -> None:
        path_id(path)
        for layer in self._layers():
            layer.path = path

    def nbytes(self) -> int:
        """Bytes allocated for keys and values, all layers together."""
        stored = [layer.stored for layer in self._layers()]
        return sum(cache.usage().allocated_bytes for cache in stored if cache is not None)

    def reserve(self, tokens: int) -> None:
        """Make room for so many tokens of each sequence: appends up to there do not allocate."""
        for layer in self._layers():
            layer.reserve(tokens)

    def refresh(self) -> None:
        """On CUDA: wait, and count what replayed graphs have appended since."""
        for layer in self._layers():
            layer.refresh()


def _for_layers(name: str, value: int | Sequence[int], layers: int) -> list[int]:
    found = [value] * layers if isinstance(value, int) else [int(bits) for bits in value]
    if len(found) != layers:
        raise refuse(
            f"{name} has {len(found)} entries; the model has {layers} layers", lib.NYB_ERROR_SHAPE
        )
    return found


def _check_supported(
    context: Context, layer: int, config: PreTrainedConfig, dim: int, window: int | None
) -> None:
    """Ask the library for a plan with what the model's layers will pass."""
    call = ffi.new("nyb_attention *", {"struct_size": ffi.sizeof("nyb_attention")})
    call.batch = call.query_heads = call.kv_heads = call.query_len = call.capacity_tokens = 1
    call.key_dim = call.value_dim = dim
    call.q.dtype = call.out.dtype = call.k.format.dtype = call.v.format.dtype = lib.NYB_F32
    call.k.format.scheme = call.v.format.scheme = lib.NYB_PLAIN
    call.scale = 1.0
    sink = ffi.new("float *")
    call.window_tokens = window or 0
    call.softcap = getattr(config, "attn_logit_softcapping", None) or 0.0
    if config.model_type.startswith("gpt_oss"):
        call.sinks = sink
    plan = ffi.new("nyb_plan *")
    plan.struct_size = ffi.sizeof("nyb_plan")
    try:
        check(lib.nyb_attention_plan(context._c, call, plan))
    except NybbleError as error:
        raise NybbleError(f"layer {layer} of {config.model_type}: {error}", error.status) from None


# ---- Masks -------------------------------------------------------------------------------------


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    config: PreTrainedConfig | None = None,
    **options: Any,
) -> torch.Tensor | None:
    """transformers' mask function of "nybble".

    Returns:
        None for a causal mask (and a window, which the layers pass themselves); an int32 [batch, 1,
        1, 1] tensor, where each sequence begins, for left padding (models may cut a mask's rows);
        else transformers' bool mask [batch, 1, query_len, tokens].
    """
    is_window = local_size is None or (
        config is not None
        and getattr(config, "sliding_window", None) == local_size
        and getattr(config, "attention_chunk_size", None) is None
    )
    ends_at_last_row = kv_offset + kv_length == q_offset + q_length
    if allow_is_causal_skip and is_window and ends_at_last_row:
        if attention_mask is None:
            return None
        if attention_mask.shape[-1] == q_offset + q_length:
            starts = left_padding(attention_mask)
            if starts is not None:
                return starts.view(-1, 1, 1, 1) if bool(starts.any()) else None
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        config=config,
        **options,
    )


# ---- Attention ----------------------------------------------------------------------------------


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function of "nybble".

    Args:
        query: f32, f16 or bf16 [batch, query_heads, query_len, head_dim].
        key, value: what `NybbleCache.update` gave; or tensors [batch, kv_heads, tokens, head_dim].
        attention_mask: None (causal), int32 [batch, 1, 1, 1] (left padding), or [batch, 1 or
            query_heads, query_len, tokens], bool or added.

    Returns:
        [batch, query_len, query_heads, head_dim] of query's dtype, and None for weights, which are
        not held.

    Raises:
        NybbleError: UNSUPPORTED for dropout, gradients, a position bias, attention weights.
    """
    if dropout or position_bias is not None or kwargs.get("output_attentions"):
        raise refuse(
            f"dropout is {dropout}, output_attentions {kwargs.get('output_attentions')} and "
            f"position_bias {'given' if position_bias is not None else None}; nybble has none of "
            "them",
            lib.NYB_ERROR_UNSUPPORTED,
        )
    if query.requires_grad and torch.is_grad_enabled():
        raise refuse(
            "query requires gradients; nybble computes for inference alone: torch.no_grad()",
            lib.NYB_ERROR_UNSUPPORTED,
        )
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap or 0.0}
    options["mask"] = "causal" if causal else "none"
    starts = None
    if attention_mask is not None and attention_mask.dtype == torch.int32:
        starts = attention_mask.view(-1)
    elif attention_mask is not None:
        if attention_mask.dtype not in (torch.bool, torch.float32, query.dtype):
            attention_mask = attention_mask.float()
        # A mask says all; "causal" beside it would hide what bidirectional blocks see.
        options["mask"] = attention_mask
    if s_aux is not None:
        options["sinks"] = s_aux.float()
    batch, heads, rows, _ = query.shape
    out = query.new_empty((batch, rows, heads, value.shape[-1]))
    options["out"] = out.transpose(1, 2)
    query = query.detach()
    if isinstance(key, _Packed):
        if not isinstance(value, _Packed) or value.layer is not key.layer:
            raise refuse("key and value are of different caches or layers")
        stored = key.layer.store(starts, module)
        if starts is None and attention_mask is not None and key.layer.has_padding:
            raise refuse(
                "a mask of [query_len, tokens] follows left padding, which this cache left out",
                lib.NYB_ERROR_UNSUPPORTED,
            )
        tokens: tuple[Any, ...] = (stored,)
        options["path"] = key.layer.path
    else:
        tokens = (key.detach(), value.detach())
        options["starts"] = starts
        if sliding_window and sliding_window < key.shape[2]:
            options["window_tokens"] = sliding_window
    attention(query, *tokens, **options)
    return out, None


# ---- GeGLU ----------------------------------------------------------------------------------------

# Whose forward is down_proj(act_fn(gate_proj(x)) * up_proj(x)) and nothing more.
_GATED_MLPS = ("GemmaMLP", "Gemma2MLP", "Gemma3MLP", "Gemma4TextMLP", "VaultGemmaMLP")


def _mlp_forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up = module.gate_proj(x), module.up_proj(x)
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        raise refuse(
            "gate and up require gradients; nybble computes for inference alone: torch.no_grad()",
            lib.NYB_ERROR_UNSUPPORTED,
        )
    made: torch.Tensor = module.down_proj(geglu(gate.detach(), up.detach(), path=module.geglu_path))
    return made


def _is_gelu_tanh(function: Any) -> bool:
    if isinstance(function, torch.nn.GELU):
        return function.approximate == "tanh"
    return isinstance(function, GELUTanh)


def patch_mlp(model: torch.nn.Module, path: str = "auto") -> int:
    """Compute a Gemma model's gelu_tanh(gate) * up by one call of `nybble.geglu`.

    Args:
        model: with MLPs of Gemma, Gemma 2, 3, 4 or VaultGemma (experts and vision towers stay).
        path: "auto" follows NYBBLE_GEGLU, else is "fused"; "fused" or "compat", the steps spelled
            out. Both have the same bits for f16 and bf16, so that logits are the same to the bit.

    Returns:
        How many MLPs compute so now. Calling it again changes their path.

    Raises:
        NybbleError: UNSUPPORTED where there is none, or with another activation; ENUM.

    PyTorch's own activation rounds once where these steps round each time (docs/python.md): its
    results differ in the last bits.
    """
    path_id(path)
    found = [m for m in model.modules() if type(m).__name__ in _GATED_MLPS]
    if not found:
        raise refuse(
            f"{type(model).__name__} has no MLP of {', '.join(_GATED_MLPS)}: nothing to patch",
            lib.NYB_ERROR_UNSUPPORTED,
        )
    for module in found:
        if not _is_gelu_tanh(module.act_fn):
            raise refuse(
                f"an MLP's activation is {module.act_fn}; it must be gelu_pytorch_tanh",
                lib.NYB_ERROR_UNSUPPORTED,
            )
    for module in found:
        vars(module).update(geglu_path=path, forward=MethodType(_mlp_forward, module))
    return len(found)


def unpatch_mlp(model: torch.nn.Module) -> int:
    """Undo `patch_mlp`; returns how many MLPs have their own forward again."""
    patched = [m for m in model.modules() if "geglu_path" in vars(m)]
    for module in patched:
        del vars(module)["forward"], vars(module)["geglu_path"]
    return len(patched)


ALL_ATTENTION_FUNCTIONS.register("nybble", attention_forward)
ALL_MASK_ATTENTION_FUNCTIONS.register("nybble", attention_mask)
