"""Importing the packages is free: no process, no GPU query, no slow import, no output."""

import subprocess
import sys
from pathlib import Path

PACKAGES = (Path(__file__).parent.parent / "packages").iterdir()
MODULES = sorted(path.name.replace("-", "_") for path in PACKAGES)
IMPORT_ALL = """
import importlib, importlib.util, sys, time
import torch
if importlib.util.find_spec("triton"):
    import triton

def refuse(*args, **kwargs):
    raise AssertionError("importing asked for a GPU")

for name in ("is_available", "device_count", "get_device_properties", "init", "_lazy_init"):
    setattr(torch.cuda, name, refuse)

def audit(event, args):
    if event in ("subprocess.Popen", "os.system", "os.posix_spawn", "os.fork", "socket.connect"):
        raise AssertionError(f"importing caused {event} {args}")

before = set(sys.modules)
sys.addaudithook(audit)
for name in sys.argv[1:]:
    start = time.process_time()  # CPU time hardly depends on what else runs
    importlib.import_module(name)
    seconds = time.process_time() - start
    assert seconds < 0.7, f"{name} takes {seconds:.2f} s beyond torch and triton"
assert not torch.cuda.is_initialized()
slow = {"torch._dynamo", "torch._inductor", "transformers", "matplotlib"} & set(sys.modules)
assert not slow - before, slow - before
"""


def test_importing_is_free() -> None:
    command = [sys.executable, "-W", "error", "-c", IMPORT_ALL, *MODULES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
