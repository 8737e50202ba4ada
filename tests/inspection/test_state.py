"""What a resume would restore, by keys and by files."""

import pytest
from made_results import report

from ckptctl.findings import Finding, Verdict
from ckptctl.formats.pickles.values import TensorStub
from ckptctl.inspection.train_state import (
    NO_STATE,
    Sources,
    check_optimizer_steps,
    check_required,
    train_state,
)
from ckptctl.model import BytesEntry, Chunks, FileInfo, Metadata, TensorEntry


def metadata(*names: str) -> Metadata:
    is_tensor = [n for n in names if "_group" not in n and "step" not in n]
    empty = Chunks.of(1, [])
    tensors = {n: TensorEntry(n, "float32", (4,), empty, tuple(n.split("."))) for n in is_tensor}
    others = {n: BytesEntry(n, None, tuple(n.split("."))) for n in names if n not in tensors}
    return Metadata(tensors, others, ())


def state(*names: str, layout: str = "dcp", files=(), contents=None, numbers=None):
    return train_state(
        Sources(layout, [("", metadata(*names))], files, contents or {}, numbers or {})
    )


def test_nothing_is_held_by_a_step_that_could_not_be_looked_at():
    assert NO_STATE.held == ()


def test_model_and_optimizer_are_found_by_their_keys():
    found = state("model.w", "optimizer.state.w.exp_avg")
    assert found.held == ("model", "optimizer")
    assert found.optimizer.where == ("optimizer.state.w.exp_avg",)


def test_an_optimizer_without_moments_is_none():
    assert state("model.w", "optimizer.param_groups.0.betas").held == ("model",)


def test_the_ranks_of_state_per_rank_are_counted():
    names = [f"dataloader.dp_rank_{rank}.step" for rank in range(3)]
    assert state("model.w", *names).dataloader.n_ranks == 3


def test_a_number_that_was_read_is_shown():
    found = state("model.w", "train_state.step", numbers={("", "train_state.step"): 1200})
    assert found.step.value == 1200


def test_a_file_is_believed_by_its_name_until_someone_has_looked_inside():
    file = FileInfo("train_state.pt", 100)
    by_name = state("model.w", layout="kempnerforge", files=[file])
    assert by_name.held == ("model", "scheduler", "rng", "dataloader", "step", "tokens")
    content = {"train_state.pt": {"step": 7, "rng": {"torch": 1}, "scheduler": None}}
    inspected = state("model.w", layout="kempnerforge", files=[file], contents=content)
    assert inspected.held == ("model", "rng", "step")
    assert inspected.step.value == 7


def test_the_file_of_one_rank_speaks_for_those_of_the_others():
    files = [FileInfo(f"extra_state/extra_state_rank_{rank}.pt", 100) for rank in range(4)]
    content = {files[0].path: {"global_step": 7, "train_dataloader": {"a": 1}}}
    found = state("model.w", layout="bytecheckpoint", files=files, contents=content)
    assert found.held == ("model", "dataloader", "step")
    assert (found.dataloader.n_ranks, found.step.value) == (4, 7)


def test_a_count_within_an_epoch_is_not_that_of_the_run():
    names = ["train_state.step", "epoch.step"]
    numbers = {("", names[0]): 8, ("", names[1]): 0}
    assert state("model.w", *names, numbers=numbers).step.value == 8


def test_counts_below_a_key_that_says_nothing_are_found():
    file = FileInfo("checkpoint_metadata.json", 100)
    content = {file.path: {"tp": 1, "metas": {"last_train_step": 20, "consumed_tokens_total": 99}}}
    found = state(layout="nanotron", files=[file], contents=content)
    assert (found.step.value, found.tokens.value) == (20, 99)


def test_a_scheduler_in_the_folder_of_the_optimizer_is_one():
    names = ("optim.state.w.exp_avg", "sched.last_epoch_group")
    found = train_state(Sources("automodel", [("optim", metadata(*names))], (), {}, {}))
    assert found.held == ("optimizer", "scheduler")


def test_an_empty_file_holds_nothing():
    assert state(layout="kempnerforge", files=[FileInfo("train_state.pt", 0)]).held == ()


def test_a_missing_kind_is_one_remark_that_names_what_was_required():
    found = state("model.w", "optimizer.state.w.exp_avg")
    (note,) = check_required(found, ("rng",), "root/step_1")
    assert note.code == "state.missing"
    assert note.message.endswith("; rng is required")
    assert note.unmet
    (note,) = check_required(found, ("optimizer",), "root/step_1")
    assert not note.unmet


