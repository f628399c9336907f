"""Exact model FLOPs of Megatron Core's GPTModel, from its configuration alone.

What is counted: matrix multiplications, at 2 m n k for `[m, k] x [k, n]`. Norms, activations, softmax, rotary
embeddings, embedding look-ups, losses and the optimizer are left out, as everybody leaves them out. The backward pass
costs twice the forward pass, one multiplication for the gradient of each factor, so a training step is 3 x forward
(appendix of Narayanan et al. 2021, arXiv:2104.04473). That supposes that every matrix is trained.

Three figures are in use for the same model, and a utilisation means nothing until one is named:

    training                  what a causal model needs: a query counts the keys that it sees, s (s + 1) / 2 pairs in a
                              document of s tokens, fewer with a sliding window
    training_full_attention   every query with every key of its document, s^2 pairs, mask and window ignored: what most
                              publications count (the same appendix; PaLM, arXiv:2204.02311, appendix B)
    training_hardware         `training` and the forward passes that activation recompute repeats (Korthikanti et al.
                              2022, arXiv:2205.05198, calls the two model and hardware FLOPs)

What a kernel repeats by itself isn't counted (flash attention computes its scores a second time in the backward pass),
nor is what padding adds to it. All figures are for one sequence and the whole model, whatever the parallel sizes.

Nothing here imports torch or Megatron Core. Where a figure can't be known from the configuration there is none: fields
that change the model in other ways than those counted here raise.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from lt_parallel.topology import require_positive_int

__all__ = ["FlopsPerToken", "ForwardFlops", "ModelFlops", "causal_pairs", "model_flops"]

_MULTIPLY_ADD = 2
_FORWARD_AND_BACKWARD = 3

_UNKNOWN: dict[str, str] = {
    "experimental_attention_variant": "its attention isn't the softmax attention counted here",
    "is_hybrid_model": "its layers aren't all transformer layers",
    "hybrid_layer_pattern": "its layers aren't all transformer layers",
    "mtp_hybrid_override_pattern": "its layers aren't all transformer layers",
    "heterogeneous_block_specs": "each of its layers has sizes of its own",
    "moe_token_dropping": "how many tokens the experts get depends on the data",
    "moe_expert_capacity_factor": "how many tokens the experts get depends on the data",
    "moe_expert_rank_capacity_factor": "how many tokens the experts get depends on the data",
    "cache_mla_latents": "it is for inference, whose attention multiplies other matrices",
}
"""Fields that, when set, make the model another than the one counted here; and why."""

_RECOMPUTED_WITHOUT_MATRICES = ("layernorm", "moe_act")
_RECOMPUTED_BESIDES = ("routed_experts", "a2a_overlap_attn", "a2a_overlap_post_attn", "a2a_overlap_mlp")
_RECOMPUTED_WITH_MATRICES = ("core_attn", "mla_up_proj", "mlp", "moe", "shared_experts")


@dataclass(frozen=True, kw_only=True)
class ForwardFlops:
    """FLOPs of one forward pass over one sequence, by component.

    Attributes:
        attention_projections: Queries, keys, values, output; with MLA also down and up projections.
        attention_core: Queries by keys and probabilities by values, for the keys that the causal mask, the sliding
            window and the document boundaries let a query see.
        attention_core_full: The same for every key of the query's document. An alternative to `attention_core`, not a
            further part.
        mlp: Of the layers without experts.
        router: Tokens by expert embeddings.
        experts: The `moe_router_topk` experts of each token, and projections to and from `moe_latent_size`.
        shared_experts: The experts that every token passes, and their gate.
        mtp_projection: From embedding and hidden state, joined, to the input of a multi-token prediction layer.
        output_layer: Hidden states to logits.
    """

    attention_projections: int = 0
    attention_core: int = 0
    attention_core_full: int = 0
    mlp: int = 0
    router: int = 0
    experts: int = 0
    shared_experts: int = 0
    mtp_projection: int = 0
    output_layer: int = 0

    @property
    def total(self) -> int:
        """All components, attention as the mask has it."""
        return sum(self.breakdown().values())

    @property
    def total_full_attention(self) -> int:
        """All components, attention of every query with every key of its document."""
        return sum(self.breakdown(full_attention=True).values())

    def breakdown(self, full_attention: bool = False) -> dict[str, int]:
        """Component -> FLOPs, without those that the model doesn't have; the values add up to the total."""
        left_out = "attention_core" if full_attention else "attention_core_full"
        parts = {item.name: getattr(self, item.name) for item in fields(self) if item.name != left_out}
        return {name: flops for name, flops in parts.items() if flops}

    def __add__(self, other: "ForwardFlops") -> "ForwardFlops":
        return ForwardFlops(
            **{item.name: getattr(self, item.name) + getattr(other, item.name) for item in fields(self)}
        )


