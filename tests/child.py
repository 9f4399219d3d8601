"""A child process of a test, which ends with its block when that fails."""

import subprocess
from types import TracebackType


class Child(subprocess.Popen[str]):
    """As `subprocess.Popen`, but a block that fails kills it: waiting for its end would hide the failure, for ever."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.kill()
        try:
            super().__exit__(kind, error, trace)
        except BaseException:  # the time limit came while this waited
            self.kill()
            raise
