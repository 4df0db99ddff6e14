"""Training scripts. Run them as they are; the benchmark imports the core of one of them (``examples.pretraining``)."""
