"""Megatron Core's GPTModel with multi-token prediction (MTP) heads, and the loss that trains them.

The main head predicts `labels[i]` at position i; the head of depth k = 1 ... D (D = mtp_num_layers) predicts
`labels[i + k]` (DeepSeek-V3, arXiv:2412.19437, section 2.2). Labels and mask are moved k places to the left, so depth k
counts the positions i whose `loss_mask[i + k]` lets them count, and none whose label lies beyond the sequence. A step
minimises

    S / N + mtp_loss_scaling_factor / D * sum over k of S_k / N_k

    S, N      the main loss, summed over the global batch, and its tokens that count: train_loss = S / N
    S_k, N_k  the same of depth k: mtp_k_loss = S_k / N_k; N_k = 0 counts as 1

Megatron Core's `process_mtp_loss` takes (n S_k / n_k) / N in place of S_k / N_k, with n and n_k counted in each micro
batch and on each context-parallel rank. That is the same number where no mask differs and no sequence is cut, and
otherwise depends on which samples share a micro batch, so on the data- and context-parallel sizes. Here a step counts
first (`token_counts`, summed over the data-parallel ranks), and every layout has the same gradients.

The heads are trained, never evaluated: validation, test and generation don't run them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, override

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, roll_tensor
from torch import Tensor

__all__ = ["MultiTokenGPTModel", "token_counts"]

#: What the heads take of GPTModel's own arguments.
_OF_LAYERS = (
    "attention_mask",
    "rotary_pos_emb",
    "rotary_pos_cos",
    "rotary_pos_sin",
    "packed_seq_params",
    "sequence_len_offset",
    "padding_mask",
)


class MultiTokenGPTModel(GPTModel):
    """One chunk of a GPTModel with MTP heads, wherever they lie.

    Attributes:
        mtp_weights: `[D]`, N / N_k of the step that runs; to be set before its first forward on the last stage.
        mtp_losses: Of the last forward in training, on the last stage: for each depth the sum of its loss and the
            tokens that it is over, both of this context-parallel rank's part.
    """

    mtp_weights: Tensor
    mtp_losses: list[tuple[Tensor, Tensor]]

    @override
    def _postprocess(
        self,
        hidden_states: Tensor,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor | None,
        *,
        loss_mask: Tensor | None = None,
        mtp_in_postprocess: bool | None = None,
        runtime_gather_output: bool | None = None,
        **options: Any,
    ) -> Tensor:
        """What follows the decoder layers: heads, output layer, losses.

        Args:
            hidden_states: `[s, b, h]`; where the heads lie on an earlier stage, theirs follow along s.
            input_ids: `[b, s]`.
            position_ids: `[b, s]`.
            labels: `[b, s]`; None: logits are returned.
            loss_mask: `[b, s]`; None: every token counts.
            mtp_in_postprocess: Whether the heads are to be run here.
            runtime_gather_output: Overrides the output layer's choice.
            options: GPTModel's others.

        Returns:
            As GPTModel: hidden states, and on the last stage the main loss `[b, s]` or the logits `[b, s, vocabulary]`.
        """
        trained = self.training and labels is not None
        if trained and mtp_in_postprocess:
            hidden_states = self.mtp(
                input_ids=input_ids,
                position_ids=position_ids,
                hidden_states=hidden_states,
                embedding=self.embedding,
                **{name: options.get(name) for name in _OF_LAYERS},
                **(options.get("extra_block_kwargs") or {}),
            )
        if not self.post_process:
            return hidden_states
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None

        def logits_of(hidden: Tensor, weight: Tensor | None) -> Tensor:
            logits, _ = self.output_layer(hidden, weight=weight, runtime_gather_output=runtime_gather_output)
            return self._scale_logits(logits)

        if trained:
            assert labels is not None
            hidden_states, *of_heads = hidden_states.chunk(1 + self.config.mtp_num_layers)
            head_weight = weight
            if self.config.mtp_detach_heads:
                head_weight = (self.output_layer.weight if weight is None else weight).detach()
            mask = torch.ones_like(labels, dtype=torch.float32) if loss_mask is None else loss_mask
            losses = self._losses([logits_of(hidden, head_weight) for hidden in of_heads], labels, mask)
            hidden_states = MTPLossAutoScaler.apply(hidden_states, losses)
        logits = logits_of(hidden_states, weight)
        if labels is None:
            return logits.transpose(0, 1).contiguous()
        return self.compute_language_model_loss(labels, logits)

    def _losses(self, logits: list[Tensor], labels: Tensor, mask: Tensor) -> Tensor:
        """The scalar that this rank adds to the main loss, before the division by the global batch's tokens."""
        group = self.pg_collection.cp
        sums, counts = [], []
        for of_depth in logits:
            labels, _ = roll_tensor(labels, cp_group=group)
            mask, count = roll_tensor(mask, cp_group=group)
            sums.append((self.compute_language_model_loss(labels, of_depth).float() * mask).sum())
            counts.append(count)
        self.mtp_losses = [(loss_sum.detach(), count) for loss_sum, count in zip(sums, counts, strict=True)]
        return self.config.mtp_loss_scaling_factor / len(logits) * (torch.stack(sums) * self.mtp_weights).sum()


def token_counts(masks: Iterable[Tensor], depths: int) -> Tensor:
    """Tokens that count for the main head and for each depth.

    Args:
        masks: `loss_mask` `[b, s]` of each micro batch, before anything is cut.
        depths: D.

    Returns:
        `[1 + D]`, float64.
    """
    return sum(  # type: ignore[return-value]  # there is at least one micro batch
        torch.stack([mask[:, depth:].sum(dtype=torch.float64) for depth in range(depths + 1)]) for mask in masks
    )
