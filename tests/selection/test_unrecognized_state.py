"""State that nothing shows the kind of is unknown, and a person can map it."""

from pathlib import Path

import pytest
from command_line import run_ckptctl

import ckptctl
from ckptctl.errors import UsageError

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
save_file = pytest.importorskip("safetensors.torch").save_file


def weights(prefix: str = "") -> dict[str, torch.Tensor]:
    return {f"{prefix}layer.weight": torch.ones(8, 4), f"{prefix}layer.bias": torch.ones(8)}


def adam() -> dict[str, object]:
    state = {
        n: {"exp_avg": w, "exp_avg_sq": w, "step": torch.tensor(1.0)}
        for n, w in enumerate(weights().values())
    }
    return {"state": state, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}]}


def save(root: Path, number: int, **more: object) -> None:
    root.mkdir(exist_ok=True)
    torch.save({"model": weights(), "step": number, **more}, root / f"step_{number}.pt")


def test_an_unrecognized_entry_is_named_and_its_kind_is_unknown(tmp_path):
    for number in (10, 20):
        save(tmp_path / "run", number, opt=adam(), data_pos=number * 64)
    chosen = ckptctl.pick(str(tmp_path / "run")).chosen
    assert chosen is not None
    assert chosen.number == 20
    (entry,) = chosen.state.unrecognized
    assert (entry.where, entry.key) == ("step_20.pt: data_pos", "data_pos")
    assert "dataloader" in chosen.state.unknown
    assert "dataloader" not in chosen.state.absent
    assert {"scheduler", "rng"} <= {*chosen.state.absent}


def test_a_required_kind_that_is_unknown_leads_to_show_and_the_mapping(tmp_path):
    for number in (10, 20):
        save(tmp_path / "run", number, opt=adam(), data_pos=number * 64)
    root = str(tmp_path / "run")
    found = ckptctl.pick(root, require=("dataloader",))
    assert found.exit_code == 11
    assert "--state dataloader=data_pos" in found.message
    assert found.next_command == f"ckptctl show {root}/step_20.pt"
    mapped = ckptctl.pick(root, require=("dataloader",), state_keys=["dataloader=data_pos"])
    assert (mapped.exit_code, mapped.step) == (0, 20)
    assert "dataloader" in mapped.required


def test_a_required_kind_that_is_absent_leads_to_show(tmp_path):
    save(tmp_path / "run", 10, opt=adam())
    found = ckptctl.pick(str(tmp_path / "run"), require=("rng",))
    assert found.exit_code == 11
    assert "rng is required" in found.message
    assert found.next_command == f"ckptctl show {tmp_path}/run/step_10.pt"


def test_weights_alone_are_refused_whatever_else_is_not_recognized(tmp_path):
    save(tmp_path / "run", 10, anything=adam(), data_pos=640)
    save(tmp_path / "run", 20, data_pos=1280)
    assert ckptctl.pick(str(tmp_path / "run")).step == 10


def test_a_kind_that_only_the_older_step_holds_is_lost_although_both_have_more(tmp_path):
    save(tmp_path / "run", 10, opt=adam(), data_pos=640, sampler={"epoch": 1, "offset": 5})
    save(tmp_path / "run", 20, opt=adam(), data_pos=1280)
    found = ckptctl.pick(str(tmp_path / "run"))
    assert found.step == 10
    assert "--state dataloader=data_pos" in found.passed_over[0].reason


def test_the_file_of_a_dcp_step_that_nothing_names_is_read_and_mapped(tmp_path):
    for number in (10, 20):
        step = tmp_path / "run" / f"step_{number}"
        dcp.save({"model": weights(), "optim": adam()}, checkpoint_id=step, no_dist=True)
        torch.save({"cursor_of_mine": {"a": 1}}, step / "mine.pt")
    root = str(tmp_path / "run")
    chosen = ckptctl.pick(root).chosen
    assert chosen is not None
    assert [entry.where for entry in chosen.state.unrecognized] == ["mine.pt: cursor_of_mine"]
    for key in ("cursor_of_mine", "mine.pt"):
        mapped = ckptctl.pick(root, require=("dataloader",), state_keys=[f"dataloader={key}"])
        assert mapped.step == 20
        assert mapped.chosen is not None
        assert mapped.chosen.state.unrecognized == ()


