"""Checkpoints: a Hugging Face folder or an Orbax folder -> sharded NNX state.

A Hugging Face folder is read by its own tensor names. Each tensor is read once and placed straight on the mesh, so
host memory above the loaded state stays near the largest tensor. An Orbax folder is the same small files
(config.json, tokenizer, template, ...) with the weights under `orbax/`, restored straight into the wanted sharding.
"""

import ctypes
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from safetensors import SafetensorError, safe_open

from vitstripe.quantised import FP8, RAW_DTYPES, SCALES, block_of, dequantise, why_not

ORBAX_FOLDER = "orbax"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LARGE = 1 << 20  # bytes from which a parameter is worth a call into the C library's allocator

Progress = Callable[[int, int], None]
"""Called with (bytes placed so far, bytes in all)."""


class CheckpointError(ValueError):
    """The folder is no usable checkpoint; the text lists everything that is wrong with it."""


WRONG_KIND = (TypeError, AttributeError, KeyError, IndexError)
"""What reading a field raises where a list or an object was expected and something else is there."""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not an object")
    return value


class Checkpoint:
    """An open checkpoint folder.

    folder: its path. config: the parsed config.json. is_orbax: weights are under `orbax/`.
    tensors: Hugging Face tensor name -> file, empty for an Orbax folder.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is not a folder; give the folder that holds config.json")
        if not (self.folder / "config.json").is_file():
            raise CheckpointError(f"{self.folder} holds no config.json, so it is not a checkpoint folder")
        self.config = _read_json(self.folder / "config.json")
        self.is_orbax = (self.folder / ORBAX_FOLDER).is_dir()
        self._open_files: dict[Path, Any] = {}
        self._raw_files: dict[Path, tuple[dict[str, Any], np.ndarray]] = {}
        self.tensors: dict[str, Path] = {} if self.is_orbax else self._index()

    def _index(self) -> dict[str, Path]:
        index, single = self.folder / _INDEX, self.folder / _WEIGHTS
        if index.is_file():
            weight_map = _read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise CheckpointError(f"{index} has no weight_map")
            # A name in the map is a path someone else wrote: it must not leave the folder.
            bad = sorted({str(f) for f in weight_map.values() if Path(str(f)).name != str(f)})
            if bad:
                raise CheckpointError(f"{index} names files outside the folder: {', '.join(bad)}")
            files = {name: self.folder / str(file) for name, file in weight_map.items()}
            absent = sorted({f.name for f in files.values() if not f.is_file()})
            if absent:
                raise CheckpointError(f"{self.folder} lacks weight files that {_INDEX} names: {', '.join(absent)}")
            held = {file: set(self._file(file).keys()) for file in set(files.values())}
            lost = sorted(name for name, file in files.items() if name not in held[file])
            if lost:
                raise CheckpointError(f"{index} names tensors that their files do not hold: {', '.join(lost)}")
            return files
        if single.is_file():
            return dict.fromkeys(self._file(single).keys(), single)
        raise CheckpointError(f"{self.folder} holds neither {_WEIGHTS}, {_INDEX} nor {ORBAX_FOLDER}/: no weights")

    def _file(self, path: Path):
        if path not in self._open_files:
            try:
                self._open_files[path] = safe_open(path, framework="numpy")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
        return self._open_files[path]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file(self.tensors[name]).get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """As the file names it: "BF16", "F32", "F8_E4M3", ..."""
        return self._file(self.tensors[name]).get_slice(name).get_dtype()

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """One tensor or, with `index`, a part of it, in the file's dtype (bfloat16 and float8 through ml_dtypes)."""
        if (dtype := self.dtype(name)) in RAW_DTYPES:
            return np.array(self._raw(name).view(RAW_DTYPES[dtype]).reshape(self.shape(name))[index])
        file = self._file(self.tensors[name])
        return file.get_slice(name)[index] if index else file.get_tensor(name)

    def _raw(self, name: str) -> np.ndarray:
        """The bytes of a tensor, mapped: after eight bytes of length and a JSON header, where the header says."""
        path = self.tensors[name]
        if path not in self._raw_files:
            content = np.memmap(path, np.uint8, "r")
            length = int(content[:8].view("<u8")[0])
            header = json.loads(content[8 : 8 + length].tobytes())
            self._raw_files[path] = (header, content[8 + length :])
        header, content = self._raw_files[path]
        return content[slice(*header[name]["data_offsets"])]


