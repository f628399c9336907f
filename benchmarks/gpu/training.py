"""A tiny model's numbers against the CPU's, and the rates of three training loops."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader

import lt_parallel  # noqa: F401  (before megatron.core)
from benchmarks.gpu.attention import attention_operators, profiler, synchronize
from benchmarks.gpu.shapes import CLIP, SEED, TINY, Shape, rounded
from benchmarks.overhead import core_loop
from lt_parallel.models import GPTModule
from lt_parallel.strategies import MegatronParallelStrategy


def random_tokens(shape: Shape, steps: int) -> Any:
    """Samples `{tokens, labels, loss_mask, position_ids}` for so many steps: windows of one random stream."""
    length = shape.seq_length
    count = steps * shape.micro_batch_size * shape.num_microbatches
    generator = torch.Generator().manual_seed(SEED)
    stream = torch.randint(shape.vocab_size, (count + length + 1,), generator=generator)
    mask, positions = torch.ones(length), torch.arange(length)
    return [
        {
            "tokens": stream[start : start + length],
            "labels": stream[start + 1 : start + length + 1],
            "loss_mask": mask,
            "position_ids": positions,
        }
        for start in range(count)
    ]


def make_module(shape: Shape) -> Any:
    return GPTModule(
        shape.vocab_size, shape.seq_length, **shape.model(), lr=3e-4, lr_warmup_iters=2, lr_decay_iters=1000
    )


def fit(shape: Shape, device: str, precision: str, steps: int, callbacks: list[Any]) -> Any:
    """Trains on one device; returns the module."""
    L.seed_everything(SEED, verbose=False)
    module = make_module(shape)
    trainer = L.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        precision=precision,  # type: ignore[arg-type]
        max_steps=steps,
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,  # windows in their order, as the plain loop reads them
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        strategy=MegatronParallelStrategy(num_microbatches=shape.num_microbatches, layer_backend="torch"),
    )
    trainer.fit(module, DataLoader(random_tokens(shape, steps), batch_size=shape.micro_batch_size))
    return module


def training_numbers(device: str, precision: str) -> dict[str, list[float]]:
    """Losses and gradient norms of five steps of the tiny model."""
    numbers: dict[str, list[float]] = {"loss": [], "grad_norm": []}

    class Numbers(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            numbers["loss"].append(float(trainer.callback_metrics["train_loss"]))
            numbers["grad_norm"].append(float(trainer.callback_metrics["grad_norm"]))

    fit(TINY, device, precision, 5, [Numbers()])
    return numbers


def parity_reference(shape: Shape, device: str) -> dict[str, Any]:
    return training_numbers("cpu", "32-true")


def parity(shape: Shape, device: str) -> dict[str, Any]:
    return {precision: training_numbers(device, precision) for precision in ("32-true", "bf16-mixed")}


class Clock:
    """Seconds of blocks of steps."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._began_s = 0.0
        self.blocks_s: list[float] = []

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        self.start()
        yield
        self.stop()

    def start(self) -> None:
        synchronize(self._device)
        self._began_s = time.perf_counter()

    def stop(self) -> None:
        synchronize(self._device)
        self.blocks_s.append(time.perf_counter() - self._began_s)

    def step_s(self, block: int) -> float:
        return statistics.median(self.blocks_s) / block


def peak_memory_gib(device: str) -> float | None:
    return rounded(torch.cuda.max_memory_allocated() / 2**30) if device == "cuda" else None


def rates(shape: Shape, device: str) -> dict[str, Any]:
    """Trainer and plain loop in turns, block by block; then one step under the profiler."""
    steps = shape.warmup + shape.block * shape.blocks + 1
    clocks = {"trainer": Clock(device), "megatron": Clock(device)}
    result: dict[str, Any] = {}
    losses: list[Any] = []

    class Turns(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            done = batch_idx - shape.warmup
            if done == 0:
                result["memory_gib"] = peak_memory_gib(device)
                result["params"] = module.parameter_counts()["params_total"]
                loader = DataLoader(random_tokens(shape, steps), batch_size=shape.micro_batch_size)
                self.core = core_loop(module, trainer, loader, shape.num_microbatches)
                for _ in range(shape.warmup):
                    self.core.step()
                clocks["trainer"].start()
            elif done > 0 and done % shape.block == 0:
                clocks["trainer"].stop()
                with clocks["megatron"].block():
                    for _ in range(shape.block):
                        self.core.step()
                if done == shape.block * shape.blocks:
                    self.profile = profiler(device)
                    self.profile.__enter__()
                else:
                    clocks["trainer"].start()

        def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
            losses.append(trainer.callback_metrics["train_loss"].detach())

        def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
            self.profile.__exit__(None, None, None)
            result["operators"] = attention_operators(self.profile)
            result["flops"] = sequence_flops(module.model_flops())
            pairs = [(float(mine), float(core)) for mine, core in zip(losses, self.core.losses, strict=False)]
            result["loss_error"] = rounded(max(abs(mine - core) / abs(core) for mine, core in pairs))
            result["compared"] = len(pairs)

    fit(shape, device, "bf16-mixed", steps, [Turns()])
    for name, clock in clocks.items():
        result[name] = {"step_s": clock.step_s(shape.block), "blocks_s": clock.blocks_s}
    return result


def sequence_flops(flops: Any) -> dict[str, float]:
    """FLOPs per token by the package's three definitions."""
    return {
        "model": flops.training / flops.seq_length,
        "hardware": flops.training_hardware / flops.seq_length,
        "full_attention": flops.training_full_attention / flops.seq_length,
    }


def hugging_face(shape: Shape, device: str) -> dict[str, Any]:
    """The Llama of transformers: SDPA, fp32 weights, bf16 autocast, fused AdamW."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_query_groups,
        max_position_embeddings=shape.seq_length,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model: Any = LlamaForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    samples = random_tokens(shape, 1)
    size = shape.micro_batch_size
    batches = [
        torch.stack([sample["tokens"] for sample in samples[start : start + size]]).to(device)
        for start in range(0, len(samples), size)
    ]

    def step() -> Any:
        total = torch.zeros((), device=device)
        for tokens in batches:
            with torch.autocast(device, torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens).loss / len(batches)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    first = float(step())
    for _ in range(shape.warmup):
        step()
    clock = Clock(device)
    for _ in range(shape.blocks):
        with clock.block():
            for _ in range(shape.block):
                step()
    with profiler(device) as profile:
        step()
        synchronize(device)
    return {
        "step_s": clock.step_s(shape.block),
        "first_loss": first,
        "params": sum(parameter.numel() for parameter in model.parameters()),
        "operators": attention_operators(profile),
        "memory_gib": peak_memory_gib(device),
    }