class FlopsPerToken(NamedTuple):
    """A sequence's FLOPs divided by its length, padding included."""

    forward: float
    training: float
    training_full_attention: float
    training_hardware: float


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """FLOPs of one sequence through the whole model; made by `model_flops`.

    Attributes:
        seq_length: Tokens of the sequence.
        vocab_size: Columns of the output layer.
        main: Forward pass of the decoder layers and the output layer.
        mtp: Forward pass of the multi-token prediction layers, each with its pass of the output layer.
        recomputed: What the backward pass computes again of `main` and `mtp`.
        weight_gradients_skipped: Backward FLOPs of `mtp` that fall away with `mtp_detach_heads`, where its loss doesn't
            train the output layer.
    """

    seq_length: int
    vocab_size: int
    main: ForwardFlops
    mtp: ForwardFlops
    recomputed: ForwardFlops
    weight_gradients_skipped: int = 0

    @property
    def forward(self) -> int:
        """One forward pass, causal."""
        return self.main.total + self.mtp.total

    @property
    def forward_full_attention(self) -> int:
        """One forward pass, every query with every key of its document."""
        return self.main.total_full_attention + self.mtp.total_full_attention

    @property
    def training(self) -> int:
        """Forward and backward, causal: the model FLOPs."""
        return _FORWARD_AND_BACKWARD * self.forward - self.weight_gradients_skipped

    @property
    def training_full_attention(self) -> int:
        """Forward and backward, every query with every key of its document: for comparison with publications."""
        return _FORWARD_AND_BACKWARD * self.forward_full_attention - self.weight_gradients_skipped

    @property
    def training_hardware(self) -> int:
        """Forward, backward and activation recompute, causal: the hardware FLOPs."""
        return self.training + self.recomputed.total

    @property
    def training_hardware_full_attention(self) -> int:
        """Forward, backward and activation recompute, every query with every key of its document."""
        return self.training_full_attention + self.recomputed.total_full_attention

    @property
    def per_token(self) -> FlopsPerToken:
        """The totals per token."""
        totals = (self.forward, self.training, self.training_full_attention, self.training_hardware)
        return FlopsPerToken(*(total / self.seq_length for total in totals))

    def breakdown(self, full_attention: bool = False) -> dict[str, int]:
        """Component -> forward FLOPs, multi-token prediction as one; the values add up to the forward total."""
        mtp = self.mtp.total_full_attention if full_attention else self.mtp.total
        return self.main.breakdown(full_attention) | ({"mtp": mtp} if mtp else {})

    def with_vocab_size(self, vocab_size: int) -> "ModelFlops":
        """The same model with another number of columns in its output layer.

        Args:
            vocab_size: For example without padding, where `model_flops` was given the padded size.

        Raises:
            ValueError: It isn't a positive integer.
        """
        require_positive_int("vocab_size", vocab_size)

        def scaled(flops: int) -> int:
            return flops // self.vocab_size * vocab_size  # each column costs the same, so nothing is rounded

        return replace(
            self,
            vocab_size=vocab_size,
            main=replace(self.main, output_layer=scaled(self.main.output_layer)),
            mtp=replace(self.mtp, output_layer=scaled(self.mtp.output_layer)),
            weight_gradients_skipped=scaled(self.weight_gradients_skipped),
        )