@dataclass(frozen=True)
class Source:
    """A tensor of the file, or the part of it that `index` takes, its last two axes swapped if `transposed`. scale: the
    tensor of its blocks' scales, where it is quantised."""

    tensor: str
    index: tuple[slice, ...] = ()
    transposed: bool = False
    scale: str | None = None

    def read(self, checkpoint: Checkpoint) -> np.ndarray:
        tensor = checkpoint.read(self.tensor, self.index) if self.index else checkpoint.read(self.tensor)
        return tensor.swapaxes(-1, -2) if self.transposed else tensor


@dataclass
class Binding:
    """A module bound to the tensors of a checkpoint, before anything is read.

    graphdef, abstract: the NNX module split, with ShapeDtypeStructs. sources: parameter path -> where in the file it is
    (several for a stacked parameter). problems: what is missing, unknown or mis-shaped. block: rows and columns that
    share a scale where weights are quantised.
    """

    name: str
    graphdef: Any
    abstract: nnx.State
    sources: dict[tuple, list[Source]]
    problems: list[str] = field(default_factory=list)
    block: tuple[int, int] = (128, 128)


def bind(
    checkpoint: Checkpoint,
    build: Callable[[], nnx.Module],
    *,
    name: str,
    disk_names: Callable[[str], Sequence[str]] = lambda path: (path,),
    owns: Callable[[str], bool] = lambda tensor: True,
    ignore: Callable[[str], bool] = lambda tensor: False,
) -> Binding:
    """Builds a module abstractly and finds each parameter's tensor.

    build: makes the module; runs under nnx.eval_shape.
    name: of the module, used in messages and as the item name in an Orbax folder.
    disk_names: dotted parameter path -> tensor names it may have in the file, the first that exists is taken.
    owns: which tensors of the folder belong to this module; an owned tensor that no parameter uses is unknown.
    ignore: owned tensors that are known and unused (a speculative head, say).
    """
    graphdef, abstract = nnx.split(nnx.eval_shape(build))
    binding = Binding(name, graphdef, abstract, {})
    if checkpoint.is_orbax:
        binding.problems += _orbax_problems(checkpoint, binding)
        return binding
    if text := why_not(checkpoint.config, lambda: {t: checkpoint.dtype(t) for t in checkpoint.tensors}):
        raise CheckpointError(f"{checkpoint.folder}: {text}")
    try:
        binding.block = block_of(checkpoint.config)
    except (ValueError, *WRONG_KIND) as error:
        raise CheckpointError(f"config.json: its quantization_config cannot be read: {error}") from error
    used: set[str] = set()
    for path, variable in nnx.to_flat_state(abstract):
        found = []
        for param_name, want, indices in _wanted(checkpoint, path, variable, disk_names):
            candidates = disk_names(param_name)
            tensor = next((c for c in candidates if c in checkpoint.tensors), None)
            if tensor is None:
                binding.problems.append(f"missing   {candidates[0]} {list(want)}")
                continue
            used.add(tensor)
            have, scale = checkpoint.shape(tensor), None
            if checkpoint.dtype(tensor) == FP8:
                scale, problems = _scale_of(checkpoint, tensor, binding.block)
                used.add(scale)
                binding.problems += [p for p in problems if p not in binding.problems]
            elif variable.get_metadata("stacked") and have != want and have == (want[0], want[2], want[1]):
                # Qwen3-VL's experts as released: [E, in, out]. Where in == out the two could not be told apart.
                found += [Source(tensor, (e, slice(None), rows), transposed=True) for e, rows in indices]
                continue
            found += [Source(tensor, index, scale=scale) for index in indices]
            if not _alike(have, want, variable.get_metadata("disk_axes")):
                problem = f"mis-shaped {tensor}: the file has {list(have)}, the config wants {list(want)}"
                if problem not in binding.problems:  # a tensor that several parameters are rows of is named once
                    binding.problems.append(problem)
        binding.sources[path] = found
    unknown = [t for t in checkpoint.tensors if t not in used and owns(t) and not ignore(t)]
    binding.problems += [f"unknown   {t} {list(checkpoint.shape(t))}" for t in sorted(unknown)]
    return binding


