"""Errors of a command that are for people: one line on stderr and an exit code, never a traceback."""


class CommandError(Exception):
    """The command could not do what it was asked; the message says what is missing or wrong."""

    exit_code = 1


class OptionError(CommandError):
    """A bad option or configuration file; the message names it."""

    exit_code = 2