def model_flops(
    config: object,
    *,
    seq_length: int,
    vocab_size: int,
    document_lengths: Sequence[int] | None = None,
    recomputed_modules: Sequence[str] = (),
) -> ModelFlops:
    """Count the FLOPs of one sequence through a GPTModel.

    Args:
        config: Megatron Core's `TransformerConfig` or `MLATransformerConfig`, or anything with the same attributes;
            an option that is missing is off.
        seq_length: Tokens of the whole sequence, not of one rank's part, and padding included: the matrices multiply
            it all the same.
        vocab_size: Columns of the output layer. What is executed is the padded vocabulary.
        document_lengths: Tokens of each document, where several are packed in the sequence and attention stays within
            them. What they leave of the sequence is padding that attends to nothing. None: one document of
            `seq_length` tokens.
        recomputed_modules: Recomputed besides what `config` says: "routed_experts", "a2a_overlap_mlp" (the same),
            "a2a_overlap_attn" (attention) or "a2a_overlap_post_attn" (the router).

    Raises:
        ValueError: A size is missing or wrong, the documents don't fit, or the configuration has a field set with which
            the figure would be wrong.
    """
    _refuse_unknown(config)
    require_positive_int("seq_length", seq_length)
    require_positive_int("vocab_size", vocab_size)
    documents = _documents(document_lengths, seq_length)
    layers, mtp_layers = _layers(config, seq_length, documents)
    hidden_size = _size(config, "hidden_size")
    output = ForwardFlops(output_layer=_MULTIPLY_ADD * seq_length * hidden_size * vocab_size)
    mtp = _sum(layer + output for layer in mtp_layers)
    return ModelFlops(
        seq_length=seq_length,
        vocab_size=vocab_size,
        main=_sum(layers) + output,
        mtp=mtp,
        recomputed=_recomputed(config, layers, mtp_layers, seq_length)
        + _recomputed_besides(config, recomputed_modules, _sum([*layers, *mtp_layers])),
        weight_gradients_skipped=mtp.output_layer if getattr(config, "mtp_detach_heads", False) else 0,
    )


def causal_pairs(length: int, window_left: int | None = None) -> int:
    """Pairs of a query and a key that it sees in a causal document.

    Args:
        length: Tokens of the document.
        window_left: Tokens before its own that a query sees; None: all.
    """
    most = length if window_left is None else min(length, window_left + 1)
    # The first `most` queries see 1, 2, ... keys, every later one sees `most`.
    return most * (most + 1) // 2 + (length - most) * most


# -------------------------------------------------------------------- layers


class _Attention(NamedTuple):
    """Multiply-adds of one layer's attention.

    Attributes:
        projections: Per token.
        up_projections: Of these, the part that `mla_up_proj` recomputes.
        core: Per pair of a query and a key, all heads.
    """

    projections: int
    up_projections: int
    core: int


def _layers(config: object, seq_length: int, documents: Sequence[int]) -> tuple[list[ForwardFlops], list[ForwardFlops]]:
    """Each decoder layer, and each multi-token prediction layer with its projection but without the output layer."""
    attention = _attention(config)
    has_experts = _expert_pattern(config)
    mlp_of = {kind: _mlp(config, seq_length, kind) for kind in set(has_experts)}
    pairs_of = {left: sum(causal_pairs(length, left) for length in documents) for left in {None, _window_left(config)}}
    full_pairs = sum(length * length for length in documents)

    def layer(number: int, kind: bool) -> ForwardFlops:
        left = _window_left(config) if _has_window(config, number) else None
        return mlp_of[kind] + ForwardFlops(
            attention_projections=_MULTIPLY_ADD * seq_length * attention.projections,
            attention_core=_MULTIPLY_ADD * pairs_of[left] * attention.core,
            attention_core_full=_MULTIPLY_ADD * full_pairs * attention.core,
        )

    layers = [layer(number, kind) for number, kind in enumerate(has_experts, start=1)]
    projection = ForwardFlops(mtp_projection=_MULTIPLY_ADD * seq_length * 2 * _size(config, "hidden_size") ** 2)
    repeated = getattr(config, "mtp_use_repeated_layer", False)
    # Megatron builds these like the last decoder layer, but numbers them from 1 again.
    mtp_layers = [
        projection + layer(1 if repeated else depth, has_experts[-1])
        for depth in range(1, _count(config, "mtp_num_layers") + 1)
    ]
    return layers, mtp_layers


