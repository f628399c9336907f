"""`MixtureOfExperts`: what of a GPT's layers is experts, and how tokens are given to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from lt_parallel.size_checks import require_positive_int

if TYPE_CHECKING:
    from lt_parallel.settings import Settings

__all__ = ["MixtureOfExperts"]

LoadBalancing = Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn"]
ScoreFunction = Literal["softmax", "sigmoid"]
RouterDtype = Literal["fp32", "fp64"]
DropPolicy = Literal["probs", "position"]
_OWNER = "GPTModule(moe=...)"
_WITH_LOSS = ("aux_loss", "seq_aux_loss", "global_aux_loss")
_CHOICES: dict[str, Any] = {
    "moe_router_score_function": ScoreFunction,
    "moe_router_dtype": RouterDtype,
    "moe_token_drop_policy": DropPolicy,
}
_POSITIVE = (
    "num_moe_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_router_num_groups",
    "moe_router_group_topk",
)
_AT_LEAST_ZERO = ("moe_router_bias_update_rate", "moe_input_jitter_eps")
_ABOVE_ZERO = ("moe_z_loss_coeff", "moe_router_topk_scaling_factor", "moe_expert_capacity_factor")


@dataclass(frozen=True, kw_only=True)
class MixtureOfExperts:
    """Replaces the MLP of a GPT's layers by experts, of which each token visits a few. Names are Megatron's.

    Args:
        num_moe_experts: Experts of each such layer, over all ranks.
        moe_router_topk: Experts that a token visits.
        moe_ffn_hidden_size: Width inside an expert; None: the dense layers' ffn_hidden_size.
        moe_layer_freq: Which layers have experts: every n-th beginning with the first, or a list with 1 (experts) or 0
            (a dense MLP) for each layer.
        moe_shared_expert_intermediate_size: Width of the MLP that every token visits beside its experts (of several
            shared experts, together); None: there is none.
        moe_shared_expert_gate: Scales the shared expert's result by a learnt gate.
        moe_router_load_balancing_type: Losses (one or a list) or sinkhorn that keep experts equally busy; "none" where
            moe_router_enable_expert_bias does. "aux_loss" is over a micro batch, "seq_aux_loss" over each sequence (so
            it doesn't depend on how work is cut), "global_aux_loss" over the data-parallel ranks and the step so far.
        moe_aux_loss_coeff: Weight of that loss, or one for each. All tokens enter it, and it weighs per token that
            counts: with a loss_mask it has (all tokens / tokens that count) times this weight, as in Megatron Core.
        moe_z_loss_coeff: Weight of the mean squared log-sum-exp of the router's logits; None: no such loss.
        moe_router_score_function: From logits to scores.
        moe_router_pre_softmax: Softmax over all experts before the top k are taken; False: over these alone.
        moe_router_topk_scaling_factor: Multiplies the weights of a token's experts; None: 1.
        moe_router_num_groups: Cuts the experts into this many groups, and a token may visit moe_router_group_topk of
            them; None: one group.
        moe_router_group_topk: Groups that a token's experts come from.
        moe_router_enable_expert_bias: Adds a bias per expert to the choice (not to the weights), raised step by step
            for experts that got few tokens and lowered for the others; needs "sigmoid".
        moe_router_bias_update_rate: How much per step.
        moe_router_dtype: Precision of the router's logits and of the weights of a token's experts; None: the model's.
        moe_expert_capacity_factor: An expert takes at most this many times its even share of a micro batch, further
            tokens skip it; None: it takes all.
        moe_token_drop_policy: Which tokens skip it: those with the smallest "probs", or with "position" whichever
            PyTorch's topk leaves out of equals (not always the last ones).
        moe_pad_expert_input_to_capacity: Fills an expert's tokens up to its capacity.
        moe_input_jitter_eps: Multiplies the router's input by noise in [1 - eps, 1 + eps]; None: no noise.
        moe_grouped_gemm: All experts of a rank in one matrix product; False: one after the other.

    Raises:
        ValueError: One is wrong, or two don't fit.
    """

    num_moe_experts: int
    moe_router_topk: int = 2
    moe_ffn_hidden_size: int | None = None
    moe_layer_freq: int | list[int] = 1
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    moe_router_load_balancing_type: str | list[str] = "aux_loss"
    moe_aux_loss_coeff: float | list[float] = 0.0
    moe_z_loss_coeff: float | None = None
    moe_router_score_function: ScoreFunction = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_topk_scaling_factor: float | None = None
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_enable_expert_bias: bool = False
    moe_router_bias_update_rate: float = 1e-3
    moe_router_dtype: RouterDtype | None = None
    moe_expert_capacity_factor: float | None = None
    moe_token_drop_policy: DropPolicy = "probs"
    moe_pad_expert_input_to_capacity: bool = False
    moe_input_jitter_eps: float | None = None
    moe_grouped_gemm: bool = True

    @classmethod
    def of(cls, given: MixtureOfExperts | Mapping[str, Any] | None) -> MixtureOfExperts | None:
        """What a module was given, which may come from a checkpoint's hyper-parameters as a dictionary."""
        return cls(**given) if isinstance(given, Mapping) else given

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) is not None:
                require_positive_int(name, getattr(self, name))
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in get_args(choices):
                raise ValueError(f"{name}={value!r} is not one of {', '.join(get_args(choices))}")
        for names, rule, holds in (
            (_AT_LEAST_ZERO, "a number that isn't negative", lambda value: value >= 0),
            (_ABOVE_ZERO, "a positive number", lambda value: value > 0),
        ):
            for name in names:
                value = getattr(self, name)
                if value is not None and not (_is_number(value) and holds(value)):
                    raise ValueError(f"{name}={value!r} must be {rule}")
        self._check_layers()
        self._check_load_balancing()
        self._check_choice()

    def _check_layers(self) -> None:
        freq = self.moe_layer_freq
        if isinstance(freq, list):
            if not freq or any(each not in (0, 1) for each in freq) or not any(freq):
                raise ValueError(
                    f"moe_layer_freq={freq!r} must have 1 (experts) or 0 (dense) for each layer, and a 1; e.g. "
                    "[0, 1, 1, 1]"
                )
        else:
            require_positive_int("moe_layer_freq", freq)

    def _check_load_balancing(self) -> None:
        kinds, coefficients = self.moe_router_load_balancing_type, self.moe_aux_loss_coeff
        if isinstance(kinds, list) != isinstance(coefficients, list) or (
            isinstance(kinds, list) and isinstance(coefficients, list) and len(kinds) != len(coefficients)
        ):
            raise ValueError(
                f"moe_router_load_balancing_type={kinds!r} and moe_aux_loss_coeff={coefficients!r} must be one each, "
                "or lists of the same length"
            )
        pairs = self.auxiliary_losses
        for kind, coefficient in pairs:
            if kind not in get_args(LoadBalancing):
                raise ValueError(
                    f"moe_router_load_balancing_type={kind!r} is not one of {', '.join(get_args(LoadBalancing))}"
                )
            if not _is_number(coefficient) or coefficient < 0:
                raise ValueError(f"moe_aux_loss_coeff={coefficient!r} must be a number that isn't negative")
            if coefficient and kind not in _WITH_LOSS:
                raise ValueError(
                    f"moe_router_load_balancing_type={kind!r} has no loss, so moe_aux_loss_coeff={coefficient} means "
                    f"nothing; use one of {', '.join(_WITH_LOSS)}, or moe_aux_loss_coeff=0"
                )
            if self.moe_expert_capacity_factor is not None and kind == "sinkhorn":
                raise ValueError(
                    f"moe_expert_capacity_factor={self.moe_expert_capacity_factor} can't be combined with "
                    "moe_router_load_balancing_type='sinkhorn'; use a loss, or no capacity"
                )
        if not self.moe_pad_expert_input_to_capacity:
            return
        factor, most = self.moe_expert_capacity_factor, self.num_moe_experts / self.moe_router_topk
        if factor is None or factor > most:
            raise ValueError(
                f"moe_pad_expert_input_to_capacity=True needs moe_expert_capacity_factor, at most num_moe_experts / "
                f"moe_router_topk = {most:g} (an expert can't get more than all tokens), got {factor}; usual: 1.25"
            )

    def _check_choice(self) -> None:
        experts, topk = self.num_moe_experts, self.moe_router_topk
        if topk > experts:
            raise ValueError(f"moe_router_topk={topk} must be at most num_moe_experts={experts}")
        if self.moe_router_enable_expert_bias and self.moe_router_score_function != "sigmoid":
            raise ValueError(
                "moe_router_enable_expert_bias=True needs moe_router_score_function='sigmoid', not "
                f"{self.moe_router_score_function!r}"
            )
        groups, of_groups = self.moe_router_num_groups, self.moe_router_group_topk
        if (groups is None) != (of_groups is None):
            raise ValueError(
                f"moe_router_num_groups={groups} and moe_router_group_topk={of_groups} belong together: give both, "
                "e.g. 8 and 4, or neither"
            )
        if groups is None or of_groups is None:
            return
        if experts % groups or of_groups > groups or topk > of_groups * (experts // groups) or topk % of_groups:
            raise ValueError(
                f"moe_router_num_groups={groups} must divide num_moe_experts={experts}, and moe_router_group_topk="
                f"{of_groups} must be at most that many, divide moe_router_topk={topk}, and leave at least as many "
                f"experts (here {of_groups * (experts // groups)})"
            )

    @property
    def auxiliary_losses(self) -> list[tuple[str, float]]:
        """Each kind of load balancing and the weight of its loss."""
        kinds, coefficients = self.moe_router_load_balancing_type, self.moe_aux_loss_coeff
        if isinstance(kinds, list) and isinstance(coefficients, list):
            return list(zip(kinds, coefficients, strict=True))
        return [(kinds, coefficients)]  # type: ignore[list-item]  # neither is a list

    def contribute(self, settings: Settings) -> None:
        """Adds the config fields. The dense fields are to be there already.

        Raises:
            ValueError: They don't fit.
        """
        num_layers = settings.get("model", "num_layers")
        if isinstance(self.moe_layer_freq, list) and len(self.moe_layer_freq) != num_layers:
            raise ValueError(
                f"moe_layer_freq={self.moe_layer_freq!r} has {len(self.moe_layer_freq)} entries, and num_layers="
                f"{num_layers} needs one for each layer"
            )
        if settings.get("model", "add_bias_linear"):
            raise ValueError("experts have no biases: GPTModule(moe=...) needs add_bias_linear=False")
        fields = dataclasses.asdict(self)
        fields["moe_ffn_hidden_size"] = self.moe_ffn_hidden_size or settings.get("model", "ffn_hidden_size")
        settings.contribute(_OWNER, "model", **fields)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
