"""Rank arithmetic against Megatron Core's own, and the text of every error."""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.parallel_state import RankGenerator
from megatron.core.process_groups_config import ProcessGroupCollection

# Registers the backend "fake": groups without communication, for any world size in one process.
from torch.testing._internal.distributed.fake_pg import FakeStore

from lt_parallel.topology import (
    GROUP_ALIASES,
    GROUP_NAMES,
    ExpertCoordinates,
    ParallelSizes,
    RankCoordinates,
    padded_vocab_size,
    require_divisible,
    require_positive_int,
)

ORDER = "tp-cp-ep-dp-pp"
DENSE_TOKENS = {
    "tp": "tp",
    "pp": "pp",
    "cp": "cp",
    "dp": "dp",
    "dp_cp": "dp-cp",
    "mp": "tp-pp",
    "tp_cp": "tp-cp",
    "tp_dp": "tp-dp",
    "tp_dp_cp": "tp-dp-cp",
}
EXPERT_TOKENS = {"ep": "ep", "expt_tp": "tp", "expt_dp": "dp", "tp_ep": "tp-ep", "tp_ep_pp": "tp-ep-pp"}
DEEPSEEK_V3 = ParallelSizes(
    world_size=1024,
    pipeline_model_parallel_size=16,
    virtual_pipeline_model_parallel_size=2,
    expert_model_parallel_size=64,
    expert_tensor_parallel_size=1,
)


