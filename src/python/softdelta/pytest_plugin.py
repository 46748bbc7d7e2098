"""A fixture for the tests of a kernel. In conftest.py: pytest_plugins = ["softdelta.pytest_plugin"]

    def test_my_kernel(audit_kernel):
        audit_kernel("my_kernels:chunk_kda", op="kda")
"""
import pytest

from . import audit


@pytest.fixture
def audit_kernel(tmp_path):
    """softdelta.audit, which fails the test unless the function is right. The smallest failing input is in tmp_path."""
    def check(fn, **options):
        __tracebackhide__ = True
        found = audit(fn, **{"output": tmp_path / "audit.safetensors", **options})
        if not found.right:
            pytest.fail(str(found), pytrace=False)
        return found
    return check
