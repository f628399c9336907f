"""Small training runs whose step-by-step numbers are compared, one per kind of loop.

`train_with_trainer` is what a user writes. `train_with_core_loop` is Megatron Core alone: no Lightning, no strategy,
and its own data order, so the two share only the model's definition and its initialisation.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader, Dataset

from lt_parallel.models import GPTModule
from lt_parallel.strategies import MegatronParallelStrategy
from tests.support.ranks import init_gloo

SEED = 7
SEQ_LENGTH = 32
VOCAB_SIZE = 100  # padded to 128
MICRO_BATCH, GLOBAL_BATCH, STEPS = 2, 16, 10

GPT2 = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
LLAMA: dict[str, Any] = {
    **GPT2,
    "num_query_groups": 4,
    "num_attention_heads": 8,
    "ffn_hidden_size": 160,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
}
MOE: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 96,
    "moe_router_load_balancing_type": "seq_aux_loss",
}
MIXTRAL = {**LLAMA, "moe": {**MOE, "moe_aux_loss_coeff": 2e-2, "moe_z_loss_coeff": 1e-3}}
QWEN3_MOE = {**LLAMA, "qk_layernorm": True, "kv_channels": 16, "moe": {**MOE, "moe_aux_loss_coeff": 1e-2}}
DEEPSEEK_V3 = {
    **{name: value for name, value in LLAMA.items() if name != "num_query_groups"},
    "num_attention_heads": 4,
    "qk_layernorm": True,
    "mtp_num_layers": 1,
    "mtp_loss_scaling_factor": 0.3,
    "mla": {"kv_lora_rank": 32, "q_lora_rank": 48, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16},
    "moe": {
        **MOE,
        "moe_aux_loss_coeff": 1e-3,
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_shared_expert_intermediate_size": 96,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_topk_scaling_factor": 2.5,
    },
}
MOE_SHAPES: dict[str, dict[str, Any]] = {"mixtral": MIXTRAL, "qwen3_moe": QWEN3_MOE, "deepseek_v3": DEEPSEEK_V3}
DENSE_SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "llama+mtp": {**LLAMA, "mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3},
}
SHAPES = {**DENSE_SHAPES, **MOE_SHAPES}
OPTIMIZER = {"lr": 2e-3, "min_lr": 2e-4, "lr_warmup_iters": 3, "lr_decay_iters": 20, "weight_decay": 0.1}


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """Sequences with some structure to learn and masks of unequal length."""

    def __init__(self, length: int = 203) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 + index)
        start, stride = torch.randint(1, 20, (2,), generator=generator).tolist()
        tokens = (start + stride * torch.arange(SEQ_LENGTH + 1)) % VOCAB_SIZE
        mask = torch.ones(SEQ_LENGTH)
        mask[int(torch.randint(8, SEQ_LENGTH, (1,), generator=generator)) :] = 0
        positions = torch.arange(SEQ_LENGTH)
        return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": mask, "position_ids": positions}


class StepNumbers(L.Callback):
    """Keeps what each step reported, and the validation loss."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.further_losses: dict[str, list[float]] = {}
        self.grad_norms: list[float] = []
        self.val_losses: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss"]))
        for name, value in trainer.callback_metrics.items():
            if name.startswith("mtp_") or "load_balancing_loss" in name or "z_loss" in name:
                self.further_losses.setdefault(name, []).append(float(value))
        self.grad_norms.append(trainer.optimizers[0].grad_norm)

    def on_validation_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.val_losses.append(float(trainer.callback_metrics["val_loss"]))

    def numbers(self) -> dict[str, list[float]]:
        return {"loss": self.losses, **self.further_losses, "grad_norm": self.grad_norms, "val_loss": self.val_losses}


def build_trainer(numbers: StepNumbers, strategy: dict[str, Any], **options: Any) -> L.Trainer:
    batch = {} if "num_microbatches" in strategy else {"global_batch_size": GLOBAL_BATCH}
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    arguments: dict[str, Any] = {
        "accelerator": "cpu",
        "max_steps": STEPS,
        "gradient_clip_val": 1.0,
        "num_sanity_val_steps": 0,
        "val_check_interval": STEPS,
        "limit_val_batches": 3,
        "strategy": MegatronParallelStrategy(**{**batch, **strategy}),
        **quiet,
        **options,
    }
    arguments["callbacks"] = [numbers, *options.get("callbacks", [])]
    return L.Trainer(**arguments)


