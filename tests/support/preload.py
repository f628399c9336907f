"""What every rank needs, imported once in the fork server so that a rank starts in milliseconds.

`multiprocessing`'s fork server imports this module before it forks anything. A failed import is kept as text in
`PRELOAD_ERRORS` and not raised: the fork server would swallow or die of it, whereas the test that needs the module
meets the same error with a readable traceback. Nothing here may start a thread, because a fork copies only the one
that forks: `THREADS_AFTER_PRELOAD` is recorded for the test that checks it.
"""

import gc
import importlib
import os
import time
import traceback
import warnings

from tests.support.processes import die_with_parent

SWITCH = "LT_PARALLEL_TEST_PRELOAD"  # "0" imports nothing early: for a session that starts ranks only once
_MODULES = (
    "lt_parallel",
    "torch",
    "torch.distributed",
    "lightning.pytorch",
    "lightning.pytorch.loggers",
    "lightning.pytorch.callbacks",
    "megatron.core",
    "megatron.core.parallel_state",
    "megatron.core.tensor_parallel",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.dist_checkpointing",
    "tests.support.ranks",
    "pytest",
)

PRELOAD_ERRORS: dict[str, str] = {}


def _import_all() -> float:
    """Imports `_MODULES` in order and returns the seconds that took."""
    start = time.monotonic()
    for name in _MODULES if os.environ.get(SWITCH) != "0" else ():
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001  (kept for the test that needs it, see above)
            PRELOAD_ERRORS[name] = traceback.format_exc()
        if name == "torch":
            importlib.import_module("torch").set_num_threads(1)
    gc.collect()
    gc.freeze()  # the collector must not touch, and so copy, the pages shared with the ranks
    return time.monotonic() - start


def _quiet_known_notices() -> None:
    """Hides Megatron Core's import-time notices that optional libraries are missing: here they always are."""
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
    warnings.filterwarnings("ignore", message="Apex is not installed")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


_quiet_known_notices()
die_with_parent()  # ranks hold the pipe whose end would otherwise tell the fork server that the session is over
PRELOAD_SECONDS = _import_all()
THREADS_AFTER_PRELOAD = len(os.listdir("/proc/self/task"))
