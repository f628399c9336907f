"""The table of muted messages: each entry mutes its own message and lets others through."""

import logging
import warnings

import pytest

from lt_parallel import quiet

ALL_NOISE = (*quiet.RUN_NOISE, *quiet.COMMAND_NOISE)
DEPRECATION = "GPTModel IS DEPRECATED. Use another one"
STREAMS = "When using async grad allreduce it is recommended to set the environment variable"


@pytest.fixture
def _muted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LT_PARALLEL_DEBUG", raising=False)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    sources = {noise.source for noise in ALL_NOISE if isinstance(noise.source, str)}
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
def test_loggers_of_the_table_are_muted_and_others_are_not(caplog: pytest.LogCaptureFixture) -> None:
    quiet.install()
    logger = logging.getLogger("megatron.core.models.gpt.gpt_model")
    for text in (DEPRECATION, "something else"):
        logger.warning(text)
    assert [record.getMessage() for record in caplog.records] == ["something else"]


@pytest.mark.usefixtures("_muted")
@pytest.mark.parametrize(("on_cpu", "streams_shown"), [(True, 0), (False, 1)])
def test_a_run_is_muted_and_leaves_the_users_filters_alone(
    on_cpu: bool, streams_shown: int, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("megatron.core.models.gpt.gpt_model")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        with quiet.muted_run(on_cpu=on_cpu):
            for text in ("full scope is deprecated. Use", STREAMS, "mine", "The 'train_dataloader' does not have many"):
                warnings.warn(text, UserWarning, stacklevel=1)
            logger.warning(DEPRECATION)
            logger.warning("mine")
        assert list(warnings.filters) == before
        warnings.warn("full scope is deprecated. Use", UserWarning, stacklevel=1)
        logger.warning(DEPRECATION)
    streams = [STREAMS] * streams_shown
    data = "The 'train_dataloader' does not have many"
    assert [str(w.message) for w in seen] == [*streams, "mine", data, "full scope is deprecated. Use"]
    assert [record.getMessage() for record in caplog.records] == ["mine", DEPRECATION]


@pytest.mark.usefixtures("_muted")
def test_a_general_warning_is_muted_in_megatron_core_only() -> None:
    text = "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed. Its"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with quiet.muted_run(on_cpu=True):
            for module in ("megatron.core.optimizer.optimizer", "mine"):
                warnings.warn_explicit(text, UserWarning, f"{module}.py", 1, module)
    assert [warning.filename for warning in seen] == ["mine.py"]


@pytest.mark.usefixtures("_muted")
def test_a_run_that_fails_leaves_the_filters_alone_too() -> None:
    logger = logging.getLogger("megatron.core.models.gpt.gpt_model")
    before = list(warnings.filters)
    with pytest.raises(RuntimeError), quiet.muted_run(on_cpu=True):
        raise RuntimeError
    assert (list(warnings.filters), logger.filters) == (before, [])


@pytest.mark.usefixtures("_muted")
def test_debugging_mutes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LT_PARALLEL_DEBUG", "1")
    before = len(warnings.filters)
    quiet.install()
    assert len(warnings.filters) == before
    with quiet.muted_run(on_cpu=True):
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
    assert all(noise.why and noise.pattern for noise in ALL_NOISE)