def _attention(config: object) -> _Attention:
    hidden_size, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    if getattr(config, "multi_latent_attention", False):
        return _latent_attention(config, hidden_size, heads)
    channels = _size(config, "kv_channels", hidden_size // heads)
    query = heads * channels
    key_and_value = 2 * _size(config, "num_query_groups", heads) * channels
    gate = query if getattr(config, "attention_output_gate", False) else 0
    return _Attention(hidden_size * (query + gate + key_and_value + query), 0, 2 * query)


def _latent_attention(config: object, hidden_size: int, heads: int) -> _Attention:
    """Multi-latent attention, multiplied out as in training (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""
    rotated, value = _size(config, "qk_pos_emb_head_dim"), _size(config, "v_head_dim")
    unrotated, kv_rank = _size(config, "qk_head_dim"), _size(config, "kv_lora_rank")
    query = heads * (unrotated + rotated)
    down, query_input = hidden_size * (kv_rank + rotated), hidden_size
    if getattr(config, "q_lora_rank", None) is not None:
        query_input = _size(config, "q_lora_rank")
        down += hidden_size * query_input
    up = query_input * query + kv_rank * heads * (unrotated + value)
    return _Attention(down + up + heads * value * hidden_size, up, query + heads * value)


def _mlp(config: object, seq_length: int, has_experts: bool) -> ForwardFlops:
    hidden_size = _size(config, "hidden_size")
    ffn_hidden_size = _size(config, "ffn_hidden_size", 4 * hidden_size)
    matrices = 3 if getattr(config, "gated_linear_unit", False) else 2
    per_token = _MULTIPLY_ADD * seq_length
    if not has_experts:
        return ForwardFlops(mlp=per_token * matrices * hidden_size * ffn_hidden_size)
    experts, chosen = _size(config, "num_moe_experts"), _size(config, "moe_router_topk", 2)
    if chosen > experts:
        raise ValueError(f"moe_router_topk={chosen} must be at most num_moe_experts={experts}")
    latent = _count(config, "moe_latent_size")
    routed = chosen * matrices * (latent or hidden_size) * _size(config, "moe_ffn_hidden_size", ffn_hidden_size)
    shared_size = _count(config, "moe_shared_expert_intermediate_size")
    gate = hidden_size if shared_size and getattr(config, "moe_shared_expert_gate", False) else 0
    return ForwardFlops(
        router=per_token * hidden_size * experts,
        experts=per_token * (routed + 2 * hidden_size * latent),
        shared_experts=per_token * (matrices * hidden_size * shared_size + gate),
    )


def _expert_pattern(config: object) -> list[bool]:
    """Whether each decoder layer has experts."""
    num_layers = _size(config, "num_layers")
    if getattr(config, "num_moe_experts", None) is None:
        return [False] * num_layers
    frequency = getattr(config, "moe_layer_freq", 1)
    if not isinstance(frequency, list):
        every = require_positive_int("moe_layer_freq", frequency)
        return [index % every == 0 for index in range(num_layers)]
    if len(frequency) != num_layers or any(entry not in (0, 1) for entry in frequency):
        raise ValueError(f"moe_layer_freq={frequency} must have num_layers={num_layers} entries, each 0 or 1")
    return [bool(entry) for entry in frequency]


def _window_left(config: object) -> int | None:
    """Keys before its own that a query of a layer with a window sees; None: all. A causal mask hides all after it."""
    window = getattr(config, "window_size", None)
    if not window:
        return None
    if len(window) != 2 or any(isinstance(side, bool) or not isinstance(side, int) or side < -1 for side in window):
        raise ValueError(f"window_size={window} must be two integers of at least -1 (keys before and after; -1: all)")
    left: int = window[0]
    return None if left == -1 else left


def _has_window(config: object, layer_number: int) -> bool:
    """Whether the sliding window, if there is one, holds in the layer of that number (counted from 1)."""
    skip = getattr(config, "window_attn_skip_freq", None)
    if skip is None:
        return True
    if not isinstance(skip, list):
        return layer_number % require_positive_int("window_attn_skip_freq", skip) != 0
    if layer_number > len(skip):
        raise ValueError(
            f"window_attn_skip_freq={skip} must have an entry for each layer, and has none for layer {layer_number}"
        )
    return bool(skip[layer_number - 1])


# ----------------------------------------------------------------- recompute


def _recomputed(
    config: object, layers: Sequence[ForwardFlops], mtp_layers: Sequence[ForwardFlops], seq_length: int
) -> ForwardFlops:
    """What the backward pass computes again."""
    granularity = getattr(config, "recompute_granularity", None)
    if granularity is None:
        return ForwardFlops()
    if granularity == "full":
        return _recomputed_layers(config, layers, mtp_layers)
    if granularity == "selective":
        return _recomputed_modules(config, [*layers, *mtp_layers], seq_length)
    raise ValueError(f"recompute_granularity={granularity!r} must be None, 'full' or 'selective'")


def _recomputed_layers(
    config: object, layers: Sequence[ForwardFlops], mtp_layers: Sequence[ForwardFlops]
) -> ForwardFlops:
    """Full recompute: of every layer (uniform) or of the first few of each model chunk (block)."""
    method, length = getattr(config, "recompute_method", None), _size(config, "recompute_num_layers")
    if method == "uniform":
        if mtp_layers and length != 1:
            raise ValueError(f"recompute_num_layers={length} must be 1 with mtp_num_layers={len(mtp_layers)}")
        return _sum([*layers, *mtp_layers])
    if method != "block":
        raise ValueError(f"recompute_method={method!r} must be 'uniform' or 'block' with recompute_granularity='full'")
    total, start = ForwardFlops(), 0
    for size in _chunk_sizes(config, len(layers)):
        total += _sum(layers[start : start + min(size, length)])
        start += size
    return total  # Megatron doesn't recompute multi-token prediction layers here, and says so


def _recomputed_modules(config: object, layers: Sequence[ForwardFlops], seq_length: int) -> ForwardFlops:
    """Selective recompute: parts of every layer, multi-token prediction layers included."""
    modules = getattr(config, "recompute_modules", None)
    modules = ["core_attn"] if modules is None else modules
    known = (*_RECOMPUTED_WITH_MATRICES, *_RECOMPUTED_WITHOUT_MATRICES)
    unknown = [name for name in modules if name not in known]
    if unknown:
        raise ValueError(f"recompute_modules={modules}: what {unknown} repeats isn't known; known: {', '.join(known)}")
    total = _sum(layers)
    core, latent, mlp, moe, shared = (name in modules for name in _RECOMPUTED_WITH_MATRICES)
    up_projections = _MULTIPLY_ADD * seq_length * len(layers) * _attention(config).up_projections
    return ForwardFlops(
        attention_projections=latent * up_projections,
        attention_core=core * total.attention_core,
        attention_core_full=core * total.attention_core_full,
        mlp=mlp * total.mlp,
        router=moe * total.router,
        experts=moe * total.experts,
        # With both, one checkpoint lies in the other, and the shared experts run three times in all.
        shared_experts=(moe + shared) * total.shared_experts,
    )


def _recomputed_besides(config: object, modules: Sequence[str], total: ForwardFlops) -> ForwardFlops:
    """What Megatron Core has no name for."""
    unknown = [name for name in modules if name not in _RECOMPUTED_BESIDES]
    if unknown or (modules and _count(config, "moe_latent_size")):
        raise ValueError(
            f"recomputed_modules={list(modules)}: what they repeat is known for {', '.join(_RECOMPUTED_BESIDES)}, "
            "without moe_latent_size"
        )
    attention = "a2a_overlap_attn" in modules
    return ForwardFlops(
        attention_projections=attention * total.attention_projections,
        attention_core=attention * total.attention_core,
        attention_core_full=attention * total.attention_core_full,
        router=("a2a_overlap_post_attn" in modules) * total.router,
        experts=("routed_experts" in modules or "a2a_overlap_mlp" in modules) * total.experts,
    )


def _chunk_sizes(config: object, num_layers: int) -> list[int]:
    """Decoder layers of each model chunk, in the order in which a sample passes them."""
    ranks = _size(config, "pipeline_model_parallel_size", 1)
    layout = getattr(config, "pipeline_model_parallel_layout", None)
    if layout is None:
        sizes = _even_chunk_sizes(config, num_layers, ranks)
    elif hasattr(layout, "layout"):  # as Megatron has parsed it: by pipeline rank, then by chunk
        stages = [stage for chunk in zip(*layout.layout, strict=True) for stage in chunk]
        sizes = [sum(kind.name == "decoder" for kind in stage) for stage in stages]
    else:
        raise ValueError(f"pipeline_model_parallel_layout={layout!r} must be as TransformerConfig has parsed it")
    if sum(sizes) != num_layers or min(sizes) < 0:
        raise ValueError(f"num_layers={num_layers} can't be split over the chunks of {ranks} pipeline ranks: {sizes}")
    return sizes


def _even_chunk_sizes(config: object, num_layers: int, ranks: int) -> list[int]:
    """The same without a layout: equal but for the first and last rank, and for a layer's place that is taken."""
    first = getattr(config, "num_layers_in_first_pipeline_stage", None)
    last = getattr(config, "num_layers_in_last_pipeline_stage", None)
    embedding = bool(getattr(config, "account_for_embedding_in_pipeline_split", False))
    loss = bool(getattr(config, "account_for_loss_in_pipeline_split", False))
    others = ranks - (first is not None) - (last is not None)
    each = (num_layers + embedding + loss - (first or 0) - (last or 0)) // max(others, 1)
    of_ranks = [each] * ranks
    of_ranks[0] = each if first is None else first
    of_ranks[-1] = of_ranks[-1] if last is None else last
    chunks = _size(config, "virtual_pipeline_model_parallel_size", 1) if ranks > 1 else 1
    sizes = [size // chunks for size in of_ranks] * chunks
    sizes[0] -= embedding
    sizes[-1] -= loss
    return sizes


# --------------------------------------------------------------------- input


def _refuse_unknown(config: object) -> None:
    for name, reason in _UNKNOWN.items():
        value = getattr(config, name, None)
        unset = value is None or value is False or (isinstance(value, int | float) and value < 0)
        if not unset:
            raise ValueError(f"no FLOPs are known for {name}={value!r}: {reason}")


def _documents(document_lengths: Sequence[int] | None, seq_length: int) -> Sequence[int]:
    if document_lengths is None:
        return [seq_length]
    for index, length in enumerate(document_lengths):
        require_positive_int(f"document_lengths[{index}]", length)
    total = sum(document_lengths)
    if total > seq_length:
        shown = list(document_lengths[:8])
        more = f" and {len(document_lengths) - 8} more" if len(document_lengths) > 8 else ""
        raise ValueError(f"document_lengths={shown}{more} add up to {total}, more than seq_length={seq_length}")
    return document_lengths


def _size(config: object, name: str, default: int | None = None) -> int:
    """A field that must be a positive integer; None or missing takes the default."""
    value = getattr(config, name, None)
    return require_positive_int(name, default if value is None else value)


def _count(config: object, name: str) -> int:
    """A field where None, missing and 0 all mean none."""
    value = getattr(config, name, None)
    return require_positive_int(name, value) if value else 0


def _sum(parts: Iterable[ForwardFlops]) -> ForwardFlops:
    return sum(parts, start=ForwardFlops())
