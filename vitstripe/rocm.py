"""What must be right around jax on an AMD machine, checked without starting a backend where that is possible.

jax itself checks little of it: a ROCm plugin of another version loads silently, and a container's default /dev/shm
makes RCCL fail late. Every function takes what it judges as an argument, so that all of it can be tried anywhere.
"""

import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
KNOWN_ARCHS = ("gfx942", "gfx950")
LEVELS = ("problem", "warning", "note")
"""Will not work; may not work; good to know."""

COMMAND_BUFFER_FLAG = "--xla_gpu_enable_command_buffer"

_LEAST_SHM = 1 << 30  # bytes; 64 MB, a container's default, is known not to do
_FIRST_ROCM10 = (0, 11, 1)


@dataclass(frozen=True)
class Finding:
    """level: one of LEVELS. text: what was found and what to do."""

    level: str
    text: str


def _problem(text: str) -> Finding:
    return Finding("problem", text)


def _release(version: str) -> tuple[int, ...]:
    """The numbers a version begins with: (0, 12, 0, 1) of "0.12.0.1.dev3"."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def amd_gpus(nodes: Path = KFD_NODES) -> list[str]:
    """Architectures of the AMD GPUs the kernel driver knows, in its order, e.g. ["gfx942"]. Starts no backend.

    nodes: the driver's topology folder. gfx_target_version is major * 10000 + minor * 100 + stepping.
    """
    found = []
    for properties in sorted(nodes.glob("*/properties"), key=lambda p: (len(p.parent.name), p.parent.name)):
        try:
            values = dict(line.split(" ", 1) for line in properties.read_text().splitlines() if " " in line)
            if int(values.get("simd_count", "0")):
                target = int(values.get("gfx_target_version", "0"))
                found.append(f"gfx{target // 10000}{target // 100 % 100:x}{target % 100:x}")
        except (OSError, ValueError):
            continue  # a node that may not be read is not ours to use
    return found


def check_versions(versions: Mapping[str, str]) -> list[Finding]:
    """versions: of jax, jaxlib and every installed plugin: jax-rocm7-plugin, jax-rocm7-pjrt, jax-cuda12-plugin, ..."""
    jax, found = versions["jax"], []
    lib = versions.get("jaxlib")
    if lib is not None and _release(lib)[:3] != _release(jax)[:3]:
        found.append(_problem(f"jaxlib is {lib}, jax is {jax}: install the same version of both"))
    rocm = {name: version for name, version in versions.items() if name.startswith("jax-rocm")}
    for name, version in rocm.items():
        if version != jax:
            found.append(_problem(f"{name} is {version}, jax is {jax}: install the same version of both"))
    generations = sorted({name.split("-")[1] for name in rocm})
    if len(generations) > 1:
        found.append(_problem(f"plugins for {' and '.join(generations)} are installed: uninstall one of them"))
    if "rocm10" in generations and _release(jax) < _FIRST_ROCM10:
        found.append(_problem(f"jax {jax} does not know rocm10; it does from {'.'.join(map(str, _FIRST_ROCM10))}"))
    for generation in generations:
        halves = [f"jax-{generation}-{half}" for half in ("plugin", "pjrt")]
        if missing := [name for name in halves if name not in rocm]:
            found.append(_problem(f"{missing[0]} is not installed: the plugin is both of {' and '.join(halves)}"))
    if rocm and any(name.startswith("jax-cuda") for name in versions):
        found.append(
            Finding("warning", "plugins for ROCm and for CUDA are installed: uninstall those of the other maker")
        )
    if "jaxlib-rocm" in versions:
        found.append(_problem("jaxlib-rocm is of 2023 and stands in jaxlib's place: uninstall it; see docs/rocm.md"))
    return found


def check_shared_memory(size: int, devices: int) -> list[Finding]:
    """size: bytes of /dev/shm. RCCL keeps its rings there when several devices talk to each other."""
    if devices < 2 or size >= _LEAST_SHM:
        return []
    return [
        _problem(
            f"/dev/shm holds {size / 2**20:.0f} MiB: RCCL fails or hangs on {devices} devices; start the container "
            f"with --shm-size=64g or --ipc=host (ROCm/rocm-jax#273)"
        )
    ]


def _indices(value: str) -> list[str]:
    return [part.strip() for part in value.split(",") if part.strip()]


def check_visible_devices(environ: Mapping[str, str], present: int) -> list[Finding]:
    """Variables that hide devices. present: AMD GPUs of the machine.

    ROCR_VISIBLE_DEVICES picks physical GPUs, HIP_VISIBLE_DEVICES counts within those (jax#37054).
    """
    found, (rocr, hip) = [], ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    for name in (rocr, hip, "CUDA_VISIBLE_DEVICES"):
        if name in environ and not _indices(environ[name]):
            found.append(_problem(f"{name} is empty, which hides every GPU: unset it"))
    if not present:
        return found
    if value := environ.get("CUDA_VISIBLE_DEVICES"):
        found.append(_problem(f"CUDA_VISIBLE_DEVICES={value} on an AMD machine: unset it, and use {hip}"))
    visible = present
    for name, whose in (
        (rocr, "in this machine"),
        (hip, f"that {rocr} leaves" if rocr in environ else "in this machine"),
    ):
        asked = _indices(environ.get(name, ""))
        if beyond := [i for i in asked if i.isdigit() and int(i) >= visible]:
            found.append(
                _problem(f"{name}={environ[name]} asks for GPU {beyond[0]}; those {whose} are 0 to {visible - 1}")
            )
        visible = len(asked) or visible
    if rocr in environ and hip in environ:
        found.append(Finding("note", f"{hip} counts within what {rocr} leaves"))
    return found


def check_memory(environ: Mapping[str, str]) -> list[Finding]:
    """How much of a GPU's memory jax takes when it starts."""
    new, old, found = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", []
    if new in environ and old in environ:
        return [_problem(f"{new} and {old} are both set, which jax refuses: unset {old}")]
    if old in environ:
        found.append(Finding("warning", f"{old} is the old name: set {new} instead"))
    name = old if old in environ else new
    if name not in environ:
        found.append(
            Finding("note", f"{new} is not set: jax takes 75 % of a GPU's memory; 0.9 leaves more to the cache")
        )
    elif not 0 < (fraction := _number(environ[name])) <= 1:
        found.append(_problem(f"{name}={environ[name]} is no number above 0 and up to 1"))
    elif fraction < 0.5:
        found.append(Finding("warning", f"{name}={environ[name]}: the cache is sized from what that leaves"))
    if environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() in ("false", "0"):
        found.append(
            Finding("note", "XLA_PYTHON_CLIENT_PREALLOCATE is off: memory is taken piece by piece and fragments")
        )
    return found


def command_buffers(environ: Mapping[str, str]) -> str | None:
    """The value of the command-buffer flag in XLA_FLAGS: "" is off, None where the flag is not given."""
    values = re.findall(rf"(?<!\S){COMMAND_BUFFER_FLAG}=(\S*)", environ.get("XLA_FLAGS", ""))
    return values[-1].strip("'\"") if values else None


def turn_command_buffers_off(environ: MutableMapping[str, str]) -> bool:
    """Turns HIP graphs off unless XLA_FLAGS says something about them. True if it changed the variable. Works only
    before jax starts a backend.

    They crash on gfx950 while replaying loops (openxla/xla#46952), and AMD's installation page turns them off.
    """
    if command_buffers(environ) is not None:
        return False
    environ["XLA_FLAGS"] = f"{environ.get('XLA_FLAGS', '')} {COMMAND_BUFFER_FLAG}=".strip()
    return True


def check_command_buffers(environ: Mapping[str, str], archs: Sequence[str]) -> list[Finding]:
    """Whether HIP graphs are on. archs: of the AMD GPUs; none, nothing to say."""
    if not archs:
        return []
    value = command_buffers(environ)
    if value == "":
        return [Finding("note", f"HIP graphs are off ({COMMAND_BUFFER_FLAG}=)")]
    how = "on by jax's default" if value is None else f"on for {value}"
    return [
        Finding(
            "warning",
            f"HIP graphs are {how}; on gfx950 they are known to crash while a loop is replayed (openxla/xla#46952); "
            f"XLA_FLAGS={COMMAND_BUFFER_FLAG}= turns them off",
        )
    ]


def check_archs(archs: Sequence[str]) -> list[Finding]:
    """Whether the GPUs are of an architecture this project's checks cover."""
    known = ", ".join(KNOWN_ARCHS)
    found = [
        Finding("warning", f"{arch} is none of {known}, for which the kernels are compiled in the checks: untried")
        for arch in sorted(set(archs) - set(KNOWN_ARCHS))
    ]
    if len(set(archs)) > 1:
        found.append(
            _problem(
                f"GPUs of {' and '.join(sorted(set(archs)))} in one machine, but a program is compiled for one: hide "
                f"the others with ROCR_VISIBLE_DEVICES"
            )
        )
    return found


def check_reached(archs: Sequence[str], kinds: Sequence[str], versions: Mapping[str, str]) -> list[Finding]:
    """Whether jax got hold of the GPUs. archs: of the machine's AMD GPUs; kinds: vitstripe.platform's, of jax's
    devices; versions: as check_versions takes."""
    plugins = [name for name in versions if re.match(r"jax-(rocm|cuda)", name)]
    if archs and "rocm" not in kinds:
        why = (
            "the plugin did not start; see JAX_PLATFORMS, the permissions of /dev/kfd and /dev/dri (groups render and "
            "video), and what jax logs with JAX_LOGGING_LEVEL=DEBUG"
            if any("rocm" in name for name in plugins)
            else "no ROCm plugin is installed; take the extra rocm7 or rocm10"
        )
        return [_problem(f"this machine has {len(archs)} AMD GPUs and jax sees none of them: {why}")]
    if plugins and set(kinds) == {"cpu"}:
        return [_problem("a GPU plugin is installed but jax found no GPU: see the drivers and the visible devices")]
    return []
