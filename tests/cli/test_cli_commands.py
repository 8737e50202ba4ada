"""The commands on real checkpoints, each in a process of its own."""

import json
import os
import shutil
import struct

import pytest
from command_line import validated


def test_pick_puts_one_path_on_standard_output_and_nothing_else(ckptctl, sound_root):
    done = ckptctl("pick", sound_root)
    assert (done.returncode, done.stdout) == (0, f"{sound_root}/step_30\n")
    assert done.stderr.startswith("resume from step 30\n")


def test_pick_says_on_standard_error_why_newer_steps_were_refused(ckptctl, broken_root):
    done = ckptctl("pick", broken_root)
    assert (done.returncode, done.stdout) == (0, f"{broken_root}/step_10\n")
    assert "not step 30: incomplete: __1_0.distcp" in done.stderr
    assert "not step 20: incomplete: __0_0.distcp" in done.stderr
    assert "root.suspect" in done.stderr


def test_quiet_pick_talks_only_where_there_is_no_step(ckptctl, broken_root):
    assert ckptctl("pick", broken_root, "-q").stderr == ""
    none = ckptctl("pick", broken_root, "-q", "--before", "10")
    assert (none.returncode, none.stdout) == (11, "")
    assert none.stderr.startswith("error: ")


def test_pick_prints_the_number_where_that_is_asked_for(ckptctl, sound_root):
    assert ckptctl("pick", sound_root, "--print", "step").stdout == "30\n"


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        (["--before", "30"], "step_20"),
        (["--skip", "30,20"], "step_10"),
        (["--skip", "30", "--skip", "20"], "step_10"),
        (["--require", "model,optimizer", "--level", "listing"], "step_30"),
    ],
)
def test_pick_obeys_its_options(ckptctl, sound_root, arguments, path):
    assert ckptctl("pick", sound_root, *arguments).stdout == f"{sound_root}/{path}\n"


def test_falling_back_has_an_exit_code_of_its_own_where_that_is_asked_for(ckptctl, broken_root):
    assert ckptctl("pick", broken_root, "--detailed-exitcode").returncode == 3
    assert ckptctl("pick", broken_root).returncode == 0


def test_an_empty_root_is_a_fresh_run(ckptctl, tmp_path):
    (tmp_path / "empty").mkdir()
    done = ckptctl("pick", "empty")
    assert (done.returncode, done.stdout) == (10, "")
    assert done.stderr.endswith("next: ckptctl pick empty --allow-fresh\n")
    allowed = ckptctl("pick", "empty", "--allow-fresh")
    assert (allowed.returncode, allowed.stdout) == (0, "")


def test_scan_shows_the_chosen_step_first_then_every_step_newest_first(ckptctl, broken_root):
    done = ckptctl("scan", broken_root)
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert lines[0] == (
        "resume from step 10: complete (checked: structure; not proven: bytes, one save)"
    )
    assert lines[1] == f"  {broken_root}/step_10"
    rows = [each.split()[:3] for each in lines if each.startswith(("!", "◇"))]
    assert rows == [["!", "30", "incomplete"], ["!", "20", "incomplete"], ["◇", "10", "complete"]]
    assert lines[-1].startswith("next: ckptctl ")


@pytest.mark.parametrize(
    ("level", "deeper"),
    [
        ("listing", "verify {} --level structure"),
        ("structure", "verify {} --level content"),
    ],
)
def test_scan_ends_with_the_look_that_goes_deeper_than_its_own(ckptctl, sound_root, level, deeper):
    last = ckptctl("scan", sound_root, "--level", level).stdout.splitlines()[-1]
    assert last == f"next: ckptctl {deeper.format(f'{sound_root}/step_30')}"


def test_nothing_comes_next_where_every_byte_is_proven(ckptctl, sound_root):
    assert "next:" not in ckptctl("scan", sound_root, "--level", "content").stdout
    assert "next:" not in ckptctl("verify", f"{sound_root}@30", "--level", "content").stdout


