"""Weights are the same at every layout, follow Megatron's distributions, and none is left undrawn."""

import math
import time
from typing import Any

import pytest
import torch
from torch import nn

from lt_parallel.models.initialization import DeferredNormal, defer_initialization, initialize_chunks
from tests.ranks.tiny_gpt import (
    PADDED_VOCABULARY,
    Layout,
    Shard,
    assemble,
    build_chunks,
    initialize_parallel,
    make_config,
    shards_of,
)
from tests.support.ranks import run_ranks


def draw(shape: str, layout: Layout, seed: int, fields: dict[str, Any]) -> list[Shard]:
    initialize_parallel(layout)
    return shards_of(build_chunks(shape, layout, seed, **fields))


def weights(shape: str, layout: Layout, seed: int = 1234, **fields: Any) -> dict[str, torch.Tensor]:
    """Whole parameters of a model that was initialised at a layout."""
    return assemble(run_ranks(draw, layout.world_size, shape, layout, seed, fields))


@pytest.fixture(scope="module")
def reference() -> Any:
    """Whole parameters of a shape from a single process, made once each."""
    known: dict[str, dict[str, torch.Tensor]] = {}

    def get(shape: str) -> dict[str, torch.Tensor]:
        return known.setdefault(shape, weights(shape, Layout()) if shape not in known else {})

    return get


LAYOUTS = {
    "tp2": Layout(2, tp=2),
    "tp2 sp": Layout(2, tp=2, sequence_parallel=True),
    "tp4": Layout(4, tp=4),
    "pp2": Layout(2, pp=2),
    "pp2 vpp2": Layout(2, pp=2, vpp=2),
    "tp2 pp2": Layout(4, tp=2, pp=2),
    "dp2": Layout(2),
    "pp2 layout": Layout(
        2, pp=2, config={"pipeline_model_parallel_layout": [["embedding", "decoder"], ["decoder"] * 3 + ["loss"]]}
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_weights_do_not_depend_on_the_layout(reference: Any, shape: str, layout: str) -> None:
    assert_equal_weights(weights(shape, LAYOUTS[layout]), reference(shape))


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ("moe", Layout(2, ep=2)),
        ("moe", Layout(4, tp=2, ep=4, sequence_parallel=True)),
        ("qk_norm", Layout(2, tp=2)),
        ("mtp", Layout(2, pp=2)),
    ],
)
def test_other_architectures(reference: Any, shape: str, layout: Layout) -> None:
    assert_equal_weights(weights(shape, layout), reference(shape))


GROUPED = {"moe_grouped_gemm": True}


@pytest.mark.parametrize(
    "layout",
    [
        Layout(config=GROUPED),
        Layout(2, ep=2, config=GROUPED),
        Layout(2, tp=2, etp=2, sequence_parallel=True, config=GROUPED),
        Layout(4, tp=2, ep=2, etp=2, sequence_parallel=True, config=GROUPED),
    ],
    ids=["one", "ep2", "etp2", "ep2 etp2"],
)
def test_grouped_experts_have_the_names_and_places_of_sequential_ones(reference: Any, layout: Layout) -> None:
    """So weights, and checkpoints, are those of Megatron Core's own experts."""
    assert_equal_weights(weights("moe", layout), reference("moe"))


