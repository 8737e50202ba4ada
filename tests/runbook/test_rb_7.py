"""RB-7 as it was written: each thing that makes a resume wrong is a state with a decision.

`SENTENCES` holds what the written procedure asks for, and where the page does it. In the
tests below `--yes` stops at each decision with its code, and a decision that is given
lets the run continue.
"""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
from command_line import validated
from next_commands import run_and_follow as run_ckptctl
from rb_7_inputs import RB_7, settings
from resumed_logs import rows

from ckptctl.runbook.document import find_runbook, runbook_names
from ckptctl.runbook.executing import execute

SENTENCES = (
    ("classify the failure first: infrastructure or job", "Classify: classify", "classify"),
    ("name the node and the device that failed", "DrainNode: suspects", "--print-nodes"),
    ("drain the bad node before the resume", "DrainNode: drain", 'eval "$DRAIN"'),
    ("do not resume onto hardware that is known to be bad", "DrainNode: drained", "$DRAINED"),
    ("do not resume onto the bug that ended the job", "MendJob: mended", "$MENDED"),
    ("enough healthy GPUs for the world size", "Capacity: capacity", "--print-capacity"),
    ("if short, decide: wait, or resume elastic and smaller", "Capacity: elastic", "$ELASTIC"),
    ("storage mounted and healthy on the surviving and new nodes", "Nodes: nodes", "--launcher"),
    ("storage that only one node sees is not enough", "Nodes: seen", "$SEEN_BY"),
    ("go back to before the first loss that is not finite", "Locate: reject-suspect", "reject"),
    ("locate the last complete step, not the newest folder", "Locate: preflight", "preflight"),
    ("metadata is there and not empty, all shards are present", "Locate: preflight", "preflight"),
    ("as many shards as the world size that wrote them", "Locate: preflight", "preflight"),
    ("skip an incomplete step and take the one before", "Locate: preflight", "preflight"),
    (
        "weights, optimizer, RNG and data position, not weights alone",
        "Verify: verify",
        "--require model,optimizer,rng,dataloader",
    ),
    ("verify the integrity of every shard", "Verify: verify", '--level "$LEVEL"'),
    ("resume the full state from that step", "Resume: resume", 'eval "$RESUME"'),
    ("confirm the world size, or reshard on load", "Capacity: capacity", "$WORLD_SIZE"),
    (
        "a flat file of rank 0 does not load at another size",
        "Capacity: capacity",
        "--print-capacity",
    ),
    ("read the first steps logged after the resume", "WatchLoss: loss", "ckptctl loss"),
    ("the loss continues from its value before the failure", "WatchLoss: loss", "--print verdict"),
    ("a spike stops the run and falls back", "Jump: jumped", "ckptctl reject"),
    ("step and tokens continue from the checkpoint's values", "WatchLoss: loss", "--resume-from"),
    ("the job loaded the step that was chosen", "Jump: loaded", "loss[.]step"),
    ("no proof is no success", "Confirm: confirmed", "$CONFIRMED"),
    ("a suspicion is decided by a person", "Suspect: suspicion", "$DIFFERENCE"),
    ("throughput returns to its band, or the fabric is suspected", "Throughput: slower", "SLOWER"),
    ("the time between saves is below the MTBF after the loss", "Cadence: recorded", "cost"),
    ("fall back by one checkpoint", "Fallback: reject", "ckptctl reject"),
    ("confirm that the older step is complete", "Verify: verify", "ckptctl verify"),
    ("accept the work that is done again", "Locate: preflight", "--log="),
    ("several damaged steps: how far back is acceptable", "Damaged: how-far", "$OLDEST"),
)
ELSEWHERE = (
    ("several corrupt steps: suspect the storage", "Probe: probe", "--probe-storage"),
    ("validate the file system before a step is trusted", "Probe: validated", "$VALIDATED"),
)


@pytest.mark.parametrize(
    ("page", "sentence", "where", "how"),
    [("rb-7", *each) for each in SENTENCES] + [("storage-corruption", *each) for each in ELSEWHERE],
)
def test_what_the_written_procedure_asks_for_is_done_by_a_block(page, sentence, where, how):
    state, _, name = where.partition(": ")
    (block,) = [each for each in find_runbook(page).state(state).blocks if each.name == name]
    assert how in block.code, sentence