def test_pick_does_not_decide_while_one_of_its_roots_is_not_there(ckptctl, sound_root):
    copy = f"{sound_root}-copy"
    done = ckptctl("pick", sound_root, copy)
    assert (done.returncode, done.stdout) == (75, "")
    assert f"{copy} does not exist, and {sound_root} holds 3 steps" in done.stderr
    assert done.stderr.endswith(f"next:  ckptctl pick {sound_root} --optional-root {copy}\n")
    allowed = ckptctl("pick", sound_root, "--optional-root", copy)
    assert (allowed.returncode, allowed.stdout) == (0, f"{sound_root}/step_30\n")
    assert "root.unavailable" in allowed.stderr


def test_a_root_that_is_only_optional_is_a_mistake(ckptctl, sound_root):
    done = ckptctl("pick", sound_root, "--optional-root", sound_root)
    assert (done.returncode, done.stdout) == (2, "")
    assert "at least one must be mandatory" in done.stderr


@pytest.mark.parametrize("command", ["scan", "preflight", "pick"])
def test_several_roots_are_one_decision(ckptctl, sound_root, tmp_path, command):
    local = tmp_path / "nvme"
    shutil.copytree(sound_root, local, symlinks=True)
    shutil.rmtree(sound_root / "step_30")
    room = ["--room-for", "0"] if command == "preflight" else []
    given = [command, sound_root, "--optional-root", local, *room, "--json"]
    document = validated(ckptctl(*given).stdout)
    chosen = document["chosen"] if command == "scan" else document["path"]
    assert chosen == f"{local}/step_30"
    shutil.rmtree(local)
    document = validated(ckptctl(*given).stdout)
    chosen = document["chosen"] if command == "scan" else document["path"]
    assert (document["exit_code"], chosen) == (0, f"{sound_root}/step_20")
    findings = (document["pick"] if command == "preflight" else document)["findings"]
    assert "root.unavailable" in [each["code"] for each in findings]


def test_scan_names_the_root_of_each_step_where_there_are_several(ckptctl, sound_root, tmp_path):
    local = shutil.copytree(sound_root, tmp_path / "nvme", symlinks=True)
    shutil.rmtree(sound_root / "step_30")
    done = ckptctl("scan", sound_root, local)
    rows = [line.split() for line in done.stdout.splitlines() if "complete " in line]
    assert [f"root 1: {sound_root}", f"root 2: {local}"] == [
        line.strip() for line in done.stdout.splitlines() if line.strip().startswith("root ")
    ]
    assert [(row[1], row[2]) for row in rows if row[1].isdigit()] == [
        ("30", "2"),
        ("20", "1"),
        ("20", "2"),
        ("10", "1"),
        ("10", "2"),
    ]


def test_quiet_scan_gives_addresses_for_a_script(ckptctl, broken_root):
    assert ckptctl("scan", broken_root, "--quiet").stdout == f"{broken_root}/step_10\n"


def test_scan_can_be_limited_to_the_newest(ckptctl, sound_root):
    done = ckptctl("scan", sound_root, "--last", "1", "--json")
    assert [each["number"] for each in validated(done.stdout)["reports"]] == [30]


def test_verify_answers_with_its_exit_code(ckptctl, broken_root):
    assert ckptctl("verify", f"{broken_root}@10").returncode == 0
    done = ckptctl("verify", f"{broken_root}@latest")
    assert done.returncode == 20
    assert done.stdout.startswith(f"! incomplete: {broken_root}/step_30\n")
    assert done.stdout.endswith(f"next: ckptctl pick {broken_root} --before 30\n")


def test_quiet_verify_answers_with_nothing_else(ckptctl, broken_root):
    done = ckptctl("verify", f"{broken_root}@30", "-q")
    assert (done.returncode, done.stdout, done.stderr) == (20, "", "")


def test_verify_draws_a_map_of_the_ranks(ckptctl, broken_root):
    lines = ckptctl("verify", f"{broken_root}@30").stdout.splitlines()
    at = lines.index("ranks 0 to 1")
    assert lines[at + 1 : at + 3] == [
        "  ◇○",
        "  ○ 1 missing   ◇ 1 structure only",
    ]


def test_show_lists_what_is_in_a_step(ckptctl, sound_root):
    done = ckptctl("show", f"{sound_root}@auto")
    assert done.returncode == 0
    assert "model.layers.{0..1}.attention.q_proj.weight" in done.stdout
    every = ckptctl("show", f"{sound_root}@auto", "--tensors").stdout
    assert "model.layers.1.attention.q_proj.weight" in every
    names = ckptctl("show", f"{sound_root}@auto", "-q").stdout.splitlines()
    assert "model.layers.1.attention.q_proj.weight" in names


