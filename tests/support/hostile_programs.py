"""A script: hostile programs in the sandbox, started from a terminal, beside what they try to reach.

Its standard input is a terminal, which becomes its own. It writes one line of JSON: what each program reached. It needs
only the standard library and `train_jax.language.chat`, so that any user can run it.
"""

import contextlib
import fcntl
import json
import os
import resource
import select
import socket
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from textwrap import dedent

from train_jax.language.chat.execution import FunctionTests, execute, passes

SECONDS = 1
FREE_SECONDS = 20
"""Time for starting and ending, on a busy machine."""

# Each part is tried. One that does not raise an exception has reached something.
BEGIN = """
import ctypes, os, platform, socket, sys
C, ARM = ctypes.CDLL(None, use_errno=True), platform.machine() == "aarch64"
def did(result):
    if result in (-1, None) or result is False:
        raise OSError(ctypes.get_errno())
def call(x86, arm, *arguments):
    did(C.syscall(arm if ARM else x86, *arguments))
def attempt(*parts):
    for part in parts:
        try:
            exec(part, globals())
        except BaseException:
            continue
        print("REACHED", part)
"""
TRIED = {
    "the terminal": [
        "os.open('/dev/tty', os.O_RDWR)",
        "os.open({terminal!r}, os.O_RDWR)",
        "os.open('/dev/console', os.O_WRONLY)",
        "os.openpty()",
    ],
    "typing into the shell": [
        "import fcntl; [fcntl.ioctl(n, 0x5412, b'!') for n in range(3)]",
        "import fcntl; fcntl.ioctl(os.open('/dev/tty', os.O_RDWR), 0x5412, b'!')",
        "import fcntl; fcntl.ioctl(os.open({terminal!r}, os.O_RDWR), 0x5412, b'!')",
        "did(C.ioctl(0, 0x5412, b'!') == 0)",
    ],
    "a UNIX socket": [
        "socket.socket(socket.AF_UNIX).connect({folder!r} + '/socket')",
        "socket.socket(socket.AF_UNIX).connect('\\0' + {abstract!r})",
        "socket.socketpair()",
    ],
    "the network": [
        "socket.create_connection(('127.0.0.1', {port}), timeout=1)",
        "socket.create_connection(('1.1.1.1', 53), timeout=1)",
        "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
        "socket.socket(40)",
    ],
    "a pipe with a name": [
        "os.write(os.open({folder!r} + '/fifo', os.O_WRONLY | os.O_NONBLOCK), b'!')",
        "os.write(os.open({here!r} + '/fifo', os.O_WRONLY | os.O_NONBLOCK), b'!')",
        "os.mkfifo('fifo')",
    ],
    "devices": [
        *(f"os.open('/dev/{name}', os.O_{flag})"
          for name in ("kvm", "fuse", "loop-control", "loop0", "vda", "sda", "mem", "kmsg", "userfaultfd", "vhost-net",
                       "net/tun", "shm/x", "snapshot", "uinput", "zero") for flag in ("RDONLY", "RDWR")),
        "os.mknod('device', 0o20666, os.makedev(1, 1))",
        "os.mknod('/tmp/loop', 0o60666, os.makedev(7, 0))",
    ],
    "files outside": [
        *(f"open({path}).read(1)"
          for path in ("{folder!r} + '/file'", "{here!r} + '/file'", "'/etc/passwd'", "'/etc/shadow'",
                       "{checkout!r} + '/README.md'", "'/proc/1/environ'", "'/proc/self/environ'",
                       "'/proc/self/status'", "'/proc/version'",
                       "'/sys/kernel/mm/transparent_hugepage/enabled'", "{home!r} + '/.bashrc'",
                       "{home!r} + '/.netrc'", "'/var/log/dpkg.log'", "'/usr/bin/env'", "'/boot/vmlinuz'")),
        *(f"assert os.listdir({path})"
          for path in ("{folder!r}", "{here!r}", "'/home'", "'/var'", "'/run'", "'/proc'", "'/sys'", "'/mnt'", "'/opt'",
                       "'/usr/include'", "'/usr/share'", "'/etc/ssl'", "{checkout!r} + '/.git'")),
    ],
    "the checkout": [
        "assert os.listdir({checkout!r} + '/train_jax')",
        "open({checkout!r} + '/train_jax/errors.py').read()",
        "open({checkout!r} + '/train_jax/language/chat/sandboxed.py', 'a')",
    ],
    "writing": [
        *(f"open({path} + '/written', 'w').write('!')"
          for path in ("''", "{folder!r}", "{here!r}", "{home!r}", "'/dev'", "'/dev/shm'", "'/etc'", "'/usr'",
                       "'/lib64'", "'/var/tmp'", "os.path.dirname(os.__file__)", "sys.path[-1]", "{checkout!r}")),
        "os.chmod('/dev/null', 0o600)",
        "os.utime('/dev/null', (0, 0))",
        "os.chmod(os.__file__, 0o777)",
        "os.chmod('/', 0o777)",
        "os.utime(os.__file__, (0, 0))",
        "os.truncate(os.__file__, 0)",
        "os.unlink(os.__file__)",
        "os.rename('/files', '/etc/files')",
        "os.link(os.__file__, 'link')",
        "os.symlink('a', '/link')",
        "import shutil; shutil.rmtree('/dev')",
        "os.setxattr('.', 'user.x', bytes(100))",
        "os.chown('.', 1, 1)",
    ],
    "links in its folder": [
        "os.symlink({folder!r} + '/file', 'a'); open('a').read()",
        "os.symlink({folder!r}, 'b'); open('b/written', 'w').write('!')",
        "os.symlink('/', 'c'); open('c/etc/passwd').read()",
        "os.symlink('/proc/self/root', 'd'); assert os.listdir('d')",
        "os.mkdir('e'); os.chdir('e'); os.symlink('../' * 20 + {folder!r}, 'f'); open('f/file').read()",
    ],
    "signals": [
        *(f"os.kill({process}, 0)"
          for process in ("-1", "0", "2", "os.getppid()", "{victim}", "{driver}", "os.getpid()")),
        "os.kill({victim}, 9)",
        "os.killpg(0, 0)",
        "import signal; signal.raise_signal(signal.SIGSTOP)",
        "import signal; signal.pidfd_send_signal(os.pidfd_open(1), 0)",
        "call(234, 131, {victim}, {victim}, 9)",
        "call(129, 138, {victim}, 9, 0)",
        "import fcntl; fcntl.fcntl(os.pipe()[0], 8, {victim})",
    ],
    "other processes": [
        "open('/proc/{victim}/mem', 'rb')",
        "open('/proc/self/mem', 'r+b')",
        "did(C.ptrace(16, {victim}, 0, 0))",
        "did(C.ptrace(0, 0, 0, 0))",
        "call(310, 270, {victim}, bytes(16), 1, bytes(16), 1, 0)",
        "call(311, 271, {victim}, bytes(16), 1, bytes(16), 1, 0)",
        "call(312, 272, 1, {victim}, 0, 0, 0)",
        "os.pidfd_open({victim})",
        "os.setpriority(os.PRIO_PROCESS, {victim}, 19)",
        "os.sched_setaffinity({victim}, [0])",
    ],
    "processes": [
        "os.fork()",
        "os.posix_spawn(sys.executable, ['python'], {{}})",
        "import subprocess; subprocess.Popen(['ls'])",
        "os.execv(sys.executable, ['python', '-c', 'print(1)'])",
        "call(56, 220, 17, 0, 0, 0, 0)",
        "call(58, 9999)",
        "call(435, 435, bytes(88), 88)",
    ],
    "threads": [
        "import _thread; _thread.start_new_thread(print, ())",
        "import threading; threading.Thread(target=print).start()",
        "import multiprocessing; multiprocessing.Process(target=print).start()",
    ],
    "programs with more rights": [
        *(f"os.execv('{path}', ['{path}'])" for path in ("/usr/bin/su", "/bin/su", "/usr/bin/sudo", "/usr/bin/mount")),
        "os.setuid(0)",
        "os.setgid(0)",
        "os.setgroups([])",
        "os.setresuid(0, 0, 0)",
        "did(C.prctl(47, 2, 21, 0, 0) == 0)",
        "did(C.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(*[2**32 - 1] * 6)))",
    ],
    "namespaces": [
        "call(272, 97, 0x10000000)",
        "call(272, 97, 0x00020000)",
        "did(C.setns(0, 0))",
        "call(56, 220, 0x10000011, 0, 0, 0, 0)",
        "call(435, 435, (ctypes.c_uint64 * 11)(0x10000000, 0, 0, 0, 17), 88)",
    ],
    "mounts": [
        "did(C.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, b'size=4g'))",
        "did(C.mount(None, b'/', None, 0x1020, None))",
        "did(C.mount(b'proc', b'/tmp', b'proc', 0, None))",
        "did(C.umount2(b'/files', 2))",
        "did(C.umount2(b'/dev/null', 2))",
        "os.chroot('.')",
        "call(155, 41, b'.', b'.')",
        "call(428, 428, -100, b'/', 1)",
        "call(430, 430, b'tmpfs', 0)",
        "call(442, 442, -100, b'/', 0x8000, bytes(32), 32)",
        "call(304, 265, -100, bytes(128), 0)",
        "did(C.swapon(b'/tmp/x', 0))",
    ],
    "parts of the kernel": [
        "call(321, 280, 0, bytes(128), 128)",
        "call(425, 425, 8, bytes(120))",
        "call(206, 0, 8, bytes(8))",
        "call(323, 282, 0)",
        "call(298, 241, bytes(128), 0, -1, -1, 0)",
        "call(250, 219, 0, -3, 0)",
        "call(248, 217, b'user', b'x', b'x', 1, -3)",
        "call(300, 262, 0, 0)",
        "call(444, 444, 0, 0, 1)",
        "did(C.personality(0x0040000))",
        "did(C.sethostname(b'x', 1))",
        "did(C.klogctl(3, ctypes.create_string_buffer(9), 9))",
        "did(C.reboot(0))",
        "call(317, 277, 1, 0, bytes(16))",
        "call(175, 105, b'', 0, b'')",
        "call(246, 104, 0, 0, 0, 0)",
        "call(303, 264, -100, b'/', bytes(8), bytes(8), 0)",
        "os.inotify_init() if hasattr(os, 'inotify_init') else did(C.inotify_init())",
        "import select; select.epoll()",
        "os.eventfd(0)",
        "did(C.timerfd_create(0, 0))",
        "did(C.signalfd(-1, bytes(128), 0))",
    ],
    "settings of the kernel": [
        "open('/proc/sys/kernel/hostname', 'w').write('x')",
        "open('/proc/sys/kernel/core_pattern', 'w').write('|/tmp/x')",
        "open('/proc/sysrq-trigger', 'w').write('h')",
        "open('/sys/fs/cgroup/cgroup.procs', 'w').write('1')",
        "open('/proc/self/oom_score_adj', 'w').write('1')",
        "open('/proc/self/uid_map', 'w').write('0 0 1')",
    ],
    "memory in files": [
        "f = os.memfd_create('x'); [os.write(f, bytes(2**20)) for _ in range(20)]",
        "call(447, 447, 0)",
        "open('/dev/shm/x', 'wb').write(bytes(2**20))",
        "import multiprocessing.shared_memory as m; m.SharedMemory(create=True, size=2**20)",
    ],
    "memory of System V": [
        "did(C.shmget(0, 2**20, 0o1600))",
        "did(C.msgget(0, 0o1600))",
        "did(C.semget(0, 1, 0o1600))",
        "did(C.mq_open(b'/x', 0o102, 0o600, None))",
        "did(C.syscall(180 if ARM else 240, b'x', 0o102, 0o600, None))",
    ],
    "memory in pipes": [
        "import fcntl; fcntl.fcntl(os.pipe()[1], 1031, 2**20)",
        "import fcntl; [fcntl.fcntl(os.pipe()[1], 1031, 2**17) for _ in range(9)]",
        "call(278, 75, os.pipe()[1], bytes(16), 1, 0)",
        "os.splice(os.pipe()[0], os.pipe()[1], 1)",
        "[os.pipe() for _ in range(40)]",
    ],
    "locks of files": [
        "import fcntl; fcntl.lockf(open('x', 'w'), fcntl.LOCK_EX)",
        "import fcntl; fcntl.flock(open('x', 'w'), fcntl.LOCK_EX)",
        "import fcntl; fcntl.fcntl(open('x', 'w'), fcntl.F_SETLEASE, fcntl.F_WRLCK)",
        "import fcntl; fcntl.fcntl(os.open('.', 0), fcntl.F_NOTIFY, 1)",
    ],
    "locked memory, queued signals and timers": [
        "did(C.mlock(ctypes.create_string_buffer(2**16), 2**16))",
        "did(C.mlockall(1))",
        "did(C.timer_create(0, None, ctypes.create_string_buffer(8)))",
        "call(129, 138, os.getpid(), 40, bytes(128))",
        "call(297, 240, os.getpid(), os.getpid(), 40, bytes(128))",
    ],
    "higher limits": [
        *(f"import resource; resource.setrlimit(resource.RLIMIT_{name}, (2**40, 2**40))"
          for name in ("AS", "CPU", "FSIZE", "NOFILE")),
    ],
    "open files of the parent": [
        "assert sum(1 for n in range(1000) if C.fcntl(n, 1) >= 0) > 5",  # the null device, and two pipes
        "import stat; assert any(stat.S_ISCHR(os.fstat(n).st_mode) and os.isatty(n) for n in range(5))",
        "os.read({secret_descriptor}, 100).index(b'kept')",
    ],
    "the environment": [
        "os.environ['WANDB_API_KEY']",
        "os.environ['PATH']",
        "assert {folder!r} in str(os.environ)",
        "C.getenv.restype = ctypes.c_char_p; assert C.getenv(b'WANDB_API_KEY')",
        "assert len(os.environ) > 5",
    ],
}  # fmt: skip

