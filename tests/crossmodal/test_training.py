"""What training of pairs refuses before it starts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from crossmodal.training import check_validation


def test_data_without_training_pairs_is_refused():
    data = SimpleNamespace(name="pairs:a.jsonl", train=(), val=(1, 2, 3))
    with pytest.raises(ValueError, match=r"pairs:a.jsonl has no training pairs.*--val-share"):
        check_validation(data, least=2)