def test_show_and_its_json_list_what_is_not_recognized(tmp_path):
    save(tmp_path / "run", 10, opt=adam(), data_pos=640)
    step = f"{tmp_path}/run/step_10.pt"
    done = run_ckptctl("show", step)
    assert "not recognized: step_10.pt: data_pos" in " ".join(done.stdout.split())
    done = run_ckptctl("show", step, "--state", "dataloader=data_pos", "--json")
    assert '"unrecognized": []' in done.stdout


@pytest.mark.parametrize("pair", ["data_pos", "loader=data_pos", "dataloader="])
def test_a_mapping_that_is_none_is_refused(pair):
    with pytest.raises(UsageError, match="--state is KIND=KEY"):
        ckptctl.Requirements(state_keys=[pair])


def test_of_several_counts_the_one_in_the_name_is_the_train_step(tmp_path):
    save(tmp_path / "run", 16, opt=adam(), iter_num=32)
    assert ckptctl.show(f"{tmp_path}/run/step_16.pt").train_step == 16


@pytest.mark.parametrize("how", ["dcp", "file", "safetensors"])
@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "other."])
def test_tensors_with_other_names_than_before_are_noted(prefix, how, tmp_path):
    root = tmp_path / "run"
    for number, front in ((10, ""), (20, ""), (30, prefix)):
        step = root / f"step_{number}"
        step.mkdir(parents=True)
        if how == "dcp":
            dcp.save({"model": weights(front)}, checkpoint_id=step, no_dist=True)
        elif how == "file":
            torch.save({"model": weights(front)}, step / "model.pt")
        else:
            from safetensors.torch import save_file

            save_file(weights(front), step / "model.safetensors")
    renamed = [
        [
            one
            for one in ckptctl.verify(f"{root}/step_{number}", level="structure").findings
            if one.code == "state.renamed"
        ]
        for number in (20, 30)
    ]
    assert renamed[0] == []
    (note,) = renamed[1]
    assert note.message.startswith("2 tensors of 2 have other names than in step_20: ")
    assert f"{prefix}layer.bias" in note.message


def test_a_model_that_grew_is_not_renamed(tmp_path):
    for number, more in ((10, {}), (20, {"head.weight": torch.ones(3, 3)})):
        step = tmp_path / "run" / f"step_{number}"
        dcp.save({"model": {**weights(), **more}}, checkpoint_id=step, no_dist=True)
    report = ckptctl.verify(f"{tmp_path}/run/step_20", level="structure")
    assert "state.renamed" not in {one.code for one in report.findings}


@pytest.mark.parametrize("how", ["file", "dcp"])
@pytest.mark.parametrize("entry", ["tuple", "slots", "quantized"])
def test_a_step_that_lost_an_entry_of_any_kind_is_not_chosen(how, entry, tmp_path):
    values: dict[str, object] = {
        "tuple": (adam(), {"a": 1}),
        "slots": {"accumulated": weights()},
        "quantized": {"codes": torch.ones(99, dtype=torch.uint8)},
    }
    for number in (10, 20, 30):
        more = {} if number == 30 else {"solver": values[entry]}
        if how == "file":
            save(tmp_path, number, **more)
        else:
            state = {"model": weights(), "step": number, **more}
            dcp.save(state, checkpoint_id=tmp_path / f"step-{number}", no_dist=True)
    found = ckptctl.pick(str(tmp_path))
    assert found.step == 20
    (over,) = found.passed_over
    assert "solver" in over.reason
    state = found.chosen.state if found.chosen else None
    assert state is not None
    assert "optimizer" in (*state.held, *state.unknown)
    mapped = ckptctl.pick(str(tmp_path), require=("optimizer",), state_keys=["optimizer=solver"])
    assert mapped.step == 20