def test_every_decision_stops_an_unattended_run():
    for page in runbook_names():
        for state in find_runbook(page).states:
            for block in state.blocks:
                if block.decides is not None:
                    refused = block.on("not run")
                    assert refused is not None
                    assert refused.then == "stop", block.name
                    assert refused.code not in (None, 0), block.name


def run(root: Path, **inputs: object) -> tuple[int, dict[str, dict], dict]:
    """Run RB-7 unattended: its exit code, the last end of each block, and its document."""
    given = settings(**RB_7 | {"RESUME": 'echo "$STEP" > "$ROOT/../resumed"'} | inputs)
    done = run_ckptctl("runbook", "run", "rb-7", root, "--yes", "--new", "--json", *given)
    document = validated(done.stdout)
    ended = {each["block"]: each for each in document["events"] if each["event"] == "ended"}
    return done.returncode, ended, document


def resumed(root: Path) -> str | None:
    path = root.parent / "resumed"
    return Path(path.read_text().strip()).name if path.exists() else None


def log(tmp_path: Path, name: str, text: str) -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


XID = "Nov 22 03:00:01 gpu-17 kernel: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n"
BUG = 'Traceback (most recent call last):\n  File "train.py", line 3\nValueError: bad shape\n'


def test_hardware_that_failed_is_named_and_not_resumed_onto(root, tmp_path):
    xid = log(tmp_path, "xid.log", XID)
    exit_code, ended, document = run(root, LOG=xid, DRAIN=f"touch {tmp_path}/drained")
    assert exit_code == 93
    assert ended["suspects"]["printed"] == ["gpu-17"]
    assert ended["drain"]["not_run"] == "not run"
    assert "hardware failed and was not drained" in document["reason"]
    assert resumed(root) is None
    assert not (tmp_path / "drained").exists()
    assert any("Xid 79" in text for text in ended["classify"]["lines"])
    run(root, LOG=xid, DRAINED="excluded with --exclude=gpu-17, ticket 4711")
    assert resumed(root) == "step_500"


def test_hardware_is_drained_also_where_the_job_failed_by_itself(root, tmp_path):
    bug = log(tmp_path, "train.log", BUG)
    exit_code, ended, _ = run(root, LOG=bug, NODE=["gpu-17"])
    assert exit_code == 93
    assert "drained" in ended
    assert resumed(root) is None


def test_a_job_that_failed_by_its_own_code_is_not_resumed(root, tmp_path):
    bug = log(tmp_path, "train.log", BUG)
    exit_code, _, document = run(root, LOG=bug, MENDED=None)
    assert exit_code == 93
    assert "nobody stated what keeps the job from failing again" in document["reason"]
    assert resumed(root) is None
    _, ended, _ = run(root, LOG=bug, MENDED="commit 1a2b3c mends it")
    assert ended["mended"]["lines"] == ["removed by: commit 1a2b3c mends it"]
    assert resumed(root) == "step_500"


def test_fewer_ranks_are_a_decision_with_its_numbers(root):
    exit_code, ended, document = run(root, WORLD_SIZE=2)
    assert exit_code == 93
    assert "ELASTIC=yes" in document["reason"]
    assert any("2 ranks, saved by 4" in text for text in ended["preflight"]["lines"])
    assert run(root, WORLD_SIZE=2, ELASTIC="no")[0] == 75
    assert resumed(root) is None
    run(root, WORLD_SIZE=2, ELASTIC="yes")
    assert resumed(root) == "step_500"


@pytest.mark.slow
def test_storage_that_only_this_node_sees_is_a_decision(root):
    exit_code, _, document = run(root, SEEN_BY=None)
    assert exit_code == 75
    assert "give LAUNCHER" in document["reason"]
    exit_code, _, document = run(root, LAUNCHER="false")
    assert exit_code == 75
    assert resumed(root) is None
    run(root, SEEN_BY=None, LAUNCHER="env")
    assert resumed(root) == "step_500"


def without_rng(step: Path) -> None:
    """Take the state of the random numbers out of a step's metadata, as a save without it."""
    path = step / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    lost = [name for name in metadata.state_dict_metadata if "rng" in name]
    assert lost
    for name in lost:
        del metadata.state_dict_metadata[name]
    for index in [each for each in metadata.storage_data if "rng" in each.fqn]:
        del metadata.storage_data[index]
    if metadata.planner_data:
        for name in lost:
            metadata.planner_data.pop(name, None)
    path.write_bytes(pickle.dumps(metadata))


