"""The threads that execute programs: the caller leads, the pool's follow for as long as a program runs."""

from __future__ import annotations

import threading
from functools import cache

import numpy as np
from numpy.typing import NDArray

from worker.kernels.cpu.compiling import compile_kernels
from worker.kernels.cpu.program import ACTIVE, FAILED, MAX_TASKS, STATE_WORDS, TASKS, follow, lead


class Pool:
    """`num_threads` threads, the caller's included. Programs are executed one after the other."""

    def __init__(self, num_threads: int) -> None:
        """Start the threads; they are daemons and sleep between programs. Compiles what is not compiled yet."""
        compile_kernels()
        self.num_threads = num_threads
        self._turn = threading.Lock()
        self._state = np.zeros(STATE_WORDS, dtype=np.int64)
        self._wake = [threading.Semaphore(0) for _ in range(num_threads - 1)]
        for number, wake in enumerate(self._wake):
            threading.Thread(target=self._follow, args=(wake,), name=f"kernels-{number}", daemon=True).start()

    def run(self, program: NDArray[np.int64]) -> None:
        """Execute a program, [n, ROW] int64; what its addresses point to must live until this returns.

        Raises MemoryError when there was no room for a task's intermediate results; nothing runs any more then.
        """
        if len(program) and int(program[:, TASKS].max()) > MAX_TASKS:
            raise ValueError(f"an operation has {program[:, TASKS].max()} tasks; at most {MAX_TASKS} can be counted")
        with self._turn:
            self._state[FAILED], self._state[ACTIVE] = 0, 1
            for wake in self._wake:
                wake.release()
            try:
                lead(program, self._state)
            finally:
                self._state[ACTIVE] = 0
            if self._state[FAILED]:
                raise MemoryError("a kernel had no memory for its intermediate results")

    def _follow(self, wake: threading.Semaphore) -> None:
        while True:
            wake.acquire()
            follow(self._state)


@cache
def shared_pool(num_threads: int) -> Pool:
    """Return the process's pool of so many threads."""
    return Pool(num_threads)
