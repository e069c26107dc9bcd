"""The error for packages that are not installed."""

import pytest

from memfeed.system.messages import require


def test_packages_that_are_there_are_no_error():
    require("vision", "json", "sys")


def test_the_error_names_what_is_missing_and_the_extra():
    with pytest.raises(ModuleNotFoundError) as caught:
        require("vision", "json", "memfeed_not_there", "memfeed_nor_there")
    assert str(caught.value) == (
        "found no memfeed_not_there and no memfeed_nor_there; expected the packages of the extra [vision]: "
        "pip install 'memfeed[vision]'"
    )
    assert caught.value.name == "memfeed_not_there"
