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
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import SafetensorError, safe_open

ORBAX_FOLDER = "orbax"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LARGE = 1 << 20  # bytes from which a parameter is worth a call into the C library's allocator

Progress = Callable[[int, int], None]
"""Called with (bytes placed so far, bytes in all)."""


class CheckpointError(ValueError):
    """The folder is no usable checkpoint; the text lists everything that is wrong with it."""


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

    def read(self, name: str) -> np.ndarray:
        """One tensor, in the file's dtype (bfloat16 through ml_dtypes)."""
        return self._file(self.tensors[name]).get_tensor(name)


@dataclass
class Binding:
    """A module bound to the tensors of a checkpoint, before anything is read.

    graphdef, abstract: the NNX module split, with ShapeDtypeStructs. sources: parameter path -> tensor names in the
    file (several for a stacked parameter). problems: what is missing, unknown or mis-shaped.
    """

    name: str
    graphdef: Any
    abstract: nnx.State
    sources: dict[tuple, list[str]]
    problems: list[str] = field(default_factory=list)


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
    used: set[str] = set()
    for path, variable in nnx.to_flat_state(abstract):
        dotted = ".".join(str(part) for part in path)
        shape = tuple(variable.get_metadata("disk_shape"))
        if variable.get_metadata("stacked"):
            head, _, tail = dotted.partition("experts.")
            wanted = [(f"{head}experts.{e}.{tail}", shape[1:]) for e in range(shape[0])]
        else:
            wanted = [(dotted, shape)]
        found = []
        for param_name, want in wanted:
            candidates = disk_names(param_name)
            tensor = next((c for c in candidates if c in checkpoint.tensors), None)
            if tensor is None:
                binding.problems.append(f"missing   {candidates[0]} {list(want)}")
                continue
            used.add(tensor)
            found.append(tensor)
            if (have := checkpoint.shape(tensor)) != want:
                binding.problems.append(
                    f"mis-shaped {tensor}: the file has {list(have)}, the config wants {list(want)}"
                )
        binding.sources[path] = found
    unknown = [t for t in checkpoint.tensors if t not in used and owns(t) and not ignore(t)]
    binding.problems += [f"unknown   {t} {list(checkpoint.shape(t))}" for t in sorted(unknown)]
    return binding


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
        names = binding.sources[path]
        if variable.get_metadata("stacked"):
            array = _fill_stack(checkpoint, names, value, sharding)
        else:
            tensor = checkpoint.read(names[0])
            if axes := variable.get_metadata("disk_axes"):
                tensor = tensor.transpose(axes)
            tensor = tensor.reshape(value.shape).astype(value.dtype, copy=False)
            array = jax.device_put(tensor, sharding)
        # Waiting here bounds host memory: a queue of pending transfers would hold every tensor at once.
        loaded.append((path, variable.replace(jax.block_until_ready(array))))
        done += size
        if size >= _LARGE:
            _return_freed_memory()
        if progress:
            progress(done, total)
    return nnx.from_flat_state(loaded)


@cache
def _stack_programs(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding):
    """Makes an empty stack, and puts one expert into it; one pair for all layers of a shape."""
    zeros = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)
    return zeros, jax.jit(lambda stack, x, e: stack.at[e].set(x), donate_argnums=0, out_shardings=sharding)


def _fill_stack(checkpoint: Checkpoint, names: Sequence[str], value, sharding: NamedSharding) -> jax.Array:
    part = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    zeros, put = _stack_programs(value.shape, value.dtype, sharding)
    array = zeros()
    for e, tensor_name in enumerate(names):
        tensor = checkpoint.read(tensor_name).astype(value.dtype, copy=False)
        array = jax.block_until_ready(put(array, jax.device_put(tensor, part), np.int32(e)))
    return array


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