# These are run as they are, and print REACHED if something has no limit.
RUN = {
    "a large file": """
        with open('x', 'wb') as f:
            while f.tell() < 17e6: f.write(bytes(2**16))
        print('REACHED')
    """,
    "large files": """
        size = 0
        try:
            for i in range(99):
                with open(str(i), 'wb') as f: size += f.write(bytes(2**20))
        except OSError: pass
        if size > 17e6: print('REACHED', size)
    """,
    "many files": """
        import os
        count = 0
        try:
            for count in range(10**5): os.symlink('a' * 4000, str(count))
        except OSError: pass
        if count > 2000: print('REACHED', count)
    """,
    "much memory": """
        blocks = []
        try:
            while len(blocks) < 80: blocks.append(bytearray(2**24))
        except MemoryError: pass
        if len(blocks) > 70: blocks.clear() or print('REACHED')
    """,
    "much shared memory": """
        import mmap
        blocks = []
        try:
            while len(blocks) < 80:
                blocks.append(mmap.mmap(-1, 2**24))
                blocks[-1][:] = bytes(2**24)
        except (MemoryError, OSError): pass
        if len(blocks) > 70: print('REACHED', len(blocks))
    """,
    "1 GB of output": """
        for _ in range(1000): print('x' * 10**6)
    """,
    "1 GB into the pipe": """
        import os
        while True:
            for n in range(3, 9):
                try: os.write(n, b'x' * 2**16)
                except OSError: pass
    """,
    "1 GB of errors": """
        import sys
        while True: sys.stderr.write('x' * 2**16)
    """,
    "no end": """
        while True: pass
    """,
    "sleep": """
        import time
        time.sleep(1000)
    """,
    "an end that is caught": """
        import signal
        for n in range(1, 65):
            try: signal.signal(n, signal.SIG_IGN)
            except (OSError, ValueError): pass
        while True:
            try:
                while True: pass
            except BaseException: pass
    """,
    "a traced stop": """
        import ctypes, os, signal
        ctypes.CDLL(None).ptrace(0, 0, 0, 0)
        ctypes.CDLL(None)['raise'](19)
        try: os.kill(os.getpid(), signal.SIGSTOP)
        except OSError: pass
        while True: pass
    """,
    "life after its end": """
        import os, time
        try:
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0: time.sleep(1000)
        except OSError: pass
    """,
    "many processes": """
        import os
        while True:
            try: os.fork()
            except OSError: pass
    """,
    "closed pipes": """
        import os, time
        os.closerange(0, 64)
        time.sleep(1000)
    """,
    "a crash": """
        import ctypes
        ctypes.string_at(0)
    """,
    "a call of another ABI": """
        import ctypes
        ctypes.CDLL(None).syscall(0x40000000 + 39)
        print('REACHED' if __import__('platform').machine() == 'x86_64' else '')
    """,
}  # fmt: skip

