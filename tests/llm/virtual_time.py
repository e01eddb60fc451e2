"""An event loop in which waits take no time, for tests of waits, rates and timeouts."""

import asyncio


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps over every wait; when nothing is ready to run, it goes to the next timer at once.

    Don't wait for threads in it: their work is not a timer, and the clock would run ahead of them.
    """

    ahead = 0.0

    def time(self):
        """The time of the machine, and what was jumped over, in seconds."""
        return super().time() + self.ahead

    def _run_once(self):
        """Jump to the next timer if nothing is ready, then run as always."""
        if not self._ready and self._scheduled:
            self.ahead += max(0.0, self._scheduled[0]._when - self.time())
        super()._run_once()


def run_virtually(coroutine):
    """As `asyncio.run`, on virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)


def now():
    """The running loop's time, in seconds."""
    return asyncio.get_running_loop().time()
