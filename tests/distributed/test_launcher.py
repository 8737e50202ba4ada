"""The job and its ranks are identified by the environment of schedulers and launchers."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest
from command_line import clean_environment
from hypothesis import given
from hypothesis import strategies as st

from ckptctl.distributed.launcher import Cluster, cluster_context

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": "llama",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_JOB_NODELIST": "gpu-[007-010]",
    "SLURMD_NODENAME": "gpu-008",
    "SLURM_RESTART_COUNT": "2",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_JOB_END_TIME": "1700000000",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "run-1",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "RANK": "9",
    "WORLD_SIZE": "32",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "4",
    "MASTER_ADDR": "gpu-007",
}


def test_a_process_of_torchrun_under_slurm_knows_both():
    agent = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1", "SLURM_STEP_NUM_NODES": "4"}
    found = cluster_context({**SLURM, **agent, **TORCHRUN})
    assert (found.scheduler, found.launcher) == ("slurm", "torchrun")
    assert (found.job, found.run_id, found.node) == ("4711", "run-1", "gpu-008")
    assert (found.rank, found.world_size, found.local_rank, found.node_rank) == (9, 32, 1, 1)
    assert (found.requeues, found.restarts, found.max_restarts) == (2, 1, 3)
    assert found.restarted
    assert found.sentence == (
        "SLURM job 4711 (requeued 2 times, restarted 1 time): "
        "4 nodes, rank 9 of 32 by torchrun, on gpu-008"
    )


def test_a_task_of_srun_has_the_rank_of_its_step():
    step = {
        "SLURM_STEP_NUM_TASKS": "32",
        "SLURM_PROCID": "17",
        "SLURM_LOCALID": "1",
        "SLURM_NTASKS_PER_NODE": "8",
    }
    found = cluster_context({**SLURM, **step})
    assert (found.launcher, found.rank, found.world_size) == ("srun", 17, 32)
    assert (found.local_rank, found.local_world_size) == (1, 8)


def test_a_batch_script_has_no_rank_though_slurm_counts_it_as_task_0():
    found = cluster_context(SLURM)
    assert (found.launcher, found.rank, found.world_size) == ("none", None, None)
    assert (found.nodes, found.gpus_per_node, found.node_list) == (4, 8, "gpu-[007-010]")


def test_a_task_of_an_array_is_called_as_squeue_calls_it():
    array = {"SLURM_ARRAY_JOB_ID": "4700", "SLURM_ARRAY_TASK_ID": "3"}
    assert cluster_context({**SLURM, **array}).job == "4700_3"


def test_a_pod_of_kubernetes_is_not_taken_for_its_node():
    told = {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "HOSTNAME": "train-0-abcde",
        "NODE_NAME": "node-17",
        "JOB_NAME": "train",
        "JOB_COMPLETION_INDEX": "0",
    }
    found = cluster_context(told)
    assert (found.scheduler, found.job, found.pod) == ("kubernetes", "train", "train-0-abcde")
    assert (found.node, found.node_rank, found.restarted) == ("node-17", 0, False)
    assert found.sentence == "Kubernetes job train: 1 node, on node-17"


def test_mpirun_says_the_rank_and_a_script_of_its_own_may():
    found = cluster_context({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"})
    assert (found.launcher, found.rank, found.world_size) == ("mpirun", 1, 2)
    found = cluster_context({"RANK": "0", "WORLD_SIZE": "1"})
    assert (found.launcher, found.rank, found.world_size) == ("environment", 0, 1)


def test_nothing_is_invented_where_nothing_is_said():
    assert cluster_context({}) == Cluster("none", "none", socket.gethostname())
    assert not cluster_context({}).restarted
    assert cluster_context({}).placed(1, 2).world_size == 2


@pytest.mark.parametrize("value", ["", "-1", "two", "1.5", "²", "0x3", "9" * 5000])
def test_a_number_that_is_none_is_one_that_is_not_there(value):
    assert cluster_context({**SLURM, "SLURM_RESTART_COUNT": value}).requeues is None


def test_the_document_holds_every_field_and_a_date_for_the_end():
    document = cluster_context({**SLURM, **TORCHRUN}).document()
    assert document["ends_at"] == "2023-11-14T22:13:20Z"
    assert set(document) == {*Cluster.__slots__}


@given(
    st.dictionaries(st.sampled_from(sorted({**SLURM, **TORCHRUN, "HOSTNAME": ""})), st.text()),
)
def test_whatever_is_in_the_environment_the_answer_is_a_document(told):
    found = cluster_context(told)
    assert json.loads(json.dumps(found.document(), allow_nan=False)) == found.document()
    assert found.sentence


def test_asking_for_the_place_loads_no_torch():
    code = "import sys, ckptctl.train as t; t.cluster_context(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=clean_environment()).returncode == 0