def test_a_note_that_is_added_to_a_report_leaves_an_unmet_requirement_unmet():
    unmet = Finding("state.missing", "rng", "it is not restored; rng is required", unmet=True)
    added = report(1200, unmet).with_findings(Finding("seal.missing", "", "there is no seal"))
    assert (added.verdict, added.exit_code, added.usable) == (Verdict.COMPLETE, 23, False)


LORA = "model.base_model.layers.0.q_proj.lora_{}.weight"


def test_the_base_model_of_an_adapter_is_reported_as_not_in_the_step():
    found = state(LORA.format("A"), LORA.format("B"), "optimizer.state.w.exp_avg")
    note, _ = check_required(found, (), "root/step_1")
    assert (note.code, note.where) == ("state.adapter", LORA.format("A"))


@pytest.mark.parametrize("word", ["ia3_l", "oft_R", "hada_w1_a", "vera_lambda_b", "boft_R"])
def test_what_other_methods_of_peft_add_is_an_adapter_too(word):
    assert state(f"model.base_model.model.layers.0.k_proj.{word}.default").model.of_adapter
    beside = f"model.base_model.model.layers.0.k_proj.{word}.default", "model.norm.weight"
    assert not state(*beside).model.of_adapter


def test_that_a_file_of_an_unknown_format_is_no_base_model_is_not_claimed():
    files = [FileInfo("adapter_model.safetensors", 100), FileInfo("base.gguf", 1 << 30)]
    note, *_ = check_required(state(files=files), (), "root/step_1")
    assert (note.code, "is recognized" in note.message) == ("state.adapter", True)
    assert "not in the step" not in note.message


def test_an_adapter_beside_its_base_model_is_part_of_a_model():
    found = state(LORA.format("A"), "model.base_model.layers.0.q_proj.base_layer.weight")
    assert found.model.found
    assert not found.model.of_adapter


def test_the_file_of_an_adapter_holds_no_base_model_whatever_else_was_trained():
    files = [FileInfo("adapter_model.safetensors", 100)]
    assert state(layout="transformers", files=files).model.of_adapter
    head = {"base_model.model.lm_head.weight": TensorStub("float32", (4, 4), (), 0, "", 16)}
    content = {"adapter_model.safetensors": head}
    assert state(layout="transformers", files=files, contents=content).model.of_adapter
    of_model = [*files, FileInfo("model.safetensors", 100)]
    assert not state(layout="transformers", files=of_model).model.of_adapter


def test_shards_that_disagree_about_the_step_are_mixed():
    steps = {"optimizer": [("a", 10.0), ("a", 10.0), ("b", 20.0), ("b", 20.0), ("b", 20.0)]}
    (finding,) = check_optimizer_steps(steps, "root/step_20")
    assert finding.code == "state.mixed"


def test_parameters_without_a_gradient_for_a_while_are_no_mixture():
    steps = {"optimizer": [("a", 10.0), ("a", 20.0), ("b", 20.0), ("b", 20.0)]}
    assert list(check_optimizer_steps(steps, "x")) == []


def test_one_value_in_a_file_is_not_enough_to_accuse_it():
    steps = {"optimizer": [("a", 10.0), ("b", 20.0), ("b", 20.0)]}
    assert list(check_optimizer_steps(steps, "x")) == []


def test_two_optimizers_may_count_differently():
    steps = {"g": [("a", 10.0), ("a", 10.0)], "d": [("b", 50.0), ("b", 50.0)]}
    assert list(check_optimizer_steps(steps, "x")) == []


def test_a_file_that_nothing_names_and_nobody_read_may_hold_any_kind():
    found = state("model.w", files=[FileInfo("mine.pt", 100), FileInfo("config.json", 5)])
    assert [(entry.where, entry.key) for entry in found.unrecognized] == [("mine.pt", "mine.pt")]
    assert "optimizer" in found.unknown
    assert found.absent == ()


def test_what_each_rank_has_is_listed_once():
    files = [FileInfo(f"saved_rank_{rank}.pt", 100) for rank in range(3)]
    contents = {file.path: {"data_pos": 3} for file in files}
    found = state("model.w", files=files, contents=contents)
    assert [entry.where for entry in found.unrecognized] == ["saved_rank_0.pt: data_pos"]


def test_a_state_that_is_unknown_is_no_missing_one():
    found = state("model.w", files=[FileInfo("a.pt", 9)], contents={"a.pt": {"data_pos": 3}})
    missing, unknown = check_required(found, ("dataloader",), "root/step_1")
    assert (missing.code, unknown.code) == ("state.missing", "state.unrecognized")
    assert "dataloader" not in missing.message
    assert "map it with --state dataloader=data_pos" in unknown.message
    assert unknown.message.endswith("dataloader is required")
    assert (missing.unmet, unknown.unmet) == (False, True)
