"""Names that dask and distributed have and do not document. Everything else in this package takes them from
here, and tests/system/test_internals.py fails when one of them changes."""

from dask._task_spec import List, Task, TaskRef
from dask.array.core import getter
from dask.blockwise import Blockwise
from distributed.protocol import to_serialize
from distributed.utils import LoopRunner

__all__ = ["Blockwise", "List", "LoopRunner", "Task", "TaskRef", "getter", "to_serialize"]