def test_entries_that_were_renamed_are_not_lost(tmp_path):
    for number in (10, 20):
        save(tmp_path, number, opt=adam(), extra={"a": torch.ones(50)})
    save(tmp_path, 30, opt=adam(), other={"a": torch.ones(8)})
    assert ckptctl.pick(str(tmp_path)).step == 30


def test_a_step_with_its_optimizer_is_chosen_without_an_entry_that_comes_and_goes(tmp_path):
    save(tmp_path, 10, opt=adam(), images=torch.ones(3, 32, 32))
    save(tmp_path, 20, opt=adam())
    assert ckptctl.pick(str(tmp_path)).step == 20


@pytest.mark.parametrize("name", ["resume_state.bin", "resume.pt", "resume.pkl"])
def test_a_file_of_any_name_beside_safetensors_is_read(name, tmp_path):
    for number in (8, 16, 24):
        step = tmp_path / f"checkpoint-{number}"
        step.mkdir()
        save_file(weights(), step / "model.safetensors")
        (step / "config.json").write_text("{}")
        torch.save({"lr": 0.1}, step / "run_args.bin")
        if number < 24:
            torch.save({"x": adam()}, step / name)
    found = ckptctl.pick(str(tmp_path), require=("optimizer",))
    assert found.step == 16
    assert ckptctl.pick(str(tmp_path)).step == 16
    assert not ckptctl.show(f"{tmp_path}/checkpoint-16").state.unrecognized


def test_an_optimizer_is_known_by_parameters_that_lie_in_another_file(tmp_path):
    step = tmp_path / "step_10"
    step.mkdir()
    torch.save(weights(), step / "weights.pt")
    slots = {name: {"a": w, "b": w, "step": 3} for name, w in weights().items()}
    torch.save({"solver": slots}, step / "resume.pt")
    assert "optimizer" in ckptctl.show(str(step)).state.held


def test_weights_of_an_unknown_form_that_a_person_maps_are_the_weights_of_the_step(tmp_path):
    for number in (10, 20):
        step = tmp_path / "run" / f"step_{number}"
        step.mkdir(parents=True)
        torch.save({"packed": b"\x01\x02"}, step / "a.pt")
        torch.save({"note": "text"}, step / "b.pt")
    unmapped = ckptctl.verify(str(step))
    assert "format.unlisted" in [one.code for one in unmapped.findings]
    mapped = ckptctl.verify(str(step), state_keys=["model=packed"])
    assert (mapped.verdict.value, mapped.state.held) == ("complete", ("model",))


def litgpt(folder: Path, steps: int) -> None:
    """A save as LitGPT's `pretrain.py` makes it, of two micro-batches a step."""
    folder.mkdir(parents=True)
    held = {"model": weights(), "optimizer": adam(), "iter_num": 2 * steps, "step_count": steps}
    loader = torch.utils.data.DataLoader(torch.arange(64), batch_size=4)
    torch.save({**held, "train_dataloader": loader}, folder / "lit_model.pth")


def test_the_count_of_micro_batches_beside_that_of_steps_is_no_step(tmp_path):
    for name, steps in (("step-00000010", 10), ("step-00000020", 20), ("final", 20)):
        litgpt(tmp_path / name, steps)
    assert ckptctl.verify(str(tmp_path / "final")).state.step.value == 20
    chosen = ckptctl.pick(str(tmp_path))
    assert (chosen.step, [finding.code for finding in chosen.findings]) == (20, [])


def test_a_loader_that_was_saved_as_an_object_may_hold_no_place_in_the_data(tmp_path):
    litgpt(tmp_path / "step-00000010", 10)
    state = ckptctl.verify(str(tmp_path / "step-00000010")).state
    assert not state.dataloader.found
    assert [entry.key for entry in state.unrecognized] == ["train_dataloader"]
    assert state.unknown == ("dataloader",)
