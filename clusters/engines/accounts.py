"""The user whom a launch runs as, where its keeper runs as root: an account of this host.

A keeper starts the launch with the user's ids, groups and home, and with none of the scheduler's
own variables but a few. So nothing that a job does, and no file that it makes, is root's.
"""

import grp
import os
import pwd
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...schema.errors import FileError, ProblemError

_PASSED = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH")


@dataclass(frozen=True, slots=True)
class Account:
    """A user of this host, with the numbers of all groups that the user is in."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str

    def group_names(self) -> set[str]:
        """The names of those groups that have one."""
        found = set[str]()
        for gid in self.groups:
            with suppress(KeyError):
                found.add(grp.getgrgid(gid).gr_name)
        return found

    def environment(self, scheduler: Mapping[str, str]) -> dict[str, str]:
        """The variables of the user's launches, of which few are the scheduler's."""
        own = {"HOME": self.home, "SHELL": self.shell, "USER": self.name, "LOGNAME": self.name}
        return {name: scheduler[name] for name in _PASSED if name in scheduler} | own


def account(uid: int) -> Account:
    """The user of a number.

    Raises:
        ProblemError: This host has none.
    """
    try:
        found = pwd.getpwuid(uid)
    except KeyError:
        raise ProblemError(
            f"user {uid} has no account on this host", hint="add the account, and release the job"
        ) from None
    groups = tuple(os.getgrouplist(found.pw_name, found.pw_gid))
    return Account(
        found.pw_name, uid, found.pw_gid, groups, found.pw_dir or "/", found.pw_shell or "/bin/sh"
    )


def give(path: Path, to: Account) -> None:
    """Let a user alone have a file or folder, which lies where only this process's user writes.

    Raises:
        FileError: It cannot be given.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.fchmod(handle, 0o700 if path.is_dir() else 0o600)
            os.fchown(handle, to.uid, to.gid)
        finally:
            os.close(handle)
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from None
