"""One process that fake ranks are forked from, for all tests here that want it."""

from collections.abc import Iterator

import pytest

from tests.support.fake_world import FakeWorld


@pytest.fixture(scope="session")
def fake_world() -> Iterator[FakeWorld]:
    with FakeWorld() as world:
        yield world
