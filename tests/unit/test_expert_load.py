"""What is made of the tokens that experts got: figures, table, picture, and the order that experts are put into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from lt_parallel import ExpertLoadMonitor, ExpertRebalance
from lt_parallel.callbacks.expert_load import draw_heat_map, load_figures, load_table
from lt_parallel.callbacks.expert_rebalance import new_orders
from tests.unit.test_strategy_settings import (
    _no_process_may_start,  # noqa: F401  (a fixture)
    fit_error,
)

MODEL = {"add_bias_linear": False, "position_embedding_type": "rope"}
TOKENS = torch.tensor([[0, 0, 0, 0], [30, 10, 20, 20], [80, 0, 0, 0]])
PER_RANK = TOKENS.view(3, 2, 2).sum(2)
DROPPED = torch.tensor([0, 20, 0])


def test_figures_are_of_the_layers_with_experts() -> None:
    assert load_figures(TOKENS, PER_RANK, DROPPED) == pytest.approx(
        {
            "moe/expert_imbalance": (1.5 + 4) / 2,
            "moe/rank_imbalance": (1.0 + 2) / 2,
            "moe/dropped_share": 0.1,
            "moe/unused_experts": 3.0,
            "moe/expert_imbalance_layer_1": 1.5,
            "moe/rank_imbalance_layer_1": 1.0,
            "moe/dropped_share_layer_1": 0.2,
            "moe/expert_imbalance_layer_2": 4.0,
            "moe/rank_imbalance_layer_2": 2.0,
            "moe/dropped_share_layer_2": 0.0,
        }
    )
    assert load_figures(torch.zeros(2, 4), torch.zeros(2, 2), torch.zeros(2)) == {}


def test_the_table_has_a_row_for_each_layer_with_experts() -> None:
    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(load_table(TOKENS, PER_RANK, DROPPED))
    rows = [line.split() for line in console.export_text().splitlines()]
    assert ["1", "10", "20", "30", "expert", "0", "1.50", "1.00", "20"] in rows
    assert ["2", "0", "20", "80", "expert", "0", "4.00", "2.00", "0"] in rows
    assert not any(row[:1] == ["0"] for row in rows)


def test_the_heat_map_is_a_picture_with_a_cell_for_each_expert(tmp_path: Path) -> None:
    draw_heat_map(TOKENS, tmp_path / "map.png")
    with Image.open(tmp_path / "map.png") as picture:
        colours = picture.convert("RGB").getcolors(100_000)
        assert picture.width > 200 and picture.height > 100
    assert len(colours) > 20  # the cells, and the bar beside them


def loads(draw: Any) -> tuple[torch.Tensor, int | None, int, float]:
    ep, per_rank = draw(st.sampled_from([2, 4, 8])), draw(st.integers(1, 4))
    groups = draw(st.sampled_from([None, 1, 2, 4, 8]))
    experts = ep * per_rank * (groups or 1)
    layers = draw(st.integers(1, 3))
    values = draw(st.lists(st.integers(0, 50), min_size=layers * experts, max_size=layers * experts))
    return torch.tensor(values).view(layers, experts), groups, ep, draw(st.sampled_from([1.0, 1.2, 2.0]))


@given(data=st.data())
def test_orders_are_permutations_that_help_and_keep_groups_together(data: st.DataObject) -> None:
    tokens, groups, ep, threshold = loads(data.draw)
    experts = tokens.size(1)
    for layer, order in new_orders(tokens, groups, ep, threshold).items():
        assert sorted(order) == list(range(experts))
        before, after = (load.view(ep, -1).sum(1) for load in (tokens[layer], tokens[layer, order]))
        assert after.max() < before.max()
        assert before.max() > threshold * before.double().mean()
        if groups:
            size = experts // groups
            members = [{expert // size for expert in order[first : first + size]} for first in range(0, experts, size)]
            assert all(len(group) == 1 for group in members)


def test_orders_of_a_known_load() -> None:
    tokens = torch.tensor([[40, 30, 10, 20], [25, 25, 25, 25], [0, 0, 0, 0]])
    assert new_orders(tokens, None, 2, 1.1) == {0: [0, 2, 1, 3]}
    assert new_orders(tokens, None, 2, 1.5) == {}  # 70 of a mean of 50
    # Two groups on two ranks: there is nothing to move that would help.
    assert new_orders(tokens, 2, 2, 1.1) == {}
    # Four groups on two ranks: whole groups change places. Two on four: experts within their group.
    by_fours = torch.tensor([[9, 9, 8, 8, 1, 1, 2, 2]])
    assert new_orders(by_fours, 4, 2, 1.1) == {0: [0, 1, 4, 5, 2, 3, 6, 7]}
    two_on_four = new_orders(torch.tensor([[9, 8, 1, 2, 6, 4, 5, 5]]), 2, 4, 1.1)
    assert two_on_four == {0: [0, 2, 1, 3, 4, 5, 6, 7]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps must be an integer of at least 1, got 0"),
        ({"threshold": 0.9}, "threshold=0.9 must be a number of at least 1"),
        ({"threshold": float("nan")}, "threshold=nan must be"),
        ({"threshold": True}, "threshold=True must be"),
    ],
)
def test_arguments_of_rebalancing_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExpertRebalance(**arguments)


def test_arguments_of_the_monitor_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="every_n_steps must be an integer of at least 1, got 0"):
        ExpertLoadMonitor(every_n_steps=0)
    with pytest.raises(ValueError, match="heat_map_every_n must be an integer of at least 1, got -1"):
        ExpertLoadMonitor(heat_map_every_n=-1)


def moe(**arguments: Any) -> dict[str, Any]:
    return {**MODEL, "moe": {"num_moe_experts": 12, **arguments}}


EP2 = {"expert_model_parallel_size": 2, "num_microbatches": 1}
GROUPS = {"moe_router_num_groups": 3, "moe_router_group_topk": 1, "moe_router_score_function": "sigmoid"}
#: name: (devices, strategy, model, callback, what the message must say)
BAD: dict[str, tuple[int, dict[str, Any], dict[str, Any], Any, list[str]]] = {
    "a monitor of a dense model": (1, {}, {}, ExpertLoadMonitor(), ["ExpertLoadMonitor", "has none", "moe=..."]),
    "rebalancing a dense model": (1, {}, {}, ExpertRebalance(), ["num_moe_experts=None", "leave it out"]),
    "rebalancing one rank": (
        2,
        {"num_microbatches": 1},
        moe(),
        ExpertRebalance(),
        ["num_moe_experts=12", "expert_model_parallel_size=1", "expert_model_parallel_size > 1"],
    ),
    "rebalancing cut parameters": (
        2,
        {**EP2, "data_parallel_sharding_strategy": "optim_grads"},
        moe(),
        ExpertRebalance(),
        ["data_parallel_sharding_strategy='optim_grads'", "use 'optim' or 'no_shard'"],
    ),
    "groups that ranks cut": (
        2,
        EP2,
        moe(**GROUPS),
        ExpertRebalance(),
        ["moe_router_num_groups=3", "expert_model_parallel_size=2", "divide one another"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_combination_is_one_error(case: str) -> None:
    devices, strategy, model, callback, words = BAD[case]
    message = fit_error(devices, strategy, model, callbacks=[callback])
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"