@pytest.mark.parametrize(
    ("value", "expected"), [("train-step", "30\n"), ("world-size", "2\n"), ("tokens", "7680\n")]
)
def test_show_prints_one_value_for_a_script(ckptctl, sound_root, value, expected):
    done = ckptctl("show", f"{sound_root}@auto", "--print", value)
    assert (done.returncode, done.stdout) == (0, expected)


@pytest.mark.parametrize(
    ("arguments", "exit_code"),
    [
        (["scan", "run"], 0),
        (["verify", "run@30"], 20),
        (["verify", "run@10"], 0),
        (["pick", "run"], 0),
        (["pick", "run", "--detailed-exitcode"], 3),
        (["pick", "run", "--before", "10"], 11),
        (["pick", "nowhere"], 10),
        (["show", "run@10"], 0),
        (["explain"], 0),
        (["explain", "shard.truncated"], 0),
        (["verify", "run@999"], 2),
        (["verify", "run/step_77"], 2),
        (["explain", "shard.truncted"], 2),
        (["pick", "run", "--require", "brains"], 2),
        (["pick", "run", "--level", "deep"], 2),
        (["pick"], 2),
        (["pick", "run", "--nonsense"], 2),
        (["sacn", "run"], 2),
    ],
)
def test_json_is_one_valid_document_with_the_exit_code_also_on_failure(
    ckptctl, broken_root, arguments, exit_code
):
    done = ckptctl(*arguments, "--json")
    read = validated(done.stdout)
    assert done.returncode == read["exit_code"] == exit_code
    assert ("error" in read["schema"]) == (exit_code == 2) == done.stderr.startswith("error: ")


def test_the_report_file_holds_the_document(ckptctl, broken_root, tmp_path):
    done = ckptctl("verify", f"{broken_root}@30", "--report", "report.json")
    assert done.returncode == 20
    assert validated((tmp_path / "report.json").read_text())["report"]["verdict"] == "incomplete"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["report.json", "run"]


def test_a_report_leaves_a_pipe_and_a_link_what_they_are(ckptctl, sound_root, tmp_path):
    pipe, link, file = tmp_path / "pipe", tmp_path / "link.json", tmp_path / "file.json"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    link.symlink_to(file)
    for path in (pipe, link):
        assert ckptctl("pick", sound_root, "--report", path).returncode == 0
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert validated(os.read(reader, 1 << 16).decode()) | {"generated_at": ""} == validated(
        file.read_text()
    ) | {"generated_at": ""}
    os.close(reader)


def test_the_report_file_also_says_what_went_wrong(ckptctl, tmp_path):
    ckptctl("verify", "nowhere@30", "--report", "report.json")
    assert validated((tmp_path / "report.json").read_text())["exit_code"] == 2


def test_a_report_that_cannot_be_written_is_an_error(ckptctl, sound_root):
    done = ckptctl("verify", f"{sound_root}@30", "--report", "no/such/folder/report.json")
    assert done.returncode == 2
    assert "cannot be written to no/such/folder/report.json" in done.stderr


def test_every_option_can_come_from_the_environment(ckptctl, sound_root):
    done = ckptctl("pick", sound_root, env={"CKPTCTL_BEFORE": "30", "CKPTCTL_PRINT": "step"})
    assert done.stdout == "20\n"
    assert json.loads(ckptctl("pick", sound_root, env={"CKPTCTL_JSON": "1"}).stdout)["step"] == 30


def test_a_next_command_overwrites_no_file_of_another_command(ckptctl, sound_root, tmp_path):
    figures = tmp_path / "scan.prom"
    done = ckptctl("scan", sound_root, "--metrics", figures, "--level", "listing")
    (shown,) = [each for each in done.stdout.splitlines() if each.startswith("next: ")]
    assert figures.exists()
    assert "ckptctl verify " in shown
    assert str(figures) not in shown