def factorizations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `number` as an ordered product of `parts` factors."""
    if parts == 1:
        yield (number,)
        return
    for factor in range(1, number + 1):
        if number % factor == 0:
            for rest in factorizations(number // factor, parts - 1):
                yield (factor, *rest)


def dense_generator(sizes: ParallelSizes) -> RankGenerator:
    """As `initialize_model_parallel` makes it."""
    tp, cp = sizes.tensor_model_parallel_size, sizes.context_parallel_size
    pp = sizes.pipeline_model_parallel_size
    return RankGenerator(tp=tp, ep=1, dp=sizes.world_size // (tp * cp * pp), pp=pp, cp=cp, order=ORDER)


def expert_generator(sizes: ParallelSizes) -> RankGenerator:
    """As `initialize_model_parallel` makes it."""
    tp = sizes.expert_tensor_parallel_size or sizes.tensor_model_parallel_size
    ep, pp = sizes.expert_model_parallel_size, sizes.pipeline_model_parallel_size
    return RankGenerator(tp=tp, ep=ep, dp=sizes.world_size // (tp * ep * pp), pp=pp, cp=1, order=ORDER)


def assert_dense_groups_equal(sizes: ParallelSizes) -> None:
    generator = dense_generator(sizes)
    for name, token in DENSE_TOKENS.items():
        assert sizes.groups(name) == generator.get_ranks(token), (name, sizes)


def assert_expert_groups_equal(sizes: ParallelSizes) -> None:
    generator = expert_generator(sizes)
    for name, token in EXPERT_TOKENS.items():
        assert sizes.groups(name) == generator.get_ranks(token), (name, sizes)


# --- groups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", range(1, 65))
def test_groups_equal_megatron_cores_rank_generator(world_size: int) -> None:
    for tp, cp, _, pp in factorizations(world_size, 4):
        assert_dense_groups_equal(
            ParallelSizes(
                world_size=world_size,
                tensor_model_parallel_size=tp,
                context_parallel_size=cp,
                pipeline_model_parallel_size=pp,
            )
        )
    for etp, ep, _, pp in factorizations(world_size, 4):
        assert_expert_groups_equal(
            ParallelSizes(
                world_size=world_size,
                expert_tensor_parallel_size=etp,
                expert_model_parallel_size=ep,
                pipeline_model_parallel_size=pp,
            )
        )


@pytest.mark.parametrize(
    "sizes",
    [
        DEEPSEEK_V3,
        ParallelSizes(
            world_size=1536,
            tensor_model_parallel_size=8,
            pipeline_model_parallel_size=12,
            context_parallel_size=2,
            expert_model_parallel_size=4,
        ),
    ],
    ids=["1024", "1536"],
)
def test_groups_of_large_worlds_equal_megatron_cores(sizes: ParallelSizes) -> None:
    assert_dense_groups_equal(sizes)
    assert_expert_groups_equal(sizes)
    assert sizes.groups("pp") == expert_generator(sizes).get_ranks("pp")


@pytest.fixture
def no_process_group() -> Iterator[None]:
    assert not dist.is_initialized()
    yield
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def real_groups(sizes: ParallelSizes, rank: int, hierarchical: list[int] | None) -> dict[str, Any]:
    """Name -> ranks of the group that Megatron Core creates for `rank`; None where it has none."""
    dist.init_process_group("fake", rank=rank, world_size=sizes.world_size, store=FakeStore())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor_model_parallel_size,
        pipeline_model_parallel_size=sizes.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=sizes.virtual_pipeline_model_parallel_size,
        context_parallel_size=sizes.context_parallel_size,
        expert_model_parallel_size=sizes.expert_model_parallel_size,
        expert_tensor_parallel_size=sizes.expert_tensor_parallel_size,
        hierarchical_context_parallel_sizes=hierarchical,
        create_gloo_process_groups=False,
    )
    collection = ProcessGroupCollection.use_mpu_process_groups()
    made = {name: getattr(collection, name) for name in collection.__dataclass_fields__}
    if hierarchical is None:
        del made["hcp"]  # destroy_model_parallel leaves those of an earlier initialisation
    made["tp_dp"] = parallel_state.get_tensor_and_data_parallel_group()
    ranks = {
        name: [dist.get_process_group_ranks(one) for one in group]
        if isinstance(group, list)
        else group and dist.get_process_group_ranks(group)
        for name, group in made.items()
    }
    assert parallel_state.get_data_parallel_world_size() == sizes.data_parallel_size
    assert parallel_state.get_expert_data_parallel_world_size() == sizes.expert_data_parallel_size
    place, expert_place = sizes.coordinates(rank), sizes.expert_coordinates(rank)
    assert place == (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    assert expert_place == (
        parallel_state.get_expert_tensor_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_data_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return ranks


@pytest.mark.parametrize(
    ("sizes", "hierarchical", "ranks"),
    [
        (ParallelSizes(world_size=1), None, [0]),
        (
            ParallelSizes(
                world_size=8,
                tensor_model_parallel_size=2,
                pipeline_model_parallel_size=2,
                virtual_pipeline_model_parallel_size=2,
            ),
            None,
            range(8),
        ),
        (
            ParallelSizes(
                world_size=24,
                tensor_model_parallel_size=2,
                pipeline_model_parallel_size=3,
                context_parallel_size=2,
                expert_model_parallel_size=4,
                expert_tensor_parallel_size=1,
            ),
            None,
            range(24),
        ),
        (
            ParallelSizes(
                world_size=16,
                tensor_model_parallel_size=2,
                context_parallel_size=8,
                expert_model_parallel_size=2,
            ),
            [2, 4],
            range(16),
        ),
        (DEEPSEEK_V3, None, [0, 63, 64, 777, 1023]),
    ],
    ids=["1", "8", "24", "16-hcp", "1024"],
)
@pytest.mark.usefixtures("no_process_group")
def test_groups_equal_those_that_megatron_core_creates(
    sizes: ParallelSizes, hierarchical: list[int] | None, ranks: Any
) -> None:
    for rank in ranks:
        made = real_groups(sizes, rank, hierarchical)
        for name in (*GROUP_NAMES, *GROUP_ALIASES):
            # A rank without an embedding has no such group: Megatron Core has None, or its non-member marker.
            expected = made[name] or []
            assert sizes.group_of(name, rank) == expected, (name, rank)
        # Fields that are left: not used with one optimizer instance, or groups of one rank.
        left = set(made) - set(GROUP_NAMES) - set(GROUP_ALIASES) - {"hcp"}
        assert {name for name in left if made[name] not in (None, [rank])} == set()
        if hierarchical:
            levels = sizes.hierarchical_context_groups(hierarchical)
            assert [next(group for group in level if rank in group) for level in levels] == made["hcp"]


@pytest.mark.parametrize("name", [*GROUP_NAMES, *GROUP_ALIASES])
def test_every_rank_is_in_one_group(name: str) -> None:
    sizes = ParallelSizes(
        world_size=48,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=3,
        context_parallel_size=2,
        expert_model_parallel_size=8,
        expert_tensor_parallel_size=1,
    )
    members = sorted(rank for group in sizes.groups(name) for rank in group)
    expected = {
        "embd": [r for r in range(48) if sizes.coordinates(r).pp in (0, 2)],
        "pos_embd": [r for r in range(48) if sizes.coordinates(r).pp == 0],
    }
    assert members == expected.get(name, list(range(48)))


def test_embedding_groups_with_multi_token_prediction_on_a_stage_of_its_own() -> None:
    sizes = ParallelSizes(world_size=8, pipeline_model_parallel_size=4)
    assert sizes.groups("pp") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert sizes.embedding_groups() == [[0, 6], [1, 7]]
    assert sizes.embedding_groups([2, 0, 3]) == [[0, 4, 6], [1, 5, 7]]
    assert ParallelSizes(world_size=2).embedding_groups() == [[0], [1]]
    with pytest.raises(ValueError, match=r"^pp_ranks=\[0, 4\] must be in 0 to 3, got 4$"):
        sizes.embedding_groups([0, 4])


# --- coordinates and sizes ------------------------------------------------------------------------


def test_coordinates_by_hand() -> None:
    sizes = ParallelSizes(
        world_size=32,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        context_parallel_size=2,
        expert_model_parallel_size=4,
        expert_tensor_parallel_size=1,
    )
    assert sizes.coordinates(0) == RankCoordinates(tp=0, cp=0, dp=0, pp=0)
    assert sizes.coordinates(7) == RankCoordinates(tp=1, cp=1, dp=1, pp=0)
    assert sizes.coordinates(29) == RankCoordinates(tp=1, cp=0, dp=3, pp=1)
    assert sizes.expert_coordinates(7) == ExpertCoordinates(etp=0, ep=3, edp=1, pp=0)
    assert sizes.expert_coordinates(29) == ExpertCoordinates(etp=0, ep=1, edp=3, pp=1)
    assert (sizes.data_parallel_size, sizes.expert_data_parallel_size, sizes.model_parallel_size) == (4, 4, 4)
    assert [sizes.rank_of(sizes.coordinates(rank)) for rank in range(32)] == list(range(32))


def test_defaults() -> None:
    sizes = ParallelSizes(world_size=8, tensor_model_parallel_size=4)
    assert sizes.effective_expert_tensor_parallel_size == 4
    assert replace(sizes, expert_tensor_parallel_size=2).effective_expert_tensor_parallel_size == 2
    assert sizes.num_model_chunks == 1
    one_chunk = replace(sizes, virtual_pipeline_model_parallel_size=1)
    assert one_chunk.virtual_pipeline_model_parallel_size is None
    assert one_chunk == sizes
    assert DEEPSEEK_V3.num_model_chunks == 2


def test_outside_the_world() -> None:
    sizes = ParallelSizes(world_size=8, tensor_model_parallel_size=2)
    for method in (sizes.coordinates, sizes.expert_coordinates, lambda rank: sizes.group_of("tp", rank)):
        for rank in (-1, 8):
            with pytest.raises(ValueError, match=rf"^rank={rank} is outside world_size=8; valid: 0 to 7$"):
                method(rank)
    with pytest.raises(ValueError, match=r"^dp=4 is not a place on an axis of size 4; valid: 0 to 3$"):
        sizes.rank_of(RankCoordinates(tp=0, cp=0, dp=4, pp=0))
    with pytest.raises(ValueError, match=r"^no process group is called 'edp'; valid: tp, pp, cp, .*, pos_embd, and"):
        sizes.groups("edp")


# --- errors ---------------------------------------------------------------------------------------

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
VPP, EP, ETP = (
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"world_size": 8, TP: 3},
            (
                f"world_size=8 must be divisible by {TP}=3 x {PP}=1 x {CP}=1 (= 3); "
                f"nearest valid: world_size=6 or 9; or keep world_size=8 with {TP}=2 or 4"
            ),
        ),
        (
            {"world_size": 4, TP: 8},
            (
                f"world_size=4 must be divisible by {TP}=8 x {PP}=1 x {CP}=1 (= 8); "
                f"nearest valid: world_size=8; or keep world_size=4 with {TP}=4"
            ),
        ),
        (
            {"world_size": 8, TP: 3, PP: 3},
            f"world_size=8 must be divisible by {TP}=3 x {PP}=3 x {CP}=1 (= 9); nearest valid: world_size=9",
        ),
        (
            {"world_size": 8, TP: 2, PP: 2, CP: 4},
            (
                f"world_size=8 must be divisible by {TP}=2 x {PP}=2 x {CP}=4 (= 16); "
                f"nearest valid: world_size=16; or keep world_size=8 with {TP}=1, or {PP}=1, or {CP}=2"
            ),
        ),
        (  # one chunk fewer would need no pipeline, so PP=1 is no way out here
            {"world_size": 8, TP: 2, PP: 2, VPP: 2, CP: 4},
            (
                f"world_size=8 must be divisible by {TP}=2 x {PP}=2 x {CP}=4 (= 16); "
                f"nearest valid: world_size=16; or keep world_size=8 with {TP}=1, or {CP}=2"
            ),
        ),
        (  # the experts' tensor size is the dense layers' unless given
            {"world_size": 8, TP: 2, EP: 8},
            (
                f"world_size=8 must be divisible by {TP}=2 x {EP}=8 x {PP}=1 (= 16); "
                f"nearest valid: world_size=16; or keep world_size=8 with {TP}=1, or {EP}=4"
            ),
        ),
        (  # 12 suits the experts and 8 the dense layers: only multiples of 24 suit both
            {"world_size": 32, TP: 8, EP: 12, ETP: 1},
            (
                f"world_size=32 must be divisible by {ETP}=1 x {EP}=12 x {PP}=1 (= 12); "
                f"nearest valid: world_size=24 or 48; or keep world_size=32 with {EP}=8 or 16"
            ),
        ),
        (
            {"world_size": 8, VPP: 2},
            f"{VPP}=2 needs {PP} > 1, got 1; nearest valid: {PP}=2, or no {VPP}",
        ),
        ({"world_size": 0}, "world_size must be an integer of at least 1, got 0"),
        ({"world_size": 2, TP: -1}, f"{TP} must be an integer of at least 1, got -1"),
        ({"world_size": 2, PP: 2.0}, f"{PP} must be an integer of at least 1, got 2.0"),
        ({"world_size": 2, CP: True}, f"{CP} must be an integer of at least 1, got True"),
        ({"world_size": 2, CP: None}, f"{CP} must be an integer of at least 1, got None"),
        ({"world_size": 2, EP: "2"}, f"{EP} must be an integer of at least 1, got '2'"),
        ({"world_size": 2, ETP: 0}, f"{ETP} must be an integer of at least 1, got 0"),
        ({"world_size": 2, PP: 2, VPP: 0}, f"{VPP} must be an integer of at least 1, got 0"),
    ],
)
def test_size_errors(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        ParallelSizes(**sizes)
    assert str(error.value) == message


def test_what_size_errors_propose_is_valid() -> None:
    """Every number that a message offers is tried."""
    tried = 0
    for world_size, tp, pp, cp, ep in product((6, 8, 12), (1, 2, 3), (1, 2), (1, 4), (1, 3, 8)):
        given = {"world_size": world_size, TP: tp, PP: pp, CP: cp, EP: ep}
        try:
            ParallelSizes(**given)
        except ValueError as error:
            offers = str(error).partition("nearest valid: ")[2].replace("keep world_size=", "keep ")
            for name, values in re.findall(r"(\w+_size)=([0-9]+(?: or [0-9]+)*)", offers):
                for value in values.split(" or "):
                    ParallelSizes(**(given | {name: int(value)}))
                    tried += 1
    assert tried > 100


def test_hierarchical_context_groups_by_hand() -> None:
    sizes = ParallelSizes(world_size=16, tensor_model_parallel_size=2, context_parallel_size=4)
    assert sizes.groups("cp") == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    near, far = sizes.hierarchical_context_groups([2, 2])
    assert near == [[0, 2], [4, 6], [1, 3], [5, 7], [8, 10], [12, 14], [9, 11], [13, 15]]
    assert far == [[0, 4], [2, 6], [1, 5], [3, 7], [8, 12], [10, 14], [9, 13], [11, 15]]


def test_hierarchical_size_errors() -> None:
    sizes = ParallelSizes(world_size=16, context_parallel_size=8)
    with pytest.raises(ValueError) as error:
        sizes.hierarchical_context_groups([2, 2])
    assert str(error.value) == (
        "hierarchical_context_parallel_sizes=[2, 2] must multiply to context_parallel_size=8, got 4; "
        "valid for example: [2, 4]"
    )
    with pytest.raises(ValueError, match=r"=\[\] must multiply to context_parallel_size=8, got 1"):
        sizes.hierarchical_context_groups([])
    with pytest.raises(ValueError, match=r"^hierarchical_context_parallel_sizes\[1\] must be an integer of at least 1"):
        sizes.hierarchical_context_groups([8, 0])


# --- shared rules ---------------------------------------------------------------------------------


def test_require_divisible() -> None:
    assert require_divisible("num_attention_heads", 12, TP, 4) == 3
    with pytest.raises(ValueError) as error:
        require_divisible("num_attention_heads", 10, TP, 4)
    assert str(error.value) == f"num_attention_heads=10 must be divisible by {TP}=4; nearest valid: 8 or 12"
    with pytest.raises(ValueError) as error:
        require_divisible("num_query_groups", 2, TP, 4)
    assert str(error.value) == f"num_query_groups=2 must be divisible by {TP}=4; nearest valid: 4"
    with pytest.raises(ValueError) as error:
        require_divisible("seq_length", 1001, "2 x context_parallel_size=4", 8)
    assert str(error.value) == (
        "seq_length=1001 must be divisible by 2 x context_parallel_size=4 (= 8); nearest valid: 1000 or 1008"
    )


def test_require_positive_int_returns_the_value() -> None:
    assert require_positive_int("num_layers", 3) == 3


@pytest.mark.parametrize(
    ("vocab_size", "divisible_by", "padded"),
    [
        (1, 128, 128),
        (128, 128, 128),
        (129, 128, 256),
        (50257, 128, 50304),
        (256, 1, 256),
        (32000, 128, 32000),
    ],
)
def test_padded_vocab_size(vocab_size: int, divisible_by: int, padded: int) -> None:
    assert padded_vocab_size(vocab_size, divisible_by) == padded
    for tp in (1, 2, 4):
        if padded % tp == 0:
            assert padded_vocab_size(vocab_size, divisible_by, tensor_model_parallel_size=tp) == padded


def test_padded_vocab_size_errors() -> None:
    with pytest.raises(ValueError) as error:
        padded_vocab_size(256, 128, tensor_model_parallel_size=3)
    assert str(error.value) == (
        "the padded vocabulary of 256 (vocab_size=256 rounded up to a multiple of "
        f"make_vocab_size_divisible_by=128) must be divisible by {TP}=3; nearest valid: {TP}=2 or 4, "
        "or make_vocab_size_divisible_by=384"
    )
    for arguments, name in (((0,), "vocab_size"), ((5, 0), "make_vocab_size_divisible_by"), ((5, 8, 0), TP)):
        with pytest.raises(ValueError, match=f"^{name} must be an integer of at least 1, got 0$"):
            padded_vocab_size(*arguments)


def test_imports_nothing_but_the_standard_library() -> None:
    code = (
        "import sys; before = set(sys.modules); import lt_parallel.pipeline_layout, lt_parallel.topology; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before} - {'lt_parallel'}; "
        "sys.exit(repr(new - sys.stdlib_module_names) if new - sys.stdlib_module_names else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
