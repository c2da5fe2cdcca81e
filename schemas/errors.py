"""The error tree: every expected fault is one of these, with a one-line message that gives the value, the rule and what to do.

The command line prints the message after `error:` and exits with `exit_code`; anything else that escapes is a defect of ours.
"""


class DflashError(Exception):
    """An expected fault. Exit code 1 unless a subclass says otherwise."""

    exit_code = 1


class UserError(DflashError):
    """The user's input or arguments are wrong: nothing was changed, and the message says what to do instead."""

    exit_code = 2


class OptionError(UserError):
    """A command-line argument or a config key: unknown, out of range, or at odds with another."""


class DataError(UserError):
    """A conversation or prompt file; the message begins with `file:line:` where a line is to blame."""


class TargetError(UserError):
    """The target model or its tokenizer cannot be found, read or used as asked."""


class CacheError(UserError):
    """A path that is no cache, or a cache that is incomplete, of another version, of other settings, or without the layer asked for."""


class DraftError(UserError):
    """A draft folder or run folder that cannot be read or used as asked."""


class CaptureFault(DflashError):
    """The target produced something that must not be stored: a non-finite value or an all-zero layer."""


class ServerFault(DflashError):
    """A server that was asked for answers cannot be reached, fails, or gives something else; the same command goes on."""


class CacheDamaged(DflashError):
    """A complete cache whose objects are missing, short or corrupt; the message names them."""


class StoreFault(DflashError):
    """An object store that does not answer, or fails; what was there is as it was."""


class TrainFault(DflashError):
    """Training cannot go on: the loss is not finite, or the disk refuses."""


class Bystander(DflashError):
    """Another of the processes that work together failed, and has said why itself."""


class Interrupted(BaseException):
    """SIGTERM arrived; the state is saved and the message says how to go on.

    It comes in the middle of anything, so like Ctrl-C it is no Exception: a chat template or a compiler would be blamed for it.
    """

    exit_code = 143