def _scale_of(checkpoint: Checkpoint, tensor: str, block: tuple[int, int]) -> tuple[str, list[str]]:
    """The tensor that holds the scales of a float8 one, and what is wrong with it."""
    shape = checkpoint.shape(tensor)
    if len(shape) < 2:
        return tensor, [f"mis-shaped {tensor}: float8 with {len(shape)} dimension(s) has no blocks"]
    want = (*shape[:-2], *(-(-size // side) for size, side in zip(shape[-2:], block, strict=True)))
    name = next((tensor + end for end in SCALES if tensor + end in checkpoint.tensors), None)
    if name is None:
        return tensor, [f"missing   {tensor}{SCALES[0]} {list(want)}, the scales of a float8 tensor"]
    if (have := checkpoint.shape(name)) != want:
        sides = " x ".join(map(str, block))
        return name, [f"mis-shaped {name}: the file has {list(have)}, blocks of {sides} want {list(want)}"]
    return name, []


def _alike(have: tuple[int, ...], want: tuple[int, ...], axes: tuple[int, ...] | None) -> bool:
    """Whether two shapes differ in axes of length 1 at most, which is a matter of spelling (A_log as [1, 1, H, 1]),
    unless the axes are taken in an order of their own."""
    return have == want or (axes is None and [n for n in have if n != 1] == [n for n in want if n != 1])


def _wanted(
    checkpoint: Checkpoint, path: tuple, variable: nnx.Variable, disk_names: Callable[[str], Sequence[str]]
) -> list[tuple[str, tuple[int, ...], list[tuple[slice, ...]]]]:
    """The tensors a parameter is read from: name, shape, and the parts to take of it one after another."""
    dotted = ".".join(str(part) for part in path)
    shape = tuple(variable.get_metadata("disk_shape"))
    stacked, larger = variable.get_metadata("stacked"), variable.get_metadata("rows_of")
    if larger is not None:
        name = ".".join([*(str(part) for part in path[:-2]), larger.name])
        if any(c in checkpoint.tensors for c in disk_names(name)):
            own = shape[1] if stacked else shape[0]
            rows = slice(larger.start, larger.start + own)
            if not stacked:
                return [(name, (larger.rows, *shape[1:]), [(rows,)])]
            each = [(slice(e, e + 1), rows) for e in range(shape[0])]
            return [(name, (shape[0], larger.rows, *shape[2:]), each)]
    if not stacked:
        return [(dotted, shape, [()])]
    head, _, tail = dotted.partition("experts.")
    return [(f"{head}experts.{e}.{tail}", shape[1:], [()]) for e in range(shape[0])]


def raise_problems(checkpoint: Checkpoint, bindings: Iterable[Binding]) -> None:
    """One CheckpointError that lists every problem of every module, or nothing."""
    problems = [p for b in bindings for p in b.problems]
    if problems:
        raise CheckpointError(
            f"{checkpoint.folder} does not fit its config.json ({len(problems)} tensor(s)):\n  " + "\n  ".join(problems)
        )


def sharding_of(variable: nnx.Variable, mesh: Mesh | jax.sharding.AbstractMesh, axis: str) -> NamedSharding:
    """Where a parameter lives: cut along its tp_axis over mesh axis `axis`, or replicated."""
    cut = variable.get_metadata("tp_axis")
    spec = PartitionSpec() if cut is None else PartitionSpec(*[None] * cut, axis)
    return NamedSharding(mesh, spec)


def abstract_state(abstract: nnx.State, mesh: Mesh | jax.sharding.AbstractMesh, axis: str) -> nnx.State:
    """The state's ShapeDtypeStructs with their shardings: the arguments a program is lowered with."""

    def place(variable):
        value = variable.get_value()
        placed = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding_of(variable, mesh, axis))
        return variable.replace(placed)

    return jax.tree.map(place, abstract, is_leaf=lambda v: isinstance(v, nnx.Variable))


def load(
    checkpoint: Checkpoint, binding: Binding, mesh: Mesh, axis: str = "tp", progress: Progress | None = None
) -> nnx.State:
    """Reads a bound module's parameters into sharded arrays.

    Call raise_problems first. Each tensor is read once, cast to its parameter's dtype and placed before the next is
    read; a stacked parameter is filled in place, one expert at a time.
    """
    if checkpoint.is_orbax:
        return _restore(checkpoint, binding, mesh, axis)
    flat = nnx.to_flat_state(binding.abstract)
    sizes = [v.get_value().size * v.get_value().dtype.itemsize for _, v in flat]
    done, total = 0, sum(sizes)
    loaded = []
    for (path, variable), size in zip(flat, sizes, strict=True):
        value, sharding = variable.get_value(), sharding_of(variable, mesh, axis)
        sources = binding.sources[path]
        if variable.get_metadata("stacked"):
            array = _fill_stack(checkpoint, sources, value, sharding, binding.block)
        else:
            axes = variable.get_metadata("disk_axes")
            array = _placed(checkpoint, sources[0], value.shape, value.dtype, sharding, binding.block, axes)
        # Waiting here bounds host memory: a queue of pending transfers would hold every tensor at once.
        loaded.append((path, variable.replace(jax.block_until_ready(array))))
        done += size
        if size >= _LARGE:
            _return_freed_memory()
        if progress:
            progress(done, total)
    return nnx.from_flat_state(loaded)


def _placed(
    checkpoint: Checkpoint,
    source: Source,
    shape: tuple[int, ...],
    dtype: Any,
    sharding: Sharding,
    block: tuple[int, int],
    axes: tuple[int, ...] | None = None,
) -> jax.Array:
    """A tensor on its devices, in `dtype`. A quantised one goes there as it is, a byte a weight, and each device scales
    its own part. axes: the order in which the file's axes are taken."""
    tensor = source.read(checkpoint)
    if axes:
        tensor = tensor.transpose(axes)
    tensor = tensor.reshape(shape)
    if source.scale is None:
        return jax.device_put(tensor.astype(dtype, copy=False), sharding)
    expert = source.index[:1] if len(checkpoint.shape(source.scale)) == 3 else ()
    scales = checkpoint.read(source.scale, expert).astype(np.float32).reshape(-1, checkpoint.shape(source.scale)[-1])
    rows = source.index[-1].start if source.index else 0
    return dequantise(dtype, sharding, block)(jax.device_put(tensor, sharding), scales, np.array([rows, 0], np.int32))


@cache
def _stack_programs(shape: tuple[int, ...], dtype: Any, sharding: Sharding):
    """Makes an empty stack, and puts one expert into it; one pair for all layers of a shape."""
    zeros = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)
    return zeros, jax.jit(lambda stack, x, e: stack.at[e].set(x), donate_argnums=0, out_shardings=sharding)


def _fill_stack(
    checkpoint: Checkpoint, sources: Sequence[Source], value, sharding: NamedSharding, block: tuple[int, int]
) -> jax.Array:
    if sharding.spec and sharding.spec[0] is not None:
        return _fill_dealt_stack(checkpoint, sources, value, sharding, block)
    part = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    zeros, put = _stack_programs(value.shape, value.dtype, sharding)
    array = zeros()
    for e, source in enumerate(sources):
        expert = _placed(checkpoint, source, value.shape[1:], value.dtype, part, block)
        array = jax.block_until_ready(put(array, expert, np.int32(e)))
    return array


def _fill_dealt_stack(
    checkpoint: Checkpoint, sources: Sequence[Source], value, sharding: NamedSharding, block: tuple[int, int]
) -> jax.Array:
    """A stack whose experts are dealt over the devices: each expert goes only to the devices that keep it."""
    experts, own = value.shape[0], sharding.shard_shape(value.shape)
    parts_of = sharding.devices_indices_map(value.shape)
    first = {d: parts_of[d][0].indices(experts)[0] for d in sharding.addressable_devices}
    programs = {d: _stack_programs(own, value.dtype, SingleDeviceSharding(d)) for d in first}
    parts = {device: zeros() for device, (zeros, _) in programs.items()}
    for e, source in enumerate(sources):
        for device, start in first.items():
            if start <= e < start + own[0]:
                home = SingleDeviceSharding(device)
                expert = _placed(checkpoint, source, value.shape[1:], value.dtype, home, block)
                parts[device] = jax.block_until_ready(programs[device][1](parts[device], expert, np.int32(e - start)))
    return jax.make_array_from_single_device_arrays(value.shape, sharding, list(parts.values()))


def _flat_arrays(state: nnx.State) -> dict[str, Any]:
    return {".".join(str(p) for p in path): v.get_value() for path, v in nnx.to_flat_state(state)}


def save_orbax(folder: str | Path, source: Checkpoint, states: dict[str, nnx.State]) -> None:
    """Writes an Orbax folder: the small files of `source` and each module's sharded state under its name."""
    target = Path(folder).absolute()
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target} exists and is not empty; choose a new folder")
    target.mkdir(parents=True, exist_ok=True)
    for file in source.folder.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name != _INDEX:
            shutil.copy(file, target / file.name)
    # Uncompressed: weights hardly compress, and restoring compressed ones takes twice as long.
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as writer:
        for name, state in states.items():
            writer.save(target / ORBAX_FOLDER / name, _flat_arrays(state))


