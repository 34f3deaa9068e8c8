"""`make horovod`: build Horovod from its source package into this Python's environment.

No wheel is published, and the source builds by C++14, which PyTorch's headers have left behind. It is built over gloo,
for PyTorch alone. That takes a C++ compiler, CMake (3.13 to 3.x) and minutes, so it is no part of `make install`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "0.28.1"
_NEEDED = ("cffi", "cloudpickle", "psutil", "pyyaml", "packaging")
_BUILD = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_NVTX": "1",
    "HOROVOD_CPU_OPERATIONS": "GLOO",
    "MAKEFLAGS": f"-j{os.cpu_count() or 1}",
}
_REPLACED = {
    "CMAKE_CXX_STANDARD 14": "CMAKE_CXX_STANDARD 17",
    # The build type asks for symbols, which no run needs: they are half of the time.
    '"-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO': '"-O2 -g" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO',
}


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        _pip("install", "-q", *_NEEDED)
        _pip(
            *("download", "-q", "--no-binary", ":all:", "--no-deps", "--no-build-isolation"),
            *("-d", folder, f"horovod=={VERSION}"),
        )
        with tarfile.open(Path(folder) / f"horovod-{VERSION}.tar.gz") as packed:
            packed.extractall(folder, filter="data")
        source = Path(folder) / f"horovod-{VERSION}"
        for name in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt"):
            text = (source / name).read_text()
            for old, new in _REPLACED.items():
                text = text.replace(old, new)
            (source / name).write_text(text)
        _pip("install", "-q", "--no-deps", "--no-build-isolation", str(source), environment=os.environ | _BUILD)
    built = "import horovod.torch as hvd; assert hvd.gloo_built()"
    return subprocess.run([sys.executable, "-c", built]).returncode


def _pip(*words: str, environment: dict[str, str] | None = None) -> None:
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, env=environment)


if __name__ == "__main__":
    sys.exit(main())