def train_with_trainer(
    shape: str, world_size: int, strategy: dict[str, Any], model: dict[str, Any] | None = None, **options: Any
) -> dict[str, list[float]]:
    """A user's run; `limit_val_batches` is in global steps."""
    L.seed_everything(SEED, verbose=False)
    numbers = StepNumbers()
    trainer = build_trainer(numbers, strategy, devices=world_size, **options)
    module = GPTModule(VOCAB_SIZE, SEQ_LENGTH, **{**SHAPES[shape], **OPTIMIZER, **(model or {})})
    trainer.fit(
        module,
        DataLoader(Sequences(), batch_size=MICRO_BATCH, shuffle=True),
        DataLoader(Sequences(45), batch_size=MICRO_BATCH),
    )
    return numbers.numbers()


def global_order(length: int, epoch: int = 0) -> list[int]:
    """The order of samples that the strategy promises: a permutation of (seed, epoch) alone."""
    return torch.randperm(length, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()


def train_with_core_loop(shape: str) -> dict[str, list[float]]:
    """Megatron Core by itself on one process; learning rates from the formula, not from its scheduler."""
    init_gloo()
    from functools import partial

    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from lt_parallel.models.initialization import defer_initialization, initialize_chunks
    from lt_parallel.plugins.layer_backend import resolve_layer_backend
    from lt_parallel.plugins.layer_backend.specs import gpt_block_spec

    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model_parallel_cuda_manual_seed(SEED)
    backend = resolve_layer_backend("torch", "cpu")
    llama = shape == "llama"
    config = TransformerConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=8 if llama else 4,
        num_query_groups=4,
        ffn_hidden_size=160 if llama else 256,
        normalization="RMSNorm" if llama else "LayerNorm",
        gated_linear_unit=llama,
        activation_func=torch.nn.functional.silu if llama else torch.nn.functional.gelu,
        add_bias_linear=not llama,
        bias_activation_fusion=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        **backend.config_fields,
    )
    defer_initialization(config)
    chunk = GPTModel(
        config,
        gpt_block_spec(config, backend),
        vocab_size=128,
        max_sequence_length=SEQ_LENGTH,
        share_embeddings_and_output_weights=not llama,
        position_embedding_type="rope" if llama else "learned_absolute",
        pg_collection=groups,
    )

    def hide_padding(layer: Any, args: Any, result: Any) -> Any:
        logits, bias = result
        columns = torch.arange(logits.shape[-1])
        return logits.masked_fill(columns >= VOCAB_SIZE, float("-inf")), bias

    chunk.output_layer.register_forward_hook(hide_padding)
    initialize_chunks([chunk], SEED)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), chunk, pg_collection=groups)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=2e-3, weight_decay=0.1, adam_beta2=0.95, clip_grad=1.0),
        [model],
        use_gloo_process_groups=False,
        pg_collection=groups,
    )
    config.finalize_model_grads_func = finalize_model_grads

    def forward_step(batches: Any, chunk: Any) -> Any:
        batch = next(batches)
        losses = chunk(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

        def loss_function(mask: torch.Tensor, losses: torch.Tensor) -> Any:
            total, count = (losses * mask).sum(), mask.sum().int()
            return total, count, (total.detach().double(), count)

        return losses, partial(loss_function, batch["loss_mask"])

    dataset, order = Sequences(), global_order(203)
    result: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    for step in range(STEPS):
        samples = order[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH]
        micro_batches = [
            torch.utils.data.default_collate([dataset[i] for i in samples[start : start + MICRO_BATCH]])
            for start in range(0, GLOBAL_BATCH, MICRO_BATCH)
        ]
        for group in optimizer.param_groups:
            group["lr"] = expected_lr(step)
            group["weight_decay"] = 0.1 * group["wd_mult"]
        model.zero_grad_buffer()
        optimizer.zero_grad()
        parts = get_forward_backward_func(pp_size=1, vp_size=None)(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=model,
            num_microbatches=len(micro_batches),
            seq_length=SEQ_LENGTH,
            micro_batch_size=MICRO_BATCH,
        )
        _, grad_norm, _ = optimizer.step()
        total, count = (sum(part[i] for part in parts) for i in (0, 1))
        result["loss"].append(float(total / count))
        result["grad_norm"].append(float(grad_norm))
    return result


def expected_lr(step: int) -> float:
    """Linear warm-up over 3 steps to 2e-3, then a cosine to 2e-4 at step 20, for the 0-based step."""
    import math

    point = step + 1
    if point <= 3:
        return 2e-3 * point / 3
    return 2e-4 + (2e-3 - 2e-4) * 0.5 * (1 + math.cos(math.pi * (point - 3) / 17))
