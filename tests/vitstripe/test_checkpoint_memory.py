"""Loading holds little more host memory than what it loads.

Measured in a process of its own, as anonymous resident memory at the two points of the loader where it peaks: when a
tensor has just been read, and when it has been placed. Pages of the mapped file do not count: the system takes them
back. On a CPU the loaded state lives in host memory too.
"""

import json
import subprocess
import sys

import pytest

TENSORS = 40
MIB = 2**20
FILE_BYTES = 8 * MIB  # a tensor on disk, float32
STATE_BYTES = TENSORS * FILE_BYTES // 2  # the parameters are bfloat16

PROGRAM = """
import json, pathlib, sys
import jax, jax.numpy as jnp, ml_dtypes, numpy as np
from flax import nnx
from safetensors.numpy import save_file
from vitstripe import make_mesh
from vitstripe.checkpoint import Checkpoint, bind, load
from vitstripe.nn import param

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
folder, tensors, rows = pathlib.Path(sys.argv[1]), int(sys.argv[2]), 1024


class Layers(nnx.Module):
    def __init__(self, count, rows):
        for i in range(count):
            setattr(self, f"w{i:02d}", param((rows, 2048), jnp.bfloat16, tp_axis=0))


def write(folder, count, rows):
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    ramp = np.linspace(-1, 1, rows * 2048, dtype=np.float32).reshape(rows, 2048)
    half = count // 2  # two files, so that no more than half is ever built here
    index = {}
    for part, names in enumerate((range(half), range(half, count))):
        save_file({f"w{i:02d}": ramp + i for i in names}, folder / f"{part}.safetensors")
        index.update({f"w{i:02d}": f"{part}.safetensors" for i in names})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def anonymous_bytes():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024


class Watched(Checkpoint):
    def read(self, name):
        tensor = super().read(name)
        seen.append(anonymous_bytes())
        return tensor


def run(folder, count, rows):
    checkpoint = Watched(folder)
    binding = bind(checkpoint, lambda: Layers(count, rows), name="layers")
    return load(checkpoint, binding, make_mesh(2), progress=lambda *_: seen.append(anonymous_bytes()))


if len(sys.argv) > 3:
    write(folder, tensors, rows)
    write(folder.with_name("warm"), 2, 8)
else:
    seen = []
    run(folder.with_name("warm"), 2, 8)  # everything that is allocated once, is now
    before = anonymous_bytes()
    seen = []
    state = run(folder, tensors, rows)
    last = jax.tree.leaves(state)[-1]
    assert float(last[0, 0]) == tensors - 2, last[0, 0]
    print(json.dumps({"peak": max(seen) - before, "samples": len(seen)}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_the_loader_holds_the_state_and_a_few_of_the_largest_tensor(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "model"), str(TENSORS)]
    subprocess.run([*command, "write"], check=True)
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    measured = json.loads(run.stdout)
    assert measured["samples"] == 2 * TENSORS
    limit = STATE_BYTES + 3 * FILE_BYTES + 8 * MIB
    assert STATE_BYTES <= measured["peak"] < limit, (
        f"peak {measured['peak'] / MIB:.0f} MiB over the start; the state is {STATE_BYTES / MIB:.0f} MiB, "
        f"the limit {limit / MIB:.0f} MiB"
    )