def assert_equal_weights(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    different = [name for name in wanted if not torch.equal(got[name], wanted[name])]
    assert not different


def test_weights_follow_the_seed(reference: Any) -> None:
    first, other = reference("llama"), weights("llama", Layout(), seed=1235)
    for name, values in first.items():
        if "norm" in name:
            assert torch.equal(values, other[name])
        else:
            assert (values != other[name]).float().mean() > 0.999, name


def test_real_rows_do_not_depend_on_the_padding(reference: Any) -> None:
    padded, unpadded = reference("llama"), weights("llama", Layout(), vocabulary=300)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert padded[name].shape[0] == PADDED_VOCABULARY
        assert torch.equal(padded[name][:300], unpadded[name])


def test_distributions_are_megatrons(reference: Any) -> None:
    """Normal with config's standard deviation, scaled by depth for the layers that write to the residual stream."""
    model = reference("gpt2")
    assert {name for name, values in model.items() if bool((values == 1).all())} == {
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.mlp.linear_fc1.layer_norm_weight",
        "decoder.final_layernorm.weight",
    }
    zeros = {name for name, values in model.items() if bool((values == 0).all())}
    assert zeros == {name for name in model if name.endswith("bias")}
    drawn = {name: values for name, values in model.items() if name.endswith("weight") and "norm" not in name}
    assert len(drawn) == 6
    for name, values in drawn.items():
        std = 0.02 / math.sqrt(2 * 4) if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0.02
        standard = (values / std).flatten()
        error = standard.numel() ** -0.5
        assert standard.mean().abs() < 5 * error, name
        assert (standard.std() - 1).abs() < 5 * error / math.sqrt(2), name
        assert (standard.pow(4).mean() - 3).abs() < 5 * error * math.sqrt(96), name


@pytest.mark.parametrize("shape", ["llama", "moe"])
def test_no_two_parts_repeat_the_same_numbers(reference: Any, shape: str) -> None:
    """Layers, parameters, experts and tiles each have a stream of their own."""
    values = torch.cat([v.flatten() for n, v in reference(shape).items() if "norm" not in n])
    # 0.02 * normal in fp32 has some 2^23 likely values, so a few equal pairs are chance; repeated tiles are not.
    assert values.unique().numel() > 0.95 * values.numel()


GOLDEN = {
    "embedding.word_embeddings.weight": [0.03248017653822899, -0.0021096104755997658],
    "decoder.layers.mlp.linear_fc2.weight": [0.0014455579221248627, 0.003585179802030325],
    "output_layer.weight": [0.027174942195415497, 0.01085116621106863],
}


def test_a_seed_stands_for_the_same_weights_as_before(reference: Any) -> None:
    """Golden numbers: the first two of each parameter, made by this test's own model with seed 1234 and numpy 2.5."""
    model = reference("llama")
    assert {name: model[name].flatten()[:2].tolist() for name in GOLDEN} == GOLDEN


def check_std_fields() -> dict[str, float]:
    layout = Layout()
    initialize_parallel(layout)
    fields = {"init_method_std": 0.1, "embedding_init_method_std": 0.5}
    chunks = build_chunks("gpt2", layout, **fields)
    return {name: values.std().item() for name, _, _, values in shards_of(chunks)}


def test_standard_deviations_of_the_config() -> None:
    (got,) = run_ranks(check_std_fields, 1)
    assert got["embedding.word_embeddings.weight"] == pytest.approx(0.5, rel=0.03)
    assert got["embedding.position_embeddings.weight"] == pytest.approx(0.5, rel=0.1)
    assert got["decoder.layers.mlp.linear_fc1.weight"] == pytest.approx(0.1, rel=0.03)
    assert got["decoder.layers.mlp.linear_fc2.weight"] == pytest.approx(0.1 / math.sqrt(8), rel=0.03)


def draw_tied_copies(fields: dict[str, Any]) -> torch.Tensor:
    layout = Layout(2, pp=2)
    initialize_parallel(layout)
    (chunk,) = build_chunks("gpt2", layout, **fields)
    return chunk.shared_embedding_or_output_weight().detach().clone()


def test_tied_output_layer_of_the_last_stage_equals_the_embedding() -> None:
    """With a standard deviation of its own, which the output layer's constructor doesn't know."""
    first, last = run_ranks(draw_tied_copies, 2, {"embedding_init_method_std": 0.5})
    assert torch.equal(first, last)
    assert last.std().item() == pytest.approx(0.5, rel=0.03)


def draw_bfloat16() -> list[Shard]:
    layout = Layout()
    initialize_parallel(layout)
    return shards_of(build_chunks("llama", layout, params_dtype=torch.bfloat16, bf16=True))


def test_bfloat16_weights_are_the_rounded_fp32_ones(reference: Any) -> None:
    (shards,) = run_ranks(draw_bfloat16, 1)
    assert all(values.dtype == torch.bfloat16 for *_, values in shards)
    rounded = {name: values.bfloat16().float() for name, values in reference("llama").items()}
    assert_equal_weights(assemble([shards]), rounded)


def check_errors() -> list[str]:
    layout = Layout()
    initialize_parallel(layout)
    messages = []

    def catch(action: Any) -> None:
        with pytest.raises(ValueError) as error:
            action()
        messages.append(str(error.value))

    (chunk,) = build_chunks("llama", layout, seed=None)
    with torch.no_grad():
        chunk.decoder.layers[1].mlp.linear_fc1.weight.normal_()
    catch(lambda: initialize_chunks([chunk], 0))

    (chunk,) = build_chunks("llama", layout, seed=None)
    chunk.extra = nn.Linear(4, 4)
    nn.init.constant_(chunk.extra.weight, 2.0)
    nn.init.zeros_(chunk.extra.bias)
    state_dict = chunk.sharded_state_dict
    chunk.sharded_state_dict = lambda **kw: {k: v for k, v in state_dict(**kw).items() if "extra" not in k}
    catch(lambda: initialize_chunks([chunk], 0))

    (chunk,) = build_chunks("llama", layout, seed=None)
    chunk.config = make_config("llama", layout)
    catch(lambda: initialize_chunks([chunk], 0))

    catch(lambda: defer_initialization(make_config("llama", layout, init_method=nn.init.xavier_uniform_)))
    catch(lambda: defer_initialization(make_config("llama", layout, use_cpu_initialization=True)))
    catch(lambda: defer_initialization(make_config("llama", layout, perform_initialization=False)))
    return messages


def test_what_cannot_be_drawn_raises() -> None:
    (messages,) = run_ranks(check_errors, 1)
    expected = [
        "parameter decoder.layers.1.mlp.linear_fc1.weight (1536, 64) holds values from",
        "sharded_state_dict() describes 0 of the 16 values of parameter extra.weight",
        "call defer_initialization(config) before building it",
        "isn't Megatron Core's normal initialiser",
        "use_cpu_initialization=True don't go",
        "perform_initialization=False and",
    ]
    for message, part in zip(messages, expected, strict=True):
        assert part in message


def defer_twice() -> bool:
    config = make_config("gpt2", Layout())
    defer_initialization(config)
    once = config.init_method
    defer_initialization(config)
    return once == config.init_method == DeferredNormal(2.0, 0.02)


def test_deferring_twice_is_the_same_as_once() -> None:
    assert run_ranks(defer_twice, 1) == [True]


def time_initialization() -> float:
    layout = Layout()
    initialize_parallel(layout)
    fields = {"num_layers": 2, "hidden_size": 768, "ffn_hidden_size": 3072, "num_attention_heads": 12}
    chunks = build_chunks("gpt2", layout, seed=None, vocabulary=50304, **fields)
    start = time.process_time()
    initialize_chunks(chunks, 0)
    return (time.process_time() - start) / sum(param.numel() for param in chunks[0].parameters())


def test_it_takes_seconds_per_hundred_million_parameters() -> None:
    """About 20 ns of processor time per parameter; the limit allows for slower machines."""
    (seconds_per_parameter,) = run_ranks(time_initialization, 1)
    assert seconds_per_parameter < 100e-9