# Answers whose function is wrong; TESTS are those of a right one.
TESTS = FunctionTests("import math\ndef helper(x): return x\n", "def check(f): assert f([1, 2]) == helper(3)", "add")
FORGED = {
    "a number equal to everything": """
        class A(int):
            def __eq__(self, other): return True
            __ne__ = __hash__ = None
        def add(x): return A()
    """,
    "an object equal to everything": """
        class A:
            def __eq__(self, other): return True
        def add(x): return A()
    """,
    "frames": """
        import sys
        def add(x):
            frame = sys._getframe()
            while frame:
                frame.f_globals.update(encode=lambda value: value, passed=True)
                if 'peer' in frame.f_locals: frame.f_locals['peer'].write({'passed': True})
                frame = frame.f_back
            return 0
    """,
    "objects of the collector": """
        import gc
        def add(x): return 0
        for each in gc.get_objects():
            if type(each).__name__ == 'Peer':
                each.write({'error': '', 'output': ''})
                for _ in range(9): each.write({'passed': True})
    """,
    "an end without an error": """
        import os
        def add(x): return 0
        os._exit(0)
    """,
    "an end in the call": """
        import os
        def add(x): os._exit(0)
    """,
    "at the exit": """
        import atexit, os, sys
        def add(x): return 0
        for n in range(9): atexit.register(os.write, n, b'{"passed": true}\\n')
        sys.exit()
    """,
    "writing to every pipe": """
        import os
        def add(x): return 0
        for n in range(64):
            try: os.write(n, b'{"error": "", "passed": true}\\n' * 3)
            except OSError: pass
    """,
    "writing in the call": """
        import os
        def add(x):
            for n in range(64):
                try: os.write(n, b'{"passed": true}\\n')
                except OSError: pass
            return 0
    """,
    "closing every pipe": """
        import os
        def add(x): os.closerange(0, 64)
    """,
    "patched modules": """
        import json, builtins
        def add(x): return 0
        json.dumps = lambda message: '{"passed": true, "error": ""}'
        builtins.isinstance = lambda *a: True
    """,
    "a patched check": """
        import builtins
        def add(x): return 0
        builtins.check = helper = check = lambda f: None
    """,
    "an error that is none": """
        def add(x): raise SystemExit(0)
    """,
    "a nested answer": """
        import os
        def add(x):
            for n in range(3, 9):
                try: os.write(n, b'[' * 500000 + b'\\n')
                except OSError: pass
            return 0
    """,
    "not a number": """
        def add(x): return float('nan')
    """,
    "another object with the name": """
        class add:
            def __new__(cls, x): return cls
    """,
}  # fmt: skip


