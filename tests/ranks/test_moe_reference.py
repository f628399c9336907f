"""Mixtures of experts and latent attention: a first step against the same model written out in plain PyTorch.

The reference shares weights (by Megatron's names) and data with the Trainer's run and nothing else: no layer, loss or
function of Megatron Core or of this package. It takes the global batch at once, in float64.

Sources; equations without a paper's name are DeepSeek-V3's:

    DeepSeek-V3 (arXiv:2412.19437)  latent attention eq. 1-11, experts eq. 12-16, loss of a sequence eq. 17-20,
                                    multi-token prediction eq. 21-25
    Mixtral (arXiv:2401.04088)      section 2.1: softmax over the top k logits
    ST-MoE (arXiv:2202.08906)       z-loss, eq. 5
    Wang et al. (arXiv:2408.15664)  the bias of experts, algorithm 1

Where Megatron Core 0.19.2 differs from them the reference follows Megatron, and a comment says so.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad, silu
from torch.utils.data import DataLoader

from lt_parallel.models import GPTModule
from tests.ranks.parity_runs import (
    DEEPSEEK_V3,
    MICRO_BATCH,
    MIXTRAL,
    OPTIMIZER,
    QWEN3_MOE,
    SEED,
    SEQ_LENGTH,
    VOCAB_SIZE,
    Sequences,
    StepNumbers,
    build_trainer,
)
from tests.support.ranks import run_ranks

#: Of DeepSeek-V3's shape, with choices that groups and bias change, and values narrower than their keys without rope.
GROUPS: dict[str, Any] = {
    **DEEPSEEK_V3,
    "mla": {**DEEPSEEK_V3["mla"], "v_head_dim": 12},
    "moe": {
        **DEEPSEEK_V3["moe"],
        "num_moe_experts": 16,
        "moe_router_topk": 4,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_aux_loss_coeff": 2e-2,  # enough to be seen in the gradients
    },
}
#: Queries straight from the hidden state; with qk_layernorm as well, Megatron Core needs Transformer Engine's layers.
PLAIN_QUERIES = {**GROUPS, "qk_layernorm": False, "mla": {**GROUPS["mla"], "q_lora_rank": None}}
SHAPES: dict[str, dict[str, Any]] = {
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "deepseek_v3": GROUPS,
    "deepseek_v3, plain queries": PLAIN_QUERIES,
}
Weights = dict[str, Tensor]


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def swiglu(x: Tensor, gate_and_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ gate_and_up.T).chunk(2, -1)
    return (silu(gate) * up) @ down.T


def rotated(x: Tensor, neighbours: bool = False) -> Tensor:
    """RoPE (arXiv:2104.09864) of `[b, s, n, d]`: the j-th pair of channels turns by position x 10000^(-2j / d).

    Args:
        x: Queries or keys.
        neighbours: Pairs are channels 2j and 2j + 1, as DeepSeek's; otherwise j and j + d / 2.

    Returns:
        All first channels of the pairs and then all second ones, which changes no product of a query and a key.
    """
    first, second = (x[..., 0::2], x[..., 1::2]) if neighbours else x.chunk(2, -1)
    speeds = 10000.0 ** (-torch.arange(0, x.size(3), 2, dtype=torch.float64) / x.size(3))
    angles = torch.arange(x.size(1))[:, None, None] * speeds
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Of `[b, s, n, d]`, `[b, s, n, d]`, `[b, s, n, e]`: `[b, s, n e]`."""
    scores = torch.einsum("bqnd,bknd->bnqk", query, key) / query.size(3) ** 0.5
    scores = scores.masked_fill(torch.ones(scores.shape[2:]).triu(1).bool(), float("-inf"))
    return torch.einsum("bnqk,bkne->bqne", scores.softmax(-1), value).flatten(2)


