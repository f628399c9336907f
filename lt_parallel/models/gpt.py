"""`GPTModule`: Megatron Core's GPTModel as a LightningModule.

Batches are dictionaries of `[b, s]` tensors (b micro batch, s sequence): `tokens`, `labels`, `position_ids` (int64) and
`loss_mask` (float). The output layer's columns beyond the vocabulary (its padding) are minus infinity, so they never
take part in the loss or in sampling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lt_parallel.metrics.flops import ModelFlops, model_flops
from lt_parallel.metrics.language_model import Perplexity, TokenAccuracy, vocab_parallel_argmax
from lt_parallel.models.base import MegatronLightningModule
from lt_parallel.models.gpt_arguments import (
    LrDecayStyle,
    Normalization,
    PositionEmbedding,
    ValidationMetric,
    check_gpt_arguments,
)
from lt_parallel.models.mixture_of_experts import MixtureOfExperts
from lt_parallel.models.multi_latent_attention import MultiLatentAttention
from lt_parallel.models.token_check import check_batch
from lt_parallel.ops.zigzag import cut
from lt_parallel.pipeline_balance import LayerCosts
from lt_parallel.settings import check_vocab

if TYPE_CHECKING:
    from lt_parallel.settings import Settings
    from lt_parallel.strategies.step_metrics import MetricValue

_OWNER = "GPTModule"
#: What a batch holds for each token, `[b, s]`.
_PER_TOKEN = ("tokens", "labels", "position_ids", "loss_mask")


class GPTModule(MegatronLightningModule):
    """A decoder-only transformer language model, cut as the strategy says.

    Names are Megatron's. The defaults give the GPT-2 shape; the Llama shape is `normalization="RMSNorm", swiglu=True,
    add_bias_linear=False, position_embedding_type="rope", untie_embeddings_and_output_weights=True`.

    Args:
        vocab_size: Number of token ids.
        seq_length: Tokens per training sequence.
        num_layers: Decoder layers.
        hidden_size: Width of the residual stream.
        num_attention_heads: Query heads.
        ffn_hidden_size: Width inside the MLP; None: 4 x hidden_size, with swiglu 8/3 x hidden_size in steps of 64.
        num_query_groups: Key/value heads (grouped-query attention); None: one per query head.
        kv_channels: Channels per head; None: hidden_size / num_attention_heads.
        max_position_embeddings: Longest sequence; None: seq_length.
        normalization: "LayerNorm" or "RMSNorm".
        layernorm_epsilon: Added to the variance.
        swiglu: Gated MLP with SiLU; False: GELU (tanh form).
        add_bias_linear: Biases in all linear layers.
        add_qkv_bias: Biases in the query/key/value projection only.
        qk_layernorm: Normalise queries and keys per head.
        position_embedding_type: "learned_absolute" or "rope".
        rotary_base: Base of the rotary frequencies.
        rotary_percent: Share of each head's channels that is rotated.
        untie_embeddings_and_output_weights: Own weights for the output layer.
        make_vocab_size_divisible_by: The vocabulary is padded to a multiple of this, at any layout.
        hidden_dropout: Dropout on each residual branch.
        attention_dropout: Dropout on attention probabilities.
        init_method_std: Standard deviation of the initial weights; output projections use it / sqrt(2 x num_layers).
        mtp_num_layers: Multi-token prediction heads, of which the k-th predicts k tokens further than the model; None:
            no heads. They need position_embedding_type="rope". Training adds mtp_loss_scaling_factor x the mean of
            their losses (`models/multi_token_prediction.py` has the formula) and logs these apart, per token, as
            `mtp_1_loss` and so on; `train_loss` stays the model's own. Evaluation and generation don't run them.
        mtp_loss_scaling_factor: Weight of their losses' mean beside the model's own loss.
        moe: Experts in place of the MLP, in all layers or some; None: a dense model.
        mla: Multi-head latent attention, which needs position_embedding_type="rope"; None: plain or grouped-query.
        lr: Highest learning rate (AdamW).
        min_lr: Where the decay ends.
        lr_warmup_iters: Global steps of linear warm-up; the first step has lr / lr_warmup_iters, not 0.
        lr_decay_iters: Global step at which min_lr is reached. Its own length, independent of max_steps.
        lr_decay_style: Shape of the decay after the warm-up.
        weight_decay: On matrices only; none on biases and norms.
        adam_beta1: First moment's decay.
        adam_beta2: Second moment's decay.
        adam_eps: Added to the root of the second moment.
        max_new_tokens: Continuation length of `predict_step`.
        temperature: Sampling temperature of `predict_step`; 0 takes the likeliest token.
        top_k: `predict_step` samples among the k likeliest; 0: all.
        validation_metrics: Logged beside the loss of each validation and test: "perplexity" (exp of the loss per token)
            and "token_accuracy" (needs all logits of a micro batch at once). Of several loaders each has its own.
    """

    def __init__(
        self,
        vocab_size: int,
        seq_length: int = 1024,
        num_layers: int = 12,
        hidden_size: int = 768,
        num_attention_heads: int = 12,
        ffn_hidden_size: int | None = None,
        num_query_groups: int | None = None,
        kv_channels: int | None = None,
        max_position_embeddings: int | None = None,
        normalization: Normalization = "LayerNorm",
        layernorm_epsilon: float = 1e-5,
        swiglu: bool = False,
        add_bias_linear: bool = True,
        add_qkv_bias: bool = False,
        qk_layernorm: bool = False,
        position_embedding_type: PositionEmbedding = "learned_absolute",
        rotary_base: int = 10000,
        rotary_percent: float = 1.0,
        untie_embeddings_and_output_weights: bool = False,
        make_vocab_size_divisible_by: int = 128,
        hidden_dropout: float = 0.0,
        attention_dropout: float = 0.0,
        init_method_std: float = 0.02,
        mtp_num_layers: int | None = None,
        mtp_loss_scaling_factor: float = 0.1,
        moe: MixtureOfExperts | None = None,
        mla: MultiLatentAttention | None = None,
        lr: float = 3e-4,
        min_lr: float = 3e-5,
        lr_warmup_iters: int = 0,
        lr_decay_iters: int = 100_000,
        lr_decay_style: LrDecayStyle = "cosine",
        weight_decay: float = 0.1,
        adam_beta1: float = 0.9,
        adam_beta2: float = 0.95,
        adam_eps: float = 1e-8,
        max_new_tokens: int = 64,
        temperature: float = 1.0,
        top_k: int = 0,
        validation_metrics: list[ValidationMetric] | None = None,
    ) -> None:
        super().__init__()
        self.moe, self.mla = MixtureOfExperts.of(moe), MultiLatentAttention.of(mla)
        # As plain values, so that a checkpoint is read without them.
        moe, mla = (None if part is None else asdict(part) for part in (self.moe, self.mla))  # type: ignore[assignment]
        self.save_hyperparameters()
        self.vocab_size, self.seq_length = vocab_size, seq_length
        self.max_position_embeddings = max_position_embeddings or seq_length
        check_gpt_arguments(self.hparams)
        kinds: dict[str, Any] = {"perplexity": Perplexity, "token_accuracy": TokenAccuracy}
        self.validation_metrics = nn.ModuleDict({name: kinds[name]() for name in validation_metrics or ()})
        self._evaluating = False  # whether there is something to log of them

    # ---------------------------------------------------------------- model

    def contribute(self, settings: Settings) -> None:
        """Adds the transformer's dimensions and checks the vocabulary against the sizes."""
        hp: Any = self.hparams
        hidden = hp.hidden_size
        ffn = hp.ffn_hidden_size or (64 * -(-8 * hidden // (3 * 64)) if hp.swiglu else 4 * hidden)
        optional = {
            "num_query_groups": hp.num_query_groups,
            "kv_channels": hp.kv_channels,
            "mtp_num_layers": hp.mtp_num_layers,
            "mtp_loss_scaling_factor": hp.mtp_loss_scaling_factor if hp.mtp_num_layers else None,
        }
        settings.contribute(
            _OWNER,
            "model",
            num_layers=hp.num_layers,
            hidden_size=hidden,
            num_attention_heads=hp.num_attention_heads,
            ffn_hidden_size=ffn,
            normalization=hp.normalization,
            layernorm_epsilon=hp.layernorm_epsilon,
            gated_linear_unit=hp.swiglu,
            activation_func=nn.functional.silu if hp.swiglu else nn.functional.gelu,
            # The fused form of Megatron Core is GELU's tanh approximation: one choice, on every device.
            bias_activation_fusion=hp.swiglu or hp.add_bias_linear,
            bias_dropout_fusion=True,
            add_bias_linear=hp.add_bias_linear,
            add_qkv_bias=hp.add_qkv_bias,
            qk_layernorm=hp.qk_layernorm,
            hidden_dropout=hp.hidden_dropout,
            attention_dropout=hp.attention_dropout,
            init_method_std=hp.init_method_std,
            **{name: value for name, value in optional.items() if value is not None},
        )
        if self.moe is not None:
            self.moe.contribute(settings)
        if self.mla is not None:
            self.mla.contribute(settings, rotary_base=hp.rotary_base)
        settings.seq_length = self.seq_length
        settings.tied_embeddings = not hp.untie_embeddings_and_output_weights
        self.padded_vocab_size = check_vocab(settings, self.vocab_size, hp.make_vocab_size_divisible_by)

    def config_class(self) -> type:
        """Megatron Core's class for the kind of attention."""
        from megatron.core.transformer.transformer_config import MLATransformerConfig

        return super().config_class() if self.mla is None else MLATransformerConfig

    def build_chunk(
        self, config: Any, *, pre_process: bool, post_process: bool, vp_stage: int | None, groups: Any
    ) -> nn.Module:
        """One chunk of Megatron Core's GPTModel, its weights not yet drawn."""
        from megatron.core.models.gpt import GPTModel

        from lt_parallel.models.initialization import defer_initialization
        from lt_parallel.plugins.layer_backend.specs import gpt_block_spec, gpt_mtp_block_spec

        defer_initialization(config)
        hp: Any = self.hparams
        backend = self.megatron.backend
        assert backend is not None
        place = {
            "vp_stage": vp_stage,
            "pp_rank": groups.pp.rank(),
            "recomputed": self._recomputed_by_own_layers,
        }
        model_class = GPTModel
        if config.mtp_num_layers:
            from lt_parallel.models.multi_token_prediction import MultiTokenGPTModel as model_class
        chunk = model_class(
            config,
            gpt_block_spec(config, backend, **place),
            vocab_size=self.padded_vocab_size,
            max_sequence_length=self.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=not hp.untie_embeddings_and_output_weights,
            position_embedding_type=hp.position_embedding_type,
            rotary_base=hp.rotary_base,
            rotary_percent=hp.rotary_percent,
            mtp_block_spec=gpt_mtp_block_spec(config, backend, **place),
            pg_collection=groups,
            vp_stage=vp_stage,
        )
        if post_process:
            _hide_vocabulary_padding(chunk.output_layer, self.vocab_size, self.padded_vocab_size, groups.tp)
        return chunk

    def initialize_chunks(self, seed: int) -> None:
        """Draws every parameter from (seed, its global name, its global place)."""
        from lt_parallel.models.initialization import initialize_chunks

        assert self.model_chunks is not None
        initialize_chunks(list(self.model_chunks), seed)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Refuses ids outside the vocabulary, positions outside the table, and lengths that can't be cut."""
        if not self.trainer.predicting:
            learned = self.hparams["position_embedding_type"] == "learned_absolute"
            for micro_batch in batch:
                check_batch(
                    micro_batch,
                    vocab_size=self.vocab_size,
                    max_positions=self.max_position_embeddings if learned else None,
                    sequence_multiple=self.sequence_multiple,
                )
        return batch

    @property
    def sequence_multiple(self) -> int:
        """What a sequence's length must be a multiple of to be cut by context and sequence parallelism."""
        sizes = self.megatron.sizes
        chunks = 2 * sizes.context_parallel_size if sizes.context_parallel_size > 1 else 1
        return chunks * (sizes.tensor_model_parallel_size if self.megatron.arguments.sequence_parallel else 1)

    def forward(self, batch: Mapping[str, Tensor], labels: bool = True) -> Tensor:
        """Runs the active chunk.

        Args:
            batch: `tokens`, `position_ids` and, with `labels`, `labels` and `loss_mask`; each `[b, s]`.
            labels: Whether the last chunk computes the loss.

        Returns:
            On the last stage the loss per token `[b, s]`, or the logits `[b, s, padded vocabulary / tp]` without
            labels; on other stages the hidden states `[s / tp (with sequence parallelism), b, h]`.
        """
        assert self.active_chunk is not None
        batch = self._part_of(batch)
        targets = {name: batch[name] for name in ("labels", "loss_mask")} if labels else {}
        output: Tensor = self.active_chunk(batch["tokens"], batch["position_ids"], None, **targets)
        return output

    def _part_of(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """This context-parallel rank's part of the sequences; the loader gives all ranks whole ones."""
        group = self.megatron.groups.cp
        if group.size() == 1:
            return batch
        return {
            name: cut(value, group.rank(), group.size(), 1) if name in _PER_TOKEN else value
            for name, value in batch.items()
        }

    def begin_step(self, micro_batches: Sequence[Mapping[str, Tensor]]) -> None:
        """Counts the global batch's tokens for each MTP head, on the last stage; collective over its data ranks."""
        groups, depths = self.megatron.groups, self.hparams["mtp_num_layers"]
        if not depths or groups.pp.rank() != groups.pp.size() - 1:
            return
        from lt_parallel.models.multi_token_prediction import token_counts

        counts = token_counts((batch["loss_mask"] for batch in micro_batches), depths)
        if groups.dp.size() > 1:  # context-parallel ranks are given the same whole sequences
            torch.distributed.all_reduce(counts, group=groups.dp)
        assert self.model_chunks is not None
        chunk: Any = self.model_chunks[-1]
        chunk.mtp_weights = (counts[0] / counts[1:].clamp(min=1)).float()

    def end_step(self, num_microbatches: int) -> Mapping[str, Tensor]:
        """The routers' losses; collective over all ranks."""
        if self.moe is None:
            return {}
        from lt_parallel.models.router_losses import collect_router_losses

        assert self.model_chunks is not None
        config = self.model_chunks[0].config
        return collect_router_losses(config, self.megatron.groups, num_microbatches, self.device)

    def pad_micro_batch(self, batch: Mapping[str, Tensor], num_samples: int) -> Mapping[str, Tensor]:
        """Repeats the last sample with a mask of zeros."""
        missing = num_samples - len(batch["tokens"])
        padded = {
            name: torch.cat([value, value[-1:].expand(missing, *value.shape[1:])]) for name, value in batch.items()
        }
        if missing:
            padded["loss_mask"][-missing:] = 0
        return padded

    def micro_batch_shape(self, batch: Mapping[str, Tensor]) -> tuple[int, int]:
        """(seq_length, micro_batch_size)."""
        micro_batch_size, seq_length = batch["tokens"].shape
        return seq_length, micro_batch_size

    def loss_function(
        self, output: Tensor, batch: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Mapping[str, MetricValue]]:
        """Sum of the loss over the tokens that `loss_mask` lets count.

        Args:
            output: Loss per token `[b, s]`, in nats; where the token accuracy is evaluated, logits.
            batch: Its `loss_mask` `[b, s]`.
        """
        batch = self._part_of(batch)
        mask = batch["loss_mask"]
        if not self.trainer.training:
            output = self._evaluate(output, batch)
        loss_sum, num_tokens = (output.float() * mask).sum(), mask.sum()
        return loss_sum, num_tokens, {f"{self._phase}_loss": (loss_sum, num_tokens), **self._mtp_losses()}

    def _mtp_losses(self) -> dict[str, MetricValue]:
        """Of the heads, by Megatron's names; they have none outside training."""
        if not (self.hparams["mtp_num_layers"] and self.trainer.training):
            return {}
        assert self.model_chunks is not None
        last: Any = self.model_chunks[-1]
        return {f"mtp_{depth}_loss": loss for depth, loss in enumerate(last.mtp_losses, start=1)}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Runs the active chunk; the last one gives logits where the token accuracy is asked for."""
        return self(batch, labels="token_accuracy" not in self.validation_metrics)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """As `validation_step`."""
        return self.validation_step(batch, batch_idx, dataloader_idx)

    def _evaluate(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Adds a micro batch to `validation_metrics`; returns its loss per token `[b, s]`."""
        from megatron.core.utils import get_attr_wrapped_model

        metrics: Any = self.validation_metrics
        losses = output
        if "token_accuracy" in metrics:
            predictions = vocab_parallel_argmax(output, self.megatron.groups.tp)
            metrics["token_accuracy"].update(predictions, batch["labels"], batch["loss_mask"])
            loss_of = get_attr_wrapped_model(self.active_chunk, "compute_language_model_loss")
            losses = loss_of(batch["labels"], output.transpose(0, 1).contiguous())
        if "perplexity" in metrics:
            metrics["perplexity"].update(losses, batch["loss_mask"])
        return losses

    def on_validation_epoch_start(self) -> None:
        """Begins `validation_metrics` anew, whatever an interrupted evaluation left."""
        self._evaluating = True
        metrics: Any = self.validation_metrics
        for metric in metrics.values():
            metric.reset()

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Logs `validation_metrics` after a loader's last batch: each loader has its own, as it has its own loss."""
        trainer = self.trainer
        lengths = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        if trainer.testing:
            lengths = trainer.num_test_batches
        self._evaluating = batch_idx + 1 != lengths[dataloader_idx]
        if not self._evaluating:
            self._log_validation_metrics()

    def on_validation_epoch_end(self) -> None:
        """Logs them where the end wasn't known before, as of an iterable dataset."""
        if self._evaluating:
            self._log_validation_metrics()

    def _log_validation_metrics(self) -> None:
        """Equal on every rank; collective over all of them."""
        metrics: Any = self.validation_metrics
        for name, metric in metrics.items():
            no_tokens = [torch.zeros(0)] * (3 if name == "token_accuracy" else 2)
            metric.update(*no_tokens)  # pipeline stages that see no losses take part as well
            self.log(
                f"{self._phase}_{name}", metric.compute(), on_step=False, on_epoch=True, sync_dist=True, batch_size=1
            )
            metric.reset()

    def on_test_epoch_start(self) -> None:
        """As `on_validation_epoch_start`."""
        self.on_validation_epoch_start()

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """As `on_validation_batch_end`."""
        self.on_validation_batch_end(outputs, batch, batch_idx, dataloader_idx)

    def on_test_epoch_end(self) -> None:
        """As `on_validation_epoch_end`."""
        self.on_validation_epoch_end()

    def fsdp_unit_modules(self) -> list[type[nn.Module]]:
        """What Megatron-FSDP gathers together: layers, and embedding and output layer where they share nothing."""
        from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
        from megatron.core.tensor_parallel import ColumnParallelLinear
        from megatron.core.transformer import TransformerLayer

        ends = [LanguageModelEmbedding, ColumnParallelLinear]
        return [TransformerLayer, *(ends if self.hparams["untie_embeddings_and_output_weights"] else [])]

    def layer_costs(self, settings: Settings) -> LayerCosts:
        """FLOPs of embedding (none), decoder layers, MTP heads and output layer, for `pipeline_model_parallel_layout`.

        The output layer runs once more for each head, whose logits are made where the loss is.

        Args:
            settings: Holds the model's fields.

        Raises:
            ValueError: The fields have something that isn't counted.
        """
        fields = settings.fields("model")
        flops = model_flops(SimpleNamespace(**fields), seq_length=self.seq_length, vocab_size=self.padded_vocab_size)
        layers, heads = fields["num_layers"], fields.get("mtp_num_layers") or 0
        return LayerCosts(
            decoder=[(flops.main.total - flops.main.output_layer) / layers] * layers,
            mtp=[(flops.mtp.total - flops.mtp.output_layer) / heads] * heads if heads else (),
            loss=float(flops.main.output_layer + flops.mtp.output_layer),
        )

    def model_flops(self) -> ModelFlops:
        """FLOPs of one sequence of `seq_length`, the padded vocabulary included."""
        return model_flops(
            self.megatron.model_config,
            seq_length=self.seq_length,
            vocab_size=self.padded_vocab_size,
            recomputed_modules=self._recomputed_by_own_layers,
        )

    @property
    def _recomputed_by_own_layers(self) -> tuple[str, ...]:
        return tuple(self.megatron.settings.get("layers", "recompute_modules", ()))

    @property
    def _phase(self) -> str:
        if self.trainer.training:
            return "train"
        return "test" if self.trainer.testing else "val"

    # ---------------------------------------------------------------- optimizer

    def configure_optimizers(self) -> Any:
        """AdamW by Megatron Core's optimizer, warm-up and decay by its scheduler, one step per global step."""
        from lt_parallel.strategies.lr_schedule import MegatronLRScheduler

        hp: Any = self.hparams
        optimizer = self.megatron.build_optimizer(
            optimizer="adam",
            lr=hp.lr,
            min_lr=hp.min_lr,
            weight_decay=hp.weight_decay,
            adam_beta1=hp.adam_beta1,
            adam_beta2=hp.adam_beta2,
            adam_eps=hp.adam_eps,
        )
        scheduler = MegatronLRScheduler(
            optimizer,
            max_lr=hp.lr,
            min_lr=hp.min_lr,
            lr_warmup_iters=hp.lr_warmup_iters,
            lr_decay_iters=hp.lr_decay_iters,
            lr_decay_style=hp.lr_decay_style,
            weight_decay=hp.weight_decay,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def lr_scheduler_step(self, scheduler: Any, metric: Any = None) -> None:
        """Steps Megatron Core's schedule."""
        scheduler.step(metric)

    def on_train_start(self) -> None:
        """Logs the parameter counts once."""
        counts = self.parameter_counts()
        for logger in self.loggers:
            logger.log_metrics({name: float(count) for name, count in counts.items()}, step=self.global_step)

    def parameter_counts(self) -> dict[str, int]:
        """`params_total` of the whole model, without vocabulary padding counted twice, and `params_this_rank`.

        With experts also `params_active`, what one token meets. Collective over all ranks.
        """
        from lt_parallel.models.counting import active_parameters, count_parameters, count_routed

        assert self.model_chunks is not None
        where = (list(self.model_chunks), self.megatron.groups, self.device)
        total, local = count_parameters(*where)
        counts = {"params_total": total, "params_this_rank": local}
        if self.moe is not None:
            routed = count_routed(*where)
            counts["params_active"] = active_parameters(
                total, routed, self.moe.num_moe_experts, self.moe.moe_router_topk
            )
        return counts

    # ---------------------------------------------------------------- generation

    def generate(
        self, tokens: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int = 0, seed: int | None = None
    ) -> Tensor:
        """Continues sequences; every rank calls it and gets the same result.

        Args:
            tokens: Prompts `[b, s]` (int64), all of the same length.
            max_new_tokens: Tokens to add to each.
            temperature: Divides the logits; 0 takes the likeliest token.
            top_k: Samples among the k likeliest; 0: all.
            seed: Of the sampling; None: the run's seed.

        Returns:
            `[b, s + max_new_tokens]`.

        Raises:
            ValueError: A token id outside the vocabulary, or more than `max_position_embeddings` tokens.
        """
        from lt_parallel.models.generation import generate

        return generate(self, tokens, max_new_tokens, temperature=temperature, top_k=top_k, seed=seed)

    def predict_step(self, batch: Mapping[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Continuations `[b, max_new_tokens]` of the batch's `tokens` `[b, s]`."""
        hp: Any = self.hparams
        prompts = batch["tokens"]
        result = self.generate(prompts, hp.max_new_tokens, hp.temperature, hp.top_k)
        return result[:, prompts.shape[1] :]


def _hide_vocabulary_padding(output_layer: nn.Module, vocab_size: int, padded_size: int, tp_group: Any) -> None:
    """Makes the logits of padding columns minus infinity on the ranks that hold some."""
    per_rank = padded_size // tp_group.size()
    real = min(max(vocab_size - tp_group.rank() * per_rank, 0), per_rank)
    if real == per_rank:
        return

    def hide(module: nn.Module, args: Any, result: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        logits, bias = result
        logits[..., real:] = float("-inf")  # in place: only the padding is touched, nothing of it is needed again
        return logits, bias

    output_layer.register_forward_hook(hide)