def main():
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.environ["WANDB_API_KEY"] = "kept"
    with contextlib.ExitStack() as stack:
        outside = Outside(stack)
        found = {}
        for name, parts in TRIED.items():
            program = BEGIN + f"attempt(*{[part.format(**outside.places) for part in parts]!r})\nprint('to the end')"
            found[name] = reached(program, outside, whole=True)
        for name, program in RUN.items():
            found[name] = reached(dedent(program), outside)
        for name, program in FORGED.items():
            found[name] = ["passed"] if passes(dedent(program), TESTS, SECONDS) else []
        right = passes("def add(x): return sum(x)\n", TESTS, FREE_SECONDS)
    print("\n" + json.dumps({"right": right, "reached": {name: each for name, each in found.items() if each}}))


class Outside:
    """What a program could reach, and what shows that it did."""

    def __init__(self, stack):
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        here = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp")))
        for folder in (self.folder, here):
            (folder / "file").write_text("kept")
            os.mkfifo(folder / "fifo")
        self.fifos = [os.open(folder / "fifo", os.O_RDONLY | os.O_NONBLOCK) for folder in (self.folder, here)]
        abstract = f"hostile{os.getpid()}"
        self.services = [stack.enter_context(socket.create_server(("127.0.0.1", 0)))]
        for address in (str(self.folder / "socket"), f"\0{abstract}"):
            service = stack.enter_context(socket.socket(socket.AF_UNIX))
            service.bind(address)
            service.listen()
            self.services.append(service)
        self.victim = subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL)
        stack.callback(self.victim.kill)
        secret = os.open(self.folder / "file", os.O_RDONLY)
        os.set_inheritable(secret, True)
        self.files = self._listing()
        self.places = {
            "terminal": os.ttyname(0),
            "folder": str(self.folder),
            "here": str(here),
            "abstract": abstract,
            "port": self.services[0].getsockname()[1],
            "home": os.path.expanduser("~"),
            "checkout": str(Path(sys.path[0]).parent if not os.environ.get("TREE") else os.environ["TREE"]),
            "victim": self.victim.pid,
            "driver": os.getpid(),
            "secret_descriptor": secret,
        }

    def _listing(self):
        return sorted((str(each), each.lstat().st_size) for each in self.folder.rglob("*"))

    def traces(self):
        """Returns what a program left outside of its sandbox."""
        found = []
        if self.victim.poll() is not None:
            found.append("the other process ended")
        if self._listing() != self.files:
            found.append("files changed")
        readable = select.select([0, *self.fifos, *self.services], [], [], 0)[0]
        if any(each in readable for each in self.services):
            found.append("a service was called")
        if 0 in readable:
            found.append(f"the terminal has {os.read(0, 100)!r}")
        if any(each in readable and os.read(each, 1) for each in self.fifos):
            found.append("a pipe was written to")
        if survivors():
            found.append(f"processes live on: {survivors()}")
        if os.stat("/dev/null").st_mode & 0o777 != 0o666:
            found.append("/dev/null has another mode")
        return found


def survivors():
    """Returns the command lines of sandboxes of this user."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_bytes()
            if b"/sandboxed.py" in command and process.stat().st_uid == os.getuid():
                found.append(command[:60].decode(errors="replace"))
    return found


def reached(program, outside, *, whole=False):
    """Runs a program; returns what it reached by its own words, and what else shows it."""
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.monotonic()
    done = execute(program, FREE_SECONDS if whole else SECONDS)
    seconds = time.monotonic() - started
    found = [line for line in done.output.splitlines() if line.startswith("REACHED")]
    if whole and "to the end" not in done.output:
        found.append(f"it did not come to its end: {done}")
    if not whole and seconds > SECONDS + FREE_SECONDS:
        found.append(f"it took {seconds:.1f} s")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    if grown > 64 * 1024:
        found.append(f"the memory of its parent grew by {grown} kB")
    return found + outside.traces()


if __name__ == "__main__":
    main()
