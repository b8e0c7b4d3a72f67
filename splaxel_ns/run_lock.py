"""One process per run folder: a lock that the system drops with the process, however that ends."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

from nerfstudio.utils.rich_utils import CONSOLE


class RunLock:
    """An exclusive hold on `<folder>/.lock`; the file stays and means nothing by itself.

    Where the file system knows no locks, this says so and holds nothing.

    Args:
        folder: The run's folder; made if missing.

    Raises:
        ValueError: Another process (or another trainer of this one) trains in the folder.
        OSError: The folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] | None = open(folder / ".lock", "ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise ValueError(
                f"Another run is training in {folder}: give this one a folder of its own with another --timestamp, "
                "or wait until the other has ended."
            ) from None
        except OSError as error:  # some network file systems
            CONSOLE.print(
                f"{folder} cannot be locked ({error.strerror}): see to it that no second run writes there.",
                style="bold yellow",
                markup=False,
            )

    def release(self) -> None:
        """Let others in; more than once does no harm."""
        if self._file is not None:
            self._file.close()
            self._file = None
