"""Installs a release of PyTorch whose wheel was built for CUDA without CUDA's libraries, for tests on a CPU.

    python tests/torch_on_a_cpu.py torch==2.15.0

The newest releases have no CPU build in the package index. A CUDA build computes on a CPU, too, but its import needs
libraries of 3 GB. Empty libraries replace them here; nobody calls their functions, which return an error. Needs gcc, nm
and objdump, and Linux.
"""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

LIBRARY = re.compile(r"(lib(?:cublas|cudnn|cufft|cufile|cupti|cusolver|cusparse|nccl|nvrtc|nvshmem)\w*)\.so")
PREFIXES = {"libcufile": "cuFile", "libcusparseLt": "cusparseLt", "libnccl": "nccl"}
"""Library -> the beginning of the names of its functions, for libraries whose functions have no version."""


def output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *arguments], check=True)


def missing_libraries(folder: Path) -> tuple[dict[str, str], set[str]]:
    """Returns a map from the needed libraries to their versions, and the names of all functions of other libraries."""
    versions: dict[str, str] = {}
    names: set[str] = set()
    for file in sorted(folder.glob("lib*.so*")):
        headers = output_of("objdump", "-p", str(file))
        for library in re.findall(r"NEEDED\s+(\S+)", headers):
            versions.setdefault(library, "")
        for library, needed in re.findall(r"required from (\S+):\n((?:\s+0x.*\n)+)", headers):
            versions[library] = needed.split()[-1]
        names |= {line.split()[-1] for line in output_of("nm", "-D", "--undefined-only", str(file)).splitlines()}
    return versions, names


def make_library(folder: Path, library: str, version: str, functions: list[str]) -> None:
    """Compiles a library whose functions return 1, an error."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "empty.c")
        exports = Path(scratch, "exports.map")
        source.write_text("".join(f"int {name}() {{ return 1; }}\n" for name in functions))
        options = []
        if version:
            exports.write_text(f"{version} {{ global: *; }};\n")
            options.append(f"-Wl,--version-script={exports}")
        command = ["gcc", "-w", "-shared", "-fPIC", f"-Wl,-soname,{library}", *options]
        subprocess.run([*command, "-o", str(folder / library), str(source)], check=True)


def main(requirement: str) -> None:
    pip(requirement)
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    folder = Path(os.path.dirname(spec.origin), "lib")
    versions, names = missing_libraries(folder)
    for library, version in versions.items():
        match = LIBRARY.match(library)
        if match is None:
            continue
        if version:
            functions = {name.partition("@")[0] for name in names if name.endswith(f"@{version}")}
        else:
            functions = {name for name in names if name.startswith(PREFIXES[match[1]])}
        make_library(folder, library, version, sorted(functions))
    for library in versions:
        if match := re.fullmatch(r"libcudart\.so\.(\d+)", library):
            pip(f"nvidia-cuda-runtime=={match[1]}.*")  # 2 MB: it is asked whether there is a device
    # The dependencies on CUDA would be installed with the next package that needs torch.
    for metadata in folder.parents[1].glob("torch-*.dist-info/METADATA"):
        text = metadata.read_text()
        metadata.write_text(re.sub(r"^Requires-Dist: (cuda|nvidia|triton).*\n", "", text, flags=re.MULTILINE))


if __name__ == "__main__":
    main(sys.argv[1])
