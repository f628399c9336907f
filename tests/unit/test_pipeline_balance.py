"""The cut into stages, against every possible cut, and against the rules of layouts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_parallel.pipeline_layout import PipelineLayout
from lt_parallel.topology import LayerCosts, balance_layout


def stage_costs(stages: list[str], costs: LayerCosts) -> list[float]:
    """Of a layout, added up symbol by symbol."""
    decoder, mtp = iter(costs.decoder), iter(costs.mtp)
    by_symbol = {"E": iter([costs.embedding]), "t": decoder, "m": mtp, "L": iter([costs.loss])}
    return [sum(next(by_symbol[symbol]) for symbol in stage) for stage in stages]


def every_layout(costs: LayerCosts, pp: int, vpp: int) -> list[list[str]]:
    """All cuts that keep the rules, by brute force."""
    stages, layers = pp * vpp, len(costs.decoder)
    found = []
    for ends in itertools.combinations_with_replacement(range(layers + 1), stages - 1):
        cuts = [0, *ends, layers]
        decoder = ["t" * (end - first) for first, end in itertools.pairwise(cuts)]
        last_decoder = max(index for index, stage in enumerate(decoder) if stage)
        places = range(max(last_decoder, (vpp - 1) * pp + (vpp > 1)), stages) if costs.mtp else [stages - 1]
        for place in places:
            layout = list(decoder)
            layout[place] += "m" * len(costs.mtp)
            layout[0] = "E" + layout[0]
            layout[-1] += "L"
            found.append(layout)
    return found


COST = st.floats(0, 100, allow_subnormal=False)


@given(
    st.lists(st.floats(0.1, 100), min_size=1, max_size=6),
    COST,
    COST,
    st.lists(COST, max_size=2),
    st.sampled_from([(1, 1), (2, 1), (3, 1), (2, 2)]),
)
def test_no_other_layout_has_a_smaller_bottleneck(
    decoder: list[float], embedding: float, loss: float, mtp: list[float], sizes: tuple[int, int]
) -> None:
    costs = LayerCosts(decoder=decoder, embedding=embedding, loss=loss, mtp=mtp)
    found = balance_layout(costs, *sizes)
    layouts = every_layout(costs, *sizes)
    assert found in layouts
    smallest = min(max(stage_costs(layout, costs)) for layout in layouts)
    assert max(stage_costs(found, costs)) == pytest.approx(smallest)
    squares = [
        sum(cost * cost for cost in stage_costs(layout, costs))
        for layout in layouts
        if max(stage_costs(layout, costs)) <= smallest * (1 + 1e-9)
    ]
    assert sum(cost * cost for cost in stage_costs(found, costs)) == pytest.approx(min(squares))


def test_a_heavy_loss_gets_fewer_layers() -> None:
    costs = LayerCosts(decoder=[1.0] * 8, loss=2.0)
    assert balance_layout(costs, 2) == ["Ettttt", "tttL"]
    assert balance_layout(costs, 5) == ["Ett", "tt", "tt", "tt", "L"]


def test_equal_layers_are_cut_equally() -> None:
    assert balance_layout(LayerCosts(decoder=[1.0] * 8), 2, 2) == ["Ett", "tt", "tt", "ttL"]


@given(st.integers(1, 40), st.sampled_from([(2, 1), (4, 1), (2, 2), (4, 3)]), st.integers(0, 2))
def test_the_strategy_takes_what_it_proposes(layers: int, sizes: tuple[int, int], mtp: int) -> None:
    pp, vpp = sizes
    costs = LayerCosts(decoder=[1.0 + 0.1 * (index % 3) for index in range(layers)], loss=1.5, mtp=[2.0] * mtp)
    stages = balance_layout(costs, pp, vpp)
    layout = PipelineLayout.parse(
        "|".join(stages),
        num_layers=layers,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        mtp_num_layers=mtp or None,
    )
    assert [layout.stage(rank, chunk) for chunk in range(vpp) for rank in range(pp)] == stages


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"decoder": []}, "at least one layer"),
        ({"decoder": [1.0, -1.0]}, "decoder: a cost of -1.0"),
        ({"decoder": [1.0], "loss": float("nan")}, "loss: a cost of nan"),
    ],
)
def test_costs_that_mean_nothing(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LayerCosts(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(("pp", "vpp", "message"), [(0, 1, "pp must be"), (2, 0, "vpp must be"), (1, 2, "needs")])
def test_sizes_that_cannot_be(pp: int, vpp: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        balance_layout(LayerCosts(decoder=[1.0]), pp, vpp)
