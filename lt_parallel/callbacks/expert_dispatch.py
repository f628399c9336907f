"""`ExpertDispatch`: how tokens travel to the ranks that hold their experts, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import lightning.pytorch as L

from lt_parallel.topology import require_positive_int

if TYPE_CHECKING:
    from lt_parallel.settings import Settings

Dispatcher = Literal["allgather", "alltoall", "flex"]
FlexBackend = Literal["deepep", "hybridep", "ncclep"]

#: Megatron Core's earlier names of what `contribute` sets. It would let some win and ignore others.
_EARLIER_NAMES = {"moe_enable_deepep": False, "moe_deepep_num_sms": None, "moe_hybridep_num_sms": None}


class ExpertDispatch(L.Callback):
    """Says how tokens are sent to their experts; without it, by "allgather". Results stay the same.

    Args:
        dispatcher: "allgather" gives every rank all tokens of the ranks that share the experts: simple, and right for
            few of them or for tokens that visit most. "alltoall" sends each token to the ranks of its experts, once for
            each expert. "flex" sends it once to each rank, by a library made for that.
        backend: The library of "flex". "deepep" and "hybridep" are DeepEP's kernels, the second also for racks whose
            machines share NVLink; "ncclep" is NCCL's, through TransformerEngine. All need CUDA.
        num_sms: Processors of the GPU that "flex" may use to communicate; None: the library's choice (20 for "deepep").
        permute_fusion: Sorts tokens by expert in fused kernels. Needs TransformerEngine.

    Raises:
        ValueError: An argument is wrong by itself, or means nothing beside the others; combinations with the rest of
            the run are checked when the Trainer starts.
    """

    def __init__(
        self,
        dispatcher: Dispatcher = "allgather",
        backend: FlexBackend = "deepep",
        num_sms: int | None = None,
        permute_fusion: bool = False,
    ) -> None:
        for name, value, kinds in (("dispatcher", dispatcher, Dispatcher), ("backend", backend, FlexBackend)):
            if value not in get_args(kinds):
                raise ValueError(f"{name}={value!r} is not one of {', '.join(get_args(kinds))}")
        if not isinstance(permute_fusion, bool):
            raise ValueError(f"permute_fusion={permute_fusion!r} must be True or False")
        self.dispatcher, self.backend = dispatcher, backend
        self.num_sms, self.permute_fusion = num_sms, permute_fusion
        self._check_backend()
        self._check_num_sms()

    def _check_backend(self) -> None:
        if self.dispatcher != "flex" and self.backend != "deepep":
            raise ValueError(
                f"backend={self.backend!r} means nothing with dispatcher={self.dispatcher!r}; use dispatcher='flex', "
                "or leave backend out"
            )
        if self.permute_fusion and self.backend != "deepep":
            raise ValueError(
                f"permute_fusion=True means nothing with backend={self.backend!r}, which sorts tokens itself; leave "
                "permute_fusion out"
            )

    def _check_num_sms(self) -> None:
        if self.num_sms is None:
            return
        require_positive_int("num_sms", self.num_sms)
        if self.dispatcher != "flex":
            raise ValueError(
                f"num_sms={self.num_sms} means nothing with dispatcher={self.dispatcher!r}; use dispatcher='flex', or "
                "leave num_sms out"
            )
        if self.backend == "deepep" and self.num_sms % 2:
            raise ValueError(
                f"num_sms={self.num_sms} must be even with backend='deepep', which uses pairs; e.g. {self.num_sms + 1}"
            )

    def contribute(self, settings: Settings) -> None:
        """Adds the fields of Megatron Core's config that choose the dispatcher."""
        settings.contribute(
            type(self).__name__,
            "model",
            moe_token_dispatcher_type=self.dispatcher,
            moe_flex_dispatcher_backend=self.backend,
            moe_flex_dispatcher_num_sms=self.num_sms,
            moe_permute_fusion=self.permute_fusion,
            **_EARLIER_NAMES,
        )
