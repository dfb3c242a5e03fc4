"""What a user cannot have is refused in one line."""

import pytest


def refuses(message, call, *args, **options):
    """The ValueError's text, which this pattern is in."""
    with pytest.raises(ValueError, match=message) as refused:
        call(*args, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)