def _orbax_problems(checkpoint: Checkpoint, binding: Binding) -> list[str]:
    """What is missing, unknown or mis-shaped in an Orbax folder, from its metadata alone."""
    folder = checkpoint.folder / ORBAX_FOLDER / binding.name
    if not folder.is_dir():
        return [f"missing   {ORBAX_FOLDER}/{binding.name}: the whole module"]
    with ocp.StandardCheckpointer() as reader:
        try:
            saved = {
                name: tuple(array.shape) for name, array in reader.metadata(folder.absolute()).item_metadata.items()
            }
        except (AttributeError, ValueError, KeyError, FileNotFoundError) as error:
            raise CheckpointError(f"{folder} is no readable Orbax checkpoint: {error}") from error
    wanted = {name: tuple(value.shape) for name, value in _flat_arrays(binding.abstract).items()}
    problems = [f"missing   {n} {list(s)}" for n, s in wanted.items() if n not in saved]
    problems += [
        f"mis-shaped {n}: the folder has {list(saved[n])}, the config wants {list(s)}"
        for n, s in wanted.items()
        if n in saved and saved[n] != s
    ]
    return problems + [f"unknown   {n} {list(s)}" for n, s in sorted(saved.items()) if n not in wanted]


def _restore(checkpoint: Checkpoint, binding: Binding, mesh: Mesh, axis: str) -> nnx.State:
    folder = (checkpoint.folder / ORBAX_FOLDER / binding.name).absolute()
    wanted = _flat_arrays(abstract_state(binding.abstract, mesh, axis))
    with ocp.StandardCheckpointer() as reader:
        arrays = reader.restore(folder, wanted)
    flat = [
        (path, v.replace(arrays[".".join(str(p) for p in path)])) for path, v in nnx.to_flat_state(binding.abstract)
    ]
    return nnx.from_flat_state(flat)


def _return_freed_memory() -> None:
    """Asks the C library for the memory of freed tensors back. glibc keeps it otherwise, in holes between what stays:
    a quarter of the state and more, on a CPU. Other C libraries have no such call and no such habit."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
