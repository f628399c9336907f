"""The table of muted messages: each entry mutes its own message and lets others through."""

import logging
import warnings

import pytest

from lt_parallel import quiet


@pytest.fixture
def _muted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LT_PARALLEL_DEBUG", raising=False)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    sources = {noise.source for noise in quiet.NOISE if isinstance(noise.source, str)}
    for name in sources:
        monkeypatch.setattr(logging.getLogger(name), "filters", [])


@pytest.mark.usefixtures("_muted")
def test_warnings_of_the_table_are_muted_and_others_are_not() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        quiet.install()
        warnings.warn("`torch.distributed.all_gather_into_tensor` is deprecated. Please", FutureWarning, stacklevel=1)
        warnings.warn("`torch.distributed.other` is deprecated", FutureWarning, stacklevel=1)
        warnings.warn("MimoModelConfig is experimental and", UserWarning, stacklevel=1)
        warnings.warn("MimoModelConfig is experimental and", FutureWarning, stacklevel=1)
    assert [(str(w.message), w.category) for w in seen] == [
        ("`torch.distributed.other` is deprecated", FutureWarning),
        ("MimoModelConfig is experimental and", FutureWarning),
    ]


@pytest.mark.usefixtures("_muted")
def test_the_deprecation_of_the_model_class_is_shown_once(caplog: pytest.LogCaptureFixture) -> None:
    quiet.install()
    logger = logging.getLogger("megatron.core.models.gpt.gpt_model")
    for _ in range(3):
        logger.warning("GPTModel IS DEPRECATED. Use another one")
    logger.warning("something else")
    assert [record.getMessage() for record in caplog.records] == [
        "GPTModel IS DEPRECATED. Use another one",
        "something else",
    ]


@pytest.mark.usefixtures("_muted")
def test_debugging_mutes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LT_PARALLEL_DEBUG", "1")
    before = len(warnings.filters)
    quiet.install()
    assert len(warnings.filters) == before


@pytest.mark.usefixtures("_muted")
@pytest.mark.parametrize(("resumes", "shown"), [(True, 1), (False, 0)])
def test_the_state_of_callbacks_matters_only_when_training_goes_on(resumes: bool, shown: int) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        quiet.install(resumes=resumes)
        warnings.warn("Be aware that when using `ckpt_path`, callbacks", UserWarning, stacklevel=1)
    assert len(seen) == shown


def test_every_entry_says_why() -> None:
    assert all(noise.why and noise.pattern for noise in quiet.NOISE)
