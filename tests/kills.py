"""Killing a process before any object appears: what every writer of a cache must survive."""

import os
import signal
from collections.abc import Callable


def killed_before_object(number: int, work: Callable[[], object]) -> bool:
    """Run `work` in a child that is killed before its `number`-th object (from 0) appears under its name.

    Returns whether it was; where there are fewer objects, the work was done.
    """
    child = os.fork()
    if not child:
        done = 0

        def counted(act: Callable[..., None]) -> Callable[..., None]:
            def appear(*names: str) -> None:
                nonlocal done
                if done == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                done += 1
                act(*names)

            return appear

        os.rename, os.link = counted(os.rename), counted(os.link)
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), code
    return code != 0
