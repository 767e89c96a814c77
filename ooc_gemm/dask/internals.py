"""Names that dask has and does not document. Everything else in this package takes them from here, and
tests/system/test_internals.py fails when one of them changes."""

from dask._task_spec import List, Task, TaskRef
from dask.array.core import getter
from dask.blockwise import Blockwise

__all__ = ["Blockwise", "List", "Task", "TaskRef", "getter"]
