"""What the oldest torch of `pyproject.toml` cannot do, so that no test shows it there."""

import pytest
import torch

IS_OLDEST = torch.__version__.startswith("2.4.")


def not_with_oldest(why):
    """A mark that skips a test with torch 2.4, with the reason."""
    return pytest.mark.skipif(IS_OLDEST, reason=f"torch 2.4 {why}")
