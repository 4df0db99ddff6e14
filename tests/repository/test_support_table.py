import importlib.util
import sys

from tests.distributed import ROOT
from tests.ranks.mixed_models import FAMILIES


def test_the_table_of_families_is_of_now():
    spec = importlib.util.spec_from_file_location("support_table", ROOT / "tools" / "support_table.py")
    tool = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(), "run python tools/support_table.py"
    cells = [row[2:] for row in tool.rows()]
    assert {cell for row in cells for cell in row} == {"tested", "expected", "refused"}
    assert set(tool.ZOO) < set(FAMILIES)
