"""Devices whose runs differ from usual ones."""


def device_with(session, kind):
    """A class of devices like `kind` whose sessions are of the class `session`."""
    return type("Device", (kind,), {"open": lambda self, *args: session(self, *args)})