def test_a_next_command_repeats_the_options_that_it_needs(ckptctl, sound_root):
    (sound_root / "step_30").rename(sound_root / "saved30")
    shutil.rmtree(sound_root / "step_20")
    shutil.rmtree(sound_root / "step_10")
    pattern = "saved(?P<step>[0-9]+)"
    done = ckptctl("scan", sound_root, "--pattern", pattern)
    assert done.returncode == 0
    assert done.stdout.rstrip().endswith(f"--pattern '{pattern}'")
    from_environment = ckptctl("scan", sound_root, env={"CKPTCTL_PATTERN": pattern})
    assert "--pattern" not in from_environment.stdout


def test_a_hostile_name_cannot_write_to_the_terminal(ckptctl, tmp_path, sound_root):
    hostile = tmp_path / "a\x1b[31m\x1b]0;owned\x07\u202e\nnext: rm -rf"
    sound_root.rename(hostile)
    for command in ("scan", "verify"):
        target = hostile if command == "scan" else f"{hostile}@30"
        done = ckptctl(command, target, "--color", "never")
        assert "\x1b" not in done.stdout
        assert "\x07" not in done.stdout
        assert "\u202e" not in done.stdout
        assert "\nnext: rm" not in done.stdout
        assert "\\x1b[31m" in done.stdout


def test_a_path_that_is_not_text_comes_out_as_it_went_in(ckptctl, tmp_path, sound_root):
    odd = tmp_path / "run-\udcff"
    sound_root.rename(odd)
    # Compared in ASCII: a test that fails has to tell so, too.
    assert ascii(ckptctl("pick", odd).stdout) == ascii(f"{odd}/step_30\n")
    assert "run-\\udcff" in ckptctl("scan", odd).stdout


def test_a_storage_that_does_not_answer_is_asked_again_with_more_patience(ckptctl):
    pytest.importorskip("s3fs")
    # Port 9 discards what it gets, where anything listens there at all. A busy machine may
    # take longer than a short limit to connect.
    server = ["--endpoint-url", "http://127.0.0.1:9"]
    keys = ["--storage-option", "key=training", "--storage-option", "secret=hunter2"]
    done = ckptctl("pick", "s3://bucket/run", *server, *keys, "--timeout", "30")
    assert (done.returncode, done.stdout) == (75, "")
    message, command = done.stderr.splitlines()
    assert message.startswith("error: s3://bucket/run: no answer after ")
    assert command == (
        "next:  ckptctl pick s3://bucket/run --endpoint-url http://127.0.0.1:9 "
        '--storage-option key="$CKPTCTL_STORAGE_KEY" '
        '--storage-option secret="$CKPTCTL_STORAGE_SECRET" --timeout 120'
    )
    patient = ckptctl("pick", "s3://bucket/run", *server, *keys, "--timeout", "120")
    assert patient.stderr.endswith("next:  ckptctl explain 75\n")


def test_safetensors_are_unverifiable_for_want_of_checksums_until_they_are_sealed(
    ckptctl, tmp_path
):
    step = tmp_path / "run" / "checkpoint-10"
    step.mkdir(parents=True)
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    file = struct.pack("<Q", len(header)) + header + bytes(4)
    (step / "model.safetensors").write_bytes(file)
    (step / "trainer_state.json").write_text('{"global_step": 10}')
    done = ckptctl("verify", step, "--level", "content")
    assert done.returncode == 22
    first, *_, last = done.stdout.splitlines()
    assert "its files hold no checksums and no seal has any" in first
    assert last == f"next: ckptctl seal {step} --accept-unverifiable"
    assert ckptctl("seal", step, "--accept-unverifiable").returncode == 0
    assert ckptctl("verify", step, "--level", "content").returncode == 0


def test_a_mistake_is_told_on_one_line(ckptctl):
    done = ckptctl("runbook")
    assert done.returncode == 2
    assert done.stderr.splitlines()[1:] == ["next:  ckptctl runbook --help"]


def test_under_a_runbook_the_lines_fit_the_terminal_that_shows_them(ckptctl, broken_root):
    done = ckptctl("scan", broken_root.name, env={"CKPTCTL_COLUMNS": "76"})
    assert max(map(len, done.stdout.splitlines())) <= 76
    assert max(map(len, ckptctl("scan", broken_root.name).stdout.splitlines())) > 76