def among_largest(scores: Tensor, count: int) -> Tensor:
    """Whether each is among the `count` largest of the last dim."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(count).indices, True)


class Reference:
    """The model from its definition.

    Args:
        weights: By Megatron's names, float64.
        biases: Of the routers, by the names of their layers.
        hparams: What the user gave to `GPTModule`.
    """

    def __init__(self, weights: Weights, biases: Weights, hparams: Any) -> None:
        self.weights, self.biases, self.hp = weights, biases, hparams
        self.moe, self.mla = hparams["moe"], hparams["mla"]
        self.balance_losses: dict[int, Tensor] = {}  # by 0-based layer, heads after the model's
        self.z_losses: dict[int, Tensor] = {}
        self.loads: Weights = {}  # tokens of each expert, by the names of the layers
        self.closest = float("inf")  # the smallest distance of a chosen score to one that wasn't
        self.changed_by_bias = self.changed_by_groups = 0

    def loss(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """What is logged of a batch, and the `total` that a step's gradients are of."""
        tokens, vocabulary = batch["tokens"], self.weights["embedding.word_embeddings.weight"]
        x = vocabulary[tokens]
        for layer in range(self.hp["num_layers"]):
            x = self.layer(layer, f"decoder.layers.{layer}.", x)
        x = rms_norm(x, self.weights["decoder.final_layernorm.weight"])
        found = {"loss": self.mean_loss(x, batch, depth=0)}
        total = found["loss"]
        if self.hp["mtp_num_layers"]:
            # Eq. 21 puts the hidden state first and the token second; Megatron the other way round. h is the hidden
            # state after the model's last norm. Beyond the end comes token 0, whose loss doesn't count.
            head = self.under("mtp.layers.0.")
            token = rms_norm(vocabulary[pad(tokens[:, 1:], (0, 1))], head["enorm.weight"])
            both = torch.cat([token, rms_norm(x, head["hnorm.weight"])], -1)
            x = self.layer(self.hp["num_layers"], "mtp.layers.0.mtp_model_layer.", both @ head["eh_proj.weight"].T)
            found["mtp_1_loss"] = self.mean_loss(rms_norm(x, head["final_layernorm.weight"]), batch, depth=1)
            total = total + self.hp["mtp_loss_scaling_factor"] * found["mtp_1_loss"]
        # The routers' losses are means over all tokens. With `calculate_per_token_loss` Megatron multiplies them by the
        # number of all tokens, and all gradients are then divided by the number of those that count.
        weight = batch["loss_mask"].numel() / batch["loss_mask"].sum()
        for name, coefficient, losses in (
            ("seq_load_balancing_loss", self.moe["moe_aux_loss_coeff"], self.balance_losses),
            ("z_loss", self.moe["moe_z_loss_coeff"], self.z_losses),
        ):
            if coefficient is not None:
                total = total + weight * coefficient * torch.stack(list(losses.values())).sum()
                found[name] = torch.stack(list(losses.values())).mean()
                found |= {f"moe/{name}_layer_{layer}": loss for layer, loss in losses.items()}
        return {**found, "total": total}

    def under(self, prefix: str) -> Weights:
        return {name.removeprefix(prefix): each for name, each in self.weights.items() if name.startswith(prefix)}

    def mean_loss(self, x: Tensor, batch: dict[str, Tensor], depth: int) -> Tensor:
        """Cross entropy of position i's prediction of labels[i + depth], of those that count; padding takes no part."""
        logits = (x @ self.weights["output_layer.weight"][:VOCAB_SIZE].T)[:, : SEQ_LENGTH - depth]
        losses = cross_entropy(logits.flatten(0, 1), batch["labels"][:, depth:].flatten(), reduction="none")
        mask = batch["loss_mask"][:, depth:].flatten()
        return (losses * mask).sum() / mask.sum()

    def layer(self, number: int, prefix: str, x: Tensor) -> Tensor:
        weights = self.under(prefix)
        attention = self.grouped_query_attention if self.mla is None else self.latent_attention
        attended = attention(weights, rms_norm(x, weights["input_layernorm.weight"]))
        x = x + attended @ weights["self_attention.linear_proj.weight"].T
        normalised = rms_norm(x, weights["pre_mlp_layernorm.weight"])
        freq = self.moe["moe_layer_freq"]
        if freq == 1 or (freq + freq[-1:])[number]:
            return x + self.experts(number, prefix, weights, normalised)
        return x + swiglu(normalised, weights["mlp.linear_fc1.weight"], weights["mlp.linear_fc2.weight"])

    def grouped_query_attention(self, weights: Weights, x: Tensor) -> Tensor:
        """arXiv:2305.13245; with qk_layernorm, queries and keys are normalised per head before RoPE (Qwen3)."""
        heads, groups = self.hp["num_attention_heads"], self.hp["num_query_groups"]
        channels = self.hp["kv_channels"] or self.hp["hidden_size"] // heads
        # The rows of the weight: for each group the queries of its heads, its key and its value.
        of_groups = (x @ weights["self_attention.linear_qkv.weight"].T).unflatten(-1, (groups, -1, channels))
        query, key, value = (part.flatten(2, 3) for part in of_groups.split([heads // groups, 1, 1], 3))
        if self.hp["qk_layernorm"]:
            query = rms_norm(query, weights["self_attention.q_layernorm.weight"])
            key = rms_norm(key, weights["self_attention.k_layernorm.weight"])
        key, value = (part.repeat_interleave(heads // groups, 2) for part in (rotated(key), value))
        return causal_attention(rotated(query), key, value)

    def latent_attention(self, weights: Weights, x: Tensor) -> Tensor:
        """Eq. 1-11; with qk_layernorm, a norm after each compressed vector (section 4.2)."""
        mla, heads = self.mla, self.hp["num_attention_heads"]
        content, position = mla["qk_head_dim"], mla["qk_pos_emb_head_dim"]
        w = {name.removeprefix("self_attention."): weight for name, weight in weights.items()}
        if mla["q_lora_rank"]:
            latent = x @ w["linear_q_down_proj.weight"].T  # eq. 6
            latent = rms_norm(latent, w["q_layernorm.weight"]) if self.hp["qk_layernorm"] else latent
            query = latent @ w["linear_q_up_proj.weight"].T
        else:
            query = x @ w["linear_q_proj.weight"].T
        query = query.unflatten(-1, (heads, content + position))
        # The two down projections of eq. 1 and 3, one after the other; the same of those of eq. 2 and 5 per head.
        latent, shared = (x @ w["linear_kv_down_proj.weight"].T).split([mla["kv_lora_rank"], position], -1)
        latent = rms_norm(latent, w["kv_layernorm.weight"]) if self.hp["qk_layernorm"] else latent
        up = latent @ w["linear_kv_up_proj.weight"].T
        key, value = up.unflatten(-1, (heads, -1)).split([content, mla["v_head_dim"]], -1)
        shared = rotated(shared.unsqueeze(2), neighbours=True).expand(-1, -1, heads, -1)
        query = torch.cat([query[..., :content], rotated(query[..., content:], neighbours=True)], -1)
        return causal_attention(query, torch.cat([key, shared], -1), value)

    def experts(self, number: int, prefix: str, weights: Weights, x: Tensor) -> Tensor:
        """Eq. 12: every expert's result for every token, times the token's weight for it, which mostly is 0."""
        shares = self.route(number, prefix, x @ weights["mlp.router.weight"].T)
        per_expert = zip(
            weights["mlp.experts.linear_fc1.weight"], weights["mlp.experts.linear_fc2.weight"], strict=True
        )
        result = torch.zeros_like(x)
        for share, (gate_and_up, down) in zip(shares.unbind(-1), per_expert, strict=True):
            result = result + share.unsqueeze(-1) * swiglu(x, gate_and_up, down)
        if self.moe["moe_shared_expert_intermediate_size"]:
            shared = (weights[f"mlp.shared_experts.linear_{each}.weight"] for each in ("fc1", "fc2"))
            result = result + swiglu(x, *shared)
        return result

    def route(self, number: int, prefix: str, logits: Tensor) -> Tensor:
        """The weights `[b, s, experts]` of each token's experts; notes the layer's losses and loads."""
        topk = self.moe["moe_router_topk"]
        if self.moe["moe_router_score_function"] == "softmax":
            balanced = chosen = self.top(logits, topk)
            shares = logits.masked_fill(~chosen, float("-inf")).softmax(-1)
            affinities = logits.softmax(-1)
        else:
            scores = logits.sigmoid()  # eq. 15
            chosen = self.limited_top(scores, scores + self.biases[prefix], topk)  # eq. 16
            shares = torch.where(chosen, scores, 0)
            shares = self.moe["moe_router_topk_scaling_factor"] * shares / shares.sum(-1, keepdim=True)  # eq. 13
            affinities = scores / scores.sum(-1, keepdim=True)  # eq. 19
            balanced = self.top(scores, topk)  # eq. 18 knows neither bias nor groups
        of_sequences = balanced.double().mean(1) * logits.size(-1) / topk  # eq. 18; the Switch Transformer's f, N times
        self.balance_losses[number] = (of_sequences * affinities.mean(1)).sum(-1).mean()  # eq. 17 and 20
        self.z_losses[number] = logits.logsumexp(-1).square().mean()
        self.loads[prefix] = chosen.flatten(0, 1).sum(0)
        return shares

    def limited_top(self, scores: Tensor, biased: Tensor, topk: int) -> Tensor:
        """At most so many groups, of the largest sums of their topk / groups best (section 2.1.2)."""
        count, of_groups = self.moe["moe_router_num_groups"], self.moe["moe_router_group_topk"]
        best = biased.unflatten(-1, (count, -1)).sort(-1, descending=True).values[..., : topk // of_groups].sum(-1)
        allowed = self.top(best, of_groups).repeat_interleave(scores.size(-1) // count, -1)
        chosen = self.top(biased.masked_fill(~allowed, float("-inf")), topk)
        without_groups = among_largest(biased, topk)
        self.changed_by_groups += int((chosen != without_groups).any(-1).sum())
        self.changed_by_bias += int((without_groups != among_largest(scores, topk)).any(-1).sum())
        return chosen

    def top(self, scores: Tensor, count: int) -> Tensor:
        """A choice that is made; notes how clear it is."""
        values = scores.detach().sort(-1, descending=True).values
        self.closest = min(self.closest, float((values[..., count - 1] - values[..., count]).min()))
        return among_largest(scores, count)


class Written(L.Callback):
    """The first step from the reference, and what of the Trainer's isn't logged."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: list[dict[str, Tensor]], batch_idx: int) -> None:
        chunk = module.model_chunks[0]
        generator = torch.Generator().manual_seed(6)
        with torch.no_grad():  # norms of ones and biases of zeros would hide where they are applied
            for name, parameter in chunk.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5, generator=generator)
            for bias in biases_of(chunk).values():
                bias.uniform_(-0.1, 0.1, generator=generator)
        weights = {name: each.detach().double().requires_grad_() for name, each in chunk.named_parameters()}
        self.biases = {name: bias.clone() for name, bias in biases_of(chunk).items()}
        self.reference = Reference(weights, {name: each.double() for name, each in self.biases.items()}, module.hparams)
        losses = self.reference.loss({name: torch.cat([part[name] for part in batch]) for name in batch[0]})
        found = torch.autograd.grad(losses.pop("total"), list(weights.values()))
        self.gradients = dict(zip(weights, found, strict=True))
        norm = torch.cat([gradient.flatten() for gradient in found]).norm()
        self.numbers = {name: value.item() for name, value in {**losses, "grad_norm": norm}.items()}

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        chunk = module.model_chunks[0]
        self.biases_after = biases_of(chunk)
        self.errors = {
            name: float((parameter.main_grad - self.gradients[name]).norm() / self.gradients[name].norm())
            for name, parameter in chunk.named_parameters()
        }


def biases_of(chunk: Any) -> Weights:
    end = "mlp.router.expert_bias"
    return {name.removesuffix(end): buffer for name, buffer in chunk.named_buffers() if name.endswith(end)}


def first_step(shape: str) -> dict[str, Any]:
    L.seed_everything(SEED, verbose=False)
    numbers, written = StepNumbers(), Written()
    options = {"max_steps": 1, "limit_val_batches": 0, "gradient_clip_val": 1e9}  # gradients stay as they are
    trainer = build_trainer(numbers, {}, devices=1, callbacks=[written], **options)
    # Weights large enough for experts to get unequal loads, and for scores to lie apart.
    module = GPTModule(VOCAB_SIZE, SEQ_LENGTH, **{**SHAPES[shape], **OPTIMIZER, "init_method_std": 0.1})
    trainer.fit(module, DataLoader(Sequences(), batch_size=MICRO_BATCH, shuffle=True))
    reference = written.reference
    return {
        "written": written.numbers,
        "trainer": {name: values[0] for name, values in numbers.numbers().items() if values},
        "errors of gradients": written.errors,
        "closest": reference.closest,
        "loads": reference.loads,
        "changed": (reference.changed_by_bias, reference.changed_by_groups),
        "biases": {name: (bias, written.biases_after[name]) for name, bias in written.biases.items()},
    }


@cache
def step(shape: str) -> dict[str, Any]:
    return run_ranks(first_step, 1, shape)[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_first_step_is_the_one_written_out(shape: str) -> None:
    found = step(shape)
    assert found["closest"] > 1e-5, "in float32 a token may get another expert: take another seed"
    assert found["trainer"] == pytest.approx(found["written"], rel=2e-6)
    assert {name: error for name, error in found["errors of gradients"].items() if error > 5e-6} == {}
    for loads in found["loads"].values():
        assert 0 < loads.min() < 0.8 * loads.max(), "experts that are all alike would prove little"


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if "deepseek" in shape])
def test_the_bias_of_experts_changes_choices_and_follows_their_loads(shape: str) -> None:
    found = step(shape)
    assert min(found["changed"]) > 500, "of 4 layers x 512 tokens"
    assert len(found["biases"]) == 4
    for layer, (before, after) in found["biases"].items():
        loads = found["loads"][layer].double()
        torch.testing.assert_close(after, before + (1e-3 * (loads.mean() - loads).sign()).float(), rtol=0, atol=1e-7)
