"""What a run leaves in its file: read back, told to be damaged, the same on every rank."""

import json
import logging

import pytest

from horst.experiments.outcomes import once


@pytest.mark.parametrize(
    "content",
    ['{"config": {"lr": 0.1}, "outc', "[1, 2]", '"text"', "", '{"config": {"lr": 0.1}, "outcome": [1]}', "\x00\xff"],
    ids=["truncated", "list", "text", "empty", "outcome", "bytes"],
)
def test_a_damaged_outcome_is_named_and_computed_again(tmp_path, caplog, content):
    path = tmp_path / "run" / "outcome.json"
    path.parent.mkdir()
    path.write_bytes(content.encode("latin-1"))
    with caplog.at_level(logging.WARNING):
        assert once(path, {"lr": 0.1}, lambda: {"value": 1})["value"] == 1
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert json.loads(path.read_text())["outcome"] == {"value": 1}
    assert once(path, {"lr": 0.1}, lambda: pytest.fail("computed again"))["value"] == 1
