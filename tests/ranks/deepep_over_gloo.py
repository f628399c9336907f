"""DeepEP's first interface, as far as Megatron Core uses it, by gloo's collectives on the CPU.

It stands in for a library of CUDA kernels, so that Megatron Core's own "flex" dispatcher runs and can be compared with
the others. What that library demands of its arguments (types, shapes, what goes with what) is checked here too: a call
that it would refuse must not pass in a test. The one liberty is that tokens may be fp32 (`bf16_only=False`), for
comparisons that 8 bits of mantissa don't allow.

How tokens travel: `dispatch` sends a token once to each rank that has at least one of its experts, with a copy of its
top-k list in which other ranks' experts are -1 and the others are numbered from 0; they arrive ordered by sender and,
within one, as they lie there. `combine` is the way back: what the ranks return for a token is added up. The handle
that `dispatch` returns is all that `combine`, and a second `dispatch` of other rows by the same plan, need.

Shape legend: n tokens of this rank, m tokens received, k experts per token, r ranks, e experts of all ranks, h width.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: Calls since `install`, by method; "by handle": by a plan made before.
calls: Counter[str] = Counter()
#: Sizes of expert-parallel groups that the library has tuned settings for.
GROUP_SIZES = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)
ALIGNMENT_BYTES = 16


class EventHandle:
    """A moment on the stream that computes; on a CPU it is always over."""

    def current_stream_wait(self) -> None:
        calls["wait"] += 1


class EventOverlap:
    """What calls take to wait for, and give to be waited for; empty where a call wasn't asynchronous."""

    def __init__(self, event: EventHandle | None = None) -> None:
        self.event = event

    def current_stream_wait(self) -> None:
        assert self.event is not None, "nothing to wait for: the call wasn't asynchronous"
        self.event.current_stream_wait()


@dataclass(frozen=True)
class Config:
    """Settings for a group size; here only the sizes of the buffers follow from it."""

    num_sms: int

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return self.num_sms * hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0 if num_ranks <= 8 else self.num_sms * hidden_bytes * num_ranks


@dataclass(frozen=True)
class _Plan:
    """Who sends which tokens to whom.

    Args:
        rows: This rank's tokens in the order in which they are sent, by receiver.
        sent: How many go to each rank.
        received: How many come from each rank.
        num_tokens: Tokens of this rank.
    """

    rows: Tensor
    sent: list[int]
    received: list[int]
    num_tokens: int


