import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.config import parse_config
from patrickstar.sizes import enough_size, parse_size, parse_size_with_unit, show_shortage, show_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("24GiB", 24 * 2**30),
        ("128G", 128 * 2**30),
        ("24 GB", 24 * 10**9),
        ("1.5gib", 3 * 2**29),
        ("500MB", 500 * 10**6),
        ("2T", 2 * 2**40),
        ("4096B", 4096),
    ],
)
def test_sizes_are_read(text, num_bytes):
    assert parse_size(text) == parse_size_with_unit(text) == num_bytes
    assert parse_config({"device_memory": text}).device_memory == num_bytes


@pytest.mark.parametrize("text", ["", "much", "24 gigs", "-3GiB", "1e9", "GiB", "3 G iB", "٣GiB"])
def test_other_texts_are_refused(text):
    assert parse_size(text) is None
    with pytest.raises(ValueError, match="is no amount of memory; give one such as 24GiB"):
        parse_size_with_unit(text)


def test_a_number_alone_is_asked_for_its_unit_on_a_command_line_and_is_bytes_in_a_configuration():
    with pytest.raises(ValueError, match=r"^24 what\? 24GiB or 24GB$"):
        parse_size_with_unit("24")
    with pytest.raises(ValueError, match=r"^25769803776 what\? 25769803776B$"):
        parse_size_with_unit(" 25769803776 ")
    assert parse_config({"device_memory": 4096}).device_memory == parse_size("4096") == 4096


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (948 * 2**30, "948 GiB"),
        (24 * 2**30, "24 GiB"),
        (23.16 * 2**30, "23.2 GiB"),
        (1.518 * 2**20, "1.52 MiB"),
        (12, "12 bytes"),
        (20 * 2**40, "20 TiB"),
        (1.5 * 2**40, "1536 GiB"),
        (0, "0 bytes"),
    ],
)
def test_sizes_are_shown(num_bytes, text):
    assert show_size(num_bytes) == text


@given(st.integers(1, 2**50))
def test_a_size_to_paste_is_enough(num_bytes):
    pasted = parse_size_with_unit(enough_size(num_bytes))
    assert num_bytes <= pasted <= max(num_bytes * 1.01, num_bytes + 2**11)


def test_what_is_short_is_said_in_one_unit():
    assert show_shortage(948 * 2**30, 582 * 2**30) == "needs 948 GiB, has 582, short by 366"
    assert show_shortage(int(2.5 * 2**30), 2**30) == "needs 2.5 GiB, has 1, short by 1.5"
    assert show_shortage(2**30 + 5, 2**30) == "needs 1073741829 bytes, has 1073741824, short by 5"


@given(st.integers(1, 2**45), st.integers(0, 2**45))
def test_a_shortage_is_never_understated(needed, there):
    text = show_shortage(needed, there)
    needs, _, rest = text.removeprefix("needs ").partition(", has ")
    unit = needs.rpartition(" ")[2].replace("bytes", "B")
    has, _, short = rest.partition(", short by ")
    scale = parse_size(f"1{unit}")
    assert float(needs.split()[0]) * scale >= needed
    assert float(has) * scale <= there
    assert float(short) * scale >= needed - there - 1e-6 * scale
