"""Planning without a GPU: what a step uses (``uses``), how chunks follow from it (``timeline``), how fast machines are
(``machines``), and what a step then costs (``prediction``).
"""
