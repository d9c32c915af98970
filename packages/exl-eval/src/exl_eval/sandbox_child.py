"""Child process of `sandbox.py`: confines itself, then runs the program that comes on stdin.

It runs as a script and imports nothing but the standard library. Its argument is a JSON object with
the file descriptor of the pipe, the limits, the token, and the folder that the program may write.

The file system is confined by Landlock (Linux 5.13), which needs no privileges: the program may
write beneath its folder only, and read that folder, the interpreter and the system's libraries. It
sees no other file of the user. The constants are those of the kernel's Landlock header.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any

NEW_USER, NEW_PID, NEW_NET = 0x10000000, 0x20000000, 0x40000000  # CLONE_NEW... of clone(2)
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # numbers of the system calls
PATH_BENEATH = 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
TRUNCATE = 1 << 14
READING = EXECUTE | READ_FILE | READ_DIR
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE  # rights that a rule for a file may have
RIGHTS_BY_VERSION = (
    13,
    14,
    15,
    15,
    16,
)  # number of rights that versions 1, 2, ... of Landlock know
READ_ONLY = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom")
READ_WRITE = ("/dev/null",)

libc = ctypes.CDLL(None, use_errno=True)


class Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64),)


class PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("folder", ctypes.c_int32))


def confine_files(folder: str) -> bool:
    """Restricts this process and its children to `folder`. False if the kernel lacks Landlock."""
    version = libc.syscall(CREATE_RULESET, None, 0, 1)
    if version < 1:
        return False
    known = (1 << RIGHTS_BY_VERSION[min(version, len(RIGHTS_BY_VERSION)) - 1]) - 1
    wanted = Ruleset(known)
    ruleset = libc.syscall(CREATE_RULESET, ctypes.byref(wanted), ctypes.sizeof(wanted), 0)
    if ruleset < 0:
        return False
    interpreter = {sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path}
    rules = dict.fromkeys([*READ_ONLY, *interpreter], READING & known)
    rules |= dict.fromkeys(READ_WRITE, (READ_FILE | WRITE_FILE) & known) | {folder: known}
    for path, rights in rules.items():
        try:
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue  # this system has no such path
        allowed = rights if os.path.isdir(path) else rights & OF_FILES  # noqa: PTH112
        rule = PathRule(allowed, opened)
        failed = libc.syscall(ADD_RULE, ruleset, PATH_BENEATH, ctypes.byref(rule), 0)
        os.close(opened)
        if failed:
            return False
    is_bound = libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    return is_bound and bool(libc.syscall(RESTRICT_SELF, ruleset, 0) == 0)


def main(settings: dict[str, Any]) -> None:
    pipe = settings["pipe"]
    is_isolated = libc.unshare(NEW_USER | NEW_PID | NEW_NET) == 0
    is_confined = confine_files(settings["folder"])
    said = ("isolated " if is_isolated else "shared ") + ("confined " if is_confined else "open ")
    os.write(pipe, said.encode())
    child = os.fork()  # the first process of the new namespace: all others end with it
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 255)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # ends with the process that is waited for
    for name, value in settings["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    source = sys.stdin.read()
    source += f"\n__import__('os').write({pipe}, b'{settings['token']}')\n"
    exec(compile(source, "program", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
