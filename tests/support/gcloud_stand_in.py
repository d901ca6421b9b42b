"""A stand-in for `gcloud compute tpus`: records its arguments, and runs here what a worker would run.

The folder in TRM_STAND_IN holds `calls.jsonl`, `hosts` (the number of workers of a node), `nodes/NAME.json` and the
home folder of every worker, `workers/NAME/INDEX`. A file `drop` with a number breaks the next connection that follows a
log after so many lines; then, as gcloud does, this script waits and repeats the whole command. A file `refuse` with
words lets the next command that contains them fail. Flags are those of gcloud; another one is an error.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

FLAGS = {
    "tpu-vm describe": {"--zone", "--project", "--format"},
    "tpu-vm list": {"--zone", "--project", "--format"},
    "tpu-vm delete": {"--zone", "--project", "--quiet"},
    "tpu-vm ssh": {"--zone", "--project", "--quiet", "--worker", "--internal-ip", "--ssh-flag", "--command"},
    "tpu-vm scp": {"--zone", "--project", "--quiet", "--worker", "--internal-ip"},
    "queued-resources create": {"--zone", "--project", "--node-id", "--runtime-version", "--accelerator-type",
                                "--quiet", "--spot", "--reserved", "--internal-ips"},
    "queued-resources describe": {"--zone", "--project", "--format"},
    "queued-resources delete": {"--zone", "--project", "--quiet", "--force"},
}  # fmt: skip
"""The flags of each command."""
OTHER = {
    "auth login": set(),
    "auth application-default login": set(),
    "config set": set(),
    "services enable": set(),
    "storage buckets create": {"--location", "--uniform-bucket-level-access"},
    "storage buckets add-iam-policy-binding": {"--member", "--role"},
    "storage ls": set(),
    "storage cp": {"--recursive"},
    "storage rm": {"--recursive"},
    "compute tpus accelerator-types list": {"--zone"},
    "compute tpus queued-resources list": {"--zone"},
}
"""Commands of the documentation that are only recorded."""


class StandIn:
    """The TPUs in a folder."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def node(self, name):
        path = self.folder / "nodes" / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def set(self, node, /, **fields):
        path = self.folder / "nodes" / f"{node}.json"
        path.parent.mkdir(exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps((self.node(node) or {}) | fields))
        scratch.rename(path)

    def home(self, name, worker):
        return self.folder / "workers" / name / str(worker)

    def create(self, name, zone, state="READY"):
        hosts = int((self.folder / "hosts").read_text())
        for worker in range(hosts):
            self.home(name, worker).mkdir(parents=True)
        endpoints = [{"ipAddress": "127.0.0.1"}] * hosts
        path = f"projects/mine/locations/{zone}/nodes/{name}"
        kind = f"projects/mine/locations/{zone}/acceleratorTypes/v4-16"
        self.set(name, name=path, zone=zone, state=state, networkEndpoints=endpoints, acceleratorType=kind)

    def preempt(self, name, notice_seconds=0.5):
        """Preempts a node as Google Cloud does: SIGTERM, and then the machines are gone."""
        self.set(name, state="STOPPING")
        self.signal(name, signal.SIGTERM)
        time.sleep(notice_seconds)
        self.remove_machines(name)
        self.set(name, state="PREEMPTED")

    def remove_machines(self, name):
        self.signal(name, signal.SIGKILL)
        shutil.rmtree(self.folder / "workers" / name, ignore_errors=True)

    def signal(self, name, number):
        for path in (self.folder / "workers" / name).glob("*/trm-launches/*/*/process"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                process = int(path.read_text().split()[0])
                try:
                    os.killpg(process, number)
                except ProcessLookupError:  # it has no group yet, or has ended
                    os.kill(process, number)

    def calls(self):
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def fail(text):
    print(text, file=sys.stderr)
    sys.exit(1)


def ssh(place, name, worker, command):
    home = place.home(name, worker)
    environment = {"HOME": str(home), "PATH": os.environ["PATH"], "USER": "me", "TMPDIR": "/tmp"}
    drop = place.folder / "drop"
    for _ in range(10):
        print(f"SSH: Attempting to connect to worker {worker}...", file=sys.stderr, flush=True)
        process = subprocess.Popen(["bash", "-c", command], cwd=home, env=environment, stdout=subprocess.PIPE)
        lines = None
        if " follow " in command:
            with contextlib.suppress(FileNotFoundError):
                lines = int(drop.read_text())
                drop.unlink()
        for number, line in enumerate(process.stdout):
            sys.stdout.buffer.write(line[: len(line) // 2] if number - 1 == lines else line)
            sys.stdout.buffer.flush()
            if number - 1 == lines:
                process.kill()
                print("Retrying: SSH command error: [ssh] return code [255].", file=sys.stderr, flush=True)
                time.sleep(1)
                break
        else:
            sys.exit(process.wait())


def main(argv):
    place = StandIn(os.environ["TRM_STAND_IN"])
    with (place.folder / "calls.jsonl").open("a") as calls:
        calls.write(json.dumps(argv) + "\n")
    refuse = place.folder / "refuse"
    if refuse.exists() and refuse.read_text() in " ".join(argv):
        refuse.unlink()
        fail("ERROR: (gcloud) RESOURCE_EXHAUSTED: There is no more capacity in the zone")
    for command, known in OTHER.items():
        if " ".join(argv).startswith(f"{command} ") or argv == command.split():
            unknown = {word.partition("=")[0] for word in argv if word.startswith("--")} - known
            sys.exit(f"ERROR: unrecognized arguments: {unknown}" if unknown else 0)
    assert argv[:2] == ["compute", "tpus"], argv
    group, verb = argv[2:4]
    words = [word for word in argv[4:] if not word.startswith("--")]
    flags = dict(word.partition("=")[::2] for word in argv[4:] if word.startswith("--"))
    unknown = set(flags) - FLAGS[f"{group} {verb}"]
    if unknown:
        print(f"ERROR: unrecognized arguments: {unknown}", file=sys.stderr)
        sys.exit(2)
    name = next((word.partition(":")[0] for word in words if not word.startswith("/")), "")
    if verb == "list":
        nodes = [json.loads(path.read_text()) for path in sorted((place.folder / "nodes").glob("*.json"))]
        print(json.dumps([node for node in nodes if node["zone"] == flags["--zone"]]))
    elif verb == "create":
        if place.node(name) is not None:
            fail(f"ERROR: ALREADY_EXISTS: {name}")
        place.create(name, flags["--zone"], state="CREATING")
    elif place.node(name) is None:
        fail(f"ERROR: (gcloud.compute.tpus.{group}.{verb}) NOT_FOUND: Resource '{name}' was not found")
    else:
        with_node(place, group, verb, name, words, flags)


def with_node(place, group, verb, name, words, flags):
    node = place.node(name)
    if verb == "describe":
        print(json.dumps({"state": {"state": "ACTIVE"}} if group == "queued-resources" else node))
        if node["state"] == "CREATING" and group == "tpu-vm":
            place.set(name, state="READY")
    elif verb == "delete":
        place.remove_machines(name)
        (place.folder / "nodes" / f"{name}.json").unlink()
    elif node["state"] != "READY":
        fail(f'ERROR: The TPU VM "{name}" is in state "{node["state"]}"')
    elif verb == "ssh":
        ssh(place, name, int(flags["--worker"]), flags["--command"])
    elif verb == "scp":
        here = place.home(name, int(flags["--worker"]))
        source, target = (here / word.partition(":")[2] if word.startswith(f"{name}:") else word for word in words)
        shutil.copyfile(source, target)


if __name__ == "__main__":
    main(sys.argv[1:])
