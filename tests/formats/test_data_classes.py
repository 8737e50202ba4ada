"""What users of results and options objects rely on."""

import dataclasses
import pickle

from ckptctl.findings import Finding, Severity
from ckptctl.model import Level
from ckptctl.options import PickPolicy, Requirements, StorageOptions


def test_public_results_and_options_keep_what_their_users_rely_on():
    finding = Finding("shard.missing", Severity.FAULT, "__0_0.distcp", "is missing")
    assert pickle.loads(pickle.dumps(finding)) == finding
    assert dataclasses.replace(finding, where="b").where == "b"
    assert dataclasses.asdict(PickPolicy(level=Level.LISTING))["level"] is Level.LISTING
    assert "secret" not in repr(StorageOptions(storage_options={"secret": "x"}))
    assert "k3y" not in repr(Requirements(key=b"k3y" * 9))
