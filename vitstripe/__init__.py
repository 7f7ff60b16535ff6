"""What vitbatch, dsa_indexer and serving share: meshes, programs, Hugging Face layers, checkpoints."""

from vitstripe.mesh import make_mesh, require_auto_axis
from vitstripe.program import Program, collectives_in

__version__ = "0.1.0"

__all__ = ["Program", "__version__", "collectives_in", "make_mesh", "require_auto_axis"]
