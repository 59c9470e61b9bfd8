# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests that need a container; unit tests need no engine and pay nothing for these.

Without an engine, or without an image, such a test is skipped with the reason; with BOXSTRAP_CONTAINERS=required it
fails instead, so that a run which must cover containers cannot pass by leaving them out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import containers
import docker
import pytest
import requests
from docker.errors import DockerException, ImageNotFound

sys.path.insert(0, str(Path(__file__).parents[1] / "images"))
from boxes import BOXES


def leave_out(reason: str) -> NoReturn:
    """Skips the test, or fails it where containers are required."""
    if os.environ.get("BOXSTRAP_CONTAINERS") == "required":
        pytest.fail(f"BOXSTRAP_CONTAINERS=required, and {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def _client() -> Iterator[docker.DockerClient | str]:
    """A client, or why there is none: asked once, judged by each test."""
    try:
        docker.from_env(timeout=10).ping()
    except (DockerException, requests.RequestException) as error:
        yield f"no Docker engine answers (sh images/engine.sh starts one): {error}"
        return
    client = docker.from_env(timeout=600)
    containers.sweep(client)
    yield client
    client.close()


@pytest.fixture
def engine(_client: docker.DockerClient | str) -> docker.DockerClient:
    """The Docker engine."""
    if isinstance(_client, str):
        leave_out(_client)
    return _client


@pytest.fixture
def image(engine: docker.DockerClient) -> Callable[[str], str]:
    """`image("debian:12")` is the tag of that box of images/build.py; a test whose box is absent is left out."""

    def tag(name: str) -> str:
        full = f"boxstrap/{name}"
        try:
            engine.images.get(full)
        except ImageNotFound:
            if BOXES[name].optional:
                pytest.skip(f"the optional image {full} is absent: no image registry that has it answers")
            leave_out(f"the image {full} is absent (`python images/build.py {name}` makes it, or says why it cannot)")
        return full

    return tag


@pytest.fixture
def container(engine: docker.DockerClient, image: Callable[[str], str]) -> Iterator[containers.Containers]:
    """Starts boxes, and removes them after the test.

    `box = container("debian:12", network="none")`; what else it takes: Containers.__call__.
    """
    factory = containers.Containers(engine, tag_of=image)
    yield factory
    factory.remove()


@pytest.fixture
def internal_network(engine: docker.DockerClient) -> Iterator[containers.InternalNetwork]:
    """A network on which containers reach a server on this host, bound to `.host`, and nothing beyond the host."""
    with containers.internal_network(engine) as network:
        yield network
