"""Code that checks values. In a test's own file, pytest would write each `assert` anew."""

import contextlib

import torch


def compared(x):
    assert x.max().item() <= 99, f"too large: {x.max()}"
    assert 0 <= x.abs().min().item() < 99


def all_of(x):
    assert (x < 99).all() and torch.all(x > -99).item()
    assert not x.isnan().any()


def raising(x):
    if x.isnan().any() or x.max() >= 99:
        message = f"not a number, or {x.max()}"
        raise ValueError(message)
    if not torch.equal(x, x.clone()):
        raise ValueError("changed")


def used_otherwise(x):
    largest = x.max().item()
    assert largest < 99
    return x * largest


# ---- raises that decide a result, because the code catches them


def small(x):
    if x.max() < 0.3:
        raise StopIteration
    return x


def loop_that_ends(x):
    try:
        for _ in range(5):
            x = small(x / 2)
    except StopIteration:
        pass
    return x


def suppressed(x):
    with contextlib.suppress(AssertionError):
        assert x.max() < 0.3
        x = x * 2
    return x


def another_way(x):
    try:
        assert x.max() < 0.3
    except AssertionError:
        return x.clamp(max=0.3)
    return x


def until_it_holds(x):
    while True:
        try:
            assert x.max() < 0.3
            return x
        except AssertionError:
            x = x / 2


@contextlib.contextmanager
def forgiving():
    try:
        yield
    except Exception as error:
        print(error)


@forgiving()
def decorated(x):
    return small(x)


def another_way_that_has_no_translation(x):
    try:
        return small(x)
    except StopIteration:
        return x[x > 0]


# ---- raises that leave the call whatever is around them


def cleaned_up(x):
    x = x.clone()
    try:
        with torch.no_grad():
            assert x.max() < 99
    finally:
        x = x * 2
    return x


def raised_as_another(x):
    try:
        compared(x)
    except AssertionError as error:
        raise ValueError("the input") from error
    return x * 2


def of_another_class(x):
    with contextlib.suppress(KeyError):
        try:
            compared(x)
            return x * 2
        except (IndexError, torch.OutOfMemoryError):
            return x


def asserted(xs):
    assert all(bool((x > -100).all()) for x in xs), "too small"
    return xs[0] * 2


def asserted_numbers(xs):
    assert all(x.min().item() > -100 for x in xs), "too small"
    return xs[0] * 2
