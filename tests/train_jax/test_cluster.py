"""The processes of a run: detection, meeting, and the platform of the computation; without devices."""

import contextlib
import socket
import threading
import types

import jax
import pytest
from support.processes import free_port

from train_jax.errors import LostProcessError, UserError
from train_jax.runtime import backend, cluster, coordination
from train_jax.runtime.backend import Choice
from train_jax.runtime.cluster import Cluster, roll_call, this_cluster, use_on_one_host


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """A machine without a TPU and without anything that starts processes; returns its folder of device files."""
    for name in (*cluster.VARIABLES, "SLURM_NTASKS", "SLURM_PROCID", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(backend, "_DEVICE_FILES", tmp_path)
    return tmp_path


def detects(monkeypatch, count, index):
    answer = "10.0.0.2:8476", count, index, None
    monkeypatch.setattr(coordination, "detect_cluster", lambda timeout: answer)


def test_the_cluster_of_the_variables(alone, monkeypatch):
    for name, value in zip(cluster.VARIABLES, ("[::1]:1234", "8", "3"), strict=True):
        monkeypatch.setenv(name, value)
    found = this_cluster("cpu", 1)
    assert found == Cluster("[::1]:1234", 8, 3, "variables") and (found.host, found.port) == ("::1", 1234)
    monkeypatch.setenv("JAX_PROCESS_ID", "8")
    with pytest.raises(UserError, match="set all three, or none"):
        this_cluster("cpu", 1)
    monkeypatch.delenv("JAX_NUM_PROCESSES")
    with pytest.raises(UserError, match=r"JAX_NUM_PROCESSES=None.*set all three, or none"):
        this_cluster("cpu", 1)


@pytest.mark.parametrize(("tasks_per_node", "local"), [("1(x4)", None), ("4(x1)", (2,))])
def test_the_cluster_of_slurm_is_that_of_jax(alone, monkeypatch, tasks_per_node, local):
    """JAX's own detection, behind a private name."""
    variables = {"JOB_ID": 77, "STEP_NODELIST": "tpu[3-6]", "NTASKS": 4, "PROCID": 2, "LOCALID": 2}
    for name, value in (variables | {"STEP_TASKS_PER_NODE": tasks_per_node}).items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    found = this_cluster("gpu", 1)
    assert found == Cluster(found.address, 4, 2, "slurm", local) and found.host == "tpu3"
    assert found.name_of(1) == "one of the nodes tpu[3-6]"


def test_the_cluster_of_a_pod(alone, monkeypatch):
    with monkeypatch.context() as patch:
        patch.delattr(coordination, "detect_cluster")
        assert this_cluster("cpu", 1) is None and this_cluster("tpu", 1) is None, "one process asks nobody"
    (alone / "accel0").touch()
    detects(monkeypatch, 8, 3)
    found = this_cluster("tpu", 1)
    assert found == Cluster("10.0.0.2:8476", 8, 3, "tpu") and found.name_of(5) == "worker 5 of the TPU"
    assert this_cluster("cpu", 1) is None, "on the CPU no other host is needed"
    detects(monkeypatch, 1, 0)
    assert this_cluster("tpu", 1) is None
    monkeypatch.setattr(coordination, "detect_cluster", lambda timeout: {}["agent-worker-number"])
    message = r"tpu job cannot be determined .*agent-worker-number.* set JAX_COORDINATOR_ADD"
    with pytest.raises(UserError, match=message):
        this_cluster("tpu", 1)


def test_a_command_of_one_host_leaves_the_tpu_of_a_pod_alone(alone, monkeypatch, capsys):
    used = []
    monkeypatch.setattr(backend, "use", lambda wanted, several: used.append((wanted, several)))
    monkeypatch.setattr(backend, "choose", lambda wanted: Choice("tpu" if wanted == "auto" else wanted, ""))
    (alone / "vfio").mkdir()
    (alone / "vfio" / "0").touch()
    detects(monkeypatch, 1, 0)
    use_on_one_host("auto")
    detects(monkeypatch, 8, 3)
    use_on_one_host("auto")
    use_on_one_host("cpu")
    assert used == [("auto", False), ("cpu", False), ("cpu", False)]
    assert capsys.readouterr().err == "trm: computing on the CPU of this machine: its TPU belongs to 8 hosts\n"
    with pytest.raises(UserError, match="belongs to 8 hosts, and this command runs on one; use --platform cpu"):
        use_on_one_host("tpu")


@pytest.fixture
def configured(monkeypatch):
    """JAX's configuration, replaced; a list of what is set."""
    config = types.SimpleNamespace(jax_platforms=None)
    config.update = lambda name, value: setattr(config, name, value)
    monkeypatch.setattr(jax, "config", config)
    return config


@pytest.mark.parametrize(
    ("device_file", "several", "platforms"),
    [("none", True, "cpu"), ("nvidia0", False, None), ("nvidia0", True, "cuda,cpu"), ("accel0", False, "tpu,cpu")],
)
def test_nothing_falls_back_where_a_tpu_or_several_processes_are(alone, configured, device_file, several, platforms):
    (alone / device_file).touch()
    backend.use("auto", several=several)
    assert configured.jax_platforms == platforms


def test_a_backend_that_cannot_be_used(configured, monkeypatch):
    """JAX leaves out the first of `cuda,cpu` without an error if it sees no GPU."""
    configured.jax_platforms = "cuda,cpu"
    with pytest.raises(UserError, match="no device of the platform cuda, only the CPU; `trm preflight` shows who"):
        backend.local_devices()

    def held():
        raise RuntimeError("Unable to initialize backend 'tpu': The TPU is already in use by process with pid 7")

    monkeypatch.setattr(jax, "local_devices", held)
    with pytest.raises(UserError, match="already in use by process with pid 7; `trm preflight` shows who"):
        backend.local_devices()


def meet(port, count, present, timeout_seconds):
    results = {}

    def answer(index):
        try:
            results[index] = roll_call(Cluster(f"127.0.0.1:{port}", count, index, "tpu"), f"p{index}", timeout_seconds)
        except LostProcessError as error:
            results[index] = str(error)

    threads = [threading.Thread(target=answer, args=(index,)) for index in present]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_all_processes_meet_and_strangers_do_not_disturb_them():
    port = free_port()

    def disturb():
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"[1, 2]\n", b'["trm", 9, {}]\n', b""):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
                stranger.sendall(words)

    threading.Thread(target=disturb).start()
    results = meet(port, 4, [3, 1, 2, 0], 20)
    assert [each["platform"] for each in results[0]] == ["p0", "p1", "p2", "p3"]
    assert list(results.values()) == [results[0]] * 4


def test_a_missing_process_is_named_to_all():
    results = meet(free_port(), 5, [0, 1, 3], 2)
    assert len(results) == 3
    for text in results.values():
        assert text.startswith("process 2 on worker 2 of the TPU did not connect to 127.0.0.1:")
        assert "within 2 s, nor did 1 others; stopped." in text
    port = free_port()
    assert f"process 0 on 127.0.0.1 could not be reached at 127.0.0.1:{port} within 1 s" in meet(port, 2, [1], 1)[1]
