"""Programs that a model wrote: what passes, and what they cannot reach."""

import json
import os
import socket
import sys
from pathlib import Path

import pytest
from support.scripts import run_script

from train_jax.errors import UserError
from train_jax.tasks.language.chat import execution
from train_jax.tasks.language.chat.execution import execute, passes
from train_jax.tasks.language.chat.task_names import task_name

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces of Linux")


@pytest.fixture(scope="module", autouse=True)
def namespaces():
    try:
        assert passes("x = 1")
    except UserError as error:
        pytest.skip(str(error))


IN_C = "import ctypes; c = ctypes.CDLL(None); assert c."
FAILS = {
    "an early exit": "import sys; sys.exit(0)",
    "an exit of the process": "import os; os._exit(0)",
    "an exit like that of a refusal": "import os; os._exit(125)",
    "a word that claims it": "import os; [os.write(n, b'0' * 32 + b'\\n\\n') for n in range(9)]; os._exit(0)",
    "a report of its own": "import traceback; traceback.format_exception_only = lambda e: ['']; assert False",
    "a program": "import subprocess; subprocess.Popen(['ls'])",
    "a process": "import os; os.fork()",
    "the end of a process": "import os; os.kill(1, 9)",
    "the end of a folder": "import shutil; shutil.rmtree('/tmp')",
    "files writable again": f"{IN_C}mount(None, b'/', None, 0x1020, None) == 0",
    "hidden folders back": f"{IN_C}umount2(b'/home', 2) == 0",
    "more files in memory": f"{IN_C}mount(b'tmpfs', b'/tmp', b'tmpfs', 0, b'size=4g') == 0",
    "rights of a new namespace": f"{IN_C}unshare(0x10000000) == 0",
    "memory beside the limit": f"{IN_C}shmget(0, 2**30, 0o1600) >= 0",
    "sleep": "import time; time.sleep(60)",
    "a large file": "open('x', 'wb').write(bytes(2**25))",
    "large files in two folders": "[open(f'/{name}/x', 'wb').write(bytes(9 * 2**20)) for name in ('tmp', 'run')]",
}


@pytest.mark.parametrize("name", FAILS)
def test_a_program_that_fails_does_not_pass(name):
    assert not passes(FAILS[name], seconds=1)


def test_a_program_may_write_small_files_and_start_threads():
    done = execute(
        "import os, threading\n"
        "open('x', 'w').write('1')\n"
        "assert os.listdir('.') == ['x']\n"
        "thread = threading.Thread(target=print, args=['\\udc80{}\\n', \"it's\"])\n"
        "thread.start()\n"
        "thread.join()\n"
        "print('GUARD' in dir(), 'PATH' in os.environ)\n"
    )
    assert done == (True, "?{}\n it's\nFalse False\n", "", False) and not Path("x").exists()


def test_an_error_is_named():
    assert execute("x = bytearray(2**30)").error == "MemoryError"
    assert execute("while True: pass", seconds=1) == (False, "", "it did not end in 1 s", True)


@pytest.mark.slow
@pytest.mark.skipif("NANOCHAT_DIR" not in os.environ, reason="set NANOCHAT_DIR to a checkout of nanochat at 92d63d4")
def test_the_published_tests_pass():
    said = run_script("nanochat_execution")
    assert "14 passed" in said and "skipped" not in said, said


def test_a_program_reaches_no_file_no_process_and_no_network(tmp_path):
    """Each line fails; the service listens at the moment, and the environment has a secret."""
    (tmp_path / "file").write_text("kept")
    written = Path(sys.prefix) / f"written-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(str(tmp_path / "socket"))
        local.listen()
        attempts = [
            f"socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), timeout=1)",
            "socket.create_connection(('1.1.1.1', 53), timeout=1)",
            f"socket.socket(socket.AF_UNIX).connect({str(tmp_path / 'socket')!r})",
            f"open({str(tmp_path / 'file')!r}, 'w')",
            f"os.unlink({str(tmp_path / 'file')!r})",
            f"os.mkdir({str(tmp_path / 'folder')!r})",
            f"open({execution.__file__!r}, 'a')",
            f"os.chmod({execution.__file__!r}, 0o777)",
            f"open({str(written)!r}, 'w')",
            "os.environ['PATH']",
            *(f"os.kill({process}, 0)" for process in (-1, 2, os.getpid())),
            "open('/proc/1/mem')",
            "os.listdir('/proc')[0]",
        ]
        program = "import os, socket\nreached = []\n" + "".join(
            f"try:\n    {line}\n    reached.append({line!r})\nexcept Exception:\n    pass\n" for line in attempts
        )
        assert passes(program + "assert not reached, reached")
    assert (tmp_path / "file").read_text() == "kept"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "socket"]


@pytest.mark.parametrize(
    ("step", "refused"),
    [
        ('"user": 0x10000000', '"user": 1 << 62'),
        ("os.uname().machine", "'vax'"),
    ],
)
def test_nothing_is_run_that_is_not_apart(monkeypatch, tmp_path, step, refused):
    """The script fails at a step that the kernel refuses, as in a container without the right to unshare."""
    refusing, content = tmp_path / "execution.py", Path(execution.__file__).read_text()
    assert step in content
    refusing.write_text(content.replace(step, refused))
    monkeypatch.setattr(execution, "__file__", str(refusing))
    with pytest.raises(UserError, match=r"cannot be run apart from the network and files here \(.+\); leave"):
        passes("open('/proc/self/comm')")


def test_a_solution_passes_the_tests_of_its_problem(tmp_path):
    """Alone, in a block of Markdown, and with another value."""
    prompt = "from typing import List\n\n\ndef add(x: List[int]) -> int:\n    '''Adds.'''\n"
    row = {"prompt": prompt, "canonical_solution": "    return sum(x)\n", "entry_point": "add"}
    row["test"] = "def check(candidate):\n    assert candidate([1, 2]) == 3\n"
    (tmp_path / "test.jsonl").write_text(json.dumps(row) + "\n")
    problems = task_name(f"humaneval@{tmp_path}").open("test")
    written = problems.conversation(0)[1].text
    assert problems.is_right(0, written) and problems.is_right(0, f"Here:\n```python\n{written}\n```\nThat is it.")
    assert not problems.is_right(0, written.replace("sum(x)", "len(x)")) and not problems.is_right(0, "")
