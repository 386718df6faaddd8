"""An object store in this process."""

import uuid

import pytest


@pytest.fixture
def bucket():
    """A folder of the object store of this process."""
    fsspec = pytest.importorskip("fsspec")
    name = f"bucket-{uuid.uuid4().hex}"
    yield f"memory://{name}"
    files = fsspec.filesystem("memory")
    if files.exists(f"/{name}"):
        files.rm(f"/{name}", recursive=True)
