"""The programs that are compiled meanwhile."""

import contextlib

import jax


@contextlib.contextmanager
def compilations():
    """The names of the functions that are compiled inside, as a list that grows."""
    names = []

    def listen(event, _, **of):
        if "backend_compile" in event:
            names.append(of["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