@pytest.mark.torch
def test_a_step_that_lost_its_random_numbers_is_passed_over(root):
    without_rng(root / "step_500")
    _, ended, _ = run(root)
    assert resumed(root) == "step_400"
    assert any("rng" in text for text in ended["preflight"]["lines"])


@pytest.mark.torch
def test_train_state_that_no_step_holds_is_a_decision(root):
    for number in (100, 200, 300, 400, 500):
        without_rng(root / f"step_{number}")
    exit_code, _, document = run(root)
    assert exit_code == 11
    assert "lacks train state that a correct resume needs" in document["reason"]
    assert resumed(root) is None
    exit_code, _, document = run(root, WITHOUT="the job draws no random numbers")
    assert resumed(root) == "step_500"
    assert exit_code == 31
    assert "accepted against what was found: the step lacks train state (" in document["reason"]


def flip(step: Path) -> None:
    shard = step / "__1_0.distcp"
    about = shard.stat()
    data = bytearray(shard.read_bytes())
    data[len(data) * 7 // 10] ^= 0xFF
    shard.write_bytes(data)
    os.utime(shard, ns=(about.st_atime_ns, about.st_mtime_ns))  # as a disk flips it


def diverged(tmp_path: Path) -> tuple[Path, str]:
    """The root and the log of a job whose loss is NaN from step 14 on, saved every 5 steps."""
    import torch
    import torch.distributed.checkpoint as dcp

    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    printed = []
    for step in range(1, 26):
        optimizer.param_groups[0]["lr"] = 1e38 if step >= 12 else 0.01
        loss = (model(torch.randn(8, 4)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        printed.append(f"step: {step} loss: {loss.item():.4f}\n")
        if step % 5 == 0:
            state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": step}
            dcp.save(state, checkpoint_id=str(tmp_path / "run" / f"step_{step}"), no_dist=True)
    assert "nan" in printed[-1]
    return tmp_path / "run", log(tmp_path, "train.log", "".join(printed))


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
def test_steps_that_were_saved_after_the_loss_became_nan_are_rejected_before_one_is_chosen(
    tmp_path,
):
    root, train_log = diverged(tmp_path)
    assert "step_25" in run_ckptctl("pick", root, "--allow-missing-state", "-q").stdout
    given = {"MENDED": "the learning rate is lower", "WITHOUT": "the job keeps no RNG state"}
    exit_code, ended, _ = run(root, LOG=train_log, **given)
    assert ended["suspect-steps"]["printed"] == ["12 26"]
    assert resumed(root) == "step_10", (exit_code, ended)
    codes = [run_ckptctl("verify", root / f"step_{n}").returncode for n in (5, 10, 15, 20, 25)]
    assert codes == [0, 0, 27, 27, 27]


@pytest.mark.torch
def test_a_step_whose_training_step_is_not_known_is_left_to_a_person(tmp_path):
    import torch

    (tmp_path / "run").mkdir()
    for epoch in (1, 2):
        for kind in ("model", "optimizer"):
            torch.save({"weight": torch.ones(4)}, tmp_path / "run" / f"{kind}_epoch_{epoch}.pt")
    losses = "".join(f"step: {n} loss: {'nan' if n > 14 else 2.5}\n" for n in range(1, 25))
    _, ended, _ = run(
        tmp_path / "run", LOG=log(tmp_path, "train.log", losses), MENDED="the learning rate"
    )
    block = ended["reject-suspect"]
    assert (block["exit_code"], block["then"]) == (22, "stop")
    assert "run@2" in block["lines"][-1]
    assert "preflight" not in ended


@pytest.mark.parametrize(
    ("text", "exit_code", "then"),
    [
        ("epoch,loss\n" + "".join(f"{n},nan\n" for n in range(1, 25)), 31, "next"),
        ("".join(f"step: {n} loss: nan\n" for n in range(1, 25)), 0, "next"),
    ],
    ids=["epochs", "another counter"],
)
def test_a_log_of_another_counter_rejects_no_step(root, tmp_path, text, exit_code, then):
    _, ended, _ = run(root, LOG=log(tmp_path, "train.csv", text), MENDED="the learning rate")
    assert (ended["suspect-steps"]["exit_code"], ended["suspect-steps"]["then"]) == (
        exit_code,
        then,
    )
    assert ended["reject-suspect"]["exit_code"] == (None if exit_code else 22)
    assert run_ckptctl("verify", root / "step_500").returncode == 0


def test_a_log_that_ends_with_a_finite_loss_rejects_no_step(root, tmp_path):
    rows = "".join(f"step: {n} loss: {'nan' if n == 450 else 2.5}\n" for n in range(400, 501))
    run(root, LOG=log(tmp_path, "train.log", rows), MENDED="fp16 skips such a step")
    assert resumed(root) == "step_500"


def test_the_transcript_holds_the_evidence_and_not_a_word_alone(root, tmp_path):
    flip(root / "step_500")
    job_log = log(tmp_path, "train.log", rows(401, 512))
    options = settings(**RB_7, LOG=job_log, RESUME="true")
    done = run_ckptctl(
        *("runbook", "run", "rb-7", root, "--yes", "--transcript", tmp_path / "t", *options)
    )
    assert done.returncode == 31
    text = (tmp_path / "t" / "transcript.md").read_text()
    assert "does not match the checksum saved with it" in text
    assert "unknown" in text
    assert "lines from 1 log" in text
    assert "computed again: 112 steps (from step 400 to step 512)" in text


def test_a_dry_run_on_a_damaged_root_names_the_step_that_would_win(root):
    flip(root / "step_500")
    done = run_ckptctl("runbook", "run", "rb-7", root, "--dry-run", "--set", "RESUME=false")
    assert done.returncode == 31, done.stderr
    assert f"step: {root / 'step_400'}" in done.stdout
    assert not (root / ".ckptctl" / "runbooks").exists()
    assert run_ckptctl("verify", root / "step_500", "--level", "content").returncode == 21


@pytest.mark.parametrize("there", [False, True])
def test_a_dry_run_does_not_wait_for_the_log_of_a_job_that_it_does_not_start(root, tmp_path, there):
    log = tmp_path / "new.log"
    if there:
        log.write_text(rows(401, 420))
    done = run_ckptctl(
        *("runbook", "run", "rb-7", root, "--dry-run", "--json"),
        *("--set", "RESUME=false", "--set", f"NEW_LOG={log}"),
    )
    document = validated(done.stdout)
    assert document["exit_code"] == 31
    ended = {one["block"]: one for one in document["events"] if one["event"] == "ended"}
    assert (ended["loss"]["not_run"], ended["loss"]["exit_code"]) == ("dry run", None)
    assert ended["loss"]["because"].startswith("a dry run starts no job")


def watched(root: Path, tmp_path: Path, before: str, after: str, **inputs: object):
    """RB-7 on a job that logged `before`, died, and logs `after` once it is resumed."""
    ready, new = log(tmp_path, "ready.log", after), tmp_path / "after.log"
    more = {"NEW_LOG": new, "WAIT": 5, "RESUME": f"cp {ready} {new}", **inputs}
    return run(root, LOG=log(tmp_path, "before.log", before), **more)


def test_a_loss_that_continues_is_a_success(root, tmp_path):
    exit_code, ended, document = watched(root, tmp_path, rows(401, 540), rows(501, 600))
    assert exit_code == 0, document["reason"]
    assert ended["loss"]["printed"] == ["continuous"]
    assert any("were logged twice and agree" in text for text in ended["loss"]["lines"])
    assert "not compared with MTBF" in document["reason"]


def test_no_jump_is_no_success(root, tmp_path):
    exit_code, _, document = watched(root, tmp_path, rows(401, 500), rows(501, 600))
    assert exit_code == 31
    assert "nothing proves the resume" in document["reason"]
    assert "--yes" not in document["next_command"]
    ended = watched(
        root, tmp_path, rows(401, 500), rows(501, 600), CONFIRMED="alice from the picture"
    )
    assert ended[0] == 0
    assert ended[1]["confirmed"]["lines"] == ["confirmed: alice from the picture"]


CANARY_ENDS = {
    "the same values": (rows(496, 500), 0, "the replay gives the logged values"),
    "other values": (
        rows(496, 500).replace('"loss": 2.', '"loss": 3.'),
        30,
        "the replay gives other values",
    ),
    "other steps": (rows(601, 605), 31, "nothing proves the resume"),
}


@pytest.mark.parametrize(
    "canary",
    ["the same values", "other values", pytest.param("other steps", marks=pytest.mark.slow)],
)
def test_a_replay_proves_the_resume_or_that_it_was_wrong(root, tmp_path, canary):
    text, wanted, because = CANARY_ENDS[canary]
    replay = log(tmp_path, "canary.log", text)
    logs = (rows(401, 500), rows(501, 600))
    exit_code, ended, document = watched(root, tmp_path, *logs, CANARY=replay)
    assert exit_code == wanted, document["reason"]
    assert because in ended["canary"]["because"] + document["reason"]


def report(root: Path, step: int, tokens: int) -> None:
    """The report of the newest resume, as ckptctl.train writes it."""
    attempts = root / ".ckptctl" / "attempts"
    attempts.mkdir(parents=True, exist_ok=True)
    fields = {"schema": "ckptctl.resume/1", "step": step, "tokens": tokens, "root": str(root)}
    name = "20261121T000000.000000Z-00000000"
    (attempts / f"{name}.resume.json").write_text(json.dumps(fields))
    events = [{"event": "started"}, {"event": "resumed", "step": step}]
    lines = (json.dumps({**event, "attempt": name}) + "\n" for event in events)
    (attempts / f"{name}.jsonl").write_text("".join(lines))


@pytest.mark.slow
def test_the_tokens_of_the_checkpoint_outweigh_those_of_the_resume_report(root, tmp_path):
    """The log of before lacks them, so that nothing else tells where the count goes on."""
    held = int(run_ckptctl("show", root / "step_500", "--print", "tokens").stdout)
    before = rows(401, 540).replace('"tokens":', '"other":')
    report(root, 500, 7 * held)
    right = rows(501, 600, skipped_tokens=held - 500 * 4096)
    assert watched(root, tmp_path, before, right)[0] == 0
    exit_code, ended, document = watched(root, tmp_path, before, rows(501, 600))
    assert exit_code == 30, document["reason"]
    assert ended["loss"]["exit_code"] == 30


def test_a_job_that_loaded_another_step_is_stopped_and_no_step_rejected(root, tmp_path):
    exit_code, _, document = watched(root, tmp_path, rows(301, 540), rows(401, 500))
    assert exit_code == 30
    assert "the job loaded another step" in document["reason"]
    assert run_ckptctl("verify", root / "step_500").returncode == 0


def test_the_name_of_a_log_is_no_proof_that_another_step_was_loaded(root, tmp_path):
    jumped = rows(501, 600).replace('"loss": ', '"loss": 7')
    folder = tmp_path / "loss.step"
    folder.mkdir()
    _, _, document = watched(root, folder, rows(401, 540), jumped)
    events = [each for each in document["events"] if each["event"] == "ended"]
    first = next(each for each in events if each["block"] == "loaded")
    assert (first["exit_code"], first["because"]) == (0, "the job loaded the chosen step")


def test_a_log_that_can_no_longer_be_read_rejects_no_step(root, tmp_path):
    block = next(each for each in find_runbook("rb-7").state("Jump").blocks)
    lost = {"LOG": (), "NEW_LOG": str(tmp_path / "lost"), "STEP": str(root / "step_500")}
    done = execute(block.code, lost, {}, lambda _: None)
    row = block.outcome(done.exit_code, "")
    assert row is not None
    assert (row.then, row.code) == ("stop", 30)


def test_a_throughput_that_does_not_come_back_is_a_decision(root, tmp_path):
    slow = rows(501, 600, pace=0.5)
    exit_code, _, document = watched(root, tmp_path, rows(401, 540), slow)
    assert exit_code == 32
    assert "suspect the new node's fabric" in document["reason"]
    given = {"SLOWER": "there are fewer nodes"}
    exit_code, _, document = watched(root, tmp_path, rows(401, 540), slow, **given)
    assert exit_code == 35
    assert document["reason"].startswith("accepted against what was found: the throughput is lower")


@pytest.mark.slow
def test_a_throughput_that_cannot_be_compared_yet_is_no_success(root, tmp_path):
    exit_code, ended, document = watched(root, tmp_path, rows(401, 505), rows(501, 512, pace=0.5))
    assert exit_code == 31, document["reason"]
    assert ended["throughput"]["printed"] == ["watching"]
    assert "too few steps to compare" in document["reason"]


@pytest.mark.slow
def test_fewer_ranks_have_a_throughput_of_their_own(root, tmp_path):
    slow = rows(501, 600, pace=0.5)
    half = {"WORLD_SIZE": 2, "ELASTIC": "yes"}
    exit_code, ended, document = watched(root, tmp_path, rows(401, 540), slow, **half)
    assert exit_code == 0, document["reason"]
    assert ended["throughput"]["printed"] == ["in-band"]


@pytest.mark.slow
def test_saves_that_are_too_rare_after_the_failure_are_a_decision(root, tmp_path):
    logs = (rows(401, 540), rows(501, 600))
    exit_code, _, document = watched(root, tmp_path, *logs, MTBF="1s")
    assert exit_code == 32, document["reason"]
    assert "saves are too rare" in document["reason"]
    assert watched(root, tmp_path, *logs, MTBF="1s", CADENCE="it stays until Monday")[0] == 0
    assert watched(root, tmp_path, *logs, MTBF="1000d")[0] == 0


@pytest.mark.parametrize(
    ("apart_s", "word", "code"),
    [
        pytest.param(100, "short-enough", 0, marks=pytest.mark.slow),
        (7200, "longer-than-best", 32),
    ],
)
def test_the_failures_that_the_run_recorded_need_no_mtbf(root, tmp_path, apart_s, word, code):
    folder = root / ".ckptctl" / "attempts"
    folder.mkdir(parents=True)
    for number in range(3):
        name = f"2026010{number + 1}T000000.000000Z-0000000{number}"
        lines = [
            (10, "started", {}),
            (20, "resumed", {"step": 100 * number, "load_s": 5}),
            (20 + apart_s, "saving", {"step": 100 * number + 100, "stalled_s": 0}),
            (21 + apart_s, "saved", {"step": 100 * number + 100, "stalled_s": 1}),
            (8000, "progress", {"step": 100 * number + 150, "stalled_s": 1}),
        ]
        rows_of = [
            {"at": f"2026-01-0{number + 1}T{age // 3600:02}:{age // 60 % 60:02}:{age % 60:02}Z"}
            | {"event": event, "attempt": name, "process_s": age, **fields}
            for age, event, fields in lines
        ]
        text = "".join(f"{json.dumps(row)}\n" for row in rows_of)
        (folder / f"{name}.jsonl").write_text(text)
    logs = rows(401, 540), rows(501, 600)
    exit_code, ended, document = watched(root, tmp_path, *logs)
    assert ended["recorded"]["printed"] == [word]
    assert exit_code == code, document["reason"]
    assert "mtbf" not in ended


def test_a_probe_that_was_not_run_does_not_lead_to_a_rescue(root, tmp_path):
    flip(root / "step_500")
    done = run_ckptctl(
        *("runbook", "run", "storage-corruption", root, "--dry-run", "--json"),
    )
    ended = [each for each in validated(done.stdout)["events"] if each["event"] == "ended"]
    assert "validated" in [each["block"] for each in ended]
    unattended = run_ckptctl("runbook", "run", "storage-corruption", root)
    assert unattended.returncode == 2


def test_a_log_that_cannot_be_read_stops_the_run_before_the_resume(root, tmp_path):
    exit_code, ended, document = run(root, LOG=str(tmp_path / "typo.log"))
    assert exit_code == 2
    assert "correct LOG" in document["reason"]
    assert ended["classify"]["exit_code"] == 2
    assert resumed(root) is None


def test_each_block_asks_about_the_step_that_was_chosen():
    blocks = [block for state in find_runbook("rb-7").states for block in state.blocks]
    for block in blocks:
        if "ckptctl pick" in block.code or "ckptctl preflight" in block.code:
            assert "OTHER_ROOTS[@]" in block.code, block.name
            assert "--optional-root=" in block.code, block.name


def test_an_optional_root_may_be_absent(root, tmp_path):
    exit_code, _, _ = run(root, OPTIONAL_ROOTS=str(tmp_path / "nvme"))
    assert exit_code == 31
    assert resumed(root) == "step_500"
    (root.parent / "resumed").unlink()
    exit_code, _, _ = run(root, OTHER_ROOTS=str(tmp_path / "nvme"))
    assert exit_code == 75
    assert resumed(root) is None