class Buffer:
    """The exchange among the ranks of one group."""

    num_sms = 20
    bf16_only = True

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        calls["buffer"] += 1
        assert group.size() < 8 or group.size() % 8 == 0
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0, "an odd number of SMs"
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in GROUP_SIZES, f"no settings for {num_ranks} ranks"
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        """Where the tokens go.

        Returns:
            Tokens for each rank [r]; None, which is for several machines; tokens for each expert [e]; whether a token
            goes to a rank [n, r]; the event.
        """
        calls["layout"] += 1
        _check_order(previous_event, async_finish, allocate_on_comm_stream)
        assert topk_idx.dim() == 2 and topk_idx.dtype is torch.int64 and topk_idx.is_contiguous()
        assert num_experts % self.group.size() == 0
        visited = torch.zeros(len(topk_idx), num_experts + 1, dtype=torch.bool)
        visited.scatter_(1, topk_idx.masked_fill(topk_idx < 0, num_experts), True)
        per_expert = visited[:, :num_experts]
        in_rank = per_expert.unflatten(1, (self.group.size(), -1)).any(dim=-1)
        return in_rank.sum(0).int(), None, per_expert.sum(0).int(), in_rank, _event(async_finish)

    def dispatch(
        self,
        x: Tensor,
        handle: tuple[_Plan] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, list[int] | None, tuple[_Plan] | None, EventOverlap]:
        """Sends tokens to the ranks of their experts.

        Returns:
            Tokens received [m, h]. Unless by a handle also their experts on this rank [m, k], -1 for none; the weights
            of these [m, k], 0 for none; tokens for each of this rank's experts; the handle. The event.
        """
        _check_order(previous_event, async_finish, allocate_on_comm_stream)
        self._check_tokens(x)
        if handle is not None:
            calls["dispatch by handle"] += 1
            assert topk_idx is None and topk_weights is None
            (plan,) = handle
            assert len(x) == plan.num_tokens
            return self._send(x, plan), None, None, None, None, _event(async_finish)
        calls["dispatch"] += 1
        assert num_tokens_per_rank is not None and is_token_in_rank is not None and num_tokens_per_expert is not None
        assert topk_idx is not None and topk_weights is not None
        assert num_tokens_per_rank.dtype is num_tokens_per_expert.dtype is torch.int32
        assert is_token_in_rank.dtype is torch.bool and is_token_in_rank.shape == (len(x), self.group.size())
        assert topk_weights.dtype is torch.float32 and topk_weights.is_contiguous()
        assert topk_idx.shape == topk_weights.shape and len(topk_idx) == len(x)
        plan = self._plan(is_token_in_rank, num_tokens_per_rank)
        local = num_tokens_per_expert.numel() // self.group.size()
        experts, weights = self._send(topk_idx, plan), self._send(topk_weights, plan)
        experts = experts - self.group.rank() * local
        elsewhere = (experts < 0) | (experts >= local)
        experts, weights = experts.masked_fill(elsewhere, -1), weights.masked_fill(elsewhere, 0)
        counts = torch.bincount(experts[~elsewhere], minlength=local).tolist()
        return self._send(x, plan), experts, weights, counts, (plan,), _event(async_finish)

    def combine(
        self,
        x: Tensor,
        handle: tuple[_Plan],
        topk_weights: Tensor | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Sends tokens back and adds up what comes for each.

        Returns:
            Sums [n, h] of the received rows, and [n, k] of the weights where given; the event.
        """
        calls["combine"] += 1
        _check_order(previous_event, async_finish, allocate_on_comm_stream)
        self._check_tokens(x)
        (plan,) = handle
        assert len(x) == sum(plan.received)
        weights = None
        if topk_weights is not None:
            assert topk_weights.dtype is torch.float32 and topk_weights.is_contiguous()
            weights = self._return(topk_weights, plan)
        return self._return(x, plan), weights, _event(async_finish)

    def _check_tokens(self, x: Tensor) -> None:
        assert x.dim() == 2 and x.is_contiguous()
        assert x.size(1) * x.element_size() % ALIGNMENT_BYTES == 0
        assert x.dtype is torch.bfloat16 or not self.bf16_only, f"tokens of {x.dtype}"

    def _plan(self, is_token_in_rank: Tensor, num_tokens_per_rank: Tensor) -> _Plan:
        rows = is_token_in_rank.T.nonzero()[:, 1]
        sent, received = num_tokens_per_rank.long(), torch.empty(self.group.size(), dtype=torch.int64)
        dist.all_to_all_single(received, sent, group=self.group)
        return _Plan(rows, sent.tolist(), received.tolist(), len(is_token_in_rank))

    def _send(self, values: Tensor, plan: _Plan) -> Tensor:
        return self._exchange(values[plan.rows], plan.sent, plan.received)

    def _return(self, values: Tensor, plan: _Plan) -> Tensor:
        back = self._exchange(values, plan.received, plan.sent).float()
        total = torch.zeros(plan.num_tokens, back.size(1)).index_add_(0, plan.rows, back)
        return total.to(values.dtype)

    def _exchange(self, values: Tensor, sent: list[int], received: list[int]) -> Tensor:
        output = values.new_empty(sum(received), values.size(1))
        dist.all_to_all_single(output, values.contiguous(), received, sent, group=self.group)
        return output


def _check_order(previous_event: EventOverlap | None, async_finish: bool, allocate_on_comm_stream: bool) -> None:
    if allocate_on_comm_stream:
        assert async_finish and previous_event is not None and previous_event.event is not None


def _event(async_finish: bool) -> EventOverlap:
    return EventOverlap(EventHandle() if async_finish else None)


def install(bf16_only: bool = True) -> None:
    """Makes this process's Megatron Core find the library, whether or not it has looked for it already.

    Args:
        bf16_only: As with the kernels; False takes any type of tokens.
    """
    package, utils = ModuleType("deep_ep"), ModuleType("deep_ep.utils")
    package.__dict__.update(Buffer=Buffer, __path__=[], utils=utils)
    utils.__dict__.update(EventHandle=EventHandle, EventOverlap=EventOverlap)
    sys.modules.update({"deep_ep": package, "deep_ep.utils": utils})
    Buffer.bf16_only = bf16_only
    calls.clear()
    found: Any = importlib.import_module("megatron.core.transformer.moe.fused_a2a")
    if not found.HAVE_DEEP_EP:
        found = importlib.reload(found)
    assert found.HAVE_DEEP_EP and not found.HAVE_HYBRIDEP
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    for name in ("fused_dispatch", "fused_combine", "set_deepep_num_sms"):
        setattr(dispatcher, name, getattr(found, name))
